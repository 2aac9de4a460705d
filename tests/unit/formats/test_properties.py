"""Laws that hold for every input of a stated domain, and beside each the types and roundings that break it.

Each is tried by every path, where that is slow on fewer examples, and compiled only as far as a usual run compiles. A
stochastic draw is a function of seed and place, so that its laws can be put to the test like all others.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization_paths import PATHS, can_take, taking

from qcollect.formats.catalog import QUANT_TYPES, get_quant_type
from qcollect.formats.quantizer import Quantizer, fake_quantize, quantize

MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
FP8_TYPES = ("fp8_e4m3", "fp8_e5m2")
CASTS = ("bf16", "fp16", "none")
KEEPS_MINUS_ZERO = (*MX_TYPES, *FP8_TYPES, *CASTS)
SEED = 7
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Far from both ends of the scale's range, so that no scale is clamped and nothing overflows.
MODERATE = st.one_of(st.just(0.0), st.floats(2.0**-20, 2.0**20, width=32), st.floats(-(2.0**20), -(2.0**-20), width=32))
# So close together that no block's scale is subnormal under the scale of the tensor.
CLOSE = st.one_of(st.floats(1.0, 2.0**10, width=32), st.floats(-(2.0**10), -1.0, width=32))
MX_ROUNDINGS = ("nearest_even", "half_away")
ALL_MX_ROUNDINGS = (*MX_ROUNDINGS, "stochastic")
NUM_EXAMPLES = {"eager": 100, "compiled": 50, "interpreted": 25}
quick = settings(max_examples=100, deadline=None, derandomize=True)


def law(
    values: st.SearchStrategy[torch.Tensor], ways: list[Quantizer], *more: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of what holds for every tensor, every quantizer and whatever more is drawn, by every path."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("path", PATHS)
        def test(path: str, cache_dir: Path) -> None:
            found = [quantizer for quantizer in ways if can_take(path, quantizer)]
            if not found:
                pytest.skip(f"none of these is {path} in a usual run")
            few = settings(max_examples=NUM_EXAMPLES[path], deadline=None, derandomize=True)
            with taking(path, cache_dir) as asked:
                few(given(values, st.sampled_from(found), *more)(check))()
            assert asked

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def blocks_of(values: st.SearchStrategy[float], max_size: int = 70) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(values, min_size=1, max_size=max_size).map(torch.tensor)


def every_way(
    *names: str, rules: tuple[str, ...] = (), roundings: tuple[str, ...] = (), **settings: Any
) -> list[Quantizer]:
    """These types, under these rules and roundings or all they have."""
    return [
        Quantizer.create(entry, scale_rule=rule, rounding=rounding, **settings)
        for entry in map(get_quant_type, names)
        for rule in rules or entry.scale_rules or (None,)
        for rounding in roundings or entry.roundings or (None,)
    ]


def seed_for(quantizer: Quantizer) -> dict[str, Any]:
    return {"seed": SEED} if quantizer.is_stochastic else {}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# --- idempotent ---------------------------------------------------------------------------------


@law(blocks_of(FLOATS), every_way(*MX_TYPES, rules=("floor",), roundings=ALL_MX_ROUNDINGS))
def test_floor_is_idempotent(x: torch.Tensor, quantizer: Quantizer) -> None:
    """Under floor the scale of a quantized block is its own: the abs max never rounds into the next binade."""
    y = quantizer.apply(x, **seed_for(quantizer))
    assert same_bits(quantizer.apply(y, **seed_for(quantizer)), y)


@law(blocks_of(MODERATE), every_way(*MX_TYPES, roundings=MX_ROUNDINGS))
def test_every_scale_rule_is_idempotent_with_nearest_rounding(x: torch.Tensor, quantizer: Quantizer) -> None:
    """Where nothing overflows: under another scale the same values are still values."""
    y = quantizer.apply(x)
    assert same_bits(quantizer.apply(y), y)


def test_even_with_stochastic_rounding_is_not_idempotent_in_mxfp8() -> None:
    """An abs max that counts as the next power of two is rounded down after all, and then clamped."""
    x = torch.full((64, 32), 1.95)
    y = fake_quantize(x, "mxfp8", scale_rule="even", rounding="stochastic", block_size=1, seed=SEED)
    assert sorted(set(y.flatten().tolist())) == [1.875, 2.0]
    again = fake_quantize(y, "mxfp8", scale_rule="even", rounding="stochastic", block_size=1, seed=SEED)
    assert sorted(set(again.flatten().tolist())) == [1.75, 2.0]


@law(
    blocks_of(FLOATS),
    [
        Quantizer.create(name, saturate=saturate)
        for name in ("hifp8", *CASTS)
        for saturate in ((False, True) if QUANT_TYPES[name].can_saturate else (False,))
    ],
)
def test_types_without_scales_are_idempotent(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x)
    assert same_bits(quantizer.apply(y), y)


@law(blocks_of(FLOATS), every_way("hifp8", roundings=("stochastic",)))
def test_hifp8_rounded_stochastically_is_idempotent(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x, seed=SEED)
    assert same_bits(quantizer.apply(y, seed=SEED), y)


def test_hybrid_rounding_is_not_idempotent() -> None:
    """It compares the bits that are lost with bits that are kept: an exact value may go up."""
    y = fake_quantize(torch.tensor([16.0, 256.0, 2.0**-20, 40000.0, 3.0]), "hifp8", rounding="hybrid")
    assert y.tolist() == [20.0, 384.0, 2.0**-19, math.inf, 3.0]


@law(blocks_of(FLOATS), every_way(*FP8_TYPES, roundings=ALL_MX_ROUNDINGS))
def test_fp8_is_idempotent_under_its_recorded_abs_max(x: torch.Tensor, quantizer: Quantizer) -> None:
    y, amax = quantizer(x, **seed_for(quantizer))
    again = quantizer.apply(y, amax=amax, **seed_for(quantizer))
    if not quantizer.is_stochastic or quantizer.scale_rule == "rceil":
        assert torch.equal(again, y)
    else:  # a quotient that is a hair off may be drawn to the other side
        assert ((again - y).abs() <= y.abs() * 0.25 + 1e-37).all()


@law(blocks_of(CLOSE), every_way("nvfp4", roundings=MX_ROUNDINGS))
def test_nvfp4_is_idempotent_under_its_recorded_abs_max(x: torch.Tensor, quantizer: Quantizer) -> None:
    y, amax = quantizer(x)
    assert torch.equal(quantizer.apply(y, amax=amax), y)


def test_nvfp4_is_not_idempotent_where_a_scale_is_subnormal_or_rounding_is_stochastic() -> None:
    amax = torch.tensor(2688.0)  # the tensor's scale is 1
    x = torch.tensor([3.2 * 2.0**-9])  # its block's scale is 0.53 of the smallest, which becomes 1, then 0.5
    y = fake_quantize(x, "nvfp4", amax=amax)
    assert y.item() == 3 * 2.0**-9
    assert fake_quantize(y, "nvfp4", amax=amax).item() == 0
    x = torch.full((256, 1), 5.85)
    y = fake_quantize(x, "nvfp4", rounding="stochastic", seed=SEED, amax=amax)
    assert not torch.equal(fake_quantize(y, "nvfp4", rounding="stochastic", seed=SEED, amax=amax), y)


def test_hif4_is_not_idempotent() -> None:
    """Its scale is rounded to three bits, so that the abs max of a block need not be a value."""
    y = fake_quantize(torch.ones(64), "hif4")
    assert set(y.tolist()) == {0.9375}
    assert set(fake_quantize(torch.full((64,), 0.9), "hif4").tolist()) == {0.875}
    assert set(fake_quantize(torch.full((64,), 0.875), "hif4").tolist()) == {0.875}


# --- odd ----------------------------------------------------------------------------------------


@law(blocks_of(FLOATS), every_way(*KEEPS_MINUS_ZERO))
def test_types_that_keep_minus_zero_are_odd(x: torch.Tensor, quantizer: Quantizer) -> None:
    seed = seed_for(quantizer)
    assert same_bits(quantizer.apply(-x, **seed), -quantizer.apply(x, **seed))


@law(blocks_of(FLOATS), every_way("hifp8", "nvfp4", "hif4"))
def test_other_types_are_odd_but_for_the_sign_of_zero(x: torch.Tensor, quantizer: Quantizer) -> None:
    seed = seed_for(quantizer)
    assert torch.equal(quantizer.apply(-x, **seed), -quantizer.apply(x, **seed))


# --- powers of two ------------------------------------------------------------------------------


@law(blocks_of(MODERATE), every_way(*MX_TYPES), st.integers(-20, 20))
def test_mx_types_commute_with_powers_of_two(x: torch.Tensor, quantizer: Quantizer, exponent: int) -> None:
    factor, seed = 2.0**exponent, seed_for(quantizer)
    assert same_bits(quantizer.apply(x * factor, **seed), quantizer.apply(x, **seed) * factor)


@law(blocks_of(CLOSE), every_way("nvfp4", *FP8_TYPES), st.integers(-20, 20))
def test_types_with_a_tensor_scale_commute_with_powers_of_two(
    x: torch.Tensor, quantizer: Quantizer, exponent: int
) -> None:
    factor, seed = 2.0**exponent, seed_for(quantizer)
    assert same_bits(quantizer.apply(x * factor, **seed), quantizer.apply(x, **seed) * factor)


@law(blocks_of(MODERATE), [Quantizer.create("hifp8", tensor_scale=True)], st.integers(-20, 20))
def test_per_tensor_scaled_hifp8_commutes_with_powers_of_two(
    x: torch.Tensor, quantizer: Quantizer, exponent: int
) -> None:
    factor = 2.0**exponent
    (y, amax), (scaled_y, scaled_amax) = quantizer(x), quantizer(x * factor)
    assert same_bits(scaled_y, y * factor)
    scale, scaled_scale = quantizer.scale_of(amax), quantizer.scale_of(scaled_amax)
    assert scale is not None and scaled_scale is not None
    assert not x.any() or scaled_scale == scale * factor


@law(blocks_of(CLOSE), every_way("hif4"), st.integers(-30, 5))
def test_hif4_commutes_with_powers_of_two_inside_the_range_of_its_scale(
    x: torch.Tensor, quantizer: Quantizer, exponent: int
) -> None:
    factor, seed = 2.0**exponent, seed_for(quantizer)
    assert same_bits(quantizer.apply(x * factor, **seed), quantizer.apply(x, **seed) * factor)


def test_types_without_a_scale_do_not_commute_with_powers_of_two() -> None:
    assert fake_quantize(torch.tensor([1.125]), "hifp8").item() == 1.125
    assert fake_quantize(torch.tensor([1.125 * 2**10]), "hifp8").item() == 1024
    assert fake_quantize(torch.tensor([1.0 + 2.0**-10, 2.0**16]), "fp16").tolist() == [1.0 + 2.0**-10, math.inf]
    assert fake_quantize(torch.tensor([2.0**20]), "hif4").item() == 7 * 49152  # the end of its scale


# --- order --------------------------------------------------------------------------------------


@law(blocks_of(FLOATS, 32), every_way(*MX_TYPES, roundings=MX_ROUNDINGS))
def test_order_is_kept_inside_a_block(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x.sort().values)
    assert (y[1:] >= y[:-1]).all()


@law(blocks_of(FLOATS, 16), every_way("nvfp4", roundings=MX_ROUNDINGS))
def test_order_is_kept_inside_a_block_of_nvfp4(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x.sort().values)
    assert (y[1:] >= y[:-1]).all()


@law(blocks_of(FLOATS, 4), every_way("hif4", roundings=MX_ROUNDINGS))
def test_order_is_kept_among_four_of_hif4(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x.sort().values)
    assert (y[1:] >= y[:-1]).all()


def test_order_is_not_kept_between_groups_of_hif4() -> None:
    """One group's step is twice that of another."""
    x = torch.zeros(16)
    x[0], x[8], x[9] = 0.87, 0.86, 7.0
    y = fake_quantize(x, "hif4")
    assert (y[0].item(), y[8].item()) == (0.75, 1.0)


