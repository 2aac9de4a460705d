"""The Triton kernels of summaries, run by Triton's interpreter on CPU tensors, against numpy in float64."""

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreted import interpret, why_not_interpreted

from qcollect.store import summary_cuda

if why_not_interpreted():
    pytest.skip(why_not_interpreted(), allow_module_level=True)

_PATH = Path(__file__).resolve().parents[2] / "gpu" / "summary.py"
_SPEC = importlib.util.spec_from_file_location("gpu_summary", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
gpu = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def check(sizes: tuple[int, ...], kind: str) -> None:
    # the interpreter makes something else of bfloat16's subnormals
    dtypes = [dtype for dtype in gpu.DTYPES if (dtype, kind) != (torch.bfloat16, "subnormal")]
    gpu.check_values(summary_cuda.summarize, "cpu", sizes, (kind,), dtypes, num_times=1)


@pytest.mark.parametrize("kind", gpu.KINDS)
def test_one_program(kind):
    check((1, 513), kind)


@pytest.mark.parametrize("kind", ["zeros", "around 1000", "not finite", "constant"])
def test_several_programs_and_several_tiles_of_each(kind, monkeypatch):
    monkeypatch.setattr(summary_cuda, "_MAX_TILES_OF_ONE", 1)
    monkeypatch.setattr(summary_cuda, "_NUM_PROGRAMS", 2)
    check((3 * 512 + 100,), kind)


def test_shares_without_a_finite_value(monkeypatch):
    monkeypatch.setattr(summary_cuda, "_MAX_TILES_OF_ONE", 1)
    x = torch.full((1024,), float("nan"))
    gpu.check(summary_cuda.summarize(x), x, "all NaN")
    x[600] = -2.5
    gpu.check(summary_cuda.summarize(x), x, "all but one NaN")


def test_copied_on_the_way_and_put_together_with_others_later(monkeypatch):
    monkeypatch.setattr(summary_cuda, "_MAX_TILES_OF_ONE", 1)
    monkeypatch.setattr(summary_cuda, "_NUM_PROGRAMS", 2)
    for kind in ("normal", "not finite"):
        gpu.check_copies("cpu", (1, 512, 3 * 512 + 100, 4 * 512 + 8), (kind,))


def test_memory_for_shares_is_enough_for_whatever_values_fill_a_buffer():
    for size in (1, 511, 512, 100_000, 2_000_000):
        for element_size in (2, 4):
            num_values = max((1 << 20) // (size * element_size), 1)
            num_programs = min(-(-size // 512), 2048)
            needed = num_values * (9 * num_programs + 1)
            assert needed <= summary_cuda.max_shares(num_values * size * element_size, num_values)


def test_indices_of_more_than_32_bits(monkeypatch):
    monkeypatch.setattr(summary_cuda, "_MAX_INT32", 1000)
    check((1500,), "normal")


def test_memory_that_does_not_begin_at_a_multiple_of_16_bytes():
    x = torch.randn(600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(summary_cuda.summarize(x[1:]), summary_cuda.summarize(x[1:].clone()))
    gpu.check(summary_cuda.summarize(x[1:]), x[1:], "one element further")


def test_tensors_on_a_cpu_are_left_to_the_chunks():
    assert not summary_cuda.supports(torch.ones(3))
