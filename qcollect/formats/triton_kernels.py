# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM300 (what a kernel is compiled with is spelled in capitals)
"""The reference implementation of ``eager`` as Triton kernels: read once, write once, the same bits.

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

_EXPONENT_MASK = tl.constexpr(0x7F800000)
_INF_BITS = tl.constexpr(0x7F800000)
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_SIGN_MASK = tl.constexpr(-0x80000000)
_WIDTH = tl.constexpr(23)
_BIAS = tl.constexpr(127)
_ONE_STEP = tl.constexpr(1 << 23)
_BIAS_STEPS = tl.constexpr(127 << 23)
_MAGIC_STEPS = tl.constexpr(23 << 23)  # from a spacing to 2^23 of it
_INVERSE_STEPS = tl.constexpr(254 << 23)  # from a power of two to its reciprocal, subtracted from
_ENCODE_PLACE = tl.constexpr(4)  # in float32 numbers: sixteen bytes
_SHARES_PLACE = tl.constexpr(8)
_NUM_BINS = tl.constexpr(256)
_MODERATE_STEPS = tl.constexpr(64 << 23)  # blocks can be rounded at their scale
_SQUARES_STEPS = tl.constexpr(32 << 23)  # squares of errors are normal numbers, too
_LARGEST = tl.constexpr(3.4028234663852886e38)
# Triton's interpreter cuts float32 off where it should round to bfloat16, and misreads bfloat16 subnormals.
_CONVERTS_BY_BITS = tl.constexpr(triton.knobs.runtime.interpret)


# ---------------------------------------------------------------------------------------------
# Bits
# ---------------------------------------------------------------------------------------------


@triton.jit
def _as_bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_bfloat16(values):
    """Float32 rounded to bfloat16, ties to even; NaN stays."""
    bits = _as_bits(values)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where((bits & _MAGNITUDE_MASK) > _INF_BITS, values, _as_float(rounded))


@triton.jit
def _widened(x):
    """``x`` in float32."""
    if _CONVERTS_BY_BITS and x.dtype == tl.bfloat16:
        result = _as_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def _narrowed(values, DTYPE: tl.constexpr):
    """Float32 rounded to a dtype, ties to even."""
    if _CONVERTS_BY_BITS and DTYPE == tl.bfloat16:
        result = (_as_bits(_to_bfloat16(values)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(DTYPE)
    return result


@triton.jit
def _random_fractions(places, seed_low, seed_high):
    """Uniform in [0, 1) for each place: float32, multiples of 2^-24."""
    index = places.to(tl.int64)
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@triton.jit
def _places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE: tl.constexpr):
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
    exists = (row < num_rows) & (column < num_columns) & (r < TILE.rows) & (w < TILE.width)
    if TILE.wraps:
        exists = exists & (band < num_bands)
    return places, exists


@triton.jit
def _load(x_ptr, places, exists, TILE: tl.constexpr):
    if TILE.is_full:
        x = tl.load(x_ptr + places)
    else:
        x = tl.load(x_ptr + places, mask=exists, other=0.0)
    return _widened(x)


@triton.jit
def _store(out_ptr, places, exists, values, TILE: tl.constexpr):
    values = _narrowed(values, out_ptr.dtype.element_ty)
    if TILE.is_full:
        tl.store(out_ptr + places, values)
    else:
        tl.store(out_ptr + places, values, mask=exists)


@triton.jit
def _over_blocks(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
        is_subnormal = bits < _ONE_STEP
        bits = tl.where(is_subnormal, _as_bits(_as_float(bits) * 8388608.0), bits)
        offset = tl.where(is_subnormal, RULE.lifted_offset_steps, RULE.offset_steps)
    exponents = ((bits + RULE.carry) & _EXPONENT_MASK) - offset
    exponents = tl.maximum(exponents, RULE.scale_lowest_bits)
    if RULE.reaches_top:
        exponents = tl.minimum(exponents, RULE.scale_top_bits)
    # 2^-127 is a subnormal
    decode = _as_float(tl.maximum(exponents, 1 << 22))
    decode = tl.where(amax >= _INF_BITS, float("nan"), decode)
    encode = -exponents + _INVERSE_STEPS
    if RULE.reaches_top:
        encode = tl.maximum(encode, 1 << 22)
    return _as_float(encode), decode, decode


@triton.jit
def _round_scale(values, RULE: tl.constexpr):
    """Not negative values to the nearest scale, ties to even; NaN stays."""
    exponents = _as_bits(values) & _EXPONENT_MASK
    exponents = tl.minimum(tl.maximum(exponents, RULE.scale_lowest_bits), RULE.scale_highest_bits)
    magic = _as_float(exponents - RULE.scale_mantissa_steps + _MAGIC_STEPS)
    rounded = (values + magic) - magic
    rounded = tl.where(rounded > RULE.scale_max_value, RULE.scale_max_value, rounded)
    return tl.where(rounded < RULE.scale_min_value, RULE.scale_min_value, rounded)


@triton.jit
def _nearest_scales(amax, tensor_encode, RULE: tl.constexpr):
    """Encode, decode and scale from the bits of abs maxima, every step rounded to the type's scale arithmetic."""
    values = tl.where(amax >= _INF_BITS, float("nan"), _as_float(amax))
    if RULE.has_encode:
        factor = tensor_encode * RULE.factor
        if RULE.rounds_to_bfloat16:
            factor = _to_bfloat16(factor)
        values = values * factor
    else:
        values = values * RULE.factor
    if RULE.rounds_to_bfloat16:
        values = _to_bfloat16(values)
    scale = _round_scale(values, RULE)
    decode = scale
    if RULE.has_encode:
        decode = scale * tl.div_rn(1.0, tensor_encode)
        if RULE.rounds_to_bfloat16:
            decode = _to_bfloat16(decode)
    encode = tl.div_rn(tl.full(decode.shape, 1.0, tl.float32), decode)
    if RULE.rounds_to_bfloat16:
        encode = _to_bfloat16(encode)
    encode = tl.where(encode > _LARGEST, _LARGEST, encode)
    return encode, decode, scale


