# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""Histograms of exponents and scale codes, as Triton functions.

A thread counts the 25 exponents from ``top`` downwards. An element becomes 16^exponent, a float64 number; a sum of
eight of them has the counts of 13 exponents side by side in its mantissa, four bits each, and smaller exponents are
lost behind its last place. Two sums do, the second of elements that are at most the first one's lowest exponent.
Counts then have eight bits between repeats, sixteen from tile to tile. Scale codes have a window of eight, in eight
bits each. A tile with anything outside is read again, and that is added to the bins in memory one by one.
"""

import triton
import triton.language as tl

from qcollect.formats.triton_folds import (
    fold,
    largest_of,
)
from qcollect.formats.triton_steps import (
    EXPONENT_MASK,
    MANTISSA_WIDTH,
    find_scales,
    over_blocks,
    scale_codes,
)
from qcollect.formats.triton_words import (
    one_shifted,
    power_of_16,
    smaller,
    word_of,
)

_NUM_BINS = tl.constexpr(256)
_FIELDS = tl.constexpr(13)  # of four bits in a float64 number's mantissa
WINDOW = tl.constexpr(25)  # exponents that a thread counts
HEADROOM = tl.constexpr(4)
_EVEN_FIELDS = tl.constexpr(0x000F0F0F0F0F0F0F)
_ODD_BYTES = tl.constexpr(0x0000FFFFFFFFFFFF)
_EVEN_BYTES = tl.constexpr(0x00FF00FF00FF00FF)


@triton.jit
def highest(values):
    """The largest of a tile's numbers, dimension by dimension: all at once would first move them to other threads."""
    return tl.max(tl.max(tl.max(values, axis=2), axis=1), axis=0)


@triton.jit
def highest_exponent(maxima, PAIRS: tl.constexpr):
    return highest(largest_of(maxima, PAIRS)) >> MANTISSA_WIDTH


@triton.jit
def any_bits(words, block_words):
    """The bits that any of a number a thread, or of one a block, has."""
    of_blocks = tl.reduce_or(tl.reduce_or(tl.reduce_or(block_words, axis=2), axis=1), axis=0)
    return tl.reduce_or(words, axis=0) | of_blocks


