# mypy: ignore-errors
# ruff: noqa: N803 (what a kernel is compiled with is spelled in capitals)
"""The summary of a tensor in one pass, as Triton kernels.

Every thread folds what it holds of a tile to one number a statistic: sums in float64, of differences from a pivot near
the program's mean. Tiles without NaN and Inf, which a thread sees in its sum of squares, skip what those need; so do
tiles without zeros. Order and number of all additions follow from the tensor's size alone.

A share, and the summary itself, has the fields of ``qcollect.store.summary.FIELDS``.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(32)  # one warp: what its threads agree on needs no barrier
_INF = tl.constexpr(float("inf"))
_MANY = tl.constexpr(1 << 16)


@triton.jit(do_not_specialize=["num_elements"])
def summarize_kernel(
    x_ptr,
    copy_ptr,
    shares_ptr,
    num_elements,
    SIZE: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    IS_LARGE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """The share of every so many tiles of ``x``, which are copied on the way.

    Args:
        copy_ptr: where to, with ``COPIES``.
        shares_ptr: (9, programs) float64; a single program's is the summary.
        SIZE, SIDE_BY_SIDE: elements of a tile, of 16 bytes: a thread holds so many side by side.
        IS_LARGE: whether an index can pass 2^31.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if IS_LARGE:
        program = program.to(tl.int64)
    first, step = program * SIZE, num_programs * SIZE
    whole = num_elements // SIZE * SIZE
    pivot = _mean_of_first(x_ptr, first, num_elements)
    sums = tl.zeros((LANES,), tl.float64)
    squares = tl.zeros((LANES,), tl.float64)
    lows = tl.full((LANES,), _INF, tl.float32)
    highs = tl.full((LANES,), -_INF, tl.float32)
    leasts = tl.full((LANES,), _INF, tl.float32)
    finites = tl.zeros((LANES,), tl.int32)
    nans = tl.zeros((LANES,), tl.int32)
    infs = tl.zeros((LANES,), tl.int32)
    zeros = tl.zeros((LANES,), tl.int32)
    index = tl.arange(0, SIZE)
    # two tiles of a program are under way while it works on one
    following = tl.load(x_ptr + first + index, mask=first + index < whole, other=0.0)
    after_that = tl.load(x_ptr + first + step + index, mask=first + step + index < whole, other=0.0)
    for start in range(first, num_elements, step):
        if COPIES:
            tl.store(copy_ptr + start + index, following, mask=start + index < whole)
        x = _fold(following.to(tl.float32), SIDE_BY_SIDE)
        following = after_that
        third = start + 2 * step + index
        after_that = tl.load(x_ptr + third, mask=third < whole, other=0.0)
        differences = x.to(tl.float64) - pivot
        tile_sum, tile_squares = _sum(differences), _sum(differences * differences)
        magnitudes = tl.abs(x)
        least, low, high = _min(magnitudes), _min(x), _max(x)
        # squares are below Inf unless an element is Inf or NaN
        flags = tl.sum(tl.where(tile_squares < _INF, 0, _MANY) + tl.where(least == 0.0, 1, 0))
        if (start >= whole) | (flags >= _MANY):
            # in parts, which need few registers
            for part in range(start, tl.minimum(start + SIZE, num_elements), LANES * SIDE_BY_SIDE):
                part_index = part + tl.arange(0, LANES * SIDE_BY_SIDE)
                is_in_x = part_index < num_elements
                words = tl.load(x_ptr + part_index, mask=is_in_x, other=0.0)
                if COPIES:  # noqa: SIM102 (one is known when the kernel is compiled)
                    if start >= whole:
                        tl.store(copy_ptr + part_index, words, mask=is_in_x)
                y = _fold(words.to(tl.float32), SIDE_BY_SIDE)
                exists = _fold(is_in_x.to(tl.int32), SIDE_BY_SIDE) != 0
                is_finite = exists & (tl.abs(y) < _INF)
                deviations = tl.where(is_finite, y.to(tl.float64) - pivot, 0.0)
                sums += _sum(deviations)
                squares += _sum(deviations * deviations)
                lows = tl.minimum(lows, _min(tl.where(is_finite, y, _INF)))
                highs = tl.maximum(highs, _max(tl.where(is_finite, y, -_INF)))
                leasts = tl.minimum(leasts, _min(tl.where(is_finite & (y != 0.0), tl.abs(y), _INF)))
                finites += _sum(is_finite.to(tl.int32))
                zeros += _sum((exists & (y == 0.0)).to(tl.int32))
                nans += _sum((exists & (y != y)).to(tl.int32))
                infs += _sum((exists & (tl.abs(y) == _INF)).to(tl.int32))
        else:
            sums += tile_sum
            squares += tile_squares
            lows = tl.minimum(lows, low)
            highs = tl.maximum(highs, high)
            finites += SIZE // LANES
            if flags != 0:
                zeros += _sum((magnitudes == 0.0).to(tl.int32))
                least = _min(tl.where(magnitudes == 0.0, _INF, magnitudes))
            leasts = tl.minimum(leasts, least)
    num_finite = tl.sum(finites).to(tl.float64)
    total = tl.sum(sums)
    rest = total / tl.maximum(num_finite, 1.0)
    share_ptr = shares_ptr + program
    tl.store(share_ptr, num_finite)
    tl.store(share_ptr + num_programs, tl.sum(nans).to(tl.float64))
    tl.store(share_ptr + 2 * num_programs, tl.sum(infs).to(tl.float64))
    tl.store(share_ptr + 3 * num_programs, tl.sum(zeros).to(tl.float64))
    tl.store(share_ptr + 4 * num_programs, tl.min(lows).to(tl.float64))
    tl.store(share_ptr + 5 * num_programs, tl.max(highs).to(tl.float64))
    tl.store(share_ptr + 6 * num_programs, pivot + rest)
    tl.store(share_ptr + 7 * num_programs, tl.maximum(tl.sum(squares) - total * rest, 0.0))
    tl.store(share_ptr + 8 * num_programs, tl.min(leasts).to(tl.float64))


