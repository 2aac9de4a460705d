# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""The short way to quantize a tile: without NaN and Inf, and with every block's abs max zero or near 1.

Blocks under powers of two are rounded where they are, by spacings at their scale, in place of a division and a product.
Works on words (``triton_words``): for pairs of bfloat16 every step is exact in bfloat16 as well, as long as an
element has a mantissa bit less than bfloat16.
"""

import triton
import triton.language as tl

from qcollect.formats.triton_steps import BIAS_STEPS, EXPONENT_MASK, INVERSE_STEPS, MAGNITUDE_MASK, SIGN_MASK
from qcollect.formats.triton_words import (
    add,
    as_bits,
    high,
    is_equal,
    is_greater,
    larger,
    largest,
    low,
    multiply,
    smaller,
    subtract,
    swapped,
    word_of,
    word_of_float,
)

MODERATE_STEPS = tl.constexpr(32 << 23)  # squares of what is so far from 1 are normal numbers, too
_LEAST_BITS = tl.constexpr((127 - 32) << 23)
_SINGLE_STEPS = tl.constexpr(23 << 23)  # from a spacing to the power of two that a sum rounds to it with
_PAIR_STEPS = tl.constexpr(7 << 23)


@triton.jit
def magnitudes_of(words, PAIRS: tl.constexpr):
    return words & word_of(MAGNITUDE_MASK, PAIRS)


@triton.jit
def block_maxima(magnitudes, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """The bits of each block's abs max, in the tile's three dimensions; twice in a pair that lies along a width."""
    if WIDTH > 1:
        magnitudes = largest(magnitudes, 2, PAIRS, True)
        if PAIRS:
            magnitudes = larger(magnitudes, swapped(magnitudes), PAIRS)
    if ROWS > 1:
        magnitudes = largest(magnitudes, 0, PAIRS, True)
    return magnitudes


@triton.jit
def can_be_short(amax, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """Whether all abs maxima allow the short way."""
    if PAIRS:
        highest = tl.maximum(_distance(as_bits(low(amax))), _distance(as_bits(high(amax))))
    else:
        highest = _distance(amax)
    is_short = tl.max(highest) <= MODERATE_STEPS
    if not RULE.has_blocks:
        if PAIRS:
            top = tl.maximum(amax & 0xFFFF, amax >> 16) << 16
        else:
            top = amax
        is_short = is_short & (tl.max(top) < as_bits(tl.full((), RULE.limit_from, tl.float32)))
    return is_short


@triton.jit
def _distance(amax):
    """From 1, in the bits of an abs max; a zero has none."""
    return tl.where(amax == 0, 0, tl.abs(amax - BIAS_STEPS))


@triton.jit
def _shifted(words, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Powers of two multiplied by another: steps of the exponent field are added."""
    if STEPS < 0:
        result = words - word_of(-STEPS, PAIRS)
    else:
        result = words + word_of(STEPS, PAIRS)
    return result


@triton.jit
def short_scales(amax, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """The blocks' scales, powers of two; of an all-zero block any."""
    exponents = (amax + word_of(RULE.carry, PAIRS)) & word_of(EXPONENT_MASK, PAIRS)
    return _shifted(larger(exponents, word_of(_LEAST_BITS, PAIRS), PAIRS), -RULE.offset_steps, PAIRS)


@triton.jit
def round_short(magnitudes, scales, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """Magnitudes rounded to multiples of the spacing under the blocks' scales, without an upper end."""
    STEPS: tl.constexpr = _PAIR_STEPS if PAIRS else _SINGLE_STEPS
    exponents = magnitudes & word_of(EXPONENT_MASK, PAIRS)
    if RULE.has_blocks:
        lowest = _shifted(scales, RULE.lowest_bits - BIAS_STEPS - RULE.mantissa_steps + STEPS, PAIRS)
        magic = larger(multiply(exponents, _power_of_two(STEPS - RULE.mantissa_steps, PAIRS), PAIRS), lowest, PAIRS)
    else:
        exponents = larger(exponents, word_of(RULE.lowest_bits, PAIRS), PAIRS)
        factor = _power_of_two(STEPS - RULE.mantissa_steps, PAIRS)
        if RULE.num_tapers > 0:
            away = larger(exponents, word_of(INVERSE_STEPS, PAIRS) - exponents, PAIRS)
            num_tapers: tl.constexpr = RULE.num_tapers
            for i in tl.static_range(num_tapers):
                is_beyond = is_greater(away, word_of(BIAS_STEPS + RULE.taper_bounds[i], PAIRS), PAIRS)
                further = word_of_float(RULE.taper_growths[i] * (1.0 if not PAIRS else 2.0**-16), PAIRS)
                factor = add(multiply(is_beyond, further, PAIRS), factor, PAIRS)
        magic = multiply(exponents, factor, PAIRS)
    rounded = subtract(add(magnitudes, magic, PAIRS), magic, PAIRS)
    if RULE.is_half_away:
        spacing = multiply(magic, _power_of_two(-STEPS, PAIRS), PAIRS)
        lost = subtract(magnitudes, rounded, PAIRS)
        is_tie = is_equal(add(lost, lost, PAIRS), spacing, PAIRS)
        rounded = add(multiply(is_tie, spacing, PAIRS), rounded, PAIRS)
    return rounded


@triton.jit
def _power_of_two(STEPS: tl.constexpr, PAIRS: tl.constexpr):
    return word_of(BIAS_STEPS + STEPS, PAIRS)


@triton.jit
def limit_short(rounded, scales, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """What is beyond the maximum becomes the maximum; the maximum."""
    top = multiply(scales, word_of_float(RULE.max_value, PAIRS), PAIRS)
    return smaller(rounded, top, PAIRS), top


@triton.jit
def signed_short(magnitudes, words, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """Magnitudes with the signs of ``words``."""
    if not RULE.keeps_minus_zero:
        words = add(words, word_of(0, PAIRS), PAIRS)
    result = magnitudes | (words & word_of(SIGN_MASK, PAIRS))
    if not RULE.signed_zero:
        result = add(result, word_of(0, PAIRS), PAIRS)
    return result


@triton.jit
def quantize_short(words, amax, RULE: tl.constexpr, PAIRS: tl.constexpr):
    """A tile with blocks quantized and dequantized."""
    scales = short_scales(amax, RULE, PAIRS)
    rounded, _ = limit_short(round_short(magnitudes_of(words, PAIRS), scales, RULE, PAIRS), scales, RULE, PAIRS)
    return signed_short(rounded, words, RULE, PAIRS)
