"""Statistics of a tensor: counted where it lies, in one pass, without waiting for its device; read later.

    summary = summarize(tensor)           # float64, a few numbers, on the tensor's device
    ...                                   # copied to the CPU whenever that suits
    describe(summary, shape=..., ...)     # tensor_info

CUDA tensors of float32, bfloat16 and float16 go through a Triton kernel (``summary_cuda``), those on a CPU through a
compiled function (``summary_compiled``) or, without a compiler, chunks that stay in its cache (``summary_cpu``),
everything else through steps of plain torch.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qcollect.formats.catalog import E2M1
from qcollect.formats.codes import decode, unpack
from qcollect.formats.pending import PendingShares
from qcollect.store import summary_compiled, summary_cpu, summary_cuda

FIELDS = (
    "num_finite", "num_nan", "num_inf", "num_zero", "min", "max", "mean", "squared_deviations", "min_nonzero_abs",
)  # fmt: skip
STATISTICS = ("min", "max", "mean", "std", "abs_max", "rms", "min_nonzero_abs", "num_nan", "num_inf", "num_zero")
_NO_VALUES = (None,) * 7
_WITHOUT_FLOAT64 = ("mps",)
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers an element, which torch itself cannot read


def summarize(tensor: Tensor, out: Tensor | None = None, pending: PendingShares | None = None) -> Tensor:
    """The numbers that ``FIELDS`` names, (9,) float64, of finite values; complex ones by their magnitude.

    Nothing waits for a device: the result is queued behind the work that makes the tensor. Without a finite value
    ``min`` is inf and ``max`` -inf; without a nonzero one ``min_nonzero_abs`` is inf. ``squared_deviations`` is the sum
    of (x - mean)^2. Sums are float64, of differences from a value near the mean wherever squares alone would cancel.
    The same values in the same order give the same bits on a machine.

    Args:
        tensor: any shape, strides, dtype and device; of packed ones (``float4_e2m1fn_x2``) both numbers count. A tensor
            on a device without float64 is copied to the CPU, which waits.
        out: (9,) float64 on the tensor's device, contiguous, at a multiple of 16 bytes: written and returned.
        pending: what may write it later, together with those of other tensors (``summary_cuda.pending_summaries``).

    Returns:
        On the tensor's device (the CPU if that has no float64).
    """
    if tensor.numel() and summary_cuda.supports(tensor):
        return summary_cuda.summarize(_flat(tensor), out, pending=pending)
    if out is not None:
        return out.copy_(summarize(tensor))
    if tensor.dtype == _PACKED:
        codes = tensor.detach().contiguous().view(torch.uint8).reshape(-1)
        return summarize(decode(unpack(codes, 0, 2 * codes.numel()), E2M1))
    if tensor.device.type in _WITHOUT_FLOAT64:
        tensor = tensor.cpu()
    flat = _flat(tensor.detach())
    if flat.device.type == "cpu":
        numbers = summary_compiled.summarize(flat) or summary_cpu.summarize(flat)
        summary = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    else:
        summary = _summarize_in_steps(flat)
    return summary


def describe(
    summary: Sequence[float] | Tensor,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    requires_grad: bool,
    is_leaf: bool,
) -> dict[str, Any]:
    """``tensor_info`` from a summary.

    Statistics are of finite values, ``std`` is the population's. They are None without a finite value, or where float64
    overflows (the square of a large float64), ``min_nonzero_abs`` also without a nonzero value. Zeros have no sign.

    Args:
        summary: what ``summarize`` gave, on the CPU by now.
        shape, dtype: of the tensor summarized.
        device, requires_grad, is_leaf: of the tensor as the network holds it.
    """
    statistics = derive(summary.tolist() if isinstance(summary, Tensor) else summary)
    return {
        "shape": list(shape),
        "dtype": str(dtype),
        "device": str(device),
        "requires_grad": bool(requires_grad),
        "is_leaf": bool(is_leaf),
        **dict(zip(STATISTICS, statistics, strict=True)),
    }


def derive(summary: Sequence[float]) -> tuple[float | None, ...]:
    """What ``STATISTICS`` names, from what ``FIELDS`` names; rules as in ``describe``."""
    num_finite, num_nan, num_inf, num_zero, low, high, mean, squared_deviations, min_nonzero_abs = summary
    counts = (int(num_nan), int(num_inf), int(num_zero))
    if not num_finite:
        return (*_NO_VALUES, *counts)
    variance = squared_deviations / num_finite
    rms = math.sqrt(mean * mean + variance)
    values = (low, high, mean, math.sqrt(variance), max(-low, high), rms, min_nonzero_abs)
    if math.isfinite(sum(values)):
        return (*[value + 0.0 for value in values], *counts)
    return (*[value + 0.0 if math.isfinite(value) else None for value in values], *counts)


def _flat(tensor: Tensor) -> Tensor:
    """All values in one dimension, in whatever order they lie in memory; copied if they do not lie side by side."""
    if tensor.is_neg():  # a bit of torch's says that what is in memory has the other sign
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis])).contiguous()
    return tensor.view(-1)


def _summarize_in_steps(flat: Tensor) -> Tensor:
    """The summary by plain torch on any device, with masks instead of looks at the values."""
    if not flat.numel():
        summary = torch.zeros(len(FIELDS), dtype=torch.float64, device=flat.device)
        for field, bound in (("min", math.inf), ("max", -math.inf), ("min_nonzero_abs", math.inf)):
            summary[FIELDS.index(field)].fill_(bound)
        return summary
    values = (flat.abs() if flat.is_complex() else flat).to(torch.float64)
    is_finite, magnitudes = values.isfinite(), values.abs()
    num_finite, num_nan, num_zero = is_finite.sum(), values.isnan().sum(), (magnitudes == 0).sum()
    low = values.where(is_finite, math.inf).min()
    high = values.where(is_finite, -math.inf).max()
    mean = values.where(is_finite, 0.0).sum() / num_finite.clamp(min=1)
    mean = mean.where(low != high, low)  # rounding puts the mean of equal values beside them
    squared_deviations = (values - mean).where(is_finite, 0.0).square().sum()
    min_nonzero_abs = magnitudes.where(is_finite & (magnitudes > 0), math.inf).min()
    num_inf = flat.numel() - num_finite - num_nan
    counts = torch.stack((num_finite, num_nan, num_inf, num_zero)).to(torch.float64)
    return torch.cat((counts, torch.stack((low, high, mean, squared_deviations, min_nonzero_abs))))
