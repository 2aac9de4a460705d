# mypy: ignore-errors
# ruff: noqa: N803, N806 (what a kernel is compiled with is spelled in capitals)
"""Arithmetic on int32 words that hold one float32 number, or two of bfloat16 side by side.

Every function takes ``PAIRS``, which says which. With pairs one instruction does the work of two, and reads and writes
need no conversion: sums, differences, and products are rounded to bfloat16, so what uses them has to be
exact in it. The instructions are those of compute capability 9.0; Triton has no words for them, hence the
assembly, which its interpreter cannot run: there every function does the same step by step in float32.
"""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_HIGH = tl.constexpr(-0x10000)


@triton.jit
def as_bits(values):
    return values.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(values):
    """Float32 rounded to bfloat16, ties to even; NaN stays."""
    bits = as_bits(values)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & _HIGH
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, values, as_float(rounded))


@triton.jit
def low(words):
    """The first of each pair, in float32."""
    return as_float(words << 16)


@triton.jit
def high(words):
    """The second of each pair, in float32."""
    return as_float(words & _HIGH)


@triton.jit
def _pair(first, second):
    """Float32 numbers of bfloat16 as pairs."""
    return ((as_bits(first) >> 16) & 0xFFFF) | (as_bits(second) & _HIGH)


@triton.jit
def word_of(BITS: tl.constexpr, PAIRS: tl.constexpr):
    """Float32 bits as a word; of a pair, of which both are the same, the bits that bfloat16 has."""
    if PAIRS:
        WORD: tl.constexpr = (BITS & -0x10000) | ((BITS >> 16) & 0xFFFF)
    else:
        WORD: tl.constexpr = BITS
    return tl.full((), WORD, tl.int32)


@triton.jit
def word_of_float(value, PAIRS: tl.constexpr):
    """A float32 number, exact in bfloat16, as a word."""
    bits = as_bits(tl.full((), value, tl.float32))
    if PAIRS:
        bits = (bits & _HIGH) | ((bits >> 16) & 0xFFFF)
    return bits


