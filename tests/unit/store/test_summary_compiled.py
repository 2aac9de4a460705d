"""The compiled summary: any bits against numpy in float64, the order of its sums, its library, and doing without."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from qcollect.formats.c_function import FLAGS, CFunction
from qcollect.paths import cache_dir
from qcollect.store import summary as summary_module
from qcollect.store import summary_compiled, summary_cpu

pytest.importorskip("numpy")
_PATH = Path(__file__).resolve().parents[2] / "gpu" / "summary.py"
_SPEC = importlib.util.spec_from_file_location("gpu_summary", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
gpu = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)

BLOCK, LANES = 4096, 32  # of the source
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

has_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="there is no C compiler here"
)


def not_asked_for(flags: tuple[str, ...] = FLAGS) -> CFunction:
    known = summary_compiled._FUNCTION
    return CFunction(known.source, known.name, known.argument_types, flags=flags)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of libraries, empty, of a process that has not asked for one."""
    monkeypatch.setattr(summary_compiled, "_FUNCTION", not_asked_for())
    monkeypatch.setenv("QCOLLECT_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def compiled(x: torch.Tensor) -> torch.Tensor:
    numbers = summary_compiled.summarize(x)
    assert numbers is not None, summary_compiled.prepare()
    return torch.tensor(numbers, dtype=torch.float64)


def any_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every pattern of bits as likely as another; a third of the elements zeros, and a stretch without NaN and Inf."""
    words, generator = WORDS[dtype], torch.Generator().manual_seed(seed)
    info = torch.iinfo(words)
    bits = torch.randint(info.min, info.max + 1, (size,), generator=generator, dtype=torch.int64).to(words)
    x = bits.view(dtype)
    x[torch.arange(size) % 3 == seed % 3] = 0.0
    stretch = x[size // 3 : size // 2]
    stretch[~stretch.isfinite()] = -0.0
    return x


@has_compiler
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_any_bits(dtype: torch.dtype) -> None:
    around = [base + more for base in (LANES, BLOCK, 2 * BLOCK, 9 * BLOCK) for more in (-1, 0, 1, 7)]
    for seed, size in enumerate([1, 2, 3, *around, 100_003]):
        x = any_bits(size, dtype, seed)
        gpu.check(compiled(x), x, f"{dtype}, {size}")
        gpu.check(compiled(x[1:]), x[1:], f"{dtype}, {size} without the first")


@has_compiler
@pytest.mark.parametrize("kind", gpu.KINDS)
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_kinds_around_a_block(dtype: torch.dtype, size: int, kind: str) -> None:
    x = gpu.special(size, dtype, kind)
    gpu.check(compiled(x), x, kind)


@has_compiler
def test_parts_of_unlike_size_and_place() -> None:
    """What squares are counted from follows the values, there and back."""
    noise = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0))
    parts = [noise * scale + offset for offset, scale in ((1e8, 8.0), (0.0, 1e-20), (-3.0, 1e-5), (0.0, 1.0), (1e8, 8))]
    for chosen in (parts, parts[::-1], parts[1:3], parts[2:4], [parts[0], torch.full((BLOCK,), 1e8), parts[0]]):
        x = torch.cat(chosen)
        gpu.check(compiled(x), x, "parts")
    nearly = torch.full((3 * BLOCK,), 1e8)
    nearly[BLOCK + 1] += 8.0
    gpu.check(compiled(nearly), nearly, "all but one are equal")


@has_compiler
def test_no_element_is_an_empty_summary() -> None:
    assert summary_compiled.summarize(torch.empty(0)) == tuple(summary_cpu.Share())


@has_compiler
def test_bits_do_not_depend_on_the_processors_instructions(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [gpu.special(10_007, dtype, kind) for dtype in WORDS for kind in gpu.KINDS]
    expected = [compiled(x) for x in tensors]
    for number, flags in enumerate((["-O0", "-ffp-contract=off"], ["-O2", "-ffp-contract=off"])):
        function = not_asked_for(("-std=gnu11", *flags, "-fPIC", "-shared"))
        monkeypatch.setattr(summary_compiled, "_FUNCTION", function)
        monkeypatch.setenv("QCOLLECT_CACHE_DIR", str(tmp_path / str(number)))
        assert all(torch.equal(compiled(x), found) for x, found in zip(tensors, expected, strict=True))


def test_others_are_left_to_torch() -> None:
    class Other(torch.Tensor):
        pass

    odd = torch.frombuffer(bytearray(41), dtype=torch.float32, count=10, offset=1)
    for x in (
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.int32),
        torch.ones(3).as_subclass(Other),
        odd,
    ):
        assert summary_compiled.summarize(x) is None
        gpu.check(summary_module.summarize(x), x, str(x.dtype))


# ---------------------------------------------------------------------------------------------
# The library
# ---------------------------------------------------------------------------------------------


@has_compiler
def test_the_library_is_made_once_and_loaded_by_the_next(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [threading.Thread(target=summary_compiled.prepare) for _ in range(4)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
    assert summary_compiled.prepare() == (True, "")
    (made,) = fresh.iterdir()
    monkeypatch.setenv("CC", "no-such-compiler")
    code = "from qcollect.store import summary_compiled; print(summary_compiled.prepare())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(True, '')"
    assert [*fresh.iterdir()] == [made]


@pytest.mark.parametrize(
    "command", ["no-such-compiler", "false", f"{sys.executable} -c 'raise SystemExit(\"no room\")'"]
)
def test_without_a_compiler_torch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CC", command)
    x = gpu.special(10_007, torch.bfloat16, "not finite")
    gpu.check(summary_module.summarize(x), x, "by torch")
    is_ready, reason = summary_compiled.prepare()
    assert not is_ready and reason and "\n" not in reason
    assert "no room" in reason or "no room" not in command
    assert not [*fresh.iterdir()]


def test_a_system_without_any_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    is_ready, reason = summary_compiled.prepare()
    assert (is_ready, reason) == (
        False,
        "FileNotFoundError: no C compiler: none of cc, gcc, clang is on the PATH, and CC is not set",
    )


def test_a_folder_that_cannot_be_made_is_no_failure(fresh: Path) -> None:
    fresh.write_text("a file")
    is_ready, reason = summary_compiled.prepare()
    assert not is_ready and str(fresh) in reason
    assert summary_module.summarize(torch.ones(3)).tolist()[:1] == [3.0]


def test_libraries_lie_where_the_user_keeps_such_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QCOLLECT_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache_dir("compiled") == tmp_path / "chosen" / "compiled"
    monkeypatch.delenv("QCOLLECT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir("compiled") == tmp_path / "qcollect" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir("compiled") == tmp_path / "home" / ".cache" / "qcollect" / "compiled"
