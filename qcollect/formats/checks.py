"""Refusals: a combination that does not exist is an error that names it, never a default taken in silence."""

import math
import operator

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats.blocks import BlockSize
from qcollect.formats.catalog import unknown
from qcollect.formats.elements import HYBRID_SOURCES
from qcollect.formats.records import HADAMARD_SIZES, ROUNDINGS, SCALE_RULES, QuantType, Rounding, ScaleRule
from qcollect.formats.scales import MAX_TENSOR_EXPONENT, MIN_TENSOR_EXPONENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_SEEDS = 1 << 63


def does_not_apply(entry: QuantType, what: str, argument: str) -> str:
    """The message for an argument the type has no use for; ``what`` says why."""
    reason = "quantizes nothing" if entry.element is None else what
    return f"{entry.name} {reason}: {argument} does not apply; leave it out."


def resolve_axis(entry: QuantType, axis: int | None, size: BlockSize | None, hadamard: int | None) -> int | None:
    """The axis as an int, None where none takes part: without blocks and for tiles, unless something is transformed."""
    if entry.element is None or ((size is None or isinstance(size, tuple)) and hadamard is None):
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
        what = f"knows {' or '.join(entry.scale_rules)} only" if entry.scale_rules else "has no block scale"
        raise FormatError(does_not_apply(entry, what, f"scale_rule={scale_rule!r}"))
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


def resolve_block_size(entry: QuantType, block_size: BlockSize | list[int] | None) -> BlockSize | None:
    """The block size, or the type's own."""
    if block_size is None:
        return entry.block_size
    if entry.block_size is None:
        raise FormatError(does_not_apply(entry, "has no blocks", f"block_size={block_size!r}"))
    if isinstance(block_size, list | tuple):
        if len(block_size) != 2 or not all(_is_count(size) for size in block_size):
            raise FormatError(f"block_size is {block_size!r}; a tile is two whole numbers, rows and columns.")
        if entry.micro_exponents:
            raise FormatError(does_not_apply(entry, "has groups along one axis", f"block_size={block_size!r}"))
        return (block_size[0], block_size[1])
    if not _is_count(block_size):
        raise FormatError(f"block_size is {block_size!r}; it must be a whole number of elements, 1 or more.")
    if any(block_size % size for size, _ in entry.micro_exponents):
        largest = max(size for size, _ in entry.micro_exponents)
        raise FormatError(f"{entry.name} has groups of {largest}: block_size={block_size} must be a multiple of it.")
    return block_size


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def resolve_source_dtype(entry: QuantType, rounding: Rounding | None, source_dtype: str | None) -> str | None:
    """What hybrid rounding takes numbers for; None: the tensor's own dtype, or it does not apply."""
    if source_dtype is None:
        return None
    if rounding != "hybrid":
        raise FormatError(does_not_apply(entry, "does not round hybrid", f"source_dtype={source_dtype!r}"))
    known = [_dtype_name(dtype) for dtype in HYBRID_SOURCES]
    if source_dtype not in known:
        raise FormatError(f"source_dtype {unknown(source_dtype, known)}")
    return source_dtype


def resolve_hadamard(entry: QuantType, size: int | None) -> int | None:
    """The size of the transform, None without one."""
    if size is None:
        return None
    if entry.element is None:
        raise FormatError(does_not_apply(entry, "quantizes nothing", f"hadamard={size!r}"))
    if isinstance(size, bool) or size not in HADAMARD_SIZES:
        raise FormatError(f"hadamard is {size!r}; it must be one of {', '.join(map(str, HADAMARD_SIZES))}.")
    return size


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
    if not entry.takes_tensor_scale and not _is_plain(entry):
        what = (
            "has its own block scales" if entry.block_size is not None else "has its own scale, which follows from amax"
        )
        raise FormatError(does_not_apply(entry, what, f"scale={scale!r}"))
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise FormatError(f"scale is a tensor of shape {tuple(scale.shape)}; it must be a float or a 0-dim tensor.")
    elif not _is_tensor_scale(scale):
        raise FormatError(
            f"scale is {scale!r}; it must be a power of two from 2^{MIN_TENSOR_EXPONENT} to 2^{MAX_TENSOR_EXPONENT}."
        )


def _is_plain(entry: QuantType) -> bool:
    """Whether it has elements and no scale of its own."""
    return entry.element is not None and entry.block_size is None and not entry.has_tensor_scale


def check_amax(amax: object, entry: QuantType, has_tensor_scale: bool) -> None:
    """Refuses an abs max where no scale follows from it, or that is none. A tensor's value is not looked at."""
    if amax is None:
        return
    if not has_tensor_scale:
        raise FormatError(does_not_apply(entry, "has no scale for the whole tensor", "amax"))
    if isinstance(amax, Tensor):
        if amax.dim() != 0:
            raise FormatError(f"amax is a tensor of shape {tuple(amax.shape)}; it must be a float or a 0-dim tensor.")
    elif not isinstance(amax, int | float) or isinstance(amax, bool) or not amax >= 0:
        raise FormatError(f"amax is {amax!r}; it must be a number, 0 or more.")


def check_seed(seed: object, entry: QuantType) -> None:
    """Refuses what is no seed, for stochastic rounding; for any other it is of no consequence."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _NUM_SEEDS:
        raise FormatError(f"{entry.name} with stochastic rounding needs a seed from 0 to 2^63 - 1; seed is {seed!r}.")


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
