# mypy: ignore-errors
# ruff: noqa: N803 (what a kernel is compiled with is spelled in capitals)
"""The reference implementation of ``eager`` as Triton kernels: read once, write once, the same bits."""

import triton
import triton.language as tl

from qcollect.formats.triton_short import block_maxima, can_be_short, magnitudes_of, quantize_short
from qcollect.formats.triton_steps import (
    INF_BITS,
    LARGEST,
    MAGNITUDE_MASK,
    MANTISSA_WIDTH,
    find_places,
    load,
    over_blocks,
    quantize_tile,
    store,
    values_of,
    widened,
    words_of,
)
from qcollect.formats.triton_words import as_bits, as_float


@triton.jit(do_not_specialize=["seed_low", "seed_high", "row_blocks", "num_bands"])
def quantize_kernel(
    x_ptr,
    out_ptr,
    encode_ptr,
    seed_low,
    seed_high,
    num_rows,
    num_columns,
    row_blocks,
    column_blocks,
    num_bands,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile a program: values quantized and dequantized."""
    places, exists = find_places(tl.program_id(0), num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
    words = load(x_ptr, places, exists, TILE)
    tensor_encode = 1.0
    if RULE.has_encode:
        tensor_encode = tl.load(encode_ptr)
    amax = over_blocks(words & MAGNITUDE_MASK, TILE.padded_rows, TILE.padded_width)
    result, _, _ = quantize_tile(as_float(words), amax, places, tensor_encode, seed_low, seed_high, RULE)
    store(out_ptr, places, exists, as_bits(result), TILE)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "row_blocks", "num_bands"])
def count_limited_kernel(
    x_ptr,
    encode_ptr,
    count_ptr,
    seed_low,
    seed_high,
    num_rows,
    num_columns,
    row_blocks,
    column_blocks,
    num_bands,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile a program: how many elements are clamped is added to an int64."""
    places, exists = find_places(tl.program_id(0), num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
    words = load(x_ptr, places, exists, TILE)
    tensor_encode = 1.0
    if RULE.has_encode:
        tensor_encode = tl.load(encode_ptr)
    amax = over_blocks(words & MAGNITUDE_MASK, TILE.padded_rows, TILE.padded_width)
    _, is_limited, scale = quantize_tile(as_float(words), amax, places, tensor_encode, seed_low, seed_high, RULE)
    if RULE.has_blocks:
        is_limited = is_limited & (scale == scale)
    count = tl.sum(is_limited.to(tl.int32)).to(tl.int64)
    tl.atomic_add(count_ptr, count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["seed_low", "seed_high", "first_seed_low", "first_seed_high", "row_blocks", "num_bands"])
def quantize_both_kernel(
    x_ptr,
    last_ptr,
    first_ptr,
    last_encode_ptr,
    first_encode_ptr,
    seed_low,
    seed_high,
    first_seed_low,
    first_seed_high,
    num_rows,
    num_columns,
    row_blocks,
    column_blocks,
    num_bands,
    LAST: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile a program, read once: quantized with blocks along its width, and with blocks along its rows."""
    places, exists = find_places(tl.program_id(0), num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
    words = load(x_ptr, places, exists, TILE)
    last_encode = 1.0
    if LAST.has_encode:
        last_encode = tl.load(last_encode_ptr)
    first_encode = 1.0
    if FIRST.has_encode:
        first_encode = tl.load(first_encode_ptr)
    magnitudes = magnitudes_of(words, TILE.is_paired)
    last_amax = block_maxima(magnitudes, 1, TILE.padded_width, TILE.is_paired)
    first_amax = block_maxima(magnitudes, TILE.padded_rows, 1, TILE.is_paired)
    is_short = False
    if LAST.can_be_short and FIRST.can_be_short:
        is_short = can_be_short(last_amax, LAST, TILE.is_paired) & can_be_short(first_amax, FIRST, TILE.is_paired)
    if is_short:
        store(last_ptr, places, exists, quantize_short(words, last_amax, LAST, TILE.is_paired), TILE)
        store(first_ptr, places, exists, quantize_short(words, first_amax, FIRST, TILE.is_paired), TILE)
    else:
        values = values_of(words, TILE)
        bits = as_bits(values) & MAGNITUDE_MASK
        amax = over_blocks(bits, 1, TILE.padded_width)
        result, _, _ = quantize_tile(values, amax, places, last_encode, seed_low, seed_high, LAST)
        store(last_ptr, places, exists, words_of(result, x_ptr.dtype.element_ty, TILE), TILE)
        amax = over_blocks(bits, TILE.padded_rows, 1)
        result, _, _ = quantize_tile(values, amax, places, first_encode, first_seed_low, first_seed_high, FIRST)
        store(first_ptr, places, exists, words_of(result, x_ptr.dtype.element_ty, TILE), TILE)


@triton.jit
def _finish_amax(bits, found_ptr, RULE: tl.constexpr):
    """Stores the abs max whose bits these are, or the factor that follows."""
    amax = as_float(bits)
    if RULE.has_encode:
        if RULE.is_bound:
            counted = amax.to(tl.float64)
            if RULE.min_amax > 0.0:
                least = tl.full((), RULE.min_amax, tl.float64)
                counted = tl.where(counted < least, least, counted)
            encode = (tl.full((), RULE.bound, tl.float64) / counted).to(tl.float32)
            encode = tl.where(encode > LARGEST, LARGEST, encode)
            if RULE.is_rceil:
                encode = tl.where(encode != encode, encode, as_float(as_bits(encode) & -0x800000))
        else:
            exponent = tl.minimum(tl.maximum((bits >> MANTISSA_WIDTH) - RULE.target, 1), 253)
            encode = tl.where(bits == 0, 1.0, tl.div_rn(1.0, as_float(exponent << MANTISSA_WIDTH)))
        tl.store(found_ptr, encode)
    else:
        tl.store(found_ptr, amax)


@triton.jit
def _counted_bits(x, RULE: tl.constexpr):
    bits = as_bits(widened(x)) & MAGNITUDE_MASK
    if not RULE.sees_nonfinite:
        bits = tl.where(bits >= INF_BITS, 0, bits)
    return bits


@triton.jit
def amax_kernel(
    x_ptr,
    found_ptr,
    zeros_ptr,
    num_elements,
    RULE: tl.constexpr,
    SIZE: tl.constexpr,
    IS_LARGE: tl.constexpr,
    IS_ONE: tl.constexpr,
):
    """The abs max of ``x``: each program takes every so many pieces, and the one that is done last stores the result.

    Args:
        found_ptr: float32: the abs max, or the factor that follows.
        zeros_ptr: (2,) int64, zero, and zero again when the kernel is over: the largest so far, by its bits, and how
            many programs are done. A single program needs none.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if IS_LARGE:
        program = program.to(tl.int64)
    amax = tl.zeros((SIZE,), tl.int32)
    whole = num_elements // SIZE * SIZE
    for start in range(program * SIZE, whole, num_programs * SIZE):
        x = tl.load(x_ptr + start + tl.arange(0, SIZE))
        amax = tl.maximum(amax, _counted_bits(x, RULE))
    index = whole + tl.arange(0, SIZE)
    rest = tl.load(x_ptr + index, mask=index < num_elements, other=0.0)
    amax = tl.maximum(amax, _counted_bits(rest, RULE))
    result = tl.max(amax)
    if IS_ONE:
        _finish_amax(result, found_ptr, RULE)
    else:
        tl.atomic_max(zeros_ptr, result.to(tl.int64), sem="relaxed")
        num_done = tl.atomic_add(zeros_ptr + 1, tl.full((), 1, tl.int64), sem="acq_rel")
        if num_done == num_programs - 1:
            bits = tl.atomic_xchg(zeros_ptr, tl.full((), 0, tl.int64), sem="relaxed").to(tl.int32)
            tl.store(zeros_ptr + 1, tl.full((), 0, tl.int64))
            _finish_amax(bits, found_ptr, RULE)
