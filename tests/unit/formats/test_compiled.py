"""What torch's compiler makes on the CPU: the bits of plain torch for every variant, and nothing compiled unasked."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from quantization_paths import load_variant
from torch import Tensor

from qcollect.formats import compiled, compiled_graph
from qcollect.formats.blocks import BlockSize
from qcollect.formats.catalog import QUANT_TYPES, TensorScale
from qcollect.formats.custom import read_definition
from qcollect.formats.eager import Choices, limit_values, restore_values, round_values, scale_values
from qcollect.formats.elements import HYBRID_SOURCES, limit_, round_to_element_
from qcollect.formats.random import random_fractions
from qcollect.formats.records import Rounding, ScaleRule
from qcollect.formats.scales import tensor_amax, tensor_encode

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1500 elements on, the last of which is shorter."""
    monkeypatch.setattr(compiled, "_PART_ELEMENTS", 1500)


def choices_of(
    quant_type: str,
    *,
    axis: int = 1,
    rule: ScaleRule | None = None,
    rounding: Rounding | None = None,
    block_size: BlockSize | None = None,
    saturate: bool = False,
    source: torch.dtype = torch.float32,
    seed: int = 0,
) -> Choices:
    entry = QUANT_TYPES[quant_type]
    assert entry.rounding is not None
    return Choices(
        quant_type=entry,
        axis=axis,
        scale_rule=rule or entry.scale_rule,
        rounding=rounding or entry.rounding,
        block_size=block_size or entry.block_size,
        saturate=saturate,
        source=HYBRID_SOURCES[source],
        seed=seed,
    )


def by_compiler(
    x: Tensor, choices: Choices, cache_dir: Path, encode: Tensor | None = None, *, with_tensor_scale: bool = True
) -> Tensor:
    has_encode = encode is not None
    load_variant(x, choices, encode, cache_dir)
    assert compiled.supports(x, choices, has_encode=has_encode)
    out = torch.full(x.shape, 12345.0, dtype=x.dtype)
    compiled.run(x, out, choices, encode, with_tensor_scale=with_tensor_scale)
    return out


def by_steps(x: Tensor, choices: Choices, encode: Tensor | None = None, *, with_tensor_scale: bool = True) -> Tensor:
    scaled = scale_values(x, choices, encode)
    round_values(scaled, x, choices)
    limit_values(scaled, choices)
    restore_values(scaled, with_tensor_scale=with_tensor_scale)
    return scaled.blocks.cut(x.shape).to(x.dtype)


def encode_of(x: Tensor, choices: Choices, rule: ScaleRule | None = None) -> Tensor | None:
    tensor_scale: TensorScale | None = choices.quant_type.tensor_scale
    if tensor_scale is None or not tensor_scale.is_inherent:
        return None
    used = rule or choices.scale_rule
    assert used is not None
    return tensor_encode(tensor_amax(x, tensor_scale), tensor_scale, used)


def assert_bits(y: Tensor, expected: Tensor) -> None:
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    integer = INTEGERS[y.dtype]
    is_wrong = (y.contiguous().view(integer) != expected.contiguous().view(integer)) & ~(y.isnan() & expected.isnan())
    wrong = is_wrong.flatten().nonzero().flatten()
    assert wrong.numel() == 0, f"{wrong.numel()} of {y.numel()} differ, first at {wrong[0]}"