@triton.jit
def _scale_codes(scale, RULE: tl.constexpr):
    codes = (_as_bits(scale) >> RULE.code_shift) - RULE.code_offset
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
    exponents = tl.maximum(magnitudes & _EXPONENT_MASK, RULE.lowest_bits)
    if RULE.needs_top:
        exponents = tl.minimum(exponents, RULE.highest_bits)
    return exponents


@triton.jit
def _spacings(exponents, RULE: tl.constexpr):
    """The bits of the distance of neighbouring element values, and 2^23 times that distance."""
    steps = RULE.mantissa_steps
    factor = RULE.magic_factor
    if RULE.num_tapers > 0:
        distance = tl.abs(exponents - _BIAS_STEPS)
        num_tapers: tl.constexpr = RULE.num_tapers
        for i in tl.static_range(num_tapers):
            is_beyond = distance > RULE.taper_bounds[i]
            steps = tl.where(is_beyond, RULE.taper_steps[i], steps)
            factor = tl.where(is_beyond, RULE.taper_factors[i], factor)
    return exponents - steps, _as_float(exponents) * factor


@triton.jit
def _round(values, random, RULE: tl.constexpr):
    """The magnitudes of ``values`` rounded to multiples of the spacing, without an upper end; NaN and Inf stay."""
    magnitudes = _as_bits(values) & _MAGNITUDE_MASK
    values = tl.abs(values)
    exponents = _exponents(magnitudes, RULE)
    spacing_bits, magic = _spacings(exponents, RULE)
    spacing = _as_float(spacing_bits)
    if RULE.is_half_away and RULE.has_short_mantissas:
        # half away is ties to even a little further out: nothing else lies that close below a tie
        values = values * 1.00000011920928955078125
    nearest = (values + magic) - magic
    if (RULE.is_half_away and not RULE.has_short_mantissas) or RULE.is_hybrid:
        half = _as_float(spacing_bits - _ONE_STEP)
        half_away = tl.where(values - nearest == half, nearest + spacing, nearest)
    if RULE.is_stochastic or RULE.is_hybrid:
        whole = tl.where(nearest > values, nearest - spacing, nearest)
        inverse = _as_float(-spacing_bits + _INVERSE_STEPS)
        fraction = (values - whole) * inverse
    if RULE.is_stochastic:
        result = tl.where(random < fraction, whole + spacing, whole)
    elif RULE.is_hybrid:
        is_up = _is_hybrid_up(magnitudes, fraction, RULE)
        exponents = (magnitudes >> _WIDTH) - _BIAS
        is_half_away = (tl.abs(exponents) <= RULE.half_away_bound) | (half_away > RULE.max_value)
        result = tl.where(is_half_away, half_away, tl.where(is_up, whole + spacing, whole))
    elif RULE.is_half_away and not RULE.has_short_mantissas:
        result = half_away
    else:
        result = nearest
    return result