# Numbers are added up in the order in which threads hold them, which follows from what is known of addresses: no more
# here than where many are put together.
@triton.jit(do_not_specialize=["num_shares"], do_not_specialize_on_alignment=["shares_ptr", "summary_ptr"])
def finish_summary_kernel(shares_ptr, summary_ptr, num_shares, SIZE: tl.constexpr):
    """Shares put together, by one program.

    Args:
        shares_ptr, summary_ptr: (9, shares) and (9,) float64.
        SIZE: at least the number of shares.
    """
    _finish_summary(shares_ptr, summary_ptr, num_shares, SIZE)


@triton.jit(do_not_specialize_on_alignment=["memory_ptr"])
def finish_many_summaries_kernel(memory_ptr, rows_ptr, SIZE: tl.constexpr):
    """``finish_summary_kernel`` for many, a program each.

    Args:
        rows_ptr: (rows, 3) int64: from ``memory_ptr`` on, in numbers, where shares and summary are; how many shares.
    """
    row_ptr = rows_ptr + 3 * tl.program_id(0)
    num_shares = tl.load(row_ptr + 2).to(tl.int32)
    _finish_summary(memory_ptr + tl.load(row_ptr), memory_ptr + tl.load(row_ptr + 1), num_shares, SIZE)


@triton.jit
def _finish_summary(shares_ptr, summary_ptr, num_shares, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    exists = index < num_shares
    share_ptr = shares_ptr + index
    counts = tl.load(share_ptr, mask=exists, other=0.0)
    means = tl.load(share_ptr + 6 * num_shares, mask=exists, other=0.0)
    squares = tl.load(share_ptr + 7 * num_shares, mask=exists, other=0.0)
    num_finite = tl.sum(counts)
    # distances from one of the means: equal ones give that very mean
    near = tl.max(tl.where(counts > 0.0, means, -_INF))
    near = tl.where(num_finite > 0.0, near, 0.0)
    mean = near + tl.sum(counts * (means - near)) / tl.maximum(num_finite, 1.0)
    tl.store(summary_ptr, num_finite)
    for field in tl.static_range(1, 4):
        tl.store(summary_ptr + field, tl.sum(tl.load(share_ptr + field * num_shares, mask=exists, other=0.0)))
    tl.store(summary_ptr + 4, tl.min(tl.load(share_ptr + 4 * num_shares, mask=exists, other=_INF)))
    tl.store(summary_ptr + 5, tl.max(tl.load(share_ptr + 5 * num_shares, mask=exists, other=-_INF)))
    tl.store(summary_ptr + 6, mean)
    tl.store(summary_ptr + 7, tl.sum(squares + counts * ((means - mean) * (means - mean))))
    tl.store(summary_ptr + 8, tl.min(tl.load(share_ptr + 8 * num_shares, mask=exists, other=_INF)))


@triton.jit
def _mean_of_first(x_ptr, first, num_elements):
    """Of the finite ones among the first 32 elements, as a float32 number in float64; 0 without one."""
    index = first + tl.arange(0, LANES)
    exists = index < num_elements
    x = tl.load(x_ptr + index, mask=exists, other=0.0).to(tl.float32)
    is_finite = exists & (tl.abs(x) < _INF)
    count = tl.sum(is_finite.to(tl.int32)).to(tl.float64)
    mean = tl.sum(tl.where(is_finite, x.to(tl.float64), 0.0)) / tl.maximum(count, 1.0)
    return mean.to(tl.float32).to(tl.float64)


@triton.jit
def _fold(values, SIDE_BY_SIDE: tl.constexpr):
    """A tile as its threads hold it: (repeats, lanes, side by side)."""
    return tl.reshape(values, (values.numel // (LANES * SIDE_BY_SIDE), LANES, SIDE_BY_SIDE))


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, axis=2), axis=0)


@triton.jit
def _min(values):
    return tl.min(tl.min(values, axis=2), axis=0)


@triton.jit
def _max(values):
    return tl.max(tl.max(values, axis=2), axis=0)
