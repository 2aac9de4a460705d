"""The Triton kernels, run by Triton's interpreter on CPU tensors, against the same computation step by step."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from interpreted import interpret, why_not_interpreted

from qcollect.formats import triton_counts, triton_launch
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.error_stats import NUM_TOTALS, Totals
from qcollect.formats.kernel import Launch
from qcollect.formats.pending import PendingShares
from qcollect.formats.quantizer import Quantizer
from qcollect.formats.scales import tensor_amax

if why_not_interpreted():
    pytest.skip(why_not_interpreted(), allow_module_level=True)

from qcollect.formats.triton_constants import TileSize

_PATH = Path(__file__).resolve().parents[2] / "gpu" / "formats.py"
_SPEC = importlib.util.spec_from_file_location("gpu_formats", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
gpu = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.mark.parametrize("part", range(8))
def test_every_rule_and_rounding_gives_the_bits_of_plain_torch(part: int) -> None:
    gpu.check_combinations("cpu", part, 8)


def test_both_orientations_at_once() -> None:
    gpu.check_both("cpu")


@pytest.mark.parametrize("exponent", [-126, -65, -64, 0, 64, 65, 126])
@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxfp4", "mxint8"])
def test_both_orientations_where_scales_stop_being_moderate(name: str, exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent)
    exponents = exponent - torch.randint(0, 20, (32, 64), generator=generator).to(torch.float32)
    x = (torch.rand(32, 64, generator=generator) + 1.0).to(torch.bfloat16).to(torch.float32) * torch.exp2(exponents)
    x[:, 5], x[7], x[::2] = 0.0, -0.0, -x[::2]
    last, first = gpu.make_choices(QUANT_TYPES[name], x, 1), gpu.make_choices(QUANT_TYPES[name], x, 0)
    along_last, along_first = torch.empty_like(x), torch.empty_like(x)
    triton_launch.run_both(x, along_last, along_first, last, first, None, None, with_tensor_scale=True)
    assert gpu.num_different(along_last, gpu.reference(x, last, None)) == 0
    assert gpu.num_different(along_first, gpu.reference(x, first, None)) == 0


@pytest.mark.parametrize("part", range(8))
def test_statistics_are_those_of_float64(part: int) -> None:
    gpu.check_stats("cpu", part, 8)


@pytest.mark.parametrize("elements", [1024, 2048])
@pytest.mark.parametrize(("axis", "dtype"), [(0, torch.bfloat16), (1, torch.bfloat16), (0, torch.float32)], ids=str)
def test_counts_of_one_program_whose_tiles_are_far_apart(
    axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """The first tile sets the windows of exponents and scale codes; others lie below, across, above, are not finite."""
    sizes = {key: TileSize(elements=elements, num_warps=1) for key in triton_launch._TILE_SIZES}
    monkeypatch.setattr(triton_launch, "_TILE_SIZES", sizes)
    monkeypatch.setattr(triton_launch, "_plans", {})
    monkeypatch.setattr(triton_launch, "_NUM_STATS_PROGRAMS", 1)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7 * 32, 32, generator=generator)
    x[32:64] *= 2.0**-25
    x[64:96] *= torch.exp2(torch.randint(-31, 31, (32, 32), generator=generator).float())
    x[96:128] *= 2.0**20
    x[128:160] *= torch.rand(32, 32, generator=generator) > 0.5
    x[160, 3], x[161, 4], x[162, 5] = math.nan, math.inf, 2.0**-130
    x[162, 7] = 0.0
    x = x.to(dtype)
    choices = gpu.make_choices(QUANT_TYPES["mxfp8"], x, axis)
    expected = gpu.reference_stats(x, choices, None)
    out = torch.empty_like(x)
    found = triton_counts.run_with_stats(x, out, choices, None, with_tensor_scale=True, histograms=True).to_dict()
    assert gpu.num_different(out, gpu.reference(x, choices, None)) == 0
    for key, value in expected.items():
        assert found[key] == (pytest.approx(value, rel=1e-6, abs=0) if isinstance(value, float) else value), key


@pytest.mark.parametrize("fill", [0.75, 2.0**-8, 2.0**-20])
def test_counts_of_a_tile_of_equal_numbers(fill: float) -> None:
    """No count spills into the next: eight of one exponent are as many as are added up side by side."""
    x = torch.full((32, 64), fill, dtype=torch.bfloat16)
    x[0, 0], x[1, 1] = 0.75, 3.0
    choices = gpu.make_choices(QUANT_TYPES["mxfp4"], x, 0)
    out = torch.empty_like(x)
    found = triton_counts.run_with_stats(x, out, choices, None, with_tensor_scale=True, histograms=True)
    exponents = (x.to(torch.float32).view(torch.int32) >> 23) & 0xFF
    assert torch.equal(found.exponent_counts, torch.bincount(exponents.flatten(), minlength=256))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_a_cast_does_to_all_numbers_of_its_own_dtype_is_counted(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    choices = gpu.make_choices(QUANT_TYPES[name], x)
    assert triton_launch.supports_stats(x, choices)
    totals = torch.empty(NUM_TOTALS, dtype=torch.float64)
    triton_counts.count(x, choices, None, Totals(totals))
    expected = Quantizer.create(name).bind(x).with_stats(histograms=False)[1].totals.tolist()
    assert totals[0].item() == pytest.approx(expected[0], rel=1e-6)
    assert totals[1:].tolist() == expected[1:]


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3", "hifp8"])
@pytest.mark.parametrize("values", [[], [1.5, -3.0], [float("nan"), 2.0], [float("inf"), -2.0], [1e-44], [3e38]])
def test_factor_of_a_tensor_follows_from_its_abs_max(name: str, values: list[float]) -> None:
    x = torch.zeros(5000)
    x[4000 : 4000 + len(values)] = torch.tensor(values)
    entry = QUANT_TYPES[name]
    assert entry.tensor_scale is not None
    amax = triton_launch.amax(x, sees_nonfinite=entry.tensor_scale.sees_nonfinite)
    assert gpu.num_different(amax, tensor_amax(x, entry.tensor_scale)) == 0
    for rule in entry.scale_rules or (None,):
        encode = triton_launch.encode(x, entry.tensor_scale, rule)
        assert gpu.num_different(encode, gpu.encode_of(x, gpu.make_choices(entry, x, scale_rule=rule))) == 0


def test_abs_max_found_by_many_programs_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_NUM_AMAX_PROGRAMS", 7)
    for size in (2048 * 5, 2048 * 16 + 3, 2048 * 6):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        assert triton_launch.plan_amax(x, None, None, sees_nonfinite=True).num_programs > 1
        assert triton_launch.amax(x) == x.abs().max()
        assert not triton_launch.scratch_of(x.device).zeros.any()


def test_shares_of_two_that_one_launch_makes_are_not_put_together_before_it() -> None:
    x = torch.randn(70, 70, generator=torch.Generator().manual_seed(0))
    last, first = (gpu.make_choices(QUANT_TYPES["mxfp8"], x, axis) for axis in (1, 0))
    outs = torch.empty_like(x), torch.empty_like(x)
    numbers = [
        triton_counts.run_with_stats(x, outs[0], each, None, with_tensor_scale=True, histograms=False).totals
        for each in (last, first)
    ]
    programs = [triton_launch.plan(x, each, "stats", has_encode=False).num_programs for each in (last, first)]
    pending = PendingShares(triton_counts._finish_many, x.device, 5 * sum(programs) + 8)
    rows = torch.full((5, NUM_TOTALS), -1.0, dtype=torch.float64)
    triton_counts.count(x, last, None, Totals(rows[4], pending))  # so that there is room for the first of two only
    for i in (0, 2):
        totals = Totals(rows[i], pending), Totals(rows[i + 1], pending)
        triton_counts.run_both_and_count(x, outs, (last, first), (None, None), totals)
    pending.finish()
    assert torch.equal(rows, torch.stack([*numbers, *numbers, numbers[0]]))


@pytest.mark.parametrize("name", ["mxfp4", "fp8_e4m3"])
def test_kernels_started_by_addresses_get_what_those_started_by_tensors_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where a kernel that was compiled before is started by addresses."""
    started: list[tuple[str, list[int], tuple[int, ...], int]] = []

    def note(launch: Launch, addresses: list[int], numbers: tuple[int, ...], num_programs: int) -> bool:
        started.append((launch.name, list(addresses), numbers, num_programs))
        return True

    x, out, other = torch.randn(64, 64), torch.empty(64, 64), torch.empty(64, 64)
    last, first = (gpu.make_choices(QUANT_TYPES[name], x, axis) for axis in (1, 0))
    scale = QUANT_TYPES[name].tensor_scale
    count = triton_counts.PreparedCount(x, last, with_values=True, tensor_scale=scale)
    both = triton_counts.PreparedPair(x, last, first, with_values=True)
    pending = PendingShares(triton_counts._finish_many, x.device, 1000)
    rows = torch.empty(3, NUM_TOTALS, dtype=torch.float64)

    def run() -> list[tuple[str, list[int], tuple[int, ...], int]]:
        started.clear()
        count(x, out, rows[0], pending)
        both(x, (out, other), (rows[1], rows[2]), pending)
        found = list(started)
        pending.finish()
        return found

    monkeypatch.setattr(
        Launch, "_compile", lambda self, _, tensors, *rest: note(self, [t.data_ptr() for t in tensors], *rest)
    )
    by_tensors = run()
    monkeypatch.setattr(Launch, "_start", lambda self, _, index, *rest: note(self, *rest))
    assert run() == by_tensors and len(by_tensors) == 2 + (scale is not None)


