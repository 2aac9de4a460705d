# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""Quantization and its error statistics in one pass, as Triton kernels.

Sums over elements are kept by every thread for itself: a tile is folded to one number a thread, from those that the
thread holds. Squares are summed in float32 inside a tile and in float64 from tile to tile, in a fixed order.
"""

import triton
import triton.language as tl

from qcollect.formats.triton_short import (
    block_maxima,
    can_be_short,
    limit_short,
    magnitudes_of,
    round_short,
    short_scales,
    signed_short,
)
from qcollect.formats.triton_steps import (
    EXPONENT_MASK,
    INF_BITS,
    INVERSE_STEPS,
    MAGNITUDE_MASK,
    MANTISSA_WIDTH,
    ONE_STEP,
    find_places,
    find_scales,
    load,
    over_blocks,
    quantize_tile,
    scale_codes,
    store,
    values_of,
    words_of,
)
from qcollect.formats.triton_words import (
    as_bits,
    as_float,
    high,
    is_greater,
    largest,
    low,
    one_shifted,
    power_of_16,
    smaller,
    subtract,
    total,
    word_of,
)

_NUM_BINS = tl.constexpr(256)
_FIELDS = tl.constexpr(13)  # of four bits in a float64 number's mantissa
_WINDOW = tl.constexpr(25)  # exponents that a thread counts
_HEADROOM = tl.constexpr(4)
_EVEN_FIELDS = tl.constexpr(0x000F0F0F0F0F0F0F)
_ODD_BYTES = tl.constexpr(0x0000FFFFFFFFFFFF)
_EVEN_BYTES = tl.constexpr(0x00FF00FF00FF00FF)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "row_blocks", "num_bands", "num_tiles"])
def quantize_stats_kernel(
    x_ptr,
    out_ptr,
    encode_ptr,
    shares_ptr,
    bins_ptr,
    seed_low,
    seed_high,
    num_rows,
    num_columns,
    row_blocks,
    column_blocks,
    num_bands,
    num_tiles,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    HISTOGRAMS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """``_quantize_and_count`` of a tensor."""
    _quantize_and_count(
        x_ptr, out_ptr, encode_ptr, shares_ptr, bins_ptr, tl.program_id(0), tl.num_programs(0), seed_low, seed_high,
        num_rows, num_columns, row_blocks, column_blocks, num_bands, num_tiles, RULE, TILE, HISTOGRAMS, WRITES,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "seed_low", "seed_high", "first_seed_low", "first_seed_high", "num_last",
        "row_blocks", "num_bands", "num_tiles", "first_row_blocks", "first_num_bands", "first_num_tiles",
    ]
)  # fmt: skip
def quantize_both_stats_kernel(
    x_ptr,
    last_ptr,
    first_ptr,
    last_encode_ptr,
    first_encode_ptr,
    last_shares_ptr,
    first_shares_ptr,
    seed_low,
    seed_high,
    first_seed_low,
    first_seed_high,
    num_last,
    num_rows,
    num_columns,
    row_blocks,
    column_blocks,
    num_bands,
    num_tiles,
    first_num_rows,
    first_num_columns,
    first_row_blocks,
    first_column_blocks,
    first_num_bands,
    first_num_tiles,
    LAST: tl.constexpr,
    LAST_TILE: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_TILE: tl.constexpr,
    WRITES: tl.constexpr,
):
    """``_quantize_and_count`` of a tensor along its last axis, by the first programs, and along its first axis."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if program < num_last:
        _quantize_and_count(
            x_ptr, last_ptr, last_encode_ptr, last_shares_ptr, last_shares_ptr, program, num_last,
            seed_low, seed_high, num_rows, num_columns, row_blocks, column_blocks, num_bands, num_tiles,
            LAST, LAST_TILE, False, WRITES,
        )  # fmt: skip
    else:
        _quantize_and_count(
            x_ptr, first_ptr, first_encode_ptr, first_shares_ptr, first_shares_ptr,
            program - num_last, num_programs - num_last, first_seed_low, first_seed_high,
            first_num_rows, first_num_columns, first_row_blocks, first_column_blocks, first_num_bands, first_num_tiles,
            FIRST, FIRST_TILE, False, WRITES,
        )  # fmt: skip