@law(
    blocks_of(st.floats(width=32, allow_nan=False)),
    [Quantizer.create(name) for name in ("hifp8", "bf16", "fp16")],
)
def test_order_is_kept_without_scales(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x.sort().values)
    assert (y[1:] >= y[:-1]).all()


@law(blocks_of(FLOATS), every_way(*FP8_TYPES, roundings=MX_ROUNDINGS))
def test_order_is_kept_under_one_scale(x: torch.Tensor, quantizer: Quantizer) -> None:
    y = quantizer.apply(x.sort().values)
    assert (y[1:] >= y[:-1]).all()


def test_hybrid_and_stochastic_rounding_do_not_keep_order() -> None:
    x = torch.tensor([16.0, 16.5])  # 16.0 loses nothing and goes up; bits of 16.5 are above those it loses
    above = torch.tensor([16.0 + 2.0**-19])
    y = fake_quantize(torch.cat((x[:1], above)), "hifp8", rounding="hybrid")
    assert y.tolist() == [20.0, 16.0]
    y = fake_quantize(torch.full((100,), 17.0), "hifp8", rounding="stochastic", seed=SEED)
    assert (y[1:] < y[:-1]).any()


# --- errors -------------------------------------------------------------------------------------


@quick
@given(blocks_of(FLOATS), st.sampled_from(every_way(*MX_TYPES, rules=("ceil", "rceil"), roundings=ALL_MX_ROUNDINGS)))
def test_ceil_and_rceil_never_clip(x: torch.Tensor, quantizer: Quantizer) -> None:
    assert quantizer.num_saturated(x, **seed_for(quantizer)) == 0


