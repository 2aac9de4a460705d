# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM300 (what a kernel is compiled with is spelled in capitals)
"""The steps of the Triton kernels: where a tile's elements are, scales, rounding; the reference is ``eager``.

A tile is three-dimensional, (rows, blocks, width): a block along the last axis is one row of a width, a
block along another axis has a width of 1, a tile of two dimensions has both. All work is in float32 on
magnitudes; the sign is put back at the end of the rounding.

The bits are those of ``eager`` because every step is exact or is the same single rounding:

* ``(m + c) - c`` with ``c = 2^23`` spacings rounds a magnitude to whole spacings, ties to even.
* A product is never fused into a sum (kernels are launched with ``enable_fp_fusion=False``).
* Quotients are ``div_rn``; Triton's ``/`` is approximate on float32.
* Subnormals are on: Triton flushes none.
"""

import triton
import triton.language as tl

from qcollect.formats.triton_words import IS_INTERPRETED, as_bits, as_float, joined, parted, to_bfloat16

EXPONENT_MASK = tl.constexpr(0x7F800000)
INF_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
SIGN_MASK = tl.constexpr(-0x80000000)
MANTISSA_WIDTH = tl.constexpr(23)
BIAS = tl.constexpr(127)
ONE_STEP = tl.constexpr(1 << 23)
BIAS_STEPS = tl.constexpr(127 << 23)
MAGIC_STEPS = tl.constexpr(23 << 23)  # from a spacing to 2^23 of it
INVERSE_STEPS = tl.constexpr(254 << 23)  # from a power of two to its reciprocal, subtracted from
LARGEST = tl.constexpr(3.4028234663852886e38)


# ---------------------------------------------------------------------------------------------
# Bits
# ---------------------------------------------------------------------------------------------


