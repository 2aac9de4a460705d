"""Exact values: what a block, a scale rule, a rounding and an edge case give."""

import json
import math
from itertools import pairwise

import pytest
import torch

from qcollect.formats.catalog import BLOCK_ROUNDINGS, E2M1, E4M3, E8M0, INT8, POWER_OF_TWO_RULES, QUANT_TYPES
from qcollect.formats.checks import DTYPES
from qcollect.formats.codes import decode_table
from qcollect.formats.elements import limit_, magnitude_bits, round_to_element_
from qcollect.formats.quantizer import Quantizer, consumed, count_saturated, fake_quantize, quantize, tensor_scale
from qcollect.formats.scales import block_scales, power_of_two_scale, scale_exponents, tensor_amax

ALL_TYPES = tuple(QUANT_TYPES)
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
FP8_TYPES = ("fp8_e4m3", "fp8_e5m2")
BLOCK_TYPES = tuple(name for name, entry in QUANT_TYPES.items() if entry.block_size)
NAN, INF = math.nan, math.inf


def seed_for(rounding: str | None) -> dict[str, int]:
    return {"seed": 1} if rounding == "stochastic" else {}


def every_choice(quant_type: str) -> list[dict[str, object]]:
    """The settings of every rule and rounding of a type."""
    entry = QUANT_TYPES[quant_type]
    return [
        {"scale_rule": rule, "rounding": rounding, **seed_for(rounding)}
        for rule in entry.scale_rules or (None,)
        for rounding in entry.roundings or (None,)
    ]


