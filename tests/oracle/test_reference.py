"""Whole types, bit for bit against a second implementation in float64 written from the definitions."""

import pytest
import torch

from qcollect.formats.catalog import POWER_OF_TWO_RULES, get_quant_type
from qcollect.formats.quantizer import quantize
from qcollect.formats.random import random_bits as philox_words
from qcollect.formats.random import random_fractions

np = pytest.importorskip("numpy")
import float64_reference as reference  # noqa: E402
from bit_patterns import around, assert_bits, assert_values, random_bits, random_blocks  # noqa: E402

NUM_BLOCKS = 1024
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
ROUNDINGS = ("nearest_even", "half_away", "stochastic")
SEED = (123 << 32) + 456


def grid_of(quant_type: str) -> reference.Grid:
    element = get_quant_type(quant_type).element
    assert element is not None
    return reference.GRIDS[element.name]


def draws_for(rounding: str, shape: tuple[int, ...]):
    """The draws of stochastic rounding, once more in plain Python where they are few."""
    if rounding != "stochastic":
        return None
    num = int(np.prod(shape))
    if num <= 4096:
        return reference.draws(SEED, shape)
    return random_fractions(SEED, num).double().numpy().reshape(shape)


def seed_for(rounding: str) -> dict[str, int]:
    return {"seed": SEED} if rounding == "stochastic" else {}


def low_precision(x):
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


# --- random numbers -----------------------------------------------------------------------------


def test_reference_draws_are_those_of_the_published_generator() -> None:
    ones = 0xFFFFFFFF
    assert reference.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference.philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, SEED, (1 << 63) - 1])
def test_words_and_draws_are_those_of_the_generator(seed: int) -> None:
    places = [0, 1, 2, 1000, (1 << 32) - 1, 1 << 32, (1 << 40) + 7, (1 << 62) + 5]
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = [reference.philox((place & 0xFFFFFFFF, place >> 32, 0, 0), key)[0] for place in places]
    assert philox_words(seed, torch.tensor(places)).tolist() == expected
    for place in places:
        group, lane, word = place // 64, place % 16, place // 16 % 4
        drawn = reference.philox((group & 0xFFFFFFFF, group >> 32, lane, 0), key)[word]
        assert random_fractions(seed, 1, first=place).tolist() == [(drawn >> 8) / 2.0**24]


# --- blocks with a power-of-two scale -------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_mx_blocks(quant_type: str, rule: str, rounding: str, fake_quantize) -> None:
    for x in (random_bits(7, NUM_BLOCKS, 32), random_blocks(8, NUM_BLOCKS)):
        expected = reference.mx(x, grid_of(quant_type), rule, rounding, random=draws_for(rounding, x.shape))
        y = fake_quantize(torch.from_numpy(x), quant_type, scale_rule=rule, rounding=rounding, **seed_for(rounding))
        assert_bits(y, expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("axis", "size"), [(1, 32), (0, 32), (1, 5), (0, 16), (1, (32, 32)), (1, (3, 16)), (1, (1, 7))]
)
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_mx_blocks_and_tiles_with_short_ends(
    quant_type: str, axis: int, size: int | tuple[int, int], rounding: str, fake_quantize
) -> None:
    x = random_blocks(9, 45, 70, -20, 20)
    x[7, 3], x[20, 66] = np.nan, np.inf
    expected = reference.mx(
        x, grid_of(quant_type), "floor", rounding, axis=axis, size=size, random=draws_for(rounding, x.shape)
    )
    arguments = {"block_size": size, "rounding": rounding, **seed_for(rounding)}
    assert_bits(fake_quantize(torch.from_numpy(x), quant_type, axis, **arguments), expected)
    dequantized = quantize(torch.from_numpy(x), quant_type, axis, **arguments).dequantize()
    (assert_values if quant_type == "mxint8" else assert_bits)(dequantized, expected)


# --- a scale for the tensor -------------------------------------------------------------------------


