"""Refusals: a combination that does not exist is an error that names it, never a default taken in silence."""

import math
import operator

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats.catalog import ROUNDINGS, SCALE_RULES, QuantType, Rounding, ScaleRule, unknown

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A tensor's scale and its reciprocal are both normal float32 numbers.
MIN_TENSOR_EXPONENT, MAX_TENSOR_EXPONENT = -126, 126


def does_not_apply(entry: QuantType, what: str, argument: str) -> str:
    """The message for an argument the type has no use for; ``what`` says why."""
    reason = "quantizes nothing" if entry.element is None else what
    return f"{entry.name} {reason}: {argument} does not apply; leave it out."


def resolve_axis(entry: QuantType, axis: int | None) -> int | None:
    """The axis as an int, None for a type without blocks."""
    if entry.block_size is None:
        return None
    if axis is None:
        raise FormatError(f"{entry.name} needs an axis for its blocks to run along; axis is None.")
    try:
        return operator.index(axis)
    except TypeError:
        raise FormatError(f"axis is {axis!r}; it must be a whole number.") from None


def resolve_scale_rule(entry: QuantType, scale_rule: str | None) -> ScaleRule | None:
    """The rule, or the type's default."""
    if scale_rule is None:
        return entry.scale_rule
    if scale_rule not in SCALE_RULES:
        raise FormatError(f"scale rule {unknown(scale_rule, SCALE_RULES)}")
    if scale_rule not in entry.scale_rules:
        raise FormatError(does_not_apply(entry, "has no block scale", f"scale_rule={scale_rule!r}"))
    return scale_rule


def resolve_rounding(entry: QuantType, rounding: str | None) -> Rounding | None:
    """The rounding, or the type's default."""
    if rounding is None:
        return entry.rounding
    if rounding not in ROUNDINGS:
        raise FormatError(f"rounding {unknown(rounding, ROUNDINGS)}")
    if rounding not in entry.roundings:
        what = f"rounds {' or '.join(entry.roundings)} only"
        raise FormatError(does_not_apply(entry, what, f"rounding={rounding!r}"))
    return rounding


def resolve_block_size(entry: QuantType, block_size: int | None) -> int | None:
    """The block size, or the type's own."""
    if block_size is None:
        return entry.block_size
    if entry.block_size is None:
        raise FormatError(does_not_apply(entry, "has no blocks", f"block_size={block_size!r}"))
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise FormatError(f"block_size is {block_size!r}; it must be a whole number of elements, 1 or more.")
    return block_size


def check_tensor(x: object, entry: QuantType) -> None:
    """Refuses what is not a dense tensor of one of ``DTYPES``."""
    if not isinstance(x, Tensor):
        raise FormatError(f"{entry.name} takes a torch tensor, not {type(x).__name__}.")
    if x.dtype not in DTYPES or x.layout != torch.strided:
        names = ", ".join(_dtype_name(dtype) for dtype in DTYPES)
        got = _dtype_name(x.dtype) if x.layout == torch.strided else f"the layout {x.layout}"
        raise FormatError(f"{entry.name} takes dense tensors of {names}, not {got}; convert the tensor first.")


def check_scale(scale: object, entry: QuantType) -> None:
    """Refuses a scale the type does not take, or that is no power of two. A tensor's value is not looked at."""
    if scale is None:
        return
    if entry.element is None or entry.block_size is not None:
        raise FormatError(does_not_apply(entry, "has its own block scales", f"scale={scale!r}"))
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise FormatError(f"scale is a tensor of shape {tuple(scale.shape)}; it must be a float or a 0-dim tensor.")
    elif not _is_tensor_scale(scale):
        raise FormatError(
            f"scale is {scale!r}; it must be a power of two from 2^{MIN_TENSOR_EXPONENT} to 2^{MAX_TENSOR_EXPONENT}."
        )


def _is_tensor_scale(scale: object) -> bool:
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        return False
    mantissa, exponent = math.frexp(scale)
    return mantissa == 0.5 and MIN_TENSOR_EXPONENT <= exponent - 1 <= MAX_TENSOR_EXPONENT


def check_out(out: object, x: Tensor) -> None:
    """Refuses an ``out`` that is not as ``x`` is."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise FormatError(f"out must be a torch tensor, not {type(out).__name__}.")
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise FormatError(f"out is {_kind(out)}; it must be {_kind(x)} as x is.")


def _kind(x: Tensor) -> str:
    return f"{_dtype_name(x.dtype)} {tuple(x.shape)} on {x.device}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