def block(*values: float) -> torch.Tensor:
    """A block of 32 that starts with these values and goes on with zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def assert_same_bits(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    same = (y == expected) & (y.signbit() == expected.signbit()) | (y.isnan() & expected.isnan())
    assert same.all(), (y, expected)


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


# --- edge cases ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_blocks_stay_zero(quant_type: str, dtype: torch.dtype) -> None:
    ones = 0.9375 if quant_type == "hif4" else 1.0  # no scale of hif4 makes a block of ones exact
    for arguments in every_choice(quant_type):
        zeros = torch.zeros(4, 64, dtype=dtype)
        assert_same_bits(fake_quantize(zeros, quant_type, **arguments), zeros)
        zeros[2] = 1
        if quant_type == "hif4" and arguments["rounding"] == "stochastic":
            continue  # nor does any draw
        if arguments["rounding"] == "hybrid":
            assert_same_bits(fake_quantize(zeros[:2], quant_type, **arguments), zeros[:2])
        assert_same_bits(fake_quantize(zeros, quant_type, **arguments), zeros * ones)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if name != "none"])
def test_codes_of_all_zero_blocks_have_finite_scales_and_no_nan(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    for arguments in every_choice(quant_type):
        for x in (torch.zeros(4, 64), torch.full((4, 64), -0.0)):
            quantized = quantize(x, quant_type, **arguments)
            y = quantized.dequantize()
            assert torch.equal(y, torch.zeros(4, 64))
            if quantized.scales is not None:
                assert entry.scale_format is not None
                codes = quantized.scales.view(torch.uint8)
                assert (codes == 0).all() and entry.scale_format.nan_code != 0
            if quantized.tensor_scale is not None:
                assert quantized.tensor_scale.isfinite()


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_all_zero_block_has_the_smallest_scale(quant_type: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    for rule in POWER_OF_TWO_RULES:
        assert scale_exponents(torch.zeros(1, dtype=torch.int32), element, E8M0, rule).item() == -127
        scales = block_scales(torch.zeros(1, dtype=torch.int32), QUANT_TYPES[quant_type], rule)
        assert scales.scale.tolist() == scales.decode.tolist() == [2.0**-127]


def test_all_zero_tensor_has_a_tensor_scale_of_one() -> None:
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    y, amax = quantizer(torch.zeros(4, 64))
    assert amax is not None and amax.item() == 0.0
    scale = quantizer.scale_of(amax)
    assert scale is not None and scale.item() == 1.0
    assert torch.equal(y, torch.zeros(4, 64))


@pytest.mark.parametrize("quant_type", MX_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
def test_nan_or_inf_makes_its_block_nan_and_no_other(quant_type: str, dtype: torch.dtype, rule: str) -> None:
    # NVIDIA/TransformerEngine issue 3550: a maximum that drops NaN hides it.
    x = torch.ones(3, 64, dtype=dtype)
    x[0, 5], x[1, 40], x[2, 0] = NAN, INF, -INF
    y = fake_quantize(x, quant_type, scale_rule=rule)
    expected = torch.ones(3, 64, dtype=dtype)
    expected[0, :32] = expected[1, 32:] = expected[2, :32] = NAN
    assert_same_bits(y, expected)
    assert count_saturated(x, quant_type, scale_rule=rule) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("quant_type", BLOCK_TYPES)
def test_a_block_without_nan_or_inf_is_as_if_there_were_none(quant_type: str, bad: float, dtype: torch.dtype) -> None:
    entry = QUANT_TYPES[quant_type]
    assert entry.block_size is not None and entry.scale_format is not None
    size = entry.block_size
    x = torch.randn(2, 2 * size, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[1, -1] = 100.0  # where the tensor has a scale, it follows from this
    with_bad = x.clone()
    with_bad[0, 5] = bad
    for axis in (1, 0):
        for arguments in every_choice(quant_type):
            clean, spoiled = (x, with_bad) if axis else (x.t().contiguous(), with_bad.t().contiguous())
            expected = fake_quantize(clean, quant_type, axis, **arguments)
            (expected if axis else expected.t())[0, :size] = NAN
            assert_same_bits(fake_quantize(spoiled, quant_type, axis, **arguments), expected)
            quantized = quantize(spoiled, quant_type, axis, **arguments)
            y = quantized.dequantize()
            assert torch.equal(y.nan_to_num(77), expected.nan_to_num(77))
            assert quantized.scales is not None
            codes = quantized.scales.view(torch.uint8)
            assert (codes == entry.scale_format.nan_code).flatten().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("quant_type", FP8_TYPES)
def test_nan_or_inf_makes_a_tensor_with_one_scale_nan(quant_type: str, bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5] = bad
    for arguments in every_choice(quant_type):
        assert fake_quantize(x, quant_type, **arguments).isnan().all()
        assert quantize(x, quant_type, **arguments).dequantize().isnan().all()


@pytest.mark.parametrize("quant_type", ["hifp8", "bf16", "fp16", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_where_there_are_no_blocks(quant_type: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5], x[1, 40], x[1, 41] = NAN, INF, -INF
    for arguments in every_choice(quant_type):
        assert_same_bits(fake_quantize(x, quant_type, **arguments), x)
        if quant_type != "none":
            assert_same_bits(quantize(x, quant_type, **arguments).dequantize(), x)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_negative_nan_payloads_are_nan(quant_type: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for one in bits.view(torch.float32):
        assert fake_quantize(block(one.item()).index_put((torch.tensor([0]),), one), quant_type).isnan().all()


def test_negative_zero() -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, 1.0])
    for quant_type in (*MX_TYPES, *FP8_TYPES, "bf16", "fp16", "none"):
        for arguments in every_choice(quant_type):
            assert fake_quantize(x, quant_type, **arguments).signbit().tolist() == [True, False, True, False]
    for quant_type in ("nvfp4", "hif4"):  # -0 is 0, and a negative number that becomes zero is not
        assert fake_quantize(x, quant_type).signbit().tolist() == [False, False, True, False]
    for saturate in (False, True):
        assert fake_quantize(x, "hifp8", saturate=saturate).signbit().tolist() == [False] * 4


def test_none_changes_no_bit() -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    y = fake_quantize(x.view(torch.float32), "none")
    assert torch.equal(y.view(torch.int32), x)


# --- per-tensor scale ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([8.0], 1.0),
        ([15.999999], 1.0),
        ([16.0, -1.0], 2.0),
        ([-3e-6], 2.0**-22),
        ([1.0, NAN, INF], 2.0**-3),
        ([NAN, INF], 1.0),
        ([0.0, -0.0], 1.0),
        ([], 1.0),
        ([2.0**-149], 2.0**-126),
        ([3.4028235e38], 2.0**124),
    ],
)
def test_tensor_scale_puts_the_finite_abs_max_between_8_and_16(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    assert tensor_scale(x, "hifp8") == scale
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    _, amax = quantizer(x)
    assert amax is not None and amax.dtype == torch.float32 and amax.shape == ()
    in_tensor = quantizer.scale_of(amax)
    assert in_tensor is not None and in_tensor.dtype == torch.float32 and in_tensor.shape == ()
    assert in_tensor.item() == scale
    rule = quantizer.quant_type.tensor_scale
    assert rule is not None and rule.target == 3
    assert power_of_two_scale(tensor_amax(x, rule), rule.target).item() == scale


def test_value_is_scale_times_element() -> None:
    x = torch.tensor([3e-6, -1.1e-6, 1e-12, 0.0, NAN])
    scale = tensor_scale(x, "hifp8")
    expected = fake_quantize(x / scale, "hifp8") * scale
    assert_same_bits(fake_quantize(x, "hifp8", scale=scale), expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=torch.tensor(scale, dtype=torch.float64)), expected)
    quantizer = Quantizer.create("hifp8", tensor_scale=True, saturate=True)
    quantized, amax = quantizer(x)
    assert_same_bits(quantized, expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=quantizer.scale_of(amax)), expected)
    assert_same_bits(quantizer.apply(x, amax=amax), expected)
    assert_same_bits(quantizer.apply(x, amax=float(amax)), expected)
    assert_same_bits(quantizer.quantize(x).dequantize(), expected)


def test_scaled_values_are_a_fixed_point_under_their_recorded_scale() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 1e-5
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    y, amax = quantizer(x)
    assert torch.equal(fake_quantize(y, "hifp8", scale=quantizer.scale_of(amax)), y)


@pytest.mark.parametrize("quant_type", ["nvfp4", *FP8_TYPES])
def test_a_part_under_the_abs_max_of_the_whole_is_a_part_of_the_result(quant_type: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 64)
    whole = fake_quantize(x, quant_type)
    amax = Quantizer.create(quant_type).amax_of(x)
    assert amax is not None and amax.item() == x.abs().max().item()
    for value in (amax, float(amax)):
        parts = [fake_quantize(part, quant_type, amax=value) for part in x.chunk(4)]
        assert_same_bits(torch.cat(parts), whole)
    assert not torch.equal(fake_quantize(x[:, :32], quant_type), whole[:, :32])


@pytest.mark.parametrize("quant_type", ["nvfp4", *FP8_TYPES])
def test_operands_without_the_tensor_scale_are_exact_in_bfloat16(quant_type: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    quantizer = Quantizer.create(quant_type)
    operand = quantizer.operand(x)
    assert torch.equal(operand.bfloat16().float(), operand)
    scale = quantizer.scale_of(quantizer.amax_of(x))
    assert scale is not None
    torch.testing.assert_close(operand * scale, quantizer.apply(x), rtol=2.0**-22, atol=0)
    assert torch.equal(Quantizer.create("mxfp8").operand(x), fake_quantize(x, "mxfp8"))


def test_abs_max_of_blocks_is_over_finite_values_and_that_of_fp8_is_not() -> None:
    x = torch.tensor([1.0, -3.0, NAN, INF])
    assert Quantizer.create("nvfp4").amax_of(x) == 3.0
    assert Quantizer.create("hifp8", tensor_scale=True).amax_of(x) == 3.0
    in_fp8 = Quantizer.create("fp8_e4m3").amax_of(x)
    assert in_fp8 is not None and in_fp8.isnan()
    assert Quantizer.create("mxfp8").amax_of(x) is None
    assert Quantizer.create("mxfp8").scale_of(None) is None


def test_saturated_elements_of_unblocked_types() -> None:
    x = torch.tensor([40959.0, 40960.0, -1e9, INF, -INF, NAN, 0.0])
    assert count_saturated(x, "hifp8") == 4
    assert count_saturated(x, "hifp8", scale=2.0**20) == 2
    assert count_saturated(x, "fp16") == 3
    assert count_saturated(x, "none") == 0
    assert count_saturated(torch.empty(0), "hifp8") == 0


# --- the record ---------------------------------------------------------------------------------


def test_quantizer_resolves_every_default() -> None:
    assert Quantizer.create("mxfp8", axis=0).describe() == {
        "axis": 0,
        "quant_type": "mxfp8",
        "definition": None,
        "scale_rule": "floor",
        "rounding": "nearest_even",
        "block_size": 32,
        "source_dtype": None,
        "hadamard": None,
    }
    tiles = Quantizer.create("nvfp4", block_size=[16, 16], hadamard=16, axis=0)
    assert tiles == Quantizer.create("nvfp4", block_size=(16, 16), hadamard=16, axis=0)
    assert tiles.describe() == {
        "axis": 0,
        "quant_type": "nvfp4",
        "definition": None,
        "scale_rule": "nearest",
        "rounding": "nearest_even",
        "block_size": [16, 16],
        "source_dtype": None,
        "hadamard": 16,
    }
    assert Quantizer.create("hifp8").describe() == {
        "axis": None,
        "quant_type": "hifp8",
        "definition": None,
        "scale_rule": None,
        "rounding": "half_away",
        "block_size": None,
        "source_dtype": None,
        "hadamard": None,
    }
    hybrid = Quantizer.create("hifp8", rounding="hybrid", source_dtype="bfloat16")
    assert hybrid.describe()["source_dtype"] == "bfloat16"
    assert set(Quantizer.create("none").describe().values()) == {None, "none"}


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("hadamard", [None, 16])
@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_what_is_recorded_gives_the_same_values_again(quant_type: str, hadamard: int | None, tiles: bool) -> None:
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(2))
    entry = QUANT_TYPES[quant_type]
    if (hadamard and quant_type == "none") or (tiles and (not entry.block_size or entry.micro_exponents)):
        pytest.skip("there is no such combination")
    for arguments in every_choice(quant_type):
        seed = arguments.pop("seed", None)
        size = (4, 16) if tiles else None
        quantizer = Quantizer.create(quant_type, hadamard=hadamard, block_size=size, **arguments)
        y, amax = quantizer(x, seed=seed, hadamard_seed=3)
        recorded = quantizer.describe()
        assert recorded == json.loads(json.dumps(recorded))
        scale = quantizer.scale_of(amax)
        consumer = {
            **recorded,
            "gemm": "fprop",
            "shape": [6, 80],
            "scale": None if scale is None else float(scale),
            "amax": None if amax is None else float(amax),
            "saturate": quantizer.saturate,
            "seed": seed,
            "hadamard_seed": 3 if hadamard else None,
        }
        assert_same_bits(consumed(x.reshape(2, 3, 80), consumer), y)


def test_a_recorded_power_of_two_scale_gives_the_same_values_again() -> None:
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(2)) * 1e-4
    quantizer = Quantizer.create("hifp8", tensor_scale=True, saturate=True)
    y, amax = quantizer(x)
    scale = quantizer.scale_of(amax)
    assert scale is not None and amax is not None
    consumer = {"shape": [480], "scale": float(scale), "amax": float(amax), "saturate": True, "seed": None}
    assert_same_bits(consumed(x, quantizer.describe() | consumer), y.flatten())


@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if name not in ("none", "hif4")])
def test_what_is_called_quantized_differs_and_is_a_fixed_point(quant_type: str) -> None:
    """Under the recorded abs max. Zeros may change their sign in nvfp4; in hif4 a block's abs max need be no value."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    quantizer = Quantizer.create(quant_type)
    y, amax = quantizer(x)
    assert not torch.equal(y, x)
    assert torch.equal(quantizer.apply(y, amax=amax), y)
    assert quantizer.amax_of(y) is None or quant_type == "nvfp4" or torch.equal(quantizer.apply(y), y)


def test_only_none_is_the_identity() -> None:
    assert [name for name in ALL_TYPES if Quantizer.create(name).is_identity] == ["none"]


def test_quantizers_that_do_the_same_are_equal() -> None:
    assert Quantizer.create("mxfp8") == Quantizer.create("mxfp8", scale_rule="floor", block_size=32)
    assert Quantizer.create("bf16", axis=0) == Quantizer.create("bf16", axis=1)
    assert Quantizer.create("mxfp8", axis=0, block_size=(4, 4)) == Quantizer.create("mxfp8", axis=1, block_size=(4, 4))
    assert len({Quantizer.create("mxfp8"), Quantizer.create("mxfp8"), Quantizer.create("mxfp4")}) == 2