@triton.jit
def _are_moderate(amax, STEPS: tl.constexpr):
    """Whether the abs maxima with these bits are zero or within so many powers of two around 1, all of them."""
    distance = tl.abs(amax - _BIAS_STEPS)
    return tl.max(tl.where(amax == 0, 0, distance)) <= STEPS


@triton.jit
def _round_at_scale(values, decode, RULE: tl.constexpr):
    """Magnitudes rounded to multiples of the spacing under moderate scales, without a division by them."""
    magic = _as_bits(_as_float(_as_bits(values) & _EXPONENT_MASK) * RULE.magic_factor)
    lowest_magic = _as_bits(decode) + (RULE.lowest_bits - RULE.mantissa_steps + _MAGIC_STEPS - _BIAS_STEPS)
    magic = _as_float(tl.maximum(magic, lowest_magic))
    return (tl.abs(values) + magic) - magic


@triton.jit
def _with_signs(magnitudes, values, RULE: tl.constexpr):
    result = _as_float(_as_bits(magnitudes) | (_as_bits(values) & _SIGN_MASK))
    if not RULE.signed_zero:
        result = result + 0.0
    return result


@triton.jit
def _is_hybrid_up(magnitudes, fraction, RULE: tl.constexpr):
    """Where the first bits of what is lost are not below the number's own last bits."""
    rest = RULE.hybrid_num_bits - RULE.hybrid_num_ones
    ones = (1 << RULE.hybrid_num_ones) - 1
    threshold = (((magnitudes >> RULE.hybrid_shift) & ((1 << rest) - 1)) << RULE.hybrid_num_ones) | ones
    lost = tl.where(magnitudes >= _INF_BITS, 0.0, fraction) * (1 << RULE.hybrid_num_bits)
    is_tiny = ((magnitudes >> _WIDTH) - _BIAS) < RULE.tiny_exponent
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
def _scales(amax, tensor_encode, RULE: tl.constexpr):
    """Encode, decode and scale of blocks from the bits of their abs maxima."""
    if RULE.is_power_of_two:
        encode, decode, scale = _power_of_two_scales(amax, RULE)
    else:
        encode, decode, scale = _nearest_scales(amax, tensor_encode, RULE)
        if RULE.has_encode and not RULE.restores_encode:
            decode = scale
    return encode, decode, scale


@triton.jit
def _quantize(values, amax, places, tensor_encode, seed_low, seed_high, RULE: tl.constexpr):
    """The tile quantized and dequantized (float32); where it was limited; the blocks' scales.

    Args:
        amax: the bits of the abs maxima of blocks.
    """
    if RULE.has_blocks:
        if not RULE.keeps_minus_zero:
            values = values + 0.0
        encode, decode, scale = _scales(amax, tensor_encode, RULE)
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


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


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
    places, exists = _places(tl.program_id(0), num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
    values = _load(x_ptr, places, exists, TILE)
    tensor_encode = 1.0
    if RULE.has_encode:
        tensor_encode = tl.load(encode_ptr)
    amax = _over_blocks(_as_bits(values) & _MAGNITUDE_MASK, TILE.padded_rows, TILE.padded_width)
    result, _, _ = _quantize(values, amax, places, tensor_encode, seed_low, seed_high, RULE)
    _store(out_ptr, places, exists, result, TILE)


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
    places, exists = _places(tl.program_id(0), num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
    values = _load(x_ptr, places, exists, TILE)
    last_encode = 1.0
    if LAST.has_encode:
        last_encode = tl.load(last_encode_ptr)
    first_encode = 1.0
    if FIRST.has_encode:
        first_encode = tl.load(first_encode_ptr)
    bits = _as_bits(values) & _MAGNITUDE_MASK
    last_amax = _over_blocks(bits, 1, TILE.padded_width)
    first_amax = _over_blocks(bits, TILE.padded_rows, 1)
    is_short = False
    if LAST.can_keep_scale and FIRST.can_keep_scale:
        is_short = _are_moderate(last_amax, _MODERATE_STEPS) & _are_moderate(first_amax, _MODERATE_STEPS)
    if is_short:
        result = _quantize_at_scale(values, last_amax, LAST)
        _store(last_ptr, places, exists, result, TILE)
        result = _quantize_at_scale(values, first_amax, FIRST)
        _store(first_ptr, places, exists, result, TILE)
    else:
        result, _, _ = _quantize(values, last_amax, places, last_encode, seed_low, seed_high, LAST)
        _store(last_ptr, places, exists, result, TILE)
        result, _, _ = _quantize(values, first_amax, places, first_encode, first_seed_low, first_seed_high, FIRST)
        _store(first_ptr, places, exists, result, TILE)


@triton.jit
def _quantize_at_scale(values, amax, RULE: tl.constexpr):
    """``_quantize`` for blocks with moderate abs maxima."""
    _, decode, _ = _power_of_two_scales(amax, RULE)
    if not RULE.keeps_minus_zero:
        values = values + 0.0
    rounded = tl.minimum(_round_at_scale(values, decode, RULE), decode * RULE.max_value)
    return _with_signs(rounded, values, RULE)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "row_blocks", "num_bands", "num_tiles"])