@law(blocks_of(MODERATE, 32), every_way(*MX_TYPES, rules=("rceil",), roundings=("nearest_even",)))
def test_rounding_error_is_at_most_half_a_step_under_rceil(x: torch.Tensor, quantizer: Quantizer) -> None:
    """Half of the relative step for normal elements, half of the smallest step of the block below them."""
    element = quantizer.quant_type.element
    assert element is not None
    y = quantizer.apply(x)
    amax = x.abs().max().item()
    if amax == 0:
        return
    scale = 2.0 ** math.ceil(math.log2(amax / element.max_value))
    limit = torch.maximum(
        x.abs() * 2.0 ** -(element.mantissa_bits + 1), torch.tensor(element.min_subnormal * scale / 2)
    )
    assert ((y - x).abs() <= limit).all()


@law(
    blocks_of(MODERATE),
    every_way(*MX_TYPES, rules=("floor", "rceil"), roundings=("stochastic",)),
    st.integers(0, 2**63 - 1),
)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(x: torch.Tensor, quantizer: Quantizer, seed: int) -> None:
    """And an exact value none but itself."""
    y = quantizer.apply(x, seed=seed)
    nearest = fake_quantize(x, quantizer.quant_type, scale_rule=quantizer.scale_rule)
    exact = nearest == x
    assert torch.equal(y[exact], x[exact])
    on_one_side = (y - x).sign() == (nearest - x).sign()  # the nearest is one of the two
    assert torch.equal(y[on_one_side], nearest[on_one_side])


