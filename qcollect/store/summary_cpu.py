"""The summary of a tensor on the CPU, in chunks that stay in the cache.

Bits of a float32, bfloat16 or float16 number are a sign and a magnitude, and magnitudes are ordered like whole numbers.
So the extremes are found in the bits, by torch's vector instructions for integers: also the smallest magnitude, which
tells of zeros, and the largest, which tells of Inf and NaN. A chunk is smaller than what torch hands to several
threads, and nearly all the time is spent inside of torch without the interpreter's lock.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_SIZE = 32768 - 64  # torch's intra-op parallelism begins at 32768 elements
_MAX_DOT_SIZE = 1024
_WORDS_IN_INT64 = 4  # at most
# of a sum of squares: with a smaller part around the mean, differences from the mean are squared instead
_MIN_SPREAD = 2.0**-6


class Share(NamedTuple):
    """The summary of a part of a tensor; as a whole tensor's, it is the summary."""

    num_finite: float = 0.0
    num_nan: float = 0.0
    num_inf: float = 0.0
    num_zero: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squared_deviations: float = 0.0
    min_nonzero_abs: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The bits of a float as a signed whole number.

    Args:
        inf: the magnitude of Inf; those above are NaN.
        code, shift: bits moved up by so many are those of a float of that ``struct`` code.
    """

    dtype: torch.dtype
    num_bits: int
    inf: int
    code: str
    shift: int = 0

    @property
    def sign(self) -> int:
        """The sign's bit alone: the lowest number of the type."""
        return -(1 << (self.num_bits - 1))

    @property
    def largest(self) -> int:
        return (1 << (self.num_bits - 1)) - 1


_WORDS = {
    torch.float32: _Words(dtype=torch.int32, num_bits=32, inf=0x7F800000, code="<f"),
    torch.bfloat16: _Words(dtype=torch.int16, num_bits=16, inf=0x7F80, code="<f", shift=16),
    torch.float16: _Words(dtype=torch.int16, num_bits=16, inf=0x7C00, code="<e"),
}


def summarize(flat: Tensor) -> Share:
    """The summary of a tensor of one dimension and any dtype."""
    chunks = [flat[start : start + _CHUNK_SIZE] for start in range(0, flat.numel(), _CHUNK_SIZE)]
    words = _WORDS.get(flat.dtype)
    if words is None:
        return _together([_share_in_steps(chunk) for chunk in chunks])
    space = _Space(min(flat.numel(), _CHUNK_SIZE), flat.dtype, words)
    return _together([_share(chunk, words, space) for chunk in chunks])


def _together(shares: Sequence[Share]) -> Share:
    filled = [share for share in shares if share.num_finite]
    num_finite = sum(share.num_finite for share in filled)
    # distances from one of the means: equal ones give that very mean
    near = filled[0].mean if filled else 0.0
    mean = near + (sum(share.num_finite * (share.mean - near) for share in filled) / num_finite if filled else 0.0)
    return Share(
        num_finite=num_finite,
        num_nan=sum(share.num_nan for share in shares),
        num_inf=sum(share.num_inf for share in shares),
        num_zero=sum(share.num_zero for share in shares),
        low=min((share.low for share in shares), default=math.inf),
        high=max((share.high for share in shares), default=-math.inf),
        mean=mean,
        squared_deviations=sum(
            share.squared_deviations + share.num_finite * (share.mean - mean) * (share.mean - mean) for share in filled
        ),
        min_nonzero_abs=min((share.min_nonzero_abs for share in shares), default=math.inf),
    )