def quantize_stats_kernel(
    x_ptr,
    out_ptr,
    encode_ptr,
    sums_ptr,
    max_errors_ptr,
    counts_ptr,
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
):
    """Every so many tiles a program: values quantized and dequantized, and the program's share of the statistics.

    Squares are summed in float32 inside a block, in units of the block's own largest power of two, and
    in float64 from block to block: nothing overflows, and what underflows is below the last bit.

    Args:
        sums_ptr: (2, programs) float64: of squares, of squared errors.
        max_errors_ptr: (programs,) float32.
        counts_ptr: (5, programs) int32: zeroed, clamped, clamped blocks, NaN, Inf.
        bins_ptr: (2, 256) int64, added to: exponents of elements, codes of scales.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    tensor_encode = 1.0
    if RULE.has_encode:
        tensor_encode = tl.load(encode_ptr)
    BLOCKS: tl.constexpr = TILE.num_blocks
    LANES: tl.constexpr = TILE.fold_lanes
    squares = tl.zeros((LANES,), tl.float64)
    squared_errors = tl.zeros((LANES,), tl.float64)
    max_error = tl.zeros((LANES,), tl.float32)
    zeroed = tl.zeros((LANES,), tl.int32)
    clamped = tl.zeros((LANES,), tl.int32)
    clamped_blocks = tl.zeros((1, BLOCKS, 1), tl.int32)
    nans = tl.zeros((), tl.int32)
    infs = tl.zeros((), tl.int32)
    if HISTOGRAMS:
        first_places, first_exist = _places(program, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
        first_bits = _as_bits(_load(x_ptr, first_places, first_exist, TILE)) & _MAGNITUDE_MASK
        # above 15, so that zeros, which also fill a tile up, are outside
        top = tl.minimum(tl.maximum((tl.max(first_bits) >> _WIDTH) + 1, 16), 254)
        if RULE.has_blocks:
            first_amax = _over_blocks(first_bits, TILE.padded_rows, TILE.padded_width)
            _, _, first_scale = _scales(first_amax, tensor_encode, RULE)
            first_codes = _scale_codes(first_scale, RULE)
            top_code = tl.max(tl.where(first_codes == RULE.nan_code, 0, first_codes)) + 1
        e0 = tl.zeros((LANES,), tl.int64)
        e1 = tl.zeros((LANES,), tl.int64)
        e2 = tl.zeros((LANES,), tl.int64)
        e3 = tl.zeros((LANES,), tl.int64)
        c0 = tl.zeros((1, BLOCKS, 1), tl.int64)
        c1 = tl.zeros((1, BLOCKS, 1), tl.int64)
        zeros = tl.zeros((), tl.int32)
    for tile in range(program, num_tiles, num_programs):
        places, exists = _places(tile, num_rows, num_columns, row_blocks, column_blocks, num_bands, TILE)
        x = _load(x_ptr, places, exists, TILE)
        x_bits = _as_bits(x) & _MAGNITUDE_MASK
        amax = _over_blocks(x_bits, TILE.padded_rows, TILE.padded_width)
        is_short = False
        if RULE.can_keep_scale and out_ptr.dtype.element_ty != tl.float16:
            is_short = _are_moderate(amax, _SQUARES_STEPS)
        if is_short:
            _, decode, _ = _power_of_two_scales(amax, RULE)
            top_value = decode * RULE.max_value
            rounded = _round_at_scale(x, decode, RULE)
            is_limited = rounded > top_value
            rounded = tl.minimum(rounded, top_value)
            _store(out_ptr, places, exists, _with_signs(rounded, x, RULE), TILE)
            error = rounded - tl.abs(x)
            squares += _folded_sum(x * x, TILE).to(tl.float64)
            squared_errors += _folded_sum(error * error, TILE).to(tl.float64)
            max_error = tl.maximum(max_error, _folded_max(tl.abs(error), TILE))
            zeroed += _folded_sum(tl.where((x != 0.0) & (rounded == 0.0), 1.0, 0.0), TILE).to(tl.int32)
            clamped += _folded_sum(tl.where(is_limited, 1.0, 0.0), TILE).to(tl.int32)
            is_beyond = _round_at_scale(_as_float(amax), decode, RULE) > top_value
            clamped_blocks += is_beyond.to(tl.int32)
        else:
            y, is_limited, scale = _quantize(x, amax, places, tensor_encode, seed_low, seed_high, RULE)
            _store(out_ptr, places, exists, y, TILE)
            y = _widened(_narrowed(y, out_ptr.dtype.element_ty))
            if RULE.has_blocks:
                is_limited = is_limited & (scale == scale)
            error = y - x
            error_bits = _as_bits(error) & _MAGNITUDE_MASK
            if _are_moderate(amax, _SQUARES_STEPS) & (tl.max(error_bits) < _INF_BITS):
                squares += _folded_sum(x * x, TILE).to(tl.float64)
                squared_errors += _folded_sum(error * error, TILE).to(tl.float64)
                max_error = tl.maximum(max_error, _folded_max(tl.abs(error), TILE))
            else:
                is_finite = error_bits < _INF_BITS  # of finite numbers it is, and of none else
                error = tl.where(is_finite, error, 0.0)
                finite = tl.where(is_finite, x, 0.0)
                unit = _over_blocks(_as_bits(finite) & _EXPONENT_MASK, TILE.padded_rows, TILE.padded_width)
                unit = tl.minimum(tl.maximum(unit, _ONE_STEP), _INVERSE_STEPS - _ONE_STEP)
                inverse = _as_float(-unit + _INVERSE_STEPS)
                weight = _as_float(unit).to(tl.float64)
                is_first = tl.arange(0, LANES) == 0
                sums = _block_sums(finite * inverse * (finite * inverse), TILE).to(tl.float64)
                squares += tl.where(is_first, tl.sum(sums * weight * weight), 0.0)
                sums = _block_sums(error * inverse * (error * inverse), TILE).to(tl.float64)
                squared_errors += tl.where(is_first, tl.sum(sums * weight * weight), 0.0)
                max_error = tl.maximum(max_error, _folded_max(tl.abs(error), TILE))
                nans += tl.sum((x_bits > _INF_BITS).to(tl.int32))
                infs += tl.sum((x_bits == _INF_BITS).to(tl.int32))
            zeroed += _folded_sum(((x != 0.0) & (y == 0.0)).to(tl.int32), TILE)
            clamped += _folded_sum(is_limited.to(tl.int32), TILE)
            if RULE.has_blocks:
                clamped_blocks += _over_blocks(is_limited.to(tl.int32), TILE.padded_rows, TILE.padded_width)
        if HISTOGRAMS:
            # four times the steps below the top; what is outside has sixty, as what is fifteen below
            steps = ((top << _WIDTH) - (x_bits & _EXPONENT_MASK)).to(tl.uint32) >> (_WIDTH - 2)
            steps = tl.minimum(steps, 60)
            words = tl.full(steps.shape, 1, tl.int64) << steps.to(tl.int64)
            words = tl.sum(tl.reshape(words, (TILE.fold_repeats, LANES, TILE.fold_each)), axis=2)
            even = tl.sum(words & 0x0F0F0F0F0F0F0F0F, axis=0)
            odd = tl.sum((words >> 4) & 0x0F0F0F0F0F0F0F0F, axis=0)
            e0 += even & 0x00FF00FF00FF00FF
            e1 += odd & 0x00FF00FF00FF00FF
            e2 += (even >> 8) & 0x00FF00FF00FF00FF
            e3 += (odd >> 8) & 0x00FF00FF00FF00FF
            if tl.max((odd >> 56).to(tl.int32) & 0xFF) > 0:
                exponents = x_bits >> _WIDTH
                is_outside = (steps == 60) & exists
                zeros += tl.sum((is_outside & (exponents == 0)).to(tl.int32))
                is_outside = is_outside & (exponents != 0)
                one = tl.full(steps.shape, 1, tl.int64)
                tl.atomic_add(bins_ptr + exponents, one, mask=is_outside, sem="relaxed")
            if RULE.has_blocks:
                _, _, scale = _scales(amax, tensor_encode, RULE)
                codes = _scale_codes(scale, RULE)
                in_tensor = _over_blocks(exists.to(tl.int32), TILE.padded_rows, TILE.padded_width) > 0
                steps = tl.minimum((top_code - codes).to(tl.uint32), 7)
                words = tl.full(steps.shape, 1, tl.int64) << ((steps & 3) * 16).to(tl.int64)
                words = tl.where(in_tensor, words, 0)
                c0 += tl.where(steps < 4, words, 0)
                c1 += tl.where(steps < 4, 0, words)
                is_outside = (steps == 7) & in_tensor
                if tl.max(is_outside.to(tl.int32)) > 0:
                    one = tl.full(steps.shape, 1, tl.int64)
                    tl.atomic_add(bins_ptr + _NUM_BINS + codes, one, mask=is_outside, sem="relaxed")
    tl.store(sums_ptr + program, tl.sum(squares))
    tl.store(sums_ptr + num_programs + program, tl.sum(squared_errors))
    tl.store(max_errors_ptr + program, tl.max(max_error))
    tl.store(counts_ptr + program, tl.sum(zeroed))
    tl.store(counts_ptr + num_programs + program, tl.sum(clamped))
    if RULE.has_blocks:
        tl.store(counts_ptr + 2 * num_programs + program, tl.sum(clamped_blocks))
    else:
        tl.store(counts_ptr + 2 * num_programs + program, tl.sum(clamped))
    tl.store(counts_ptr + 3 * num_programs + program, nans)
    tl.store(counts_ptr + 4 * num_programs + program, infs)
    if HISTOGRAMS:
        tl.atomic_add(bins_ptr, zeros.to(tl.int64), sem="relaxed")
        _add_word(bins_ptr, top, 4, e0)
        _add_word(bins_ptr, top - 1, 4, e1)
        _add_word(bins_ptr, top - 2, 4, e2)
        _add_word(bins_ptr, top - 3, 4, e3 & 0x0000FFFFFFFFFFFF)
        if RULE.has_blocks:
            _add_word(bins_ptr + _NUM_BINS, top_code, 1, c0)
            _add_word(bins_ptr + _NUM_BINS, top_code - 4, 1, c1 & 0x0000FFFFFFFFFFFF)


@triton.jit
def _block_sums(values, TILE: tl.constexpr):
    """The sum of each block, in the tile's three dimensions."""
    if TILE.padded_width > 1:
        values = tl.sum(values, axis=2, keep_dims=True)
    if TILE.padded_rows > 1:
        values = tl.sum(values, axis=0, keep_dims=True)
    return values


