"""Exact values: what a scale rule and a rounding give."""

import math
from itertools import pairwise

import pytest
import torch
from format_inputs import assert_same_bits, block, seed_for

from qcollect.formats.catalog import BLOCK_ROUNDINGS, E2M1, E4M3, E8M0, INT8, POWER_OF_TWO_RULES, QUANT_TYPES
from qcollect.formats.codes import decode_table
from qcollect.formats.elements import limit_, magnitude_bits, round_to_element_
from qcollect.formats.quantizer import count_saturated, fake_quantize, quantize
from qcollect.formats.scales import scale_exponents

MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
FP8_TYPES = ("fp8_e4m3", "fp8_e5m2")
NAN, INF = math.nan, math.inf


# --- scale rules --------------------------------------------------------------------------------


def test_floor_rule_clips_the_top_of_a_block() -> None:
    # microsoft/microxcaling issue 4: 957 comes back as 896 under the OCP rule, and that is right.
    y = fake_quantize(block(957, 960, 43.6966), "mxfp8")
    assert y.tolist() == block(896, 896, 44).tolist()


def test_rceil_rule_clips_nothing() -> None:
    y = fake_quantize(block(957, 960, 43.6966), "mxfp8", scale_rule="rceil")
    assert y.tolist() == block(960, 960, 44).tolist()


def test_clipped_elements_are_counted() -> None:
    x = block(957, 960, 43.6966)
    assert count_saturated(x, "mxfp8") == 2
    assert count_saturated(x, "mxfp8", scale_rule="rceil") == 0


@pytest.mark.parametrize("rounding", ["nearest_even", "half_away"])
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_floor_clips_an_abs_max_beyond_the_element_and_the_other_rules_make_room(
    quant_type: str, rounding: str
) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    x = block(1.9999999 * 2.0**9, -1.9999999 * 2.0**9, 2.0**9, 1.0)
    settings = {"rounding": rounding}
    y = fake_quantize(x, quant_type, **settings)
    top = element.max_mantissa * 2.0**9
    assert y[:3].tolist() == [top, -top, 2.0**9]
    assert count_saturated(x, quant_type, **settings) == 2
    for rule in ("ceil", "even", "rceil"):
        assert fake_quantize(x, quant_type, scale_rule=rule, **settings)[:3].tolist() == [1024.0, -1024.0, 512.0]
        assert count_saturated(x, quant_type, scale_rule=rule, **settings) == 0


@pytest.mark.parametrize(
    ("rule", "value", "exponent"),
    [
        ("floor", 1.9999999, 0),
        ("ceil", 1.0, 0),
        ("ceil", 1.0000001, 1),
        ("even", 1.9374999, 0),
        ("even", 1.9375, 1),
        ("rceil", 1.75, 0),
        ("rceil", 1.7500001, 1),
    ],
)
def test_scale_rules_step_up_at_their_threshold(rule: str, value: float, exponent: int) -> None:
    amax = torch.tensor([value, value * 2.0**100, value * 2.0**-100])
    exponents = scale_exponents(magnitude_bits(amax), E4M3, E8M0, rule)
    assert exponents.tolist() == [exponent - 8, exponent + 92, exponent - 108]


def test_scale_exponent_is_exact_a_hair_below_a_power_of_two() -> None:
    # log2 in float32 rounds 255.99998 up to 8.
    amax = torch.tensor([255.99998, 256.0])
    assert scale_exponents(magnitude_bits(amax), E4M3, E8M0, "floor").tolist() == [-1, 0]


@pytest.mark.parametrize(("value", "exponent"), [(6.0, 0), (3.0, -1), (0.046875, -7)])
def test_element_exponent_is_applied_once(value: float, exponent: int) -> None:
    # vllm-project/vllm issue 35562: applied twice, everything is four times too small.
    x = torch.full((32,), value)
    assert torch.equal(fake_quantize(x, "mxfp4"), x)
    assert scale_exponents(magnitude_bits(x.amax()), E2M1, E8M0, "floor").item() == exponent


@pytest.mark.parametrize("exponent", [-20, -1, 0, 1, 20])
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_scale_code_says_how_far_the_largest_value_is_from_the_abs_max(quant_type: str, exponent: int) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    for value in (element.max_value, 2.0**element.max_exponent):
        x = torch.full((64,), value * 2.0**exponent)
        quantized = quantize(x, quant_type)
        assert quantized.scales is not None
        assert quantized.scales.view(torch.uint8).tolist() == [127 + exponent] * 2
        assert torch.equal(quantized.dequantize(), x)
        assert torch.equal(fake_quantize(x, quant_type), x)


def test_scale_codes_of_blocks_of_equal_values() -> None:
    for value, code in ((6.0, 127), (3.0, 126), (0.046875, 120)):
        scales = quantize(torch.full((32,), value), "mxfp4").scales
        assert scales is not None and scales.view(torch.uint8).tolist() == [code]