def tensors(seed: int):
    """Matrices (32, 48) at magnitudes from the smallest of float32 to the largest, then with zeros, NaN and Inf."""
    for exponent in (-149, -140, -126, -100, -60, -20, -3, 0, 1, 10, 60, 100, 123):
        rng = np.random.default_rng(1000 * seed + exponent)
        with np.errstate(over="ignore", under="ignore"):
            x = (rng.standard_normal((32, 48)) * 2.0**exponent).astype(np.float32)
        x[::4, 5] *= np.float32(2.0**3)
        yield x
        if exponent % 2:
            yield low_precision(x)
    x = random_blocks(seed, 32, 48, -30, 30)
    yield x
    x = x.copy()
    x[:5], x[6, :16], x[7] = 0, -0.0, np.float32(1e-30)
    yield x
    yield np.zeros((32, 48), np.float32)
    yield np.full((32, 48), -0.0, np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        y = x.copy()
        y[3, 17] = bad
        yield y
    yield np.full((32, 48), np.nan, np.float32)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", ["nearest", "rceil"])
@pytest.mark.parametrize("quant_type", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_with_one_scale(quant_type: str, rule: str, rounding: str, fake_quantize) -> None:
    for x in tensors(11):
        expected = reference.fp8(
            x, grid_of(quant_type), rounding, power_of_two=rule == "rceil", random=draws_for(rounding, x.shape)
        )
        arguments = {"scale_rule": rule, "rounding": rounding, **seed_for(rounding)}
        assert_bits(fake_quantize(torch.from_numpy(x), quant_type, **arguments), expected)
        assert_bits(quantize(torch.from_numpy(x), quant_type, **arguments).dequantize(), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("axis", "size"), [(1, 16), (0, 16), (1, (16, 16)), (1, 20), (1, (5, 9))])
def test_nvfp4(axis: int, size: int | tuple[int, int], rounding: str, fake_quantize) -> None:
    for x in tensors(12):
        expected = reference.nvfp4(x, rounding, axis=axis, size=size, random=draws_for(rounding, x.shape))
        arguments = {"block_size": size, "rounding": rounding, **seed_for(rounding)}
        assert_bits(fake_quantize(torch.from_numpy(x), "nvfp4", axis, **arguments), expected)
        assert_bits(quantize(torch.from_numpy(x), "nvfp4", axis, **arguments).dequantize(), expected)


@pytest.mark.parametrize("rounding", ["half_away", "nearest_even", "stochastic"])
@pytest.mark.parametrize(("axis", "size"), [(1, 64), (0, 64), (1, 8), (1, 16), (0, 24)])
def test_hif4(axis: int, size: int, rounding: str, fake_quantize) -> None:
    for x in tensors(13):
        expected = reference.hif4(x, rounding, axis=axis, size=size, random=draws_for(rounding, x.shape))
        arguments = {"block_size": size, "rounding": rounding, **seed_for(rounding)}
        assert_bits(fake_quantize(torch.from_numpy(x), "hif4", axis, **arguments), expected)
        assert_bits(quantize(torch.from_numpy(x), "hif4", axis, **arguments).dequantize(), expected)


# --- hifp8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saturate", [False, True])
def test_hifp8_rounded_stochastically(saturate: bool, fake_quantize) -> None:
    grid = grid_of("hifp8")
    if saturate:
        grid = reference.Grid(grid.values, grid.beyond)
    for x in (random_bits(14, 20_000), around(15, 20_000, -26, 18)):
        exact = reference.to_float64(x)
        expected = reference.to_float32(
            reference.round_to_grid(exact, grid, "stochastic", draws_for("stochastic", x.shape))
        )
        y = fake_quantize(torch.from_numpy(x), "hifp8", rounding="stochastic", saturate=saturate, seed=SEED)
        assert_bits(y, expected + np.float32(0.0))  # one zero


@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16"])
def test_hifp8_rounded_by_comparing_bits(source_dtype: str, fake_quantize) -> None:
    is_bfloat16 = source_dtype == "bfloat16"
    for x in (random_bits(16, 20_000), around(17, 20_000, -26, 18)):
        x = low_precision(x) if is_bfloat16 else x
        y = fake_quantize(torch.from_numpy(x), "hifp8", rounding="hybrid", source_dtype=source_dtype)
        assert_bits(y, reference.hybrid(x, is_bfloat16=is_bfloat16))


@pytest.mark.parametrize("scale", [2.0**-100, 0.25, 2.0, 2.0**90])
def test_hifp8_under_a_scale(scale: float, fake_quantize) -> None:
    x = around(18, 20_000, -40, 40)
    exact = reference.round_to_grid(reference.to_float64(x) / scale, grid_of("hifp8"), "half_away") * scale
    assert_values(fake_quantize(torch.from_numpy(x), "hifp8", scale=scale), reference.to_float32(exact))