@triton.jit
def count_exponents(magnitudes, maxima, top, bit, outside, n0, n1, n2, n3, n4, n5, n6, n7, TILE: tl.constexpr):
    """A tile's elements added to the window's counts, and its bit to a thread's word if anything is outside."""
    PAIRS: tl.constexpr = TILE.is_paired
    if highest_exponent(maxima, PAIRS) > top:
        outside |= bit
    else:
        exponents = magnitudes & word_of(EXPONENT_MASK, PAIRS)
        even, odd = _fields(exponents, top, TILE)
        n0 += even & _EVEN_BYTES
        n1 += even
        n2 += odd & _EVEN_BYTES
        n3 += odd
        ceiling = (top - (_FIELDS - 1)) << MANTISSA_WIDTH
        if PAIRS:
            ceiling |= ceiling >> 16
        even, odd = _fields(smaller(exponents, ceiling, PAIRS), top - (_FIELDS - 1), TILE)
        n4 += even & _EVEN_BYTES
        n5 += even
        n6 += odd & _EVEN_BYTES
        n7 += odd
        # all that are inside are in the second sum
        counts = even + odd
        counts = (counts + (counts >> 32)).to(tl.int32)
        counts = counts + (counts >> 16)
        counts = (counts + (counts >> 8)) & 0xFF
        EACH: tl.constexpr = magnitudes.numel // TILE.fold_lanes * (2 if PAIRS else 1)
        outside |= tl.where(counts < EACH, bit, 0)
    return outside, n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _fields(exponents, top, TILE: tl.constexpr):
    """Counts of 13 exponents up to ``top``, in eight bits each: those of even fields and those of odd ones.

    A sum of eight is off by less than half of its last place, in whatever order it is taken.
    """
    if TILE.is_paired:
        powers = power_of_16(exponents & EXPONENT_MASK) + power_of_16(exponents << 16)
    else:
        powers = power_of_16(exponents)
    powers = tl.sum(fold(powers, TILE), axis=2)
    EACH: tl.constexpr = exponents.numel // (TILE.fold_repeats * TILE.fold_lanes) * (2 if TILE.is_paired else 1)
    MERGED: tl.constexpr = min(TILE.fold_repeats, 8 // EACH)
    if MERGED > 1:
        powers = tl.sum(tl.reshape(powers, (TILE.fold_repeats // MERGED, MERGED, TILE.fold_lanes)), axis=1)
    unit = ((top + 1).to(tl.int64) << 54).to(tl.float64, bitcast=True)
    words = (powers + unit).to(tl.int64, bitcast=True)
    even = tl.sum(words & _EVEN_FIELDS, axis=0)
    odd = ((tl.sum(words, axis=0) - even) >> 4) & _ODD_BYTES
    return even, odd


@triton.jit
def count_outside(bins_ptr, magnitudes, exists, bound):
    """Adds elements with exponents up to ``bound`` to the bins."""
    exponents = magnitudes >> MANTISSA_WIDTH
    is_counted = exists & (exponents <= bound)
    # zeros are many
    zeros = tl.sum((is_counted & (exponents == 0)).to(tl.int32)).to(tl.int64)
    tl.atomic_add(bins_ptr, zeros, mask=zeros > 0, sem="relaxed")
    one = tl.full(exponents.shape, 1, tl.int64)
    tl.atomic_add(bins_ptr + exponents, one, mask=is_counted & (exponents > 0), sem="relaxed")


@triton.jit
def find_codes(amax, tensor_encode, RULE: tl.constexpr):
    _, _, scale = find_scales(amax, tensor_encode, RULE)
    return scale_codes(scale, RULE)


@triton.jit
def blocks_in_tensor(exists, TILE: tl.constexpr):
    if TILE.is_full:
        in_tensor = tl.full((1, TILE.num_blocks, 1), 1, tl.int1)
    else:
        in_tensor = over_blocks(exists.to(tl.int32), TILE.padded_rows, TILE.padded_width) > 0
    return in_tensor


@triton.jit
def short_codes(scales, maxima, RULE: tl.constexpr):
    """Of the short way's scales; those of all-zero blocks are the lowest there are."""
    return tl.where(maxima == 0, 0, (scales >> RULE.code_shift) - RULE.code_offset)


@triton.jit
def count_codes(codes, in_tensor, top_code, bit, outside, c0, c1):
    """Blocks' scale codes added to the window's counts, and the tile's bit to the word of a block that is outside."""
    steps = (top_code - codes) * 8
    outside |= tl.where(in_tensor & ((steps < 0) | (steps >= 64)), bit, 0)
    steps = tl.where(in_tensor, steps, -1)
    c0 += one_shifted(steps)
    c1 += one_shifted(steps - 32)
    return outside, c0, c1


@triton.jit
def count_codes_outside(bins_ptr, codes, in_tensor, top_code):
    one = tl.full(codes.shape, 1, tl.int64)
    steps = (top_code - codes) * 8
    is_outside = in_tensor & ((steps < 0) | (steps >= 64))
    tl.atomic_add(bins_ptr + _NUM_BINS + codes, one, mask=is_outside, sem="relaxed")


@triton.jit
def _add_exponents(bins_ptr, lowest, words, NUM: tl.constexpr, TILE: tl.constexpr):
    """Adds the counts of sixteen bits: of ``lowest``, then of every fourth exponent above."""
    # a program has 32 tiles
    IS_SMALL: tl.constexpr = (
        TILE.num_blocks * TILE.padded_rows * TILE.padded_width * (2 if TILE.is_paired else 1) <= 1024
    )
    if IS_SMALL:
        words = tl.sum(words)
    for i in tl.static_range(NUM):
        counts = (words >> (16 * i)) & 0xFFFF
        if not IS_SMALL:
            counts = tl.sum(counts)
        tl.atomic_add(bins_ptr + lowest + 4 * i, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _add_counts(bins_ptr, number, words, FIELDS: tl.constexpr, STEP: tl.constexpr):
    """Adds the counts in the fields of words: of ``number``, then of those ``STEP`` further down."""
    BITS: tl.constexpr = 32 // FIELDS
    for i in tl.static_range(FIELDS):
        count = tl.sum((words >> (BITS * i)) & ((1 << BITS) - 1)).to(tl.int64)
        tl.atomic_add(bins_ptr + number - STEP * i, count, mask=count > 0, sem="relaxed")


@triton.jit
def add_windows(
    bins_ptr, top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1, RULE: tl.constexpr, TILE: tl.constexpr
):
    """Adds a program's windows to the bins."""
    # every fourth exponent in a word; every other one was added to its neighbours
    lowest = top - (_FIELDS - 1)
    _add_exponents(bins_ptr, lowest, n0, 4, TILE)
    _add_exponents(bins_ptr, lowest + 2, (n1 - n0) >> 8, 3, TILE)
    _add_exponents(bins_ptr, lowest + 1, n2, 3, TILE)
    _add_exponents(bins_ptr, lowest + 3, (n3 - n2) >> 8, 3, TILE)
    lowest -= _FIELDS - 1
    _add_exponents(bins_ptr, lowest, n4, 3, TILE)
    _add_exponents(bins_ptr, lowest + 2, (n5 - n4) >> 8, 3, TILE)
    _add_exponents(bins_ptr, lowest + 1, n6, 3, TILE)
    _add_exponents(bins_ptr, lowest + 3, (n7 - n6) >> 8, 3, TILE)
    if RULE.has_blocks:
        _add_counts(bins_ptr + _NUM_BINS, top_code, c0, 4, 1)
        _add_counts(bins_ptr + _NUM_BINS, top_code - 4, c1, 4, 1)
