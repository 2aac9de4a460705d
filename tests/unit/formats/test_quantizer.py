"""Exact values: what a block, a scale rule, a rounding and an edge case give."""

import math

import pytest
import torch

from qcollect.formats.blocks import scale_exponents
from qcollect.formats.catalog import E2M1, E4M3, E8M0, QUANT_TYPES, SCALE_RULES
from qcollect.formats.checks import DTYPES
from qcollect.formats.elements import magnitude_bits
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, tensor_scale

ALL_TYPES = tuple(QUANT_TYPES)
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp4")
NAN, INF = math.nan, math.inf


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


def test_scale_exponent_stays_in_the_scale_format() -> None:
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-120, 3.4028235e38])
    for rule in SCALE_RULES:
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


@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_blocks_stay_zero(quant_type: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(4, 64, dtype=dtype)
    assert_same_bits(fake_quantize(zeros, quant_type), zeros)
    zeros[2] = 1
    assert_same_bits(fake_quantize(zeros, quant_type), zeros)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_all_zero_block_has_a_finite_scale(quant_type: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    for rule in SCALE_RULES:
        assert scale_exponents(torch.zeros(1, dtype=torch.int32), element, E8M0, rule).item() == -127


def test_all_zero_tensor_has_a_tensor_scale_of_one() -> None:
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    y, scale = quantizer(torch.zeros(4, 64))
    assert scale is not None and scale.item() == 1.0
    assert torch.equal(y, torch.zeros(4, 64))


@pytest.mark.parametrize("quant_type", MX_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_nan_or_inf_makes_its_block_nan_and_no_other(quant_type: str, dtype: torch.dtype, rule: str) -> None:
    # NVIDIA/TransformerEngine issue 3550: a maximum that drops NaN hides it.
    x = torch.ones(3, 64, dtype=dtype)
    x[0, 5], x[1, 40], x[2, 0] = NAN, INF, -INF
    y = fake_quantize(x, quant_type, scale_rule=rule)
    expected = torch.ones(3, 64, dtype=dtype)
    expected[0, :32] = expected[1, 32:] = expected[2, :32] = NAN
    assert_same_bits(y, expected)
    assert count_saturated(x, quant_type, scale_rule=rule) == 0


@pytest.mark.parametrize("quant_type", ["hifp8", "bf16", "fp16", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_where_there_are_no_blocks(quant_type: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5], x[1, 40] = NAN, INF
    assert_same_bits(fake_quantize(x, quant_type), x)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_negative_nan_payloads_are_nan(quant_type: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for one in bits.view(torch.float32):
        assert fake_quantize(block(one.item()).index_put((torch.tensor([0]),), one), quant_type).isnan().all()


def test_negative_zero() -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, 1.0])
    for quant_type in (*MX_TYPES, "bf16", "fp16", "none"):
        assert fake_quantize(x, quant_type).signbit().tolist() == [True, False, True, False]
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
    _, in_tensor = Quantizer.create("hifp8", tensor_scale=True)(x)
    assert in_tensor is not None and in_tensor.dtype == torch.float32 and in_tensor.shape == ()
    assert in_tensor.item() == scale


def test_value_is_scale_times_element() -> None:
    x = torch.tensor([3e-6, -1.1e-6, 1e-12, 0.0, NAN])
    scale = tensor_scale(x, "hifp8")
    expected = fake_quantize(x / scale, "hifp8") * scale
    assert_same_bits(fake_quantize(x, "hifp8", scale=scale), expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=torch.tensor(scale, dtype=torch.float64)), expected)
    quantized, recorded = Quantizer.create("hifp8", tensor_scale=True, saturate=True)(x)
    assert_same_bits(quantized, expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=recorded), expected)


def test_scaled_values_are_a_fixed_point_under_their_recorded_scale() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 1e-5
    y, scale = Quantizer.create("hifp8", tensor_scale=True)(x)
    assert torch.equal(fake_quantize(y, "hifp8", scale=scale), y)


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
        "scale_rule": "floor",
        "rounding": "nearest_even",
        "block_size": 32,
    }
    assert Quantizer.create("hifp8").describe() == {
        "axis": None,
        "quant_type": "hifp8",
        "scale_rule": None,
        "rounding": "half_away",
        "block_size": None,
    }
    assert set(Quantizer.create("none").describe().values()) == {None, "none"}


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_what_is_recorded_gives_the_same_values_again(quant_type: str) -> None:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(2))
    y, scale = Quantizer.create(quant_type)(x)
    recorded = Quantizer.create(quant_type).describe()
    assert all(value is None or type(value) in (str, int) for value in recorded.values())
    assert torch.equal(fake_quantize(x, scale=scale, **recorded), y)


def test_only_none_is_the_identity() -> None:
    assert [name for name in ALL_TYPES if Quantizer.create(name).is_identity] == ["none"]


def test_quantizers_that_do_the_same_are_equal() -> None:
    assert Quantizer.create("mxfp8") == Quantizer.create("mxfp8", scale_rule="floor", block_size=32)
    assert Quantizer.create("bf16", axis=0) == Quantizer.create("bf16", axis=1)
    assert len({Quantizer.create("mxfp8"), Quantizer.create("mxfp8"), Quantizer.create("mxfp4")}) == 2