class _Space:
    """Memory and constants that every chunk of a tensor uses again."""

    def __init__(self, size: int, dtype: torch.dtype, words: _Words) -> None:
        # whatever the default device is
        self.doubles = torch.empty(size, dtype=torch.float64, device="cpu")
        # float16 to float64 torch converts number by number, and by way of float32 many at once
        is_half = dtype is torch.float16
        self.floats = torch.empty(size, dtype=torch.float32, device="cpu") if is_half else None
        num_words = -(-size // _WORDS_IN_INT64) * _WORDS_IN_INT64
        self.words = torch.empty(num_words, dtype=words.dtype, device="cpu")
        # torch's vector instructions take a tensor without dimensions, not a number
        self.sign, self.largest, self.below_largest = (
            torch.tensor(number, dtype=words.dtype, device="cpu")
            for number in (words.sign, words.largest, words.largest - 1)
        )


def _share(chunk: Tensor, words: _Words, space: _Space) -> Share:
    """The share of a chunk of float32, bfloat16 or float16, not empty."""
    bits, size = chunk.view(words.dtype), chunk.numel()
    # As whole numbers, positive ones are above negative ones, and among either the magnitude counts; with the sign
    # turned around, negative ones are above. An extreme with the wrong sign says that there is none.
    lowest, highest = _extremes(bits)
    turned_lowest, turned_highest = _extremes(torch.bitwise_xor(bits, space.sign, out=space.words[:size]))
    if max(highest, turned_highest) >= words.inf:
        return _share_with_nonfinite(chunk, words, space)
    has_positive, has_negative = highest >= 0, lowest < 0
    least_positive, least_negative = turned_lowest - words.sign, lowest - words.sign
    if has_positive and has_negative:
        low, high, least = -turned_highest, highest, min(least_positive, least_negative)
    elif has_positive:
        low, high, least = least_positive, highest, least_positive
    else:
        low, high, least = -turned_highest, -least_negative, least_negative
    num_zero = 0
    if least == 0:
        num_zero, least = _count_zeros(bits, words, space)
    low_value, high_value = _value(low, words), _value(high, words)
    mean, squared_deviations = _moments(chunk, low_value, high_value, space)
    return Share(
        num_finite=size,
        num_zero=num_zero,
        low=low_value,
        high=high_value,
        mean=mean,
        squared_deviations=squared_deviations,
        min_nonzero_abs=_value(least, words) if num_zero < size else math.inf,
    )


def _share_with_nonfinite(chunk: Tensor, words: _Words, space: _Space) -> Share:
    """What is not finite counted, and the share of the rest."""
    num_nan, finite = int(chunk.isnan().sum()), chunk.masked_select(chunk.isfinite())
    share = _share(finite, words, space) if finite.numel() else Share()
    return share._replace(num_nan=num_nan, num_inf=chunk.numel() - finite.numel() - num_nan)


def _extremes(bits: Tensor) -> tuple[int, int]:
    lowest, highest = torch.aminmax(bits)
    return int(lowest.item()), int(highest.item())


def _value(magnitude: int, words: _Words) -> float:
    """The float with the bits of a magnitude; a negative number gives a negative one."""
    bits = (abs(magnitude) << words.shift).to_bytes(struct.calcsize(words.code), "little")
    value = float(struct.unpack(words.code, bits)[0])
    return -value if magnitude < 0 else value


def _count_zeros(bits: Tensor, words: _Words, space: _Space) -> tuple[int, int]:
    """How many zeros of either sign there are, and the smallest other magnitude, if there is one.

    Twice a number's bits lose the sign. The largest whole number added to that, what overflows dropped, leaves it the
    largest for zeros, and for all else is above the lowest by the magnitude.
    """
    size = bits.numel()
    num_words = -(-size // _WORDS_IN_INT64) * _WORDS_IN_INT64
    codes = torch.add(space.largest, bits, alpha=2, out=space.words[:size])
    least = (int(codes.amin().item()) - words.largest + (1 << words.num_bits)) // 2
    # 1 more for a zero than for all else, added up several side by side in an int64
    torch.maximum(codes, space.below_largest, out=codes)
    space.words[size:num_words].fill_(words.largest - 1)
    in_int64 = space.words[:num_words].view(torch.int64)
    num_lanes = 64 // words.num_bits
    without_zeros = in_int64.numel() * sum((words.largest - 1) << (words.num_bits * lane) for lane in range(num_lanes))
    counts = (int(in_int64.sum().item()) - without_zeros) % (1 << 64)
    mask = (1 << words.num_bits) - 1
    return sum((counts >> (words.num_bits * lane)) & mask for lane in range(num_lanes)), least


def _moments(chunk: Tensor, low: float, high: float, space: _Space) -> tuple[float, float]:
    """Mean and sum of squared deviations."""
    if low == high:
        return low, 0.0
    size = chunk.numel()
    values = space.doubles[:size]
    values.copy_(chunk if space.floats is None else space.floats[:size].copy_(chunk))
    mean = values.sum().item() / size
    squares = _sum_of_squares(values)
    squared_deviations = squares - mean * mean * size
    if squared_deviations < squares * _MIN_SPREAD:
        values.sub_(mean)
        rest = values.sum().item() / size
        mean, squared_deviations = mean + rest, max(_sum_of_squares(values) - rest * rest * size, 0.0)
    return mean, squared_deviations


def _sum_of_squares(values: Tensor) -> float:
    """By way of the norm: a dot product is the BLAS library's, which starts threads of its own for long ones."""
    if values.numel() <= _MAX_DOT_SIZE:
        return torch.dot(values, values).item()
    norm: float = torch.linalg.vector_norm(values).item()
    return norm * norm


def _share_in_steps(chunk: Tensor) -> Share:
    """The share of a chunk of any dtype, not empty."""
    values = (chunk.abs() if chunk.is_complex() else chunk).to(torch.float64)
    finite = values.masked_select(values.isfinite())
    num_finite, num_nan = finite.numel(), int(values.isnan().sum())
    counts = Share(num_nan=num_nan, num_inf=chunk.numel() - num_finite - num_nan)
    if not num_finite:
        return counts
    low, high = (bound.item() for bound in torch.aminmax(finite))
    magnitudes = finite.abs()
    nonzero = magnitudes.masked_select(magnitudes > 0)
    mean = low if low == high else finite.mean().item()
    return counts._replace(
        num_finite=num_finite,
        num_zero=num_finite - nonzero.numel(),
        low=low,
        high=high,
        mean=mean,
        squared_deviations=(finite - mean).square().sum().item(),
        min_nonzero_abs=nonzero.min().item() if nonzero.numel() else math.inf,
    )