# What is summed over elements is kept by every thread for itself: a tile is folded to one number a thread, from those
# that the thread holds.


@triton.jit
def _folded_sum(values, TILE: tl.constexpr):
    values = tl.reshape(values, (TILE.fold_repeats, TILE.fold_lanes, TILE.fold_each))
    return tl.sum(tl.sum(values, axis=2), axis=0)


@triton.jit
def _folded_max(values, TILE: tl.constexpr):
    values = tl.reshape(values, (TILE.fold_repeats, TILE.fold_lanes, TILE.fold_each))
    return tl.max(tl.max(values, axis=2), axis=0)


# A thread's histogram covers the fifteen numbers from ``top`` downwards: a count is four bits of a word while elements
# side by side are added, eight between repeats, sixteen from tile to tile. Scale codes have a window of seven.
# Numbers outside are added to the bins in memory one by one.


@triton.jit
def _add_word(bins_ptr, number, STEP: tl.constexpr, words):
    """Adds counts of sixteen bits each: of ``number``, then of those ``STEP`` further down."""
    for i in tl.static_range(4):
        count = tl.sum((words >> (16 * i)) & 0xFFFF)
        tl.atomic_add(bins_ptr + number - STEP * i, count, mask=count > 0, sem="relaxed")


@triton.jit
def finish_stats_kernel(
    sums_ptr,
    max_errors_ptr,
    counts_ptr,
    sum_ptr,
    max_error_ptr,
    count_ptr,
    num_shares,
    HAS_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One statistic a program (two sums, the maximum, five counts): the shares put together in a fixed order."""
    statistic = tl.program_id(0)
    if statistic < 2:
        total = tl.zeros((SIZE,), tl.float64)
        for start in range(0, num_shares, SIZE):
            index = start + tl.arange(0, SIZE)
            total += tl.load(sums_ptr + statistic * num_shares + index, mask=index < num_shares, other=0.0)
        tl.store(sum_ptr + statistic, tl.sum(total))
    elif statistic == 2:
        largest = tl.zeros((SIZE,), tl.float32)
        for start in range(0, num_shares, SIZE):
            index = start + tl.arange(0, SIZE)
            largest = tl.maximum(largest, tl.load(max_errors_ptr + index, mask=index < num_shares, other=0.0))
        tl.store(max_error_ptr, tl.max(largest))
    else:
        count = tl.zeros((SIZE,), tl.int64)
        for start in range(0, num_shares, SIZE):
            index = start + tl.arange(0, SIZE)
            share = tl.load(counts_ptr + (statistic - 3) * num_shares + index, mask=index < num_shares, other=0)
            count += share.to(tl.int64)
        total_count = tl.sum(count)
        if statistic == 5 and not HAS_BLOCKS:
            total_count = tl.minimum(total_count, 1)
        tl.store(count_ptr + statistic - 3, total_count)


@triton.jit
def _finish_amax(bits, found_ptr, RULE: tl.constexpr):
    """Stores the abs max whose bits these are, and the factor that follows."""
    amax = _as_float(bits)
    tl.store(found_ptr, amax)
    if RULE.has_encode:
        if RULE.is_bound:
            counted = amax.to(tl.float64)
            if RULE.min_amax > 0.0:
                least = tl.full((), RULE.min_amax, tl.float64)
                counted = tl.where(counted < least, least, counted)
            encode = (tl.full((), RULE.bound, tl.float64) / counted).to(tl.float32)
            encode = tl.where(encode > _LARGEST, _LARGEST, encode)
            if RULE.is_rceil:
                encode = tl.where(encode != encode, encode, _as_float(_as_bits(encode) & -0x800000))
        else:
            exponent = tl.minimum(tl.maximum((bits >> _WIDTH) - RULE.target, 1), 253)
            encode = tl.where(bits == 0, 1.0, tl.div_rn(1.0, _as_float(exponent << _WIDTH)))
        tl.store(found_ptr + _ENCODE_PLACE, encode)


@triton.jit
def _counted_bits(x, RULE: tl.constexpr):
    bits = _as_bits(_widened(x)) & _MAGNITUDE_MASK
    if not RULE.sees_nonfinite:
        bits = tl.where(bits >= _INF_BITS, 0, bits)
    return bits


@triton.jit
def amax_kernel(
    x_ptr,
    found_ptr,
    num_elements,
    RULE: tl.constexpr,
    SIZE: tl.constexpr,
    IS_LARGE: tl.constexpr,
    IS_ONE: tl.constexpr,
):
    """The abs max of every so many pieces of ``x``; by a single program at once the result.

    Args:
        found_ptr: float32: the abs max, the factor (aligned), the shares of programs.
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
        tl.store(found_ptr + _SHARES_PLACE + program, _as_float(result))


@triton.jit
def finish_amax_kernel(found_ptr, num_programs, RULE: tl.constexpr, SIZE: tl.constexpr):
    """The largest of the programs' abs maxima, by one program."""
    index = tl.arange(0, SIZE)
    bits = tl.max(_as_bits(tl.load(found_ptr + _SHARES_PLACE + index, mask=index < num_programs, other=0.0)))
    _finish_amax(bits, found_ptr, RULE)