@triton.jit
def _quantize_and_count(
    x_ptr, out_ptr, encode_ptr, shares_ptr, bins_ptr, program, num_programs, seed_low, seed_high,
    num_rows, num_columns, row_blocks, column_blocks, num_bands, num_tiles,
    RULE: tl.constexpr, TILE: tl.constexpr, HISTOGRAMS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Every so many tiles a program: values quantized and dequantized, and the program's share of the statistics.

    What is summed neither overflows, nor does anything underflow that is not below the last bit: far from 1, squares
    are taken in units of a block's own largest power of two.

    Args:
        out_ptr: of the values, with ``WRITES``.
        shares_ptr: (2, programs) float64: sums of squares, of squared errors; then (6, programs) of four bytes: the
            largest error in float32, and as int32 the zeroed, clamped, clamped blocks, NaN, Inf.
        bins_ptr: (2, 256) int64, added to: exponents of elements, codes of scales.
    """
    tensor_encode = 1.0
    if RULE.has_encode:
        tensor_encode = tl.load(encode_ptr)
    PAIRS: tl.constexpr = TILE.is_paired
    LANES: tl.constexpr = TILE.fold_lanes
    BLOCKS: tl.constexpr = TILE.num_blocks
    top = 0
    top_code = 0
    if HISTOGRAMS:
        places, exists = find_places(program, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
        words = load(x_ptr, places, exists, TILE)
        maxima = block_maxima(magnitudes_of(words, PAIRS), TILE.padded_rows, TILE.padded_width, PAIRS)
        top = tl.minimum(tl.maximum(_highest_exponent(maxima, PAIRS) + _HEADROOM, _WINDOW), 254)
        if RULE.has_blocks:
            top_code = _highest(_codes(_first_of(maxima, PAIRS), tensor_encode, RULE)) + 1
    # bits of the program's tiles that do not go the short way, and of those that have something outside the windows:
    # they are seen to after the others, so that what they need is not held all the time
    rest = tl.full((), -1, tl.int32)
    outside = tl.zeros((), tl.int32)
    IS_SHORT: tl.constexpr = RULE.can_be_short and out_ptr.dtype.element_ty != tl.float16
    if IS_SHORT:
        squares = tl.zeros((LANES,), tl.float64)
        squared_errors = tl.zeros((LANES,), tl.float64)
        max_error = tl.zeros((LANES,), tl.float32)
        # counts of single elements, exact as far as 2^24
        zeroed = tl.zeros((LANES,), tl.float32)
        clamped = tl.zeros((LANES,), tl.float32)
        clamped_blocks = tl.zeros((1, BLOCKS, 1), tl.int32)
        n0 = tl.zeros((LANES,), tl.int64)
        n1 = tl.zeros((LANES,), tl.int64)
        n2 = tl.zeros((LANES,), tl.int64)
        n3 = tl.zeros((LANES,), tl.int64)
        n4 = tl.zeros((LANES,), tl.int64)
        n5 = tl.zeros((LANES,), tl.int64)
        n6 = tl.zeros((LANES,), tl.int64)
        n7 = tl.zeros((LANES,), tl.int64)
        c0 = tl.zeros((1, BLOCKS, 1), tl.int32)
        c1 = tl.zeros((1, BLOCKS, 1), tl.int32)
        rest = tl.zeros((), tl.int32)
        bit = tl.full((), 1, tl.int32)
        places, exists = find_places(program, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
        following = load(x_ptr, places, exists, TILE)
        for tile in range(program, num_tiles, num_programs):
            words = following
            places, exists = find_places(
                tl.minimum(tile + num_programs, num_tiles - 1),
                num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE,
            )  # fmt: skip
            following = load(x_ptr, places, exists, TILE)
            places, exists = find_places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
            magnitudes = magnitudes_of(words, PAIRS)
            maxima = block_maxima(magnitudes, TILE.padded_rows, TILE.padded_width, PAIRS)
            if can_be_short(maxima, RULE, PAIRS):
                scales = maxima
                if RULE.has_blocks:
                    scales = short_scales(maxima, RULE, PAIRS)
                rounded = round_short(magnitudes, scales, RULE, PAIRS)
                if RULE.has_blocks:
                    limited, limit = limit_short(rounded, scales, RULE, PAIRS)
                    clamped += _folded_count(is_greater(rounded, limit, PAIRS), TILE)
                    beyond = is_greater(round_short(maxima, scales, RULE, PAIRS), limit, PAIRS)
                    clamped_blocks += _count_blocks(beyond, TILE)
                    rounded = limited
                if WRITES:
                    store(out_ptr, places, exists, signed_short(rounded, words, RULE, PAIRS), TILE)
                error = magnitudes_of(subtract(rounded, magnitudes, PAIRS), PAIRS)
                squares += _folded_squares(magnitudes, TILE)
                squared_errors += _folded_squares(error, TILE)
                max_error = tl.maximum(max_error, _folded_maximum(error, TILE))
                # only what becomes zero is further from its result than that is from zero
                zeroed += _folded_count(is_greater(error, rounded, PAIRS), TILE)
                if HISTOGRAMS:
                    is_outside, n0, n1, n2, n3, n4, n5, n6, n7 = _count_exponents(
                        magnitudes, maxima, top, n0, n1, n2, n3, n4, n5, n6, n7, TILE
                    )
                    if RULE.has_blocks:
                        in_tensor = _blocks_in_tensor(exists, TILE)
                        codes = _short_codes(_first_of(scales, PAIRS), _first_of(maxima, PAIRS), RULE)
                        furthest = tl.zeros(codes.shape, tl.uint32)
                        furthest, c0, c1 = _count_codes(codes, in_tensor, top_code, furthest, c0, c1)
                        if PAIRS and TILE.padded_width == 1:
                            codes = _short_codes(as_bits(high(scales)), as_bits(high(maxima)), RULE)
                            furthest, c0, c1 = _count_codes(codes, in_tensor, top_code, furthest, c0, c1)
                        is_outside = is_outside | (_highest(furthest) >= 64)
                    outside |= tl.where(is_outside, bit, 0)
            else:
                rest |= bit
            bit <<= 1
        _keep(
            shares_ptr, bins_ptr, program, num_programs,
            squares, squared_errors, max_error, zeroed, clamped, clamped_blocks, 0, 0,
            top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1,
            False, HISTOGRAMS, RULE, TILE,
        )  # fmt: skip
    if rest != 0:
        squares = tl.zeros((LANES,), tl.float64)
        squared_errors = tl.zeros((LANES,), tl.float64)
        max_error = tl.zeros((LANES,), tl.float32)
        # counts of single elements, exact as far as 2^24
        zeroed = tl.zeros((LANES,), tl.float32)
        clamped = tl.zeros((LANES,), tl.float32)
        clamped_blocks = tl.zeros((1, BLOCKS, 1), tl.int32)
        n0 = tl.zeros((LANES,), tl.int64)
        n1 = tl.zeros((LANES,), tl.int64)
        n2 = tl.zeros((LANES,), tl.int64)
        n3 = tl.zeros((LANES,), tl.int64)
        n4 = tl.zeros((LANES,), tl.int64)
        n5 = tl.zeros((LANES,), tl.int64)
        n6 = tl.zeros((LANES,), tl.int64)
        n7 = tl.zeros((LANES,), tl.int64)
        c0 = tl.zeros((1, BLOCKS, 1), tl.int32)
        c1 = tl.zeros((1, BLOCKS, 1), tl.int32)
        nans = tl.zeros((), tl.int32)
        infs = tl.zeros((), tl.int32)
        rest_bit = tl.full((), 1, tl.int32)
        for tile in range(program, num_tiles, num_programs):
            if (rest & 1) != 0:
                places, exists = find_places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
                words = load(x_ptr, places, exists, TILE)
                x = values_of(words, TILE)
                x_bits = as_bits(x) & MAGNITUDE_MASK
                amax = over_blocks(x_bits, TILE.padded_rows, TILE.padded_width)
                y, is_limited, scale = quantize_tile(x, amax, places, tensor_encode, seed_low, seed_high, RULE)
                y_words = words_of(y, x_ptr.dtype.element_ty, TILE)
                if WRITES:
                    store(out_ptr, places, exists, y_words, TILE)
                y = values_of(y_words, TILE)
                if RULE.has_blocks:
                    is_limited = is_limited & (scale == scale)
                y_error = y - x
                is_finite = (as_bits(y_error) & MAGNITUDE_MASK) < INF_BITS  # of finite numbers it is, and of none else
                y_error = tl.where(is_finite, tl.abs(y_error), 0.0)
                squares += _folded_scaled_squares(tl.where(is_finite, x, 0.0), TILE)
                squared_errors += _folded_scaled_squares(y_error, TILE)
                max_error = tl.maximum(max_error, _folded_max(y_error, TILE))
                nans += tl.sum((x_bits > INF_BITS).to(tl.int32))
                infs += tl.sum((x_bits == INF_BITS).to(tl.int32))
                zeroed += _folded_sum(tl.where((x != 0.0) & (y == 0.0), 1.0, 0.0), TILE)
                clamped += _folded_sum(tl.where(is_limited, 1.0, 0.0), TILE)
                if RULE.has_blocks:
                    y_beyond = over_blocks(is_limited.to(tl.int32), TILE.padded_rows, TILE.padded_width)
                    if PAIRS and TILE.padded_width == 1:
                        y_beyond = tl.sum(tl.reshape(y_beyond, (1, BLOCKS, 2)), axis=2, keep_dims=True)
                    clamped_blocks += y_beyond
                if HISTOGRAMS:
                    magnitudes = magnitudes_of(words, PAIRS)
                    maxima = block_maxima(magnitudes, TILE.padded_rows, TILE.padded_width, PAIRS)
                    is_outside, n0, n1, n2, n3, n4, n5, n6, n7 = _count_exponents(
                        magnitudes, maxima, top, n0, n1, n2, n3, n4, n5, n6, n7, TILE
                    )
                    if RULE.has_blocks:
                        in_tensor = _blocks_in_tensor(exists, TILE)
                        codes = _codes(_first_of(maxima, PAIRS), tensor_encode, RULE)
                        furthest = tl.zeros(codes.shape, tl.uint32)
                        furthest, c0, c1 = _count_codes(codes, in_tensor, top_code, furthest, c0, c1)
                        if PAIRS and TILE.padded_width == 1:
                            codes = _codes(as_bits(high(maxima)), tensor_encode, RULE)
                            furthest, c0, c1 = _count_codes(codes, in_tensor, top_code, furthest, c0, c1)
                        is_outside = is_outside | (_highest(furthest) >= 64)
                    outside |= tl.where(is_outside, rest_bit, 0)
            rest_bit <<= 1
            rest >>= 1
        _keep(
            shares_ptr, bins_ptr, program, num_programs,
            squares, squared_errors, max_error, zeroed, clamped, clamped_blocks, nans, infs,
            top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1,
            IS_SHORT, HISTOGRAMS, RULE, TILE,
        )  # fmt: skip
    if HISTOGRAMS and outside != 0:
        for tile in range(program, num_tiles, num_programs):
            if (outside & 1) != 0:
                places, exists = find_places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
                words = load(x_ptr, places, exists, TILE)
                magnitudes = magnitudes_of(words, PAIRS)
                maxima = block_maxima(magnitudes, TILE.padded_rows, TILE.padded_width, PAIRS)
                bound = tl.where(_highest_exponent(maxima, PAIRS) <= top, top - _WINDOW, 255)
                if PAIRS:
                    _count_outside(bins_ptr, as_bits(low(magnitudes)), exists, bound)
                    _count_outside(bins_ptr, as_bits(high(magnitudes)), exists, bound)
                else:
                    _count_outside(bins_ptr, magnitudes, exists, bound)
                if RULE.has_blocks:
                    in_tensor = _blocks_in_tensor(exists, TILE)
                    _count_codes_outside(
                        bins_ptr, _codes(_first_of(maxima, PAIRS), tensor_encode, RULE), in_tensor, top_code
                    )
                    if PAIRS and TILE.padded_width == 1:
                        _count_codes_outside(
                            bins_ptr, _codes(as_bits(high(maxima)), tensor_encode, RULE), in_tensor, top_code
                        )
            outside >>= 1


# ---------------------------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------------------------


@triton.jit
def _fold(values, TILE: tl.constexpr):
    """A tile as its threads hold it: (repeats, lanes, side by side)."""
    EACH: tl.constexpr = values.numel // (TILE.fold_repeats * TILE.fold_lanes)
    return tl.reshape(values, (TILE.fold_repeats, TILE.fold_lanes, EACH))


@triton.jit
def _folded_sum(values, TILE: tl.constexpr):
    return tl.sum(tl.sum(_fold(values, TILE), axis=2), axis=0)


@triton.jit
def _folded_max(values, TILE: tl.constexpr):
    return tl.max(tl.max(_fold(values, TILE), axis=2), axis=0)


@triton.jit
def _folded_squares(words, TILE: tl.constexpr):
    """Float64."""
    if TILE.is_paired:
        squares = tl.fma(high(words), high(words), low(words) * low(words))
    else:
        squares = as_float(words) * as_float(words)
    return _folded_sum(squares, TILE).to(tl.float64)


@triton.jit
def _folded_scaled_squares(values, TILE: tl.constexpr):
    """Float64, of whatever finite values."""
    unit = tl.max(as_bits(values) & EXPONENT_MASK)
    unit = tl.minimum(tl.maximum(unit, ONE_STEP), INVERSE_STEPS - ONE_STEP)
    values = values * as_float(-unit + INVERSE_STEPS)
    weight = as_float(unit).to(tl.float64)
    return _folded_sum(values * values, TILE).to(tl.float64) * (weight * weight)


@triton.jit
def _folded_count(ones, TILE: tl.constexpr):
    """How many words, or numbers of pairs, are 1.0 and not 0.0; float32."""
    counts = total(total(_fold(ones, TILE), 2, TILE.is_paired), 0, TILE.is_paired)
    if TILE.is_paired:
        count = low(counts) + high(counts)
    else:
        count = as_float(counts)
    return count


@triton.jit
def _folded_larger(words, TILE: tl.constexpr):
    """The largest magnitudes, as words."""
    return largest(largest(_fold(words, TILE), 2, TILE.is_paired, False), 0, TILE.is_paired, False)


@triton.jit
def _folded_maximum(words, TILE: tl.constexpr):
    """The largest magnitudes, float32."""
    return as_float(_largest_of(_folded_larger(words, TILE), TILE.is_paired))


@triton.jit
def _largest_of(words, PAIRS: tl.constexpr):
    """Magnitudes as float32 bits, of pairs the larger."""
    if PAIRS:
        words = tl.maximum(words << 16, words & -0x10000)
    return words


@triton.jit
def _first_of(words, PAIRS: tl.constexpr):
    if PAIRS:
        words = words << 16
    return words


@triton.jit
def _count_blocks(ones, TILE: tl.constexpr):
    if not TILE.is_paired:
        count = (as_float(ones) > 0.0).to(tl.int32)
    elif TILE.padded_width > 1:
        count = (low(ones) > 0.0).to(tl.int32)
    else:
        count = (low(ones) > 0.0).to(tl.int32) + (high(ones) > 0.0).to(tl.int32)
    return count


# ---------------------------------------------------------------------------------------------
# Histograms
#
# A thread counts the 25 exponents from ``top`` downwards. An element becomes 16^exponent, a float64 number; a sum of
# eight of them has the counts of 13 exponents side by side in its mantissa, four bits each, and smaller exponents are
# lost behind its last place. Two sums do, the second of elements that are at most the first one's lowest exponent.
# Counts then have eight bits between repeats, sixteen from tile to tile. Scale codes have a window of eight, in eight
# bits each. A tile with anything outside is read again, and that is added to the bins in memory one by one.
# ---------------------------------------------------------------------------------------------


@triton.jit
def _highest(values):
    """The largest of a tile's numbers, dimension by dimension: all at once would first move them to other threads."""
    return tl.max(tl.max(tl.max(values, axis=2), axis=1), axis=0)


@triton.jit
def _highest_exponent(maxima, PAIRS: tl.constexpr):
    return _highest(_largest_of(maxima, PAIRS)) >> MANTISSA_WIDTH


@triton.jit
def _count_exponents(magnitudes, maxima, top, n0, n1, n2, n3, n4, n5, n6, n7, TILE: tl.constexpr):
    """A tile's elements added to the window's counts; first of all whether anything is outside."""
    PAIRS: tl.constexpr = TILE.is_paired
    is_outside = _highest_exponent(maxima, PAIRS) > top
    if not is_outside:
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
        is_outside = tl.min(counts, axis=0) < EACH
    return is_outside, n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _fields(exponents, top, TILE: tl.constexpr):
    """Counts of 13 exponents up to ``top``, in eight bits each: those of even fields and those of odd ones.

    A sum of eight is off by less than half of its last place, in whatever order it is taken.
    """
    if TILE.is_paired:
        powers = power_of_16(exponents & EXPONENT_MASK) + power_of_16(exponents << 16)
    else:
        powers = power_of_16(exponents)
    powers = tl.sum(_fold(powers, TILE), axis=2)
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
def _count_outside(bins_ptr, magnitudes, exists, bound):
    """Adds elements with exponents up to ``bound`` to the bins."""
    exponents = magnitudes >> MANTISSA_WIDTH
    is_counted = exists & (exponents <= bound)
    # zeros are many
    zeros = tl.sum((is_counted & (exponents == 0)).to(tl.int32)).to(tl.int64)
    tl.atomic_add(bins_ptr, zeros, mask=zeros > 0, sem="relaxed")
    one = tl.full(exponents.shape, 1, tl.int64)
    tl.atomic_add(bins_ptr + exponents, one, mask=is_counted & (exponents > 0), sem="relaxed")


@triton.jit
def _codes(amax, tensor_encode, RULE: tl.constexpr):
    _, _, scale = find_scales(amax, tensor_encode, RULE)
    return scale_codes(scale, RULE)


@triton.jit
def _blocks_in_tensor(exists, TILE: tl.constexpr):
    if TILE.is_full:
        in_tensor = tl.full((1, TILE.num_blocks, 1), 1, tl.int1)
    else:
        in_tensor = over_blocks(exists.to(tl.int32), TILE.padded_rows, TILE.padded_width) > 0
    return in_tensor


@triton.jit
def _short_codes(scales, maxima, RULE: tl.constexpr):
    """Of the short way's scales; those of all-zero blocks are the lowest there are."""
    return tl.where(maxima == 0, 0, (scales >> RULE.code_shift) - RULE.code_offset)


@triton.jit
def _count_codes(codes, in_tensor, top_code, furthest, c0, c1):
    """Blocks' scale codes added to the window's counts; the furthest step from its top, 64 and above outside."""
    steps = (top_code - codes) * 8
    furthest = tl.maximum(furthest, tl.where(in_tensor, steps, 0).to(tl.uint32, bitcast=True))
    steps = tl.where(in_tensor, steps, -1)
    c0 += one_shifted(steps)
    c1 += one_shifted(steps - 32)
    return furthest, c0, c1


@triton.jit
def _count_codes_outside(bins_ptr, codes, in_tensor, top_code):
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


# ---------------------------------------------------------------------------------------------
# Shares
# ---------------------------------------------------------------------------------------------


@triton.jit
def _keep(
    shares_ptr, bins_ptr, program, num_programs,
    squares, squared_errors, max_error, zeroed, clamped, clamped_blocks, nans, infs,
    top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1,
    IS_MORE: tl.constexpr, HISTOGRAMS: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores a program's share of the statistics, or adds it to that stored before, and adds its counts to the bins."""
    num_clamped = tl.sum(clamped.to(tl.int32))
    blocks = num_clamped
    if RULE.has_blocks:
        blocks = tl.sum(clamped_blocks)
    _keep_sum(shares_ptr + program, tl.sum(squares), IS_MORE)
    _keep_sum(shares_ptr + num_programs + program, tl.sum(squared_errors), IS_MORE)
    largest_error = tl.max(max_error)
    max_ptr = _max_errors(shares_ptr, num_programs) + program
    if IS_MORE:
        largest_error = tl.maximum(largest_error, tl.load(max_ptr))
    tl.store(max_ptr, largest_error)
    counts_ptr = _counts(shares_ptr, num_programs) + program
    _keep_sum(counts_ptr, tl.sum(zeroed.to(tl.int32)), IS_MORE)
    _keep_sum(counts_ptr + num_programs, num_clamped, IS_MORE)
    _keep_sum(counts_ptr + 2 * num_programs, blocks, IS_MORE)
    _keep_sum(counts_ptr + 3 * num_programs, nans, IS_MORE)
    _keep_sum(counts_ptr + 4 * num_programs, infs, IS_MORE)
    if HISTOGRAMS:
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


@triton.jit
def _keep_sum(pointer, number, IS_MORE: tl.constexpr):
    if IS_MORE:
        number += tl.load(pointer)
    tl.store(pointer, number)


@triton.jit
def _max_errors(shares_ptr, num_shares):
    return (shares_ptr + 2 * num_shares).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _counts(shares_ptr, num_shares):
    return (shares_ptr + 2 * num_shares).to(tl.pointer_type(tl.int32), bitcast=True) + num_shares


# Numbers are added up in the order in which threads hold them, which follows from what is known of addresses: no more
# here than where many are put together.
@triton.jit(do_not_specialize=["num_shares"], do_not_specialize_on_alignment=["shares_ptr", "totals_ptr"])
def finish_stats_kernel(shares_ptr, totals_ptr, num_shares, HAS_BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """One statistic a program: the shares put together in a fixed order.

    Args:
        totals_ptr: (8,) float64, two sums, the maximum, five counts.
    """
    _finish_statistic(shares_ptr, totals_ptr, num_shares, HAS_BLOCKS, tl.program_id(0), SIZE)


@triton.jit(do_not_specialize_on_alignment=["memory_ptr"])
def finish_many_stats_kernel(memory_ptr, rows_ptr, NUM_STATISTICS: tl.constexpr, SIZE: tl.constexpr):
    """``finish_stats_kernel`` for many, one after the other.

    Args:
        rows_ptr: (rows, 4) int64: from ``memory_ptr`` on, in numbers, where shares and totals are; how many shares, and
            whether they are of blocks.
    """
    row_ptr = rows_ptr + 4 * (tl.program_id(0) // NUM_STATISTICS)
    shares_ptr = memory_ptr + tl.load(row_ptr)
    totals_ptr = memory_ptr + tl.load(row_ptr + 1)
    num_shares = tl.load(row_ptr + 2).to(tl.int32)
    has_blocks = tl.load(row_ptr + 3) != 0
    _finish_statistic(shares_ptr, totals_ptr, num_shares, has_blocks, tl.program_id(0) % NUM_STATISTICS, SIZE)


@triton.jit
def _finish_statistic(shares_ptr, totals_ptr, num_shares, has_blocks, statistic, SIZE: tl.constexpr):
    total = tl.zeros((SIZE,), tl.float64)
    for start in range(0, num_shares, SIZE):
        index = start + tl.arange(0, SIZE)
        exists = index < num_shares
        if statistic < 2:
            total += tl.load(shares_ptr + statistic * num_shares + index, mask=exists, other=0.0)
        elif statistic == 2:
            share = tl.load(_max_errors(shares_ptr, num_shares) + index, mask=exists, other=0.0)
            total = tl.maximum(total, share.to(tl.float64))
        else:
            counts_ptr = _counts(shares_ptr, num_shares) + (statistic - 3) * num_shares
            total += tl.load(counts_ptr + index, mask=exists, other=0).to(tl.float64)
    if statistic == 2:
        result = tl.max(total)
    else:
        result = tl.sum(total)
    result = tl.where((statistic == 5) & (not has_blocks), tl.minimum(result, 1.0), result)
    tl.store(totals_ptr + statistic, result)