@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
def test_scale_exponents_of_subnormal_blocks_are_those_of_their_numbers(rule: str) -> None:
    """For an element without a binade above one they are inside the scale's range."""
    amax = torch.tensor([2.0**-127, 1.5 * 2.0**-127, 1.5 * 2.0**-126, 2.0**-126, 2.0**-120])
    expected = {"floor": [0, 0, 1, 1, 7], "ceil": [0, 1, 2, 1, 7]}.get(rule, [0, 0, 1, 1, 7])
    exponents = scale_exponents(magnitude_bits(amax), INT8, E8M0, rule)
    assert exponents.tolist() == [exponent - 127 for exponent in expected]


def test_scale_exponent_stays_in_the_scale_format() -> None:
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-120, 3.4028235e38])
    for rule in POWER_OF_TWO_RULES:
        exponents = scale_exponents(magnitude_bits(amax), E4M3, E8M0, rule).tolist()
        assert exponents[:3] == [-127, -127, -127]
        assert exponents[3] == (119 if rule == "floor" else 120)


def test_blocks_below_the_smallest_scale_round_in_its_subnormals() -> None:
    # scale 2^-127, so the smallest step is 2^-136
    step = 2.0**-136
    x = block(5 * step, 2.5 * step, 1.5 * step, 0.5 * step, -1.25 * step)
    assert_same_bits(fake_quantize(x, "mxfp8"), block(5 * step, 2 * step, 2 * step, 0, -step))


def test_largest_float32_is_clamped_by_floor_and_overflows_under_rceil() -> None:
    x = block(3.4028235e38, 1.0)
    assert fake_quantize(x, "mxfp8")[0].item() == 448 * 2.0**119
    assert fake_quantize(x, "mxfp8", scale_rule="rceil")[0].item() == INF


# --- rounding -----------------------------------------------------------------------------------


def test_mx_ties_go_to_even() -> None:
    # ROCm/aiter issues 974 and 2247
    y = fake_quantize(block(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -1.25, -5), "mxfp4")
    assert_same_bits(y, block(0, 1, 1, 2, 2, 4, 4, -0.0, -1, -4))
    assert fake_quantize(block(2.3764, -0.625, 2.0851), "mxfp4").tolist() == block(2, -0.5, 2).tolist()


@pytest.mark.parametrize("quant_type", [*MX_TYPES, "nvfp4", "hif4", *FP8_TYPES])
def test_every_tie_goes_to_the_even_code_or_away(quant_type: str) -> None:
    """All numbers halfway between two neighbours, in blocks whose scale is 1."""
    entry = QUANT_TYPES[quant_type]
    element = entry.element
    assert element is not None
    values = [value for value in decode_table(element)[: 1 << (element.bits - 1)] if math.isfinite(value)]
    # what pins the scale stands in a group of its own
    pin = 7.0 if entry.micro_exponents else element.max_value if entry.has_tensor_scale else 2.0**element.max_exponent
    arguments = {} if not entry.has_tensor_scale else {"amax": 2688.0 if entry.block_size else element.max_value}
    x, even, away = [], [], []
    for code, (low, high) in enumerate(pairwise(values)):
        row = torch.zeros(16)
        row[0], row[8], row[9] = pin, (low + high) / 2, -(low + high) / 2
        x.append(row)
        even.append(high if code % 2 else low)
        away.append(high)
    for rounding, expected in (("nearest_even", even), ("half_away", away)):
        y = fake_quantize(
            torch.stack(x), quant_type, rounding=rounding, block_size=16 if entry.block_size else None, **arguments
        )
        assert y[:, 0].tolist() == [pin] * len(x)
        assert_same_bits(y[:, 8], torch.tensor(expected))
        assert_same_bits(y[:, 9], -torch.tensor(expected))


def test_half_away_is_no_default_but_where_the_authors_say_so() -> None:
    half_away = [name for name, entry in QUANT_TYPES.items() if entry.rounding == "half_away"]
    assert half_away == ["hifp8", "hif4"]
    assert {QUANT_TYPES[name].rounding for name in (*MX_TYPES, "nvfp4", *FP8_TYPES)} == {"nearest_even"}


def test_a_hair_above_a_tie_goes_up_in_the_subnormal_step() -> None:
    above = torch.tensor(0x3F000003, dtype=torch.int32).view(torch.float32).item()
    assert fake_quantize(block(8, 0.5, above), "mxfp4").tolist() == block(8, 0, 1).tolist()