# --- codes --------------------------------------------------------------------------------------


@law(blocks_of(st.floats(width=32)), every_way(*(name for name in QUANT_TYPES if name != "none")))
def test_codes_stand_for_what_fake_quantize_gives(x: torch.Tensor, quantizer: Quantizer) -> None:
    """NaN and Inf included. An integer has one zero, so that mxint8 loses the sign of a zero in its codes."""
    seed = seed_for(quantizer)
    expected = quantizer.apply(x, **seed)
    y = quantizer.quantize(x, **seed).dequantize()
    assert torch.equal(y.isnan(), expected.isnan())
    y, expected = y.nan_to_num(0.5), expected.nan_to_num(0.5)
    assert torch.equal(y, expected)
    assert quantizer.quant_type.name == "mxint8" or same_bits(y, expected)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_floor_is_idempotent_on_normal_draws_at_every_magnitude(quant_type: str) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    y = fake_quantize(x, quant_type)
    assert torch.equal(fake_quantize(y, quant_type), y)
    for exponent in range(-20, 21):
        assert torch.equal(fake_quantize(x * 2.0**exponent, quant_type), y * 2.0**exponent)


@quick
@given(blocks_of(FLOATS), st.sampled_from(MX_TYPES))
def test_quantizing_codes_again_gives_the_same_codes(x: torch.Tensor, quant_type: str) -> None:
    first = quantize(x, quant_type)
    again = quantize(first.dequantize(), quant_type)
    assert torch.equal(first.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert first.scales is not None and again.scales is not None
    assert torch.equal(first.scales.view(torch.uint8), again.scales.view(torch.uint8))
