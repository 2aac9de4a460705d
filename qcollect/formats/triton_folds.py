# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""A tile folded to one number a thread, as Triton functions: sums, counts and maxima of what the thread holds."""

import triton
import triton.language as tl

from qcollect.formats.triton_steps import (
    EXPONENT_MASK,
    INVERSE_STEPS,
    ONE_STEP,
)
from qcollect.formats.triton_words import (
    as_bits,
    as_float,
    high,
    largest,
    low,
    total,
)


@triton.jit
def fold(values, TILE: tl.constexpr):
    """A tile as its threads hold it: (repeats, lanes, side by side)."""
    EACH: tl.constexpr = values.numel // (TILE.fold_repeats * TILE.fold_lanes)
    return tl.reshape(values, (TILE.fold_repeats, TILE.fold_lanes, EACH))


@triton.jit
def folded_sum(values, TILE: tl.constexpr):
    return tl.sum(tl.sum(fold(values, TILE), axis=2), axis=0)


@triton.jit
def folded_max(values, TILE: tl.constexpr):
    return tl.max(tl.max(fold(values, TILE), axis=2), axis=0)


@triton.jit
def folded_squares(words, TILE: tl.constexpr):
    """Float64."""
    if TILE.is_paired:
        squares = tl.fma(high(words), high(words), low(words) * low(words))
    else:
        squares = as_float(words) * as_float(words)
    return folded_sum(squares, TILE).to(tl.float64)


@triton.jit
def folded_scaled_squares(values, TILE: tl.constexpr):
    """Float64, of whatever finite values."""
    unit = tl.max(as_bits(values) & EXPONENT_MASK)
    unit = tl.minimum(tl.maximum(unit, ONE_STEP), INVERSE_STEPS - ONE_STEP)
    values = values * as_float(-unit + INVERSE_STEPS)
    weight = as_float(unit).to(tl.float64)
    return folded_sum(values * values, TILE).to(tl.float64) * (weight * weight)


@triton.jit
def folded_count(ones, TILE: tl.constexpr):
    """How many words, or numbers of pairs, are 1.0 and not 0.0; float32."""
    counts = total(total(fold(ones, TILE), 2, TILE.is_paired), 0, TILE.is_paired)
    if TILE.is_paired:
        count = low(counts) + high(counts)
    else:
        count = as_float(counts)
    return count


@triton.jit
def _folded_larger(words, TILE: tl.constexpr):
    """The largest magnitudes, as words."""
    return largest(largest(fold(words, TILE), 2, TILE.is_paired, False), 0, TILE.is_paired, False)


@triton.jit
def folded_maximum(words, TILE: tl.constexpr):
    """The largest magnitudes, float32."""
    return as_float(largest_of(_folded_larger(words, TILE), TILE.is_paired))


@triton.jit
def largest_of(words, PAIRS: tl.constexpr):
    """Magnitudes as float32 bits, of pairs the larger."""
    if PAIRS:
        words = tl.maximum(words << 16, words & -0x10000)
    return words


@triton.jit
def first_of(words, PAIRS: tl.constexpr):
    if PAIRS:
        words = words << 16
    return words


@triton.jit
def count_blocks(ones, TILE: tl.constexpr):
    if not TILE.is_paired:
        count = (as_float(ones) > 0.0).to(tl.int32)
    elif TILE.padded_width > 1:
        count = (low(ones) > 0.0).to(tl.int32)
    else:
        count = (low(ones) > 0.0).to(tl.int32) + (high(ones) > 0.0).to(tl.int32)
    return count