def awkward(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Any bit pattern, every magnitude, many ties, both zeros, blocks of zeros; NaN, Inf and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    integer = INTEGERS[dtype]
    limits = torch.iinfo(integer)
    patterns = torch.randint(limits.min, limits.max, (rows, columns), generator=generator, dtype=torch.int64)
    patterns = patterns.to(integer).view(dtype)
    numbers = torch.randn(rows, columns, generator=generator)
    numbers = torch.where(torch.rand(rows, columns, generator=generator) < 0.3, (numbers * 8).round() / 8, numbers)
    exponents = torch.randint(-150, 128, (rows, 1), generator=generator).to(torch.float64)
    scaled = (numbers * torch.exp2(exponents)).to(dtype)
    x = torch.where(torch.arange(rows)[:, None] % 4 == 0, patterns, scaled)
    x[5::16] = -0.0
    x[6::16] = numbers[6::16].to(dtype)
    return x


# --- the bits of plain torch --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("quant_type", "axis"),
    [
        ("mxfp8", 1), ("mxfp4", 0), ("nvfp4", 1), ("nvfp4", 0), ("hifp8", 1), ("hif4", 1), ("hif4", 0), ("bf16", 1),
        ("fp16", 1),
    ],
)  # fmt: skip
def test_any_number_of_any_dtype(quant_type: str, axis: int, dtype: torch.dtype, cache_dir: Path) -> None:
    choices = choices_of(quant_type, axis=axis)
    x = awkward(1024, 256, dtype)
    x = x if axis else x.t().contiguous()
    encode = encode_of(x, choices)
    assert_bits(by_compiler(x, choices, cache_dir, encode), by_steps(x, choices, encode))


@pytest.mark.parametrize("sizes", [(8, 2), (64, 32), (32, 16)])
@pytest.mark.parametrize("rounding", ["half_away", "stochastic"])
def test_exponents_of_groups_of_any_size(sizes: tuple[int, int], rounding: Rounding, cache_dir: Path) -> None:
    """Few in a vector, one over several vectors, and one in a vector."""
    hif4 = choices_of("hif4", rounding=rounding)
    choices = replace(hif4, quant_type=replace(hif4.quant_type, micro_exponents=((sizes[0], 4.0), (sizes[1], 2.0))))
    x = awkward(512, 256)
    assert_bits(by_compiler(x, choices, cache_dir), by_steps(x, choices))


@pytest.mark.parametrize("quant_type", ["nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("size", [(16, 16), (1, 32), (3, 7), (128, 64)])
@pytest.mark.parametrize("shape", [(1024, 256), (2, 70, 50), (3, 7)])
def test_tiles_with_short_ends(shape: tuple[int, ...], size: tuple[int, int], quant_type: str, cache_dir: Path) -> None:
    x = awkward(prod(shape[:-1]), shape[-1]).view(shape)
    choices = choices_of(quant_type, axis=len(shape) - 1, block_size=size)
    encode = encode_of(x, choices)
    assert_bits(by_compiler(x, choices, cache_dir, encode), by_steps(x, choices, encode))


@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [
        ((64, 64), 1, None),
        ((7, 33), 1, None),
        ((2, 5, 70), 2, None),
        ((70, 19), 0, None),
        ((3, 33, 48), 1, None),
        ((33, 50), 1, (16, 16)),
        ((2, 37, 50), 2, (16, 16)),
    ],
)
@pytest.mark.parametrize("quant_type", ["mxfp8", "hif4", "hifp8"])
def test_draws_are_those_of_a_place_in_the_tensor(
    quant_type: str, shape: tuple[int, ...], axis: int, size: BlockSize | None, cache_dir: Path
) -> None:
    if size is not None and QUANT_TYPES[quant_type].block_size != 32:
        pytest.skip(f"{quant_type} has no tiles")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for seed in (0, (1 << 63) - 1):
        choices = choices_of(quant_type, axis=axis, rounding="stochastic", block_size=size, seed=seed)
        assert_bits(by_compiler(x, choices, cache_dir), by_steps(x, choices))


def test_any_number_rounded_stochastically(cache_dir: Path) -> None:
    choices, x = choices_of("mxfp8", rounding="stochastic", seed=12345678901234567), awkward(1024, 256)
    assert_bits(by_compiler(x, choices, cache_dir), by_steps(x, choices))


def test_halves_away_from_zero_in_blocks(cache_dir: Path) -> None:
    choices, x = choices_of("mxfp8", rounding="half_away"), awkward(1024, 256)
    assert_bits(by_compiler(x, choices, cache_dir), by_steps(x, choices))


@pytest.mark.parametrize("exponent_bits", range(1, 8))
@pytest.mark.parametrize("rounding", ["nearest_even", "half_away", "stochastic"])
def test_elements_of_any_size_and_range_round_as_in_plain_torch(exponent_bits: int, rounding: Rounding) -> None:
    """Among them the smallest spacings there are. The graph, without its compiler."""
    x = awkward(256, 64).flatten()
    draws = random_fractions(5, x.numel())
    for mantissa_bits, bias in itertools.product(range(8 - exponent_bits), (None, 60, 99, -40)):
        definition = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits, "nan": True}
        has_range = {} if bias is None else {"bias": bias}
        entry, _ = read_definition("own", {"element": definition | has_range, "scale": "none"})
        if entry is None or not compiled._has_variant(replace(choices_of("mxfp8"), quant_type=entry)):
            continue  # too few codes, or beyond what the arithmetic holds
        element = entry.element
        assert element is not None
        values = torch.cat((x, (x.nan_to_num() * 2.0**element.min_exponent).clamp(-1e38, 1e38)))
        random = torch.cat((draws, draws))
        for saturate in (True, False):
            expected = limit_(
                round_to_element_(values.clone(), element, rounding, random=random), element, saturate=saturate
            )
            y = compiled_graph._rounded(values, element, rounding, random, saturate=saturate)
            assert_bits(y, expected)