@triton.jit
def widened(x):
    """``x`` in float32."""
    if IS_INTERPRETED and x.dtype == tl.bfloat16:
        result = as_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def _narrowed(values, DTYPE: tl.constexpr):
    """Float32 rounded to a dtype, ties to even."""
    if IS_INTERPRETED and DTYPE == tl.bfloat16:
        result = (as_bits(to_bfloat16(values)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(DTYPE)
    return result


@triton.jit
def _random_fractions(places, seed_low, seed_high):
    """Uniform in [0, 1) for each place: float32, multiples of 2^-24 (``random.random_fractions``)."""
    group = places.to(tl.int64) >> 6
    low = group.to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    lane = (places & 15).to(tl.uint32)
    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    first, second, third, fourth = tl.philox(seed, low, high, lane, tl.zeros_like(low))
    which = (places >> 4) & 3
    word = tl.where(which < 2, tl.where(which == 0, first, second), tl.where(which == 2, third, fourth))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@triton.jit
def find_places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE: tl.constexpr):
    """Where the elements of a tile are in memory, and which of them exist: two (rows, blocks, width)."""
    r = tl.arange(0, TILE.padded_rows)[:, None, None]
    n = tl.arange(0, TILE.num_blocks)[None, :, None]
    w = tl.arange(0, TILE.padded_width)[None, None, :]
    if TILE.is_large:
        tile = tile.to(tl.int64)
    if TILE.wraps:
        block = tile * TILE.num_blocks + n
        band = block // column_blocks
        block_column = block % column_blocks
    else:
        chunk = tile
        band = tile * 0
        if not TILE.has_one_band:
            num_chunks = tl.cdiv(column_blocks, TILE.num_blocks)
            chunk = tile % num_chunks
            band = tile // num_chunks
        block_column = chunk * TILE.num_blocks + n
    column = block_column * TILE.width + w
    if TILE.has_one_outer:
        row = band * TILE.rows + r
        places = row * num_columns + column
    else:
        row = (band % row_blocks) * TILE.rows + r
        places = (band // row_blocks * num_rows + row) * num_columns + column
    if TILE.is_full:
        exists = tl.full((TILE.padded_rows, TILE.num_blocks, TILE.padded_width), 1, tl.int1)
    else:
        exists = (row < num_rows) & (column < num_columns) & (r < TILE.rows) & (w < TILE.width)
        if TILE.wraps:
            exists = exists & (band < num_bands)
    return places, exists


@triton.jit
def load(x_ptr, places, exists, TILE: tl.constexpr):
    """A tile in words: pairs of bfloat16 as they lie, or float32 numbers."""
    if TILE.is_paired:
        words = tl.load(_as_words(x_ptr) + places)
    elif TILE.is_full:
        words = as_bits(widened(tl.load(x_ptr + places)))
    else:
        words = as_bits(widened(tl.load(x_ptr + places, mask=exists, other=0.0)))
    return words


@triton.jit
def store(out_ptr, places, exists, words, TILE: tl.constexpr):
    """``load`` reversed; numbers are rounded to the dtype there."""
    if TILE.is_paired:
        tl.store(_as_words(out_ptr) + places, words)
    elif TILE.is_full:
        tl.store(out_ptr + places, _narrowed(as_float(words), out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + places, _narrowed(as_float(words), out_ptr.dtype.element_ty), mask=exists)


@triton.jit
def values_of(words, TILE: tl.constexpr):
    """Words as float32 numbers, one for each element."""
    if TILE.is_paired:
        values = joined(words)
    else:
        values = as_float(words)
    return values


@triton.jit
def words_of(values, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Float32 numbers rounded to a dtype, as words."""
    if TILE.is_paired:
        words = parted(to_bfloat16(values), TILE.padded_rows, TILE.num_blocks, TILE.padded_width)
    else:
        words = as_bits(widened(_narrowed(values, DTYPE)))
    return words


@triton.jit
def _as_words(pointer):
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def over_blocks(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The maximum of each block, in the tile's three dimensions."""
    if WIDTH > 1:
        values = tl.max(values, axis=2, keep_dims=True)
    if ROWS > 1:
        values = tl.max(values, axis=0, keep_dims=True)
    return values


# ---------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------


@triton.jit
def _power_of_two_scales(amax, RULE: tl.constexpr):
    """Encode, decode and scale from the bits of abs maxima; decode and scale are NaN over a NaN or an Inf."""
    bits = amax
    offset = RULE.offset_steps
    if RULE.lifts_subnormals:
        is_subnormal = bits < ONE_STEP
        bits = tl.where(is_subnormal, as_bits(as_float(bits) * 8388608.0), bits)
        offset = tl.where(is_subnormal, RULE.lifted_offset_steps, RULE.offset_steps)
    exponents = ((bits + RULE.carry) & EXPONENT_MASK) - offset
    exponents = tl.maximum(exponents, RULE.scale_lowest_bits)
    if RULE.reaches_top:
        exponents = tl.minimum(exponents, RULE.scale_top_bits)
    # 2^-127 is a subnormal
    decode = as_float(tl.maximum(exponents, 1 << 22))
    decode = tl.where(amax >= INF_BITS, float("nan"), decode)
    encode = -exponents + INVERSE_STEPS
    if RULE.reaches_top:
        encode = tl.maximum(encode, 1 << 22)
    return as_float(encode), decode, decode


@triton.jit
def _round_scale(values, RULE: tl.constexpr):
    """Not negative values to the nearest scale, ties to even; NaN stays."""
    exponents = as_bits(values) & EXPONENT_MASK
    exponents = tl.minimum(tl.maximum(exponents, RULE.scale_lowest_bits), RULE.scale_highest_bits)
    magic = as_float(exponents - RULE.scale_mantissa_steps + MAGIC_STEPS)
    rounded = (values + magic) - magic
    rounded = tl.where(rounded > RULE.scale_max_value, RULE.scale_max_value, rounded)
    return tl.where(rounded < RULE.scale_min_value, RULE.scale_min_value, rounded)


@triton.jit
def _nearest_scales(amax, tensor_encode, RULE: tl.constexpr):
    """Encode, decode and scale from the bits of abs maxima, every step rounded to the type's scale arithmetic."""
    values = tl.where(amax >= INF_BITS, float("nan"), as_float(amax))
    if RULE.has_encode:
        factor = tensor_encode * RULE.factor
        if RULE.rounds_to_bfloat16:
            factor = to_bfloat16(factor)
        values = values * factor
    else:
        values = values * RULE.factor
    if RULE.rounds_to_bfloat16:
        values = to_bfloat16(values)
    scale = _round_scale(values, RULE)
    decode = scale
    if RULE.has_encode:
        decode = scale * tl.div_rn(1.0, tensor_encode)
        if RULE.rounds_to_bfloat16:
            decode = to_bfloat16(decode)
    encode = tl.div_rn(tl.full(decode.shape, 1.0, tl.float32), decode)
    if RULE.rounds_to_bfloat16:
        encode = to_bfloat16(encode)
    encode = tl.where(encode > LARGEST, LARGEST, encode)
    return encode, decode, scale


@triton.jit
def scale_codes(scale, RULE: tl.constexpr):
    codes = (as_bits(scale) >> RULE.code_shift) - RULE.code_offset
    if RULE.has_scale_subnormals:
        is_subnormal = scale < RULE.scale_lowest_value
        steps = tl.where(is_subnormal, scale, 0.0) * RULE.code_unit
        codes = tl.where(is_subnormal, steps.to(tl.int32), codes)
    codes = tl.maximum(codes, 0)
    return tl.where(scale != scale, RULE.nan_code, codes)


# ---------------------------------------------------------------------------------------------
# Rounding
# ---------------------------------------------------------------------------------------------


@triton.jit
def _exponents(magnitudes, RULE: tl.constexpr):
    """Powers of two, as bits, that have a spacing of their own."""
    exponents = tl.maximum(magnitudes & EXPONENT_MASK, RULE.lowest_bits)
    if RULE.needs_top:
        exponents = tl.minimum(exponents, RULE.highest_bits)
    return exponents


@triton.jit
def _spacings(exponents, RULE: tl.constexpr):
    """The bits of the distance of neighbouring element values, and 2^23 times that distance."""
    steps = RULE.mantissa_steps
    factor = RULE.magic_factor
    if RULE.num_tapers > 0:
        distance = tl.abs(exponents - BIAS_STEPS)
        num_tapers: tl.constexpr = RULE.num_tapers
        for i in tl.static_range(num_tapers):
            is_beyond = distance > RULE.taper_bounds[i]
            steps = tl.where(is_beyond, RULE.taper_steps[i], steps)
            factor = tl.where(is_beyond, RULE.taper_factors[i], factor)
    return exponents - steps, as_float(exponents) * factor


@triton.jit
def _round(values, random, RULE: tl.constexpr):
    """The magnitudes of ``values`` rounded to multiples of the spacing, without an upper end; NaN and Inf stay."""
    magnitudes = as_bits(values) & MAGNITUDE_MASK
    values = tl.abs(values)
    exponents = _exponents(magnitudes, RULE)
    spacing_bits, magic = _spacings(exponents, RULE)
    spacing = as_float(spacing_bits)
    if RULE.is_half_away and RULE.has_short_mantissas:
        # half away is ties to even a little further out: nothing else lies that close below a tie
        values = values * 1.00000011920928955078125
    nearest = (values + magic) - magic
    if (RULE.is_half_away and not RULE.has_short_mantissas) or RULE.is_hybrid:
        half = as_float(spacing_bits - ONE_STEP)
        half_away = tl.where(values - nearest == half, nearest + spacing, nearest)
    if RULE.is_stochastic or RULE.is_hybrid:
        whole = tl.where(nearest > values, nearest - spacing, nearest)
        inverse = as_float(-spacing_bits + INVERSE_STEPS)
        fraction = (values - whole) * inverse
    if RULE.is_stochastic:
        result = tl.where(random < fraction, whole + spacing, whole)
    elif RULE.is_hybrid:
        is_up = _is_hybrid_up(magnitudes, fraction, RULE)
        exponents = (magnitudes >> MANTISSA_WIDTH) - BIAS
        is_half_away = (tl.abs(exponents) <= RULE.half_away_bound) | (half_away > RULE.max_value)
        result = tl.where(is_half_away, half_away, tl.where(is_up, whole + spacing, whole))
    elif RULE.is_half_away and not RULE.has_short_mantissas:
        result = half_away
    else:
        result = nearest
    return result


@triton.jit
def _with_signs(magnitudes, values, RULE: tl.constexpr):
    result = as_float(as_bits(magnitudes) | (as_bits(values) & SIGN_MASK))
    if not RULE.signed_zero:
        result = result + 0.0
    return result


@triton.jit
def _is_hybrid_up(magnitudes, fraction, RULE: tl.constexpr):
    """Where the first bits of what is lost are not below the number's own last bits."""
    rest = RULE.hybrid_num_bits - RULE.hybrid_num_ones
    ones = (1 << RULE.hybrid_num_ones) - 1
    threshold = (((magnitudes >> RULE.hybrid_shift) & ((1 << rest) - 1)) << RULE.hybrid_num_ones) | ones
    lost = tl.where(magnitudes >= INF_BITS, 0.0, fraction) * (1 << RULE.hybrid_num_bits)
    is_tiny = ((magnitudes >> MANTISSA_WIDTH) - BIAS) < RULE.tiny_exponent
    return (lost.to(tl.int32) >= threshold) & (is_tiny == 0)


@triton.jit
def _micro_factors(values, SIZE: tl.constexpr, THRESHOLD: tl.constexpr):
    """2 where the group of ``SIZE`` along a block has an abs max that reaches the threshold, else 1."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = values.shape[1]
    WIDTH: tl.constexpr = values.shape[2]
    if WIDTH > 1:
        groups = tl.reshape(tl.abs(values), (ROWS, BLOCKS, WIDTH // SIZE, SIZE))
        is_wide = tl.max(groups, axis=3, keep_dims=True) >= THRESHOLD
    else:
        groups = tl.reshape(tl.abs(values), (ROWS // SIZE, SIZE, BLOCKS, WIDTH))
        is_wide = tl.max(groups, axis=1, keep_dims=True) >= THRESHOLD
    factors = tl.where(tl.broadcast_to(is_wide, groups.shape), 2.0, 1.0)
    return tl.reshape(factors, (ROWS, BLOCKS, WIDTH))


@triton.jit
def find_scales(amax, tensor_encode, RULE: tl.constexpr):
    """Encode, decode and scale of blocks from the bits of their abs maxima."""
    if RULE.is_power_of_two:
        encode, decode, scale = _power_of_two_scales(amax, RULE)
    else:
        encode, decode, scale = _nearest_scales(amax, tensor_encode, RULE)
        if RULE.has_encode and not RULE.restores_encode:
            decode = scale
    return encode, decode, scale


@triton.jit
def quantize_tile(values, amax, places, tensor_encode, seed_low, seed_high, RULE: tl.constexpr):
    """The tile quantized and dequantized (float32); where it was limited; the blocks' scales.

    Args:
        amax: the bits of the abs maxima of blocks.
    """
    if RULE.has_blocks:
        if not RULE.keeps_minus_zero:
            values = values + 0.0
        encode, decode, scale = find_scales(amax, tensor_encode, RULE)
        values = values * encode
    else:
        scale = 1.0
        if RULE.has_encode:
            values = values * tensor_encode
    if RULE.num_micro > 0:
        micro = tl.full(values.shape, 1.0, tl.float32)
        num_micro: tl.constexpr = RULE.num_micro
        for i in tl.static_range(num_micro):
            factors = _micro_factors(values, RULE.micro_sizes[i], RULE.micro_thresholds[i])
            values = tl.where(factors == 2.0, values * 0.5, values)
            micro = micro * factors
    random = 0.0
    if RULE.is_stochastic:
        random = _random_fractions(places, seed_low, seed_high)
    if RULE.is_exact:
        rounded = tl.abs(values)
    else:
        rounded = _round(values, random, RULE)
    if RULE.has_limit_from:
        is_limited = tl.abs(values) >= RULE.limit_from
    else:
        is_limited = rounded > RULE.max_value
    if RULE.has_blocks and RULE.limit == RULE.max_value:
        rounded = tl.minimum(rounded, RULE.max_value)  # drops NaN, which comes back with the scale
    else:
        rounded = tl.where(is_limited, RULE.limit, rounded)
    result = _with_signs(rounded, values, RULE)
    if RULE.num_micro > 0:
        result = result * micro
    if RULE.has_blocks:
        result = result * decode
    elif RULE.restores_encode:
        result = tl.div_rn(result, tl.zeros_like(result) + tensor_encode)
    return result, is_limited, scale
