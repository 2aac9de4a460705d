"""What quantization does to a tensor, counted: errors, zeros made, values clamped, exponents, scale codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 256
_PART = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Sums over a tensor ``x`` and its quantized values ``y`` (in the dtype of ``x``), on its device.

    Errors and sums are over elements where both are finite. Sums are made of partial sums of fixed parts in a
    fixed order, so one machine gives the same bits every time.

    Args:
        num_elements: of ``x``.
        sum_squares: of ``x``, float64.
        sum_squared_error: of ``y - x``, float64.
        max_error: the largest ``|y - x|``, float32.
        num_zeroed: elements that are not zero and become zero, int64.
        num_clamped: elements that round beyond the maximum, int64.
        num_clamped_blocks: blocks that hold one (without blocks: 0 or 1), int64.
        num_nan, num_inf: of ``x``, int64.
        exponent_counts: (256,) int64, elements by the exponent field of their float32 form: bin ``e + 127``; 0 holds
            zeros and subnormals, 255 NaN and Inf. None if not asked for.
        scale_counts: (256,) int64, blocks by their scale's code. None if not asked for, or without blocks.
    """

    num_elements: int
    sum_squares: Tensor
    sum_squared_error: Tensor
    max_error: Tensor
    num_zeroed: Tensor
    num_clamped: Tensor
    num_clamped_blocks: Tensor
    num_nan: Tensor
    num_inf: Tensor
    exponent_counts: Tensor | None = None
    scale_counts: Tensor | None = None

    def to_dict(self) -> dict[str, int | float | list[int] | None]:
        """JSON-ready; waits for the device."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


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
    return ErrorStats(
        num_elements=x.numel(),
        sum_squares=sum_in_parts(value.square()),
        sum_squared_error=sum_in_parts(error.square()),
        max_error=error.abs().amax().to(torch.float32),
        num_zeroed=((x32 != 0) & (y32 == 0)).sum(),
        num_clamped=clamped.sum(),
        num_clamped_blocks=clamped_blocks.sum(),
        num_nan=is_nan.sum(),
        num_inf=is_inf.sum(),
        exponent_counts=count_bins(exponents) if histograms else None,
        scale_counts=count_bins(scale_codes) if histograms and scale_codes is not None else None,
    )


def _plain(value: Tensor | int | None) -> int | float | list[int] | None:
    if isinstance(value, Tensor):
        plain: int | float | list[int] = value.tolist()
        return plain
    return value


def count_bins(values: Tensor) -> Tensor:
    """How often each of 0 ... 255 occurs in ``values`` (integers), (256,) int64."""
    return torch.bincount(values.flatten().to(torch.int64), minlength=NUM_BINS)