@triton.jit
def add(a, b, PAIRS: tl.constexpr):
    if not PAIRS:
        result = as_bits(as_float(a) + as_float(b))
    elif IS_INTERPRETED:
        result = _pair(to_bfloat16(low(a) + low(b)), to_bfloat16(high(a) + high(b)))
    else:
        result = tl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def subtract(a, b, PAIRS: tl.constexpr):
    if not PAIRS:
        result = as_bits(as_float(a) - as_float(b))
    elif IS_INTERPRETED:
        result = _pair(to_bfloat16(low(a) - low(b)), to_bfloat16(high(a) - high(b)))
    else:
        result = tl.inline_asm_elementwise(
            "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def multiply(a, b, PAIRS: tl.constexpr):
    if not PAIRS:
        result = as_bits(as_float(a) * as_float(b))
    elif IS_INTERPRETED:
        result = _pair(to_bfloat16(low(a) * low(b)), to_bfloat16(high(a) * high(b)))
    else:
        result = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def larger(a, b, PAIRS: tl.constexpr):
    """Of magnitudes, compared as whole numbers: NaN is above Inf."""
    if not PAIRS:
        result = tl.maximum(a, b)
    elif IS_INTERPRETED:
        result = tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    else:
        result = tl.inline_asm_elementwise(
            "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def smaller(a, b, PAIRS: tl.constexpr):
    """Of magnitudes."""
    if not PAIRS:
        result = tl.minimum(a, b)
    elif IS_INTERPRETED:
        result = tl.minimum(a & 0xFFFF, b & 0xFFFF) | (tl.minimum(a >> 16, b >> 16) << 16)
    else:
        result = tl.inline_asm_elementwise(
            "min.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def is_greater(a, b, PAIRS: tl.constexpr):
    """1.0 where ``a`` is above ``b``, else 0.0."""
    if not PAIRS:
        result = as_bits(tl.where(as_float(a) > as_float(b), 1.0, 0.0))
    elif IS_INTERPRETED:
        result = _pair(tl.where(low(a) > low(b), 1.0, 0.0), tl.where(high(a) > high(b), 1.0, 0.0))
    else:
        result = tl.inline_asm_elementwise(
            "set.gt.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def is_equal(a, b, PAIRS: tl.constexpr):
    """1.0 where the two are equal, else 0.0."""
    if not PAIRS:
        result = as_bits(tl.where(as_float(a) == as_float(b), 1.0, 0.0))
    elif IS_INTERPRETED:
        result = _pair(tl.where(low(a) == low(b), 1.0, 0.0), tl.where(high(a) == high(b), 1.0, 0.0))
    else:
        result = tl.inline_asm_elementwise(
            "set.eq.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def one_shifted(steps):
    """``1 << steps``, and 0 from 32 steps on (int32, taken as unsigned)."""
    if IS_INTERPRETED:
        is_inside = (steps >= 0) & (steps < 32)
        result = tl.where(is_inside, tl.full(steps.shape, 1, tl.int32) << tl.where(is_inside, steps, 0), 0)
    else:
        result = tl.inline_asm_elementwise("shl.b32 $0, 1, $1;", "=r,r", [steps], dtype=tl.int32, is_pure=True, pack=1)
    return result


@triton.jit
def power_of_16(bits):
    """A float32 exponent field as float64: ``16 ** exponent`` in a fixed unit, 0 of a field of 0.

    Those bits, moved right by one, are the upper half of the number.
    """
    if IS_INTERPRETED:
        result = (bits.to(tl.int64) << 31).to(tl.float64, bitcast=True)
    else:  # one product instead of a shift and a zero
        result = tl.inline_asm_elementwise(
            "{.reg .b64 t; mul.wide.u32 t, $1, 0x80000000; mov.b64 $0, t;}",
            "=d,r", [bits], dtype=tl.float64, is_pure=True, pack=1,
        )  # fmt: skip
    return result


@triton.jit
def _larger_pair(a, b):
    return larger(a, b, True)


@triton.jit
def largest(words, AXIS: tl.constexpr, PAIRS: tl.constexpr, KEEP: tl.constexpr):
    """The largest magnitudes over an axis, which stays or not; a pair's numbers stay apart."""
    if not PAIRS:
        result = tl.max(words, axis=AXIS, keep_dims=KEEP)
    elif IS_INTERPRETED:  # which takes functions for reductions element by element
        result = tl.max(words & 0xFFFF, axis=AXIS, keep_dims=KEEP) | (
            tl.max(words >> 16, axis=AXIS, keep_dims=KEEP) << 16
        )
    else:
        result = tl.reduce(words, AXIS, _larger_pair, keep_dims=KEEP)
    return result


@triton.jit
def _add_pair(a, b):
    return add(a, b, True)


@triton.jit
def total(words, AXIS: tl.constexpr, PAIRS: tl.constexpr):
    """The sum over an axis of small whole numbers; a pair's stay apart."""
    if not PAIRS:
        result = as_bits(tl.sum(as_float(words), axis=AXIS))
    elif IS_INTERPRETED:
        result = _pair(tl.sum(low(words), axis=AXIS), tl.sum(high(words), axis=AXIS))
    else:
        result = tl.reduce(words, AXIS, _add_pair)
    return result


@triton.jit
def swapped(words):
    """Pairs with their numbers in the other order."""
    return (words << 16) | ((words >> 16) & 0xFFFF)


@triton.jit
def joined(words):
    """Pairs (rows, blocks, width) as float32 along the width, or along the blocks where these have none."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = words.shape[1]
    WIDTH: tl.constexpr = words.shape[2]
    values = tl.join(low(words), high(words))
    if WIDTH > 1:
        result = tl.reshape(values, (ROWS, BLOCKS, 2 * WIDTH))
    else:
        result = tl.reshape(values, (ROWS, 2 * BLOCKS, 1))
    return result


@triton.jit
def parted(values, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """``joined`` reversed: float32 numbers of bfloat16 as pairs."""
    first, second = tl.split(tl.reshape(values, (ROWS, BLOCKS, WIDTH, 2)))
    return _pair(first, second)
