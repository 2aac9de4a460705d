"""Which way a tensor is quantized: Triton's kernels on a GPU, what was compiled before on the CPU, plain torch else.

All give the same bits, so the choice is nobody's but this module's.
"""

from typing import Protocol

import torch
from torch import Tensor

from qcollect.formats import compiled, triton_counts, triton_launch
from qcollect.formats.eager import Choices
from qcollect.formats.error_stats import ErrorStats, Totals
from qcollect.formats.kernel import has_triton
from qcollect.formats.records import ScaleRule, TensorScale
from qcollect.formats.scales import power_of_two_scale, tensor_amax, tensor_encode


class Run(Protocol):
    """Quantizes and dequantizes ``x`` into ``out`` (dense, as ``x``, or ``x`` itself)."""

    def __call__(
        self, x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool
    ) -> None: ...


def prepare(choices: Choices, dtype: torch.dtype, *, has_encode: bool) -> tuple[bool, str]:
    """Compile for the CPU what ``find_run`` may take later, if it is not there; whether that worked, and if not why."""
    return compiled.prepare([choices], [dtype], has_encode=has_encode)


def find_run(x: Tensor, choices: Choices, encode: Tensor | None) -> Run | None:
    """The fastest way for ``x`` (not empty); None: plain torch."""
    if _is_on_cpu(x):
        return compiled.run if compiled.supports(x, choices, has_encode=encode is not None) else None
    return triton_launch.run if triton_launch.supports(x, choices) else None


def run_both(
    x: Tensor, last: Choices, first: Choices, encodes: tuple[Tensor | None, Tensor | None], *, with_tensor_scale: bool
) -> tuple[Tensor, Tensor] | None:
    """``x`` (two dimensions) with blocks along axis 1 and along axis 0, read once; None where that is not possible."""
    if _is_on_cpu(x) or not triton_launch.supports_both(x, last, first):
        return None
    along_last, along_first = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    triton_launch.run_both(x, along_last, along_first, last, first, *encodes, with_tensor_scale=with_tensor_scale)
    return along_last, along_first


def run_with_stats(
    x: Tensor, choices: Choices, encode: Tensor | None, *, histograms: bool
) -> tuple[Tensor, ErrorStats] | None:
    """The values of ``x`` and their statistics in one pass; None where that is not possible.

    The values of a cast may differ from torch's own in the bits of a NaN.
    """
    if _is_on_cpu(x) or not triton_launch.supports_stats(x, choices):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stats = triton_counts.run_with_stats(x, out, choices, encode, with_tensor_scale=True, histograms=histograms)
    return out, stats


def run_and_count(x: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> Tensor | None:
    """The values of ``x``, as those of ``run_with_stats``; the totals go to ``totals``. None: not possible."""
    if _is_on_cpu(x) or not triton_launch.supports_stats(x, choices):
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    triton_counts.run_and_count(x, out, choices, encode, totals)
    return out


def run_both_and_count(
    x: Tensor,
    pair: tuple[Choices, Choices],
    encodes: tuple[Tensor | None, Tensor | None],
    totals: tuple[Totals, Totals],
) -> tuple[Tensor, Tensor] | None:
    """``run_and_count`` along axis 1 and along axis 0, by one launch; None where that is not possible.

    Args:
        totals: whose results come later (``Totals.pending``).
    """
    if _is_on_cpu(x) or not triton_counts.supports_both_stats(x, *pair):
        return None
    outs = (torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device))
    triton_counts.run_both_and_count(x, outs, pair, encodes, totals)
    return outs


def count(x: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> bool:
    """The totals of ``run_with_stats`` to ``totals``; whether that is possible."""
    if _is_on_cpu(x) or not triton_launch.supports_stats(x, choices):
        return False
    triton_counts.count(x, choices, encode, totals)
    return True


def prepare_count(
    x: Tensor, choices: Choices, tensor_scale: TensorScale | None, *, with_values: bool
) -> triton_counts.PreparedCount | None:
    """``run_and_count`` or ``count`` for tensors like ``x``, many times; None where that is not possible.

    Args:
        tensor_scale: what each one's factor follows from its abs max by; None: it has none.
    """
    if _is_on_cpu(x) or not triton_launch.supports(x, choices):
        return None
    return triton_counts.PreparedCount(x, choices, with_values=with_values, tensor_scale=tensor_scale)


def prepare_pair(x: Tensor, last: Choices, first: Choices, *, with_values: bool) -> triton_counts.PreparedPair | None:
    """``run_both_and_count`` or two ``count`` for tensors like ``x``, many times; None where that is not possible."""
    if _is_on_cpu(x) or not triton_counts.supports_both_stats(x, last, first):
        return None
    return triton_counts.PreparedPair(x, last, first, with_values=with_values)


def count_limited(x: Tensor, choices: Choices, encode: Tensor | None) -> Tensor | None:
    """How many elements of ``x`` (not empty) are clamped, 0-dim int64; None: by plain torch."""
    if _is_on_cpu(x) or not triton_launch.supports_stats(x, choices):
        return None
    return triton_counts.count_limited(x, choices, encode)


def find_amax(x: Tensor, tensor_scale: TensorScale) -> Tensor:
    """``scales.tensor_amax``."""
    if _has_kernels(x):
        return triton_launch.amax(x, sees_nonfinite=tensor_scale.sees_nonfinite)
    return tensor_amax(x, tensor_scale)


def find_encode(x: Tensor, tensor_scale: TensorScale, rule: ScaleRule | None) -> Tensor:
    """What the abs max of ``x`` has the whole tensor multiplied with, 0-dim float32; a bound needs a rule."""
    if _has_kernels(x):
        return triton_launch.encode(x, tensor_scale, rule)
    amax = tensor_amax(x, tensor_scale)
    if tensor_scale.target is not None:
        return power_of_two_scale(amax, tensor_scale.target).reciprocal()
    assert rule is not None
    return tensor_encode(amax, tensor_scale, rule)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.numel() > 0 and has_triton()