@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**20])
def test_a_power_of_two_for_the_tensor(factor: float, cache_dir: Path) -> None:
    choices, x, encode = choices_of("hifp8"), awkward(512, 256), torch.tensor(factor)
    assert_bits(by_compiler(x, choices, cache_dir, encode), by_steps(x, choices, encode))


@pytest.mark.parametrize("quant_type", ["nvfp4", "fp8_e4m3"])
def test_units_of_the_tensors_scale(quant_type: str, cache_dir: Path) -> None:
    choices, x = choices_of(quant_type), torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    encode = encode_of(x, choices)
    y = by_compiler(x, choices, cache_dir, encode, with_tensor_scale=False)
    assert_bits(y, by_steps(x, choices, encode, with_tensor_scale=False))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 32), 1),
        ((1, 20), 1),
        ((7, 33), 1),
        ((3, 5, 64), 2),
        ((32, 1), 0),
        ((32, 7), 0),
        ((100, 48), 0),
        ((3, 64, 5), 1),
        ((2, 70, 3), 1),
        ((64, 2, 3), 0),
        ((96,), 0),
    ],
)
def test_every_shape_takes_the_same_library(shape: tuple[int, ...], axis: int, cache_dir: Path) -> None:
    # a last axis with one element inside of it counts as the last
    choices = choices_of("mxfp8", axis=axis)
    for is_last in (True, False):
        variant = compiled._variant(choices, torch.float32, is_last=is_last, has_encode=False)
        compiled._kernels.setdefault(variant, compiled._load_or_compile(variant, cache_dir))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    out = torch.empty_like(x)
    compiled.run(x, out, choices, None, with_tensor_scale=True)
    assert_bits(out, by_steps(x, choices))


def test_strided_and_in_place(cache_dir: Path) -> None:
    choices = choices_of("mxfp8")
    x = awkward(256, 128)
    expected = by_steps(x, choices)
    assert_bits(by_compiler(x.t().contiguous().t(), choices, cache_dir), expected)
    compiled.run(x, x, choices, None, with_tensor_scale=True)
    assert_bits(x, expected)


def test_subnormals_stay_on(cache_dir: Path) -> None:
    choices = choices_of("mxfp8")
    by_compiler(torch.ones(2, 32), choices, cache_dir)
    assert float(torch.tensor(2.0**-127) * 0.5) == 2.0**-128
    x = torch.full((2, 32), 2.0**-127)
    assert_bits(by_compiler(x, choices, cache_dir), x)


# --- when something is compiled -----------------------------------------------------------------


@pytest.fixture
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("compiled unasked")

    monkeypatch.setattr(compiled, "_compile", refuse)
    torch._dynamo.utils.counters.clear()
    yield
    assert not torch._dynamo.utils.counters["stats"]


def test_what_was_not_prepared_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernels", {})
    assert not compiled.supports(torch.ones(64, 64), choices_of("mxfp8"))


def test_empty_tensors_and_other_devices_are_not_supported(cache_dir: Path) -> None:
    choices = choices_of("mxfp8")
    by_compiler(torch.ones(2, 32), choices, cache_dir)
    assert not compiled.supports(torch.ones(64, 64, device="meta"), choices)
    assert not compiled.supports(torch.ones(0, 64), choices)


