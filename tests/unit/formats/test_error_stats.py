"""Error statistics against a slow reference in float64 that goes element by element."""

import math

import pytest
import torch

from qcollect.errors import FormatError
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.quantizer import Quantizer, quantize

TYPES = [name for name, entry in QUANT_TYPES.items() if entry.element is not None]


def inputs():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 70, generator=generator) * torch.exp2(torch.randint(-12, 12, (9, 1), generator=generator))
    x[0] = 0.0
    x[1, ::7] *= 1e4
    x[2, 5], x[3, 6], x[4, 40] = math.nan, math.inf, -math.inf
    return x


def slow_reference(x, y):
    finite = [(a, b) for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True) if math.isfinite(a + b)]
    pairs = list(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
    return {
        "sum_squares": math.fsum(a * a for a, _ in finite),
        "sum_squared_error": math.fsum((b - a) ** 2 for a, b in finite),
        "max_error": max((abs(b - a) for a, b in finite), default=0.0),
        "num_zeroed": sum(a != 0 and b == 0 for a, b in pairs),
        "num_nan": sum(math.isnan(a) for a, _ in pairs),
        "num_inf": sum(math.isinf(a) for a, _ in pairs),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_statistics_are_those_of_the_slow_reference(quant_type, dtype, axis):
    x = inputs().to(dtype)
    quantizer = Quantizer.create(quant_type, axis=axis)
    y, stats = quantizer.apply_with_stats(x, histograms=True)
    assert torch.equal(y.nan_to_num(7.0), quantizer.apply(x).nan_to_num(7.0))
    found, expected = stats.to_dict(), slow_reference(x.double(), y.double())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=0), name
    assert found["num_elements"] == x.numel()
    assert found["num_clamped"] == int(quantizer.num_saturated(x))


@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4", "nvfp4", "hifp8"])
def test_histograms_count_every_element_and_every_block(quant_type):
    x = inputs()
    _, stats = Quantizer.create(quant_type).apply_with_stats(x, histograms=True)
    counts = stats.exponent_counts
    assert int(counts.sum()) == x.numel()
    for exponent in range(-20, 20):
        magnitude = x.abs()
        expected = ((magnitude >= 2.0**exponent) & (magnitude < 2.0 ** (exponent + 1))).sum()
        assert counts[exponent + 127] == expected
    assert counts[255] == 3
    q = quantize(x, quant_type)
    if q.scales is None:
        assert stats.scale_counts is None
    else:
        codes = q.scales.view(torch.uint8).flatten().to(torch.int64)
        assert torch.equal(stats.scale_counts, torch.bincount(codes, minlength=256))


def test_clipping_under_the_floor_rule_is_counted_and_gone_under_rceil():
    """The largest elements of a block clip under the floor rule: 957 and 960 become 896 (microxcaling issue 4)."""
    block = torch.tensor([957.0, 960.0, 43.6966] + [0.0] * 29)
    for rule, clamped, blocks in (("floor", 2, 1), ("rceil", 0, 0)):
        _, stats = Quantizer.create("mxfp8", scale_rule=rule).apply_with_stats(block)
        assert (int(stats.num_clamped), int(stats.num_clamped_blocks)) == (clamped, blocks)


def test_sums_do_not_depend_on_the_number_of_threads():
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    sums = set()
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            _, stats = Quantizer.create("mxfp4").apply_with_stats(x)
            sums.add((float(stats.sum_squares), float(stats.sum_squared_error)))
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def test_nothing_to_measure_is_refused():
    with pytest.raises(FormatError, match="none quantizes nothing: there is no error to measure"):
        Quantizer.create("none").apply_with_stats(torch.ones(3))
    with pytest.raises(FormatError, match=r"mxfp8 got a tensor of shape \(0, 3\): there is no error to measure"):
        Quantizer.create("mxfp8").apply_with_stats(torch.ones(0, 3))
