# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""Quantization and its error statistics in one pass, as Triton kernels.

Sums over elements are kept by every thread for itself (``triton_folds``), windows of histograms, too
(``triton_histograms``). Squares are summed in float32 inside a tile and in float64 from tile to tile, in a fixed order.
"""

import triton
import triton.language as tl

from qcollect.formats.triton_folds import (
    count_blocks,
    first_of,
    folded_count,
    folded_max,
    folded_maximum,
    folded_scaled_squares,
    folded_squares,
    folded_sum,
)
from qcollect.formats.triton_histograms import (
    HEADROOM,
    WINDOW,
    add_windows,
    any_bits,
    blocks_in_tensor,
    count_codes,
    count_codes_outside,
    count_exponents,
    count_outside,
    find_codes,
    highest,
    highest_exponent,
    short_codes,
)
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
    INF_BITS,
    MAGNITUDE_MASK,
    find_places,
    load,
    over_blocks,
    quantize_tile,
    store,
    values_of,
    words_of,
)
from qcollect.formats.triton_words import (
    as_bits,
    high,
    is_greater,
    low,
    subtract,
)


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
        top = tl.minimum(tl.maximum(highest_exponent(maxima, PAIRS) + HEADROOM, WINDOW), 254)
        if RULE.has_blocks:
            top_code = highest(find_codes(first_of(maxima, PAIRS), tensor_encode, RULE)) + 1
    # bits of the program's tiles that do not go the short way, and of those that have something outside the windows:
    # they are seen to after the others, so that what they need is not held all the time
    rest = tl.full((), -1, tl.int32)
    outside = tl.zeros((LANES,), tl.int32)
    outside_blocks = tl.zeros((1, BLOCKS, 1), tl.int32)
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
                    clamped += folded_count(is_greater(rounded, limit, PAIRS), TILE)
                    beyond = is_greater(round_short(maxima, scales, RULE, PAIRS), limit, PAIRS)
                    clamped_blocks += count_blocks(beyond, TILE)
                    rounded = limited
                if WRITES:
                    store(out_ptr, places, exists, signed_short(rounded, words, RULE, PAIRS), TILE)
                error = magnitudes_of(subtract(rounded, magnitudes, PAIRS), PAIRS)
                squares += folded_squares(magnitudes, TILE)
                squared_errors += folded_squares(error, TILE)
                max_error = tl.maximum(max_error, folded_maximum(error, TILE))
                # only what becomes zero is further from its result than that is from zero
                zeroed += folded_count(is_greater(error, rounded, PAIRS), TILE)
                if HISTOGRAMS:
                    outside, n0, n1, n2, n3, n4, n5, n6, n7 = count_exponents(
                        magnitudes, maxima, top, bit, outside, n0, n1, n2, n3, n4, n5, n6, n7, TILE
                    )
                    if RULE.has_blocks:
                        in_tensor = blocks_in_tensor(exists, TILE)
                        codes = short_codes(first_of(scales, PAIRS), first_of(maxima, PAIRS), RULE)
                        outside_blocks, c0, c1 = count_codes(codes, in_tensor, top_code, bit, outside_blocks, c0, c1)
                        if PAIRS and TILE.padded_width == 1:
                            codes = short_codes(as_bits(high(scales)), as_bits(high(maxima)), RULE)
                            outside_blocks, c0, c1 = count_codes(
                                codes, in_tensor, top_code, bit, outside_blocks, c0, c1
                            )
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
                squares += folded_scaled_squares(tl.where(is_finite, x, 0.0), TILE)
                squared_errors += folded_scaled_squares(y_error, TILE)
                max_error = tl.maximum(max_error, folded_max(y_error, TILE))
                nans += tl.sum((x_bits > INF_BITS).to(tl.int32))
                infs += tl.sum((x_bits == INF_BITS).to(tl.int32))
                zeroed += folded_sum(tl.where((x != 0.0) & (y == 0.0), 1.0, 0.0), TILE)
                clamped += folded_sum(tl.where(is_limited, 1.0, 0.0), TILE)
                if RULE.has_blocks:
                    y_beyond = over_blocks(is_limited.to(tl.int32), TILE.padded_rows, TILE.padded_width)
                    if PAIRS and TILE.padded_width == 1:
                        y_beyond = tl.sum(tl.reshape(y_beyond, (1, BLOCKS, 2)), axis=2, keep_dims=True)
                    clamped_blocks += y_beyond
                if HISTOGRAMS:
                    magnitudes = magnitudes_of(words, PAIRS)
                    maxima = block_maxima(magnitudes, TILE.padded_rows, TILE.padded_width, PAIRS)
                    outside, n0, n1, n2, n3, n4, n5, n6, n7 = count_exponents(
                        magnitudes, maxima, top, rest_bit, outside, n0, n1, n2, n3, n4, n5, n6, n7, TILE
                    )
                    if RULE.has_blocks:
                        in_tensor = blocks_in_tensor(exists, TILE)
                        codes = find_codes(first_of(maxima, PAIRS), tensor_encode, RULE)
                        outside_blocks, c0, c1 = count_codes(
                            codes, in_tensor, top_code, rest_bit, outside_blocks, c0, c1
                        )
                        if PAIRS and TILE.padded_width == 1:
                            codes = find_codes(as_bits(high(maxima)), tensor_encode, RULE)
                            outside_blocks, c0, c1 = count_codes(
                                codes, in_tensor, top_code, rest_bit, outside_blocks, c0, c1
                            )
            rest_bit <<= 1
            rest >>= 1
        _keep(
            shares_ptr, bins_ptr, program, num_programs,
            squares, squared_errors, max_error, zeroed, clamped, clamped_blocks, nans, infs,
            top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1,
            IS_SHORT, HISTOGRAMS, RULE, TILE,
        )  # fmt: skip
    if HISTOGRAMS:
        further = any_bits(outside, outside_blocks)
        if further != 0:
            for tile in range(program, num_tiles, num_programs):
                if (further & 1) != 0:
                    places, exists = find_places(
                        tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE
                    )
                    words = load(x_ptr, places, exists, TILE)
                    magnitudes = magnitudes_of(words, PAIRS)
                    maxima = block_maxima(magnitudes, TILE.padded_rows, TILE.padded_width, PAIRS)
                    bound = tl.where(highest_exponent(maxima, PAIRS) <= top, top - WINDOW, 255)
                    if PAIRS:
                        count_outside(bins_ptr, as_bits(low(magnitudes)), exists, bound)
                        count_outside(bins_ptr, as_bits(high(magnitudes)), exists, bound)
                    else:
                        count_outside(bins_ptr, magnitudes, exists, bound)
                    if RULE.has_blocks:
                        in_tensor = blocks_in_tensor(exists, TILE)
                        codes = find_codes(first_of(maxima, PAIRS), tensor_encode, RULE)
                        count_codes_outside(bins_ptr, codes, in_tensor, top_code)
                        if PAIRS and TILE.padded_width == 1:
                            codes = find_codes(as_bits(high(maxima)), tensor_encode, RULE)
                            count_codes_outside(bins_ptr, codes, in_tensor, top_code)
                further >>= 1


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
        add_windows(bins_ptr, top, n0, n1, n2, n3, n4, n5, n6, n7, top_code, c0, c1, RULE, TILE)


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