def test_abs_max_with_and_without_what_is_not_finite() -> None:
    x = torch.tensor([1.0, float("-inf"), -7.0])
    assert triton_launch.amax(x) == float("inf")
    assert triton_launch.amax(x, sees_nonfinite=False) == 7.0
    assert triton_launch.amax(torch.full((2, 3), float("nan")), sees_nonfinite=False) == 0.0


def test_tensor_that_is_not_dense_is_read_in_its_own_order() -> None:
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(0)).t()
    choices = gpu.make_choices(QUANT_TYPES["mxfp8"], x)
    assert gpu.num_different(gpu.by_kernels(x, choices, None), gpu.reference(x, choices, None)) == 0


def test_output_may_be_the_input() -> None:
    x = torch.randn(70, 33, generator=torch.Generator().manual_seed(0))
    choices = gpu.make_choices(QUANT_TYPES["mxfp4"], x, 0)
    expected = gpu.reference(x, choices, None)
    triton_launch.run(x, x, choices, None, with_tensor_scale=True)
    assert gpu.num_different(x, expected) == 0


def test_what_the_kernels_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 8192)
    mxfp8 = gpu.make_choices(QUANT_TYPES["mxfp8"], x)
    assert triton_launch.supports(x, mxfp8)
    assert not triton_launch.supports(x.to(torch.float64), mxfp8)
    assert not triton_launch.supports(x, gpu.make_choices(QUANT_TYPES["bf16"], x))
    assert not triton_launch.supports(x, gpu.make_choices(QUANT_TYPES["mxfp8"], x, block_size=8000))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not triton_launch.supports(x, mxfp8)
