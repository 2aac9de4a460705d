"""What quantization does to a tensor, counted: errors, zeros made, values clamped, exponents, scale codes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.formats.pending import PendingShares

NUM_BINS = 256
TOTALS = (
    "sum_squares",
    "sum_squared_error",
    "max_error",
    "num_zeroed",
    "num_clamped",
    "num_clamped_blocks",
    "num_nan",
    "num_inf",
)
NUM_TOTALS = len(TOTALS)
ERRORS = (*TOTALS[:3], "mse", "sqnr_db", *TOTALS[3:])
_PART = 4096


@dataclass(slots=True, eq=False)
class Totals:
    """Where what is counted of a tensor is to be put.

    Args:
        numbers: (8,) float64 on its device, at a multiple of 16 bytes, as ``ErrorStats.totals``.
        pending: what may put them there later, together with those of other tensors; None: at once.
    """

    numbers: Tensor
    pending: PendingShares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Sums over a tensor ``x`` and its quantized values ``y`` (in the dtype of ``x``), on its device.

    Errors and sums are over elements where both are finite. Sums are made of partial sums of fixed parts in a
    fixed order, so one machine gives the same bits every time.

    Args:
        num_elements: of ``x``.
        totals: (8,) float64, what the properties name, in their order; counts are exact as far as 2^53.
        exponent_counts: (256,) int64, elements by the exponent field of their float32 form: bin ``e + 127``; 0 holds
            zeros and subnormals, 255 NaN and Inf. None if not asked for.
        scale_counts: (256,) int64, blocks by their scale's code. None if not asked for, or without blocks.
    """

    num_elements: int
    totals: Tensor
    exponent_counts: Tensor | None = None
    scale_counts: Tensor | None = None

    @property
    def sum_squares(self) -> Tensor:
        """Of ``x``, 0-dim float64."""
        return self.totals[0]

    @property
    def sum_squared_error(self) -> Tensor:
        """Of ``y - x``, 0-dim float64."""
        return self.totals[1]

    @property
    def max_error(self) -> Tensor:
        """The largest ``|y - x|``, 0-dim float32."""
        return self.totals[2].to(torch.float32)

    @property
    def num_zeroed(self) -> Tensor:
        """Elements that are not zero and become zero, 0-dim int64."""
        return self.totals[3].to(torch.int64)

    @property
    def num_clamped(self) -> Tensor:
        """Elements that round beyond the maximum, 0-dim int64."""
        return self.totals[4].to(torch.int64)

    @property
    def num_clamped_blocks(self) -> Tensor:
        """Blocks that hold one (without blocks: 0 or 1), 0-dim int64."""
        return self.totals[5].to(torch.int64)

    @property
    def num_nan(self) -> Tensor:
        """Of ``x``, 0-dim int64."""
        return self.totals[6].to(torch.int64)

    @property
    def num_inf(self) -> Tensor:
        """Of ``x``, 0-dim int64."""
        return self.totals[7].to(torch.int64)

    def describe(self) -> dict[str, int | float | None]:
        """``describe_totals``; waits for the device."""
        return describe_totals(self.totals.tolist(), self.num_elements)

    def to_dict(self) -> dict[str, int | float | list[int] | None]:
        """JSON-ready; waits for the device."""
        totals = zip(TOTALS, self.totals.tolist(), strict=True)
        return {
            "num_elements": self.num_elements,
            **{name: int(total) if name.startswith("num_") else total for name, total in totals},
            "exponent_counts": _as_list(self.exponent_counts),
            "scale_counts": _as_list(self.scale_counts),
        }


def describe_totals(totals: Sequence[float], num_elements: int) -> dict[str, int | float | None]:
    """What ``ERRORS`` names, JSON-ready: ``TOTALS``, the squared error's mean over all elements, signal to noise in dB.

    ``sqnr_db`` is None without an error, and without a signal. A sum that float64 cannot hold is None too.
    """
    return dict(zip(ERRORS, derive_errors(totals, num_elements), strict=True))


def derive_errors(totals: Sequence[float], num_elements: int) -> tuple[float | None, ...]:
    """What ``ERRORS`` names, see ``describe_totals``."""
    squares, squared_error, max_error, zeroed, clamped, clamped_blocks, nans, infs = totals
    sqnr_db = None
    if squares > 0 and squared_error > 0:
        sqnr_db = 10.0 * math.log10(squares / squared_error)
    mse = squared_error / num_elements if num_elements else 0.0
    counts = (int(zeroed), int(clamped), int(clamped_blocks), int(nans), int(infs))
    if math.isfinite(squares + squared_error + max_error):
        return (squares, squared_error, max_error, mse, sqnr_db, *counts)
    values = (squares, squared_error, max_error, mse, sqnr_db)
    return (*[value if value is not None and math.isfinite(value) else None for value in values], *counts)


def sum_in_parts(values: Tensor) -> Tensor:
    """The sum of float64 ``values``, 0-dim: of sums of fixed parts, whatever the number of threads."""
    while values.numel() != 1:
        values = values.flatten()
        values = torch.nn.functional.pad(values, (0, -values.numel() % _PART)).view(-1, _PART).sum(1)
    return values.reshape(())


def measure(
    x: Tensor, y: Tensor, clamped: Tensor, clamped_blocks: Tensor, *, scale_codes: Tensor | None, histograms: bool
) -> ErrorStats:
    """The statistics of a quantization, step by step.

    Args:
        x: what was quantized, not empty.
        y: its values, in their dtype.
        clamped: bool, of the elements those that round beyond the maximum, in any shape.
        clamped_blocks: bool, of the blocks those that hold one.
        scale_codes: uint8, a code a block; None without blocks.
    """
    x32, y32 = x.to(torch.float32), y.to(torch.float32)
    is_nan, is_inf = x32.isnan(), x32.isinf()
    counts = torch.isfinite(y32) & ~is_nan & ~is_inf
    value, error = (torch.where(counts, t, 0.0).to(torch.float64) for t in (x32, y32.to(torch.float64) - x32))
    exponents = (x32.contiguous().view(torch.int32) >> 23) & (NUM_BINS - 1)
    totals = (
        sum_in_parts(value.square()),
        sum_in_parts(error.square()),
        error.abs().amax(),
        ((x32 != 0) & (y32 == 0)).sum(),
        clamped.sum(),
        clamped_blocks.sum(),
        is_nan.sum(),
        is_inf.sum(),
    )
    return ErrorStats(
        num_elements=x.numel(),
        totals=torch.stack([total.to(torch.float64) for total in totals]),
        exponent_counts=count_bins(exponents) if histograms else None,
        scale_counts=count_bins(scale_codes) if histograms and scale_codes is not None else None,
    )


def _as_list(counts: Tensor | None) -> list[int] | None:
    if counts is None:
        return None
    as_list: list[int] = counts.tolist()
    return as_list


def count_bins(values: Tensor) -> Tensor:
    """How often each of 0 ... 255 occurs in ``values`` (integers), (256,) int64."""
    return torch.bincount(values.flatten().to(torch.int64), minlength=NUM_BINS)