def test_half_away_is_an_option_of_mx_types() -> None:
    x = block(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -1.25, -5, 0.24999999, -0.0)
    y = fake_quantize(x, "mxfp4", rounding="half_away")
    assert_same_bits(y, block(0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1.5, -6, 0, -0.0))


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_half_away_equals_a_float64_reference(quant_type: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 32, generator=generator)
    x[::2] = x[::2].bfloat16().float()  # ties
    exact = x.double()
    scale = torch.exp2(torch.floor(torch.log2(exact.abs().amax(1, keepdim=True))) - element.max_exponent)
    scaled = exact / scale
    exponent = torch.floor(torch.log2(scaled.abs())).clamp_min(element.min_exponent)
    step = torch.exp2(exponent - element.mantissa_bits)
    magnitude = (torch.floor(scaled.abs() / step + 0.5) * step).clamp_max(element.max_value)
    expected = (magnitude.copysign(scaled) * scale).float()
    assert_same_bits(fake_quantize(x, quant_type, rounding="half_away"), expected)


def test_rounding_over_the_top_of_e5m2_clamps() -> None:
    # pytorch/ao issue 436
    y = fake_quantize(block(127.99999, 31, 30, 1), "mxfp8_e5m2")
    assert y.tolist() == block(112, 32, 32, 1).tolist()


@pytest.mark.parametrize("rounding", ["nearest_even", "half_away"])
@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_no_rounding_over_the_top_gives_inf(quant_type: str, rule: str, rounding: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    for exponent in (-100, 0, 7, 100):
        just_below = 2.0**exponent * (2 - 2.0**-23)
        y = fake_quantize(block(just_below, -just_below), quant_type, scale_rule=rule, rounding=rounding)
        largest = element.max_mantissa * 2.0**exponent if rule == "floor" else 2.0 ** (exponent + 1)
        assert y.tolist() == block(largest, -largest).tolist()


FP8_OVERFLOW = {
    "fp8_e4m3": ([448, 449, 464, 465, 1e4, -1e4, INF, -INF], [448] * 5 + [-448, 448, -448]),
    "fp8_e5m2": ([57344, 61439, 61440, 1e6, -1e6, INF, -INF], [57344] * 4 + [-57344, 57344, -57344]),
}


@pytest.mark.parametrize("rounding", BLOCK_ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quant_type", FP8_TYPES)
def test_fp8_saturates_beyond_a_given_abs_max_on_every_version_of_torch(
    quant_type: str, dtype: torch.dtype, rounding: str
) -> None:
    """No cast of torch takes part, whose overflow has been NaN, Inf and the maximum."""
    given, expected = FP8_OVERFLOW[quant_type]
    x, amax = torch.tensor(given, dtype=dtype), float(expected[0])
    y = fake_quantize(x, quant_type, rounding=rounding, amax=amax, **seed_for(rounding))
    assert y.tolist() == expected
    quantized = quantize(x, quant_type, rounding=rounding, amax=amax, **seed_for(rounding))
    assert quantized.dequantize().tolist() == expected
    assert set((quantized.codes.view(torch.uint8) & 0x7F).tolist()) == {0x7E if quant_type == "fp8_e4m3" else 0x7B}


@pytest.mark.parametrize("quant_type", FP8_TYPES)
def test_fp8_elements_saturate_without_a_scale(quant_type: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    given, expected = FP8_OVERFLOW[quant_type]
    rounded = round_to_element_(torch.tensor([*map(float, given), NAN]), element, "nearest_even")
    assert_same_bits(limit_(rounded, element, saturate=True), torch.tensor([*map(float, expected), NAN]))


def test_hifp8_values_at_the_ends_of_its_range() -> None:
    x = [40959.9, 40960.0, -1e9, INF, 2.0**-23, 2.0**-23 - 2.0**-47, 1.5 * 2.0**-22, -0.0, -(2.0**-24), 17.9, 18.0]
    y = [32768.0, INF, -INF, INF, 2.0**-22, 0.0, 2.0**-21, 0.0, 0.0, 16.0, 20.0]
    assert_same_bits(fake_quantize(torch.tensor(x), "hifp8"), torch.tensor(y))


def test_hifp8_precision_falls_with_the_exponent() -> None:
    x = torch.tensor([15.5, 15.4, 31.0, 100.0, 255.0, 300.0, 2.0**-5 * 1.1, 2.0**-9 * 1.3, 2.0**-17 * 1.4])
    y = [16.0, 15.0, 32.0, 96.0, 256.0, 256.0, 2.0**-5, 2.0**-9 * 1.5, 2.0**-17]
    assert fake_quantize(x, "hifp8").tolist() == y


def test_saturating_hifp8_ends_at_its_maximum() -> None:
    y = fake_quantize(torch.tensor([40960.0, -1e9, INF, -INF, NAN, 3.0]), "hifp8", saturate=True)
    assert_same_bits(y, torch.tensor([32768.0, -32768.0, 32768.0, -32768.0, NAN, 3.0]))


def test_saturating_fp16_ends_at_its_maximum() -> None:
    x = torch.tensor([65519.9, 65520.0, -INF, NAN])
    assert_same_bits(fake_quantize(x, "fp16"), torch.tensor([65504.0, INF, -INF, NAN]))
    assert_same_bits(fake_quantize(x, "fp16", saturate=True), torch.tensor([65504.0, 65504.0, -65504.0, NAN]))
