"""Laws that hold for every input of a stated domain (blocks of the mx types; finite values)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.formats.catalog import QUANT_TYPES, SCALE_RULES
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize

MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp4")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Far from both ends of the scale's range, so that no scale is clamped and nothing overflows.
MODERATE = st.one_of(st.just(0.0), st.floats(2.0**-20, 2.0**20, width=32), st.floats(-(2.0**20), -(2.0**-20), width=32))
mx_types, rules = st.sampled_from(MX_TYPES), st.sampled_from(SCALE_RULES)
mx_roundings = st.sampled_from(("nearest_even", "half_away"))
quick = settings(max_examples=100, deadline=None, derandomize=True)


def blocks_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(values, min_size=1, max_size=70).map(torch.tensor)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@quick
@given(blocks_of(FLOATS), mx_types, mx_roundings)
def test_floor_is_idempotent(x: torch.Tensor, quant_type: str, rounding: str) -> None:
    """Under floor the scale of a quantized block is its own: the abs max never rounds into the next binade."""
    y = fake_quantize(x, quant_type, rounding=rounding)
    assert same_bits(fake_quantize(y, quant_type, rounding=rounding), y)


@quick
@given(blocks_of(FLOATS), st.sampled_from(("hifp8", "bf16", "fp16", "none")), st.booleans())
def test_types_without_blocks_are_idempotent(x: torch.Tensor, quant_type: str, saturate: bool) -> None:
    quantizer = Quantizer.create(quant_type, saturate=saturate and QUANT_TYPES[quant_type].can_saturate)
    y = quantizer.apply(x)
    assert same_bits(quantizer.apply(y), y)


@quick
@given(blocks_of(FLOATS), mx_types, rules, mx_roundings)
def test_mx_types_are_odd(x: torch.Tensor, quant_type: str, rule: str, rounding: str) -> None:
    y = fake_quantize(x, quant_type, scale_rule=rule, rounding=rounding)
    assert same_bits(fake_quantize(-x, quant_type, scale_rule=rule, rounding=rounding), -y)


@quick
@given(blocks_of(FLOATS), st.sampled_from(("hifp8", "bf16", "fp16", "none")))
def test_types_without_blocks_are_odd_but_for_the_sign_of_zero(x: torch.Tensor, quant_type: str) -> None:
    assert torch.equal(fake_quantize(-x, quant_type), -fake_quantize(x, quant_type))


@quick
@given(blocks_of(MODERATE), mx_types, rules, mx_roundings, st.integers(-20, 20))
def test_mx_types_commute_with_powers_of_two(
    x: torch.Tensor, quant_type: str, rule: str, rounding: str, exponent: int
) -> None:
    factor = 2.0**exponent
    y = fake_quantize(x, quant_type, scale_rule=rule, rounding=rounding)
    assert same_bits(fake_quantize(x * factor, quant_type, scale_rule=rule, rounding=rounding), y * factor)


@quick
@given(blocks_of(MODERATE), st.integers(-20, 20))
def test_per_tensor_scaled_hifp8_commutes_with_powers_of_two(x: torch.Tensor, exponent: int) -> None:
    quantizer, factor = Quantizer.create("hifp8", tensor_scale=True), 2.0**exponent
    (y, scale), (scaled_y, scaled_scale) = quantizer(x), quantizer(x * factor)
    assert scale is not None and scaled_scale is not None
    assert same_bits(scaled_y, y * factor)
    assert not x.any() or scaled_scale == scale * factor


@quick
@given(st.lists(FLOATS, min_size=1, max_size=32).map(torch.tensor), mx_types, rules, mx_roundings)
def test_order_is_kept_inside_a_block(x: torch.Tensor, quant_type: str, rule: str, rounding: str) -> None:
    y = fake_quantize(x.sort().values, quant_type, scale_rule=rule, rounding=rounding)
    assert (y[1:] >= y[:-1]).all()


@quick
@given(blocks_of(st.floats(width=32, allow_nan=False)), st.sampled_from(("hifp8", "bf16", "fp16")))
def test_order_is_kept_without_blocks(x: torch.Tensor, quant_type: str) -> None:
    y = fake_quantize(x.sort().values, quant_type)
    assert (y[1:] >= y[:-1]).all()


@quick
@given(blocks_of(FLOATS), mx_types, mx_roundings)
def test_ceil_and_rceil_never_clip(x: torch.Tensor, quant_type: str, rounding: str) -> None:
    for rule in ("ceil", "rceil"):
        assert count_saturated(x, quant_type, scale_rule=rule, rounding=rounding) == 0


@quick
@given(blocks_of(MODERATE), mx_types)
def test_rounding_error_is_at_most_half_a_step_under_rceil(x: torch.Tensor, quant_type: str) -> None:
    """Half of the relative step for normal elements, half of the smallest step of the block below them."""
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    y = fake_quantize(x, quant_type, scale_rule="rceil", block_size=70)
    amax = x.abs().max().item()
    if amax == 0:
        return
    scale = 2.0 ** math.ceil(math.log2(amax / element.max_value))
    limit = torch.maximum(
        x.abs() * 2.0 ** -(element.mantissa_bits + 1), torch.tensor(element.min_subnormal * scale / 2)
    )
    assert ((y - x).abs() <= limit).all()


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_floor_is_idempotent_on_normal_draws(quant_type: str) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    y = fake_quantize(x, quant_type)
    assert torch.equal(fake_quantize(y, quant_type), y)
    for exponent in range(-20, 21):
        assert torch.equal(fake_quantize(x * 2.0**exponent, quant_type), y * 2.0**exponent)
