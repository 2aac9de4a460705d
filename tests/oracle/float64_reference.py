"""The formats a second time, from their definitions: lists of values, float64, and no code of ours.

An element is the list of its values; a number goes to the nearer of its two neighbours in that list. Scales
are found with ``frexp``. Only what a definition itself rounds to float32 or bfloat16 is rounded to it here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from bit_patterns import Floats
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
FLOAT32_MAX = np.float64(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Grid:
    """The values of an element from 0 up, in the order of their codes, and the one that would come next."""

    values: Doubles
    beyond: float
    overflows: bool = False
    mantissa_bits: int = 0

    @property
    def top(self) -> float:
        return float(self.values[-1])

    @property
    def emax(self) -> int:
        return int(np.floor(np.log2(self.top)))


def float_grid(exponent_bits: int, mantissa_bits: int, bias: int, top: float) -> Grid:
    """Sign, exponent, mantissa as in IEEE 754, up to ``top``."""
    values = []
    for field in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / (1 << mantissa_bits)
            values.append((1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias))
    finite = [value for value in values if value <= top]
    return Grid(np.array(finite), 2 * finite[-1] - finite[-2], mantissa_bits=mantissa_bits)


def hifloat8_grid() -> Grid:
    """Powers of two from 2^-22, then 1, 2 and 3 mantissa bits towards 1, and the same on the other side."""
    values = [0.0, *(2.0**exponent for exponent in range(-22, -15))]
    for exponent in range(-15, 16):
        num_steps = 8 if abs(exponent) <= 3 else 4 if abs(exponent) <= 7 else 2
        values += [2.0**exponent * (1 + step / num_steps) for step in range(num_steps)]
    assert values.pop() == 49152.0  # its code is that of Inf
    return Grid(np.array(values), 49152.0, overflows=True)


GRIDS = {
    "E4M3": float_grid(4, 3, 7, 448.0),
    "E5M2": float_grid(5, 2, 15, 57344.0),
    "E3M2": float_grid(3, 2, 3, 28.0),
    "E2M3": float_grid(2, 3, 1, 7.5),
    "E2M1": float_grid(2, 1, 1, 6.0),
    "INT8": Grid(np.arange(128) / 64, 2.0, mantissa_bits=6),
    "S1P2": Grid(np.arange(8) / 4, 2.0, mantissa_bits=2),
    "HiF8": hifloat8_grid(),
}
E6M2 = Grid(np.array([2.0**e * (1 + k / 4) for e in range(-48, 16) for k in range(4)][:-1]), 2.0**16)


def round_to_grid(x: Doubles, grid: Grid, rounding: str, random: Doubles | None = None) -> Doubles:
    """``x`` to a neighbour in the list, the sign of zero kept; beyond the last value, the last or Inf."""
    ladder = np.append(grid.values, grid.beyond)
    magnitude = np.minimum(np.abs(x), grid.beyond)
    place = np.clip(np.searchsorted(ladder, magnitude, side="right") - 1, 0, len(ladder) - 2)
    low, high = ladder[place], ladder[place + 1]
    middle = (low + high) / 2  # exact: neighbours have few bits
    if rounding == "nearest_even":
        is_up = (magnitude > middle) | ((magnitude == middle) & (place % 2 == 1))
    elif rounding == "half_away":
        is_up = magnitude >= middle
    else:
        assert random is not None
        is_up = random < (magnitude - low) / (high - low)
    is_up |= magnitude == grid.beyond
    rounded = np.where(is_up, high, low)
    rounded = np.where(rounded > grid.top, np.inf if grid.overflows else grid.top, rounded)
    return np.where(np.isnan(x), np.nan, np.copysign(rounded, x))


def power_of_two_scale(amax: Doubles, grid: Grid, rule: str) -> Doubles:
    """The scale of blocks with these finite abs maxima."""
    half, exponent = np.frexp(np.where(amax == 0, 1.0, amax))
    mantissa, exponent = 2 * half, exponent - 1
    is_up = {
        "floor": np.zeros_like(mantissa, bool),
        "ceil": mantissa > 1,
        "even": mantissa >= 2 - 2.0 ** -(grid.mantissa_bits + 1),
        "rceil": mantissa > grid.top / 2.0**grid.emax,
    }[rule]
    exponent = np.clip(exponent + is_up - grid.emax, -127, 127)
    return np.exp2(np.where(amax == 0, -127, exponent).astype(np.float64))


def blocks_of(shape: tuple[int, ...], axis: int, size: int | tuple[int, int]) -> Iterator[tuple[slice, ...]]:
    """Where each block of a two-dimensional array lies."""
    rows, columns = size if isinstance(size, tuple) else (size, 1) if axis == 0 else (1, size)
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            yield slice(row, row + rows), slice(column, column + columns)


def mx(
    x: Floats, grid: Grid, rule: str, rounding: str, *, axis: int = 1, size: int | tuple[int, int] = 32, random=None
) -> Floats:
    """Blocks with a power-of-two scale; one with a NaN or an Inf is NaN. ``x``: two dimensions."""
    y = np.empty(x.shape)
    if axis == 1 and size == x.shape[1]:  # a row a block: all of them at once
        return _mx_rows(x, grid, rule, rounding, random)
    for place in blocks_of(x.shape, axis, size):
        part = x[place].reshape(1, -1)
        draws = None if random is None else random[place].reshape(1, -1)
        y[place] = _mx_rows(part, grid, rule, rounding, draws).reshape(x[place].shape)
    return to_float32(y)


def _mx_rows(x: Floats, grid: Grid, rule: str, rounding: str, random: Doubles | None) -> Floats:
    exact = to_float64(x)
    amax = np.abs(exact).max(axis=1, keepdims=True)
    is_bad = ~np.isfinite(amax)
    scale = power_of_two_scale(np.where(is_bad, 1.0, amax), grid, rule)
    with np.errstate(invalid="ignore", over="ignore"):
        y = round_to_grid(exact / scale, grid, rounding, random) * scale
    return to_float32(np.where(is_bad, np.nan, y))


def fp8(x: Floats, grid: Grid, rounding: str, *, power_of_two: bool = False, random=None) -> Floats:
    """One scale for the tensor, ``float32(max / amax)``; a NaN or an Inf makes all of it NaN."""
    if not np.isfinite(x).all():
        return np.full(x.shape, np.nan, np.float32)
    encode = np.minimum(np.float32(grid.top / max(float(np.abs(x).max(initial=0.0)), 1e-12)), np.float32(FLOAT32_MAX))
    if power_of_two:
        encode = np.float32(2.0 ** np.floor(np.log2(np.float64(encode))))
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.float32(x) * encode
        return np.float32(to_float32(round_to_grid(to_float64(scaled), grid, rounding, random)) / encode)


def nvfp4(x: Floats, rounding: str, *, axis: int = 1, size: int | tuple[int, int] = 16, random=None) -> Floats:
    """Blocks of 16 with an E4M3 scale under a float32 scale for the tensor, every step in float32."""
    x = x + np.float32(0.0)  # no -0
    grid, scale_grid = GRIDS["E2M1"], GRIDS["E4M3"]
    finite = np.abs(x[np.isfinite(x)])
    amax = finite.max(initial=np.float32(0.0))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        encode = np.minimum(np.float32(2688.0) / amax, np.float32(FLOAT32_MAX))
        decode = np.float32(1.0) / encode
        factor = encode * np.float32(1 / 6)
        y = np.empty(x.shape, np.float32)
        for place in blocks_of(x.shape, axis, size):
            part = x[place]
            if not np.isfinite(part).all():
                y[place] = np.nan
                continue
            stored = round_to_grid(to_float64(np.abs(part).max() * factor), scale_grid, "nearest_even")
            block_decode = np.float32(stored) * decode
            block_encode = np.minimum(np.float32(1.0) / block_decode, np.float32(FLOAT32_MAX))
            draws = None if random is None else random[place]
            y[place] = to_float32(round_to_grid(to_float64(part * block_encode), grid, rounding, draws)) * block_decode
    return y


def hif4(x: Floats, rounding: str, *, axis: int = 1, size: int = 64, random=None) -> Floats:
    """Blocks of 64 with an E6M2 scale and one-bit exponents for 8 and for 4 elements; scales are made in bfloat16."""
    x = x + np.float32(0.0)
    y = np.empty(x.shape, np.float32)
    for place in blocks_of(x.shape, axis, size):
        part = x[place].ravel()
        if not np.isfinite(part).all():
            y[place] = np.nan
            continue
        scale = _e6m2(to_bfloat16(np.abs(part).max() * to_bfloat16(np.float32(1 / 7))))
        inverse = to_bfloat16(np.float32(1.0) / scale)
        with np.errstate(under="ignore"):
            scaled = to_float64(part * inverse)
        draws = None if random is None else random[place].ravel()
        out = np.empty(part.shape)
        for start in range(0, len(part), 8):
            coarse = 2.0 if np.abs(scaled[start : start + 8]).max() >= 4 else 1.0
            for inner in range(start, min(start + 8, len(part)), 4):
                group = slice(inner, inner + 4)
                fine = 2.0 if np.abs(scaled[group]).max() / coarse >= 2 else 1.0
                rounded = round_to_grid(
                    scaled[group] / coarse / fine, GRIDS["S1P2"], rounding, None if draws is None else draws[group]
                )
                out[group] = rounded * coarse * fine * float(scale)
        y[place] = to_float32(out).reshape(y[place].shape)
    return y


def _e6m2(value: np.float32) -> np.float32:
    """Nearest of 2^-48 (1 + k/4) ... 2^15 * 1.5, ties to even."""
    clamped = np.clip(np.float64(value), E6M2.values[0], E6M2.top)
    return np.float32(round_to_grid(clamped, E6M2, "nearest_even"))


def hybrid(x: Floats, *, is_bfloat16: bool) -> Floats:
    """HiFloat8's rounding by comparing bits, on the bits: near 1 half away, else discarded bits against kept ones."""
    y = round_to_grid(to_float64(x), GRIDS["HiF8"], "half_away")
    for place in np.flatnonzero(np.isfinite(x)):
        bits = int(x.ravel()[place : place + 1].view(np.uint32)[0]) & 0x7FFFFFFF
        exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
        if abs(exponent) <= 3 or np.isinf(y.ravel()[place]):
            continue
        if exponent < -23:
            y.ravel()[place] = 0.0
            continue
        kept = 2 if abs(exponent) <= 7 else 1 if abs(exponent) <= 15 else 0
        discarded = mantissa << kept & 0x7FFFFF  # its bits first
        if exponent == -23:  # the leading one is discarded, too
            discarded = (mantissa | 0x800000) >> 1
        if is_bfloat16:
            is_up = discarded >> 21 >= ((bits >> 16 & 1) << 1 | 1)
        else:
            is_up = discarded >> 9 >= bits & 0x3FFF
        step = 2.0 ** max(exponent - kept, -22)
        low = 0.0 if exponent == -23 else 2.0**exponent * (1 + (mantissa >> (23 - kept)) / (1 << kept))
        rounded = low + step * is_up
        y.ravel()[place] = np.copysign(np.inf if rounded > 32768 else rounded, x.ravel()[place])
    return to_float32(y) + np.float32(0.0)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 as its paper writes it, on Python's own whole numbers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def draws(seed: int, shape: tuple[int, ...]) -> Doubles:
    """What each element of a tensor draws: the first 24 bits of its word, over 2^24.

    Of 64 elements each the first 16 have the first words of 16 counters, the next 16 the second words, and so on.
    """
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words: list[int] = []
    for group in range(-(-int(np.prod(shape)) // 64)):
        of_lanes = [philox((group & 0xFFFFFFFF, group >> 32, lane, 0), key) for lane in range(16)]
        words += [of_lane[word] for word in range(4) for of_lane in of_lanes]
    words = words[: int(np.prod(shape))]
    return (np.array(words, dtype=np.uint64) >> np.uint64(8)).astype(np.float64).reshape(shape) / 2.0**24


def to_bfloat16(x: np.float32) -> np.float32:
    """Nearest bfloat16, ties to even, by adding to the bits. Finite numbers only."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def to_float32(x: Doubles) -> Floats:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32)


def to_float64(x: Floats) -> Doubles:
    with np.errstate(invalid="ignore"):
        return np.asarray(x, dtype=np.float32).astype(np.float64)