def test_what_would_be_filled_up_to_several_times_its_size_is_not_supported(cache_dir: Path) -> None:
    """Few elements side by side, when there are blocks along another axis."""
    choices = choices_of("mxfp8", axis=0)
    by_compiler(torch.ones(64, 17), choices, cache_dir)
    by_compiler(torch.ones(64, 1), choices, cache_dir)  # as along the last axis
    assert not compiled.supports(torch.ones(64, 15), choices)
    assert not compiled.supports(torch.ones(64, 5, 3), choices)


def test_what_has_no_variant_is_passed_over(tmp_path: Path) -> None:
    """Exponents inside a block in groups that do not lie in each other, and a taper beyond 2^64."""
    hif4, hifp8 = choices_of("hif4"), choices_of("hifp8")
    assert hifp8.quant_type.element is not None
    wide = replace(hifp8.quant_type.element, max_value=2.0**100)
    for choices in (
        replace(hif4, quant_type=replace(hif4.quant_type, micro_exponents=((8, 4.0), (3, 2.0)))),
        replace(hifp8, quant_type=replace(hifp8.quant_type, element=wide)),
        replace(hifp8, quant_type=QUANT_TYPES["none"]),
    ):
        assert compiled.prepare([choices], [torch.float32], cache_dir=tmp_path) == (True, "")
        assert not any(tmp_path.iterdir())
        assert not compiled.supports(torch.ones(64, 64), choices)


def test_preparing_again_and_running_compiles_nothing(cache_dir: Path, request: pytest.FixtureRequest) -> None:
    choices = choices_of("mxfp8", axis=0)
    assert compiled.prepare([choices], [torch.float32], cache_dir=cache_dir) == (True, "")
    request.getfixturevalue("_without_compiler")
    assert compiled.prepare([choices], [torch.float32], cache_dir=cache_dir) == (True, "")
    threads = torch.get_num_threads()
    for rows, columns in ((32, 48), (64, 64), (96, 1), (1024, 32), (33, 2)):
        x = torch.randn(rows, columns, requires_grad=True)
        out = torch.empty(rows, columns)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(rows % 64 == 0):
            compiled.run(x, out, choices, None, with_tensor_scale=True)
        torch.set_num_threads(1 + rows % 2)
        assert_bits(out, by_steps(x, choices))
    torch.set_num_threads(threads)


def test_another_process_loads_what_was_compiled(cache_dir: Path) -> None:
    choices = choices_of("mxfp8")
    assert compiled.prepare([choices], [torch.float32], cache_dir=cache_dir)[0]
    code = f"""
import torch
from pathlib import Path
from qcollect.formats import compiled
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.eager import Choices
torch.export.export = None  # nothing to compile with
choices = Choices(quant_type=QUANT_TYPES["mxfp8"], axis=1, scale_rule="floor", rounding="nearest_even", block_size=32,
                  saturate=False)
print(compiled.prepare([choices], [torch.float32], cache_dir=Path({str(cache_dir)!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(True, '')", done.stderr


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernels", {})
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        is_ready, reason = compiled.prepare([choices_of("mxfp8")], [torch.float32], cache_dir=tmp_path)
    assert not is_ready
    assert "compiler" in reason
    assert not list(tmp_path.glob("*.pt2"))


def test_what_cannot_be_loaded_is_a_reason_and_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_program: object, *, package_path: str, inductor_configs: object) -> None:
        Path(package_path).write_bytes(b"nothing that torch can load")

    monkeypatch.setattr(compiled, "_kernels", {})
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", make)
    is_ready, reason = compiled.prepare([choices_of("mxfp8")], [torch.float32], cache_dir=tmp_path)
    assert not is_ready
    assert "cannot be loaded (exit code 1)" in reason
    assert not list(tmp_path.glob("*.pt2"))


def test_an_unusable_folder_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernels", {})
    (tmp_path / "file").touch()
    is_ready, reason = compiled.prepare([choices_of("mxfp8")], [torch.float32], cache_dir=tmp_path / "file")
    assert not is_ready
    assert "FileExistsError" in reason
