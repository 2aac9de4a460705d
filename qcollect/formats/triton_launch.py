"""Quantization by the Triton kernels: what can be done by them, and the launches.

Nothing here waits for the device. Triton is imported when a tensor first asks for it; on a CPU only its interpreter
can work (``TRITON_INTERPRET=1``, set before the process starts). Two launches of the same kind cost one look into a
dictionary: what a kernel is compiled with is worked out once for every shape and choice.
"""

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qcollect.formats.eager import Choices
from qcollect.formats.error_stats import NUM_BINS, ErrorStats
from qcollect.formats.records import QuantType, ScaleRule, TensorScale
from qcollect.formats.triton_constants import (
    EncodeRule,
    Geometry,
    Rule,
    TileSize,
    as_outer_rows_columns,
    cut,
    is_expressible,
    make_encode_rule,
    make_rule,
    power_of_two_above,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A block has to fit into one program.
_MAX_BLOCK_ELEMENTS = 4096
_MAX_WARP_ELEMENTS = 2048
# Programs of the kernels that add up; the same number on every device, so that sums are the same too.
_NUM_PROGRAMS = 4096
_AMAX_BYTES = 8192
_FINISH_SIZE = 1024
_MAX_TILES = 512
_STATS_GROUP = 32
_ALIGNED = 4  # float32 numbers in sixteen bytes
_MAX_PLANS = 4096
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A launch worked out; ``quant_types`` keeps alive what its key names by identity."""

    quant_types: tuple[QuantType, ...]
    rules: tuple[Rule, ...]
    geometry: Geometry

    @property
    def sizes(self) -> tuple[int, ...]:
        geometry = self.geometry
        return geometry.rows, geometry.columns, geometry.row_blocks, geometry.column_blocks, geometry.num_bands


_plans: dict[tuple[object, ...], _Plan] = {}


def supports(x: Tensor, choices: Choices) -> bool:
    """Whether ``run`` can quantize ``x`` so."""
    if x.dtype not in _DTYPES or not _is_on_device(x):
        return False
    entry, element = choices.quant_type, choices.quant_type.element
    if element is None or element.is_cast or not is_expressible(element, entry.scale_format):
        return False
    if choices.block_size is None or x.numel() == 0:
        return True
    _, rows, width = as_outer_rows_columns(x, choices)
    return power_of_two_above(rows) * power_of_two_above(width) <= _MAX_BLOCK_ELEMENTS


def supports_both(x: Tensor, last: Choices, first: Choices) -> bool:
    """Whether ``run_both`` can read ``x`` once for the two."""
    if x.dim() != 2 or not (supports(x, last) and supports(x, first)):
        return False
    if not (isinstance(last.block_size, int) and isinstance(first.block_size, int)):
        return False
    rows, width = min(first.block_size, x.shape[0]), min(last.block_size, x.shape[1])
    if last.quant_type.micro_exponents or first.quant_type.micro_exponents:
        return False
    return power_of_two_above(rows) * power_of_two_above(width) <= _MAX_BLOCK_ELEMENTS


def run(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> None:
    """Quantizes and dequantizes ``x`` into ``out``.

    Args:
        x: not empty, any strides (read as it lies if dense, else copied first).
        out: dense, of the shape, dtype and device of ``x``; may be ``x`` itself.
        choices: ones that ``supports`` takes.
        encode: 0-dim float32 on the device, what the whole tensor is multiplied with; None: nothing.
        with_tensor_scale: whether the result holds the tensor's scale.
    """
    x = x.detach().contiguous()
    plan = _plan(x, choices, encode is not None, with_tensor_scale, "plain")
    (rule,), tile = plan.rules, plan.geometry.tile
    tensors = (x, out, x if encode is None else encode)
    _launch("quantize_kernel", plan.geometry.num_tiles, tensors, (*_seed(choices), *plan.sizes, rule, tile), plan)


def run_both(
    x: Tensor,
    out_last: Tensor,
    out_first: Tensor,
    last: Choices,
    first: Choices,
    encode_last: Tensor | None,
    encode_first: Tensor | None,
    *,
    with_tensor_scale: bool,
) -> None:
    """``run`` with blocks along axis 1 and with blocks along axis 0 of ``x``, which is read once.

    Args:
        x: two dimensions; as in ``run``.
        last, first: ones that ``supports_both`` takes.
    """
    x = x.detach().contiguous()
    plan = _plan_both(x, last, first, encode_last is not None, encode_first is not None, with_tensor_scale)
    encodes = (x if encode_last is None else encode_last, x if encode_first is None else encode_first)
    numbers = (*_seed(last), *_seed(first), *plan.sizes, *plan.rules, plan.geometry.tile)
    _launch("quantize_both_kernel", plan.geometry.num_tiles, (x, out_last, out_first, *encodes), numbers, plan)


def run_with_stats(
    x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool, histograms: bool
) -> ErrorStats:
    """``run``, and what it does to the tensor, counted in the same pass."""
    x = x.detach().contiguous()
    plan = _plan(x, choices, encode is not None, with_tensor_scale, "histograms" if histograms else "stats")
    (rule,), tile = plan.rules, plan.geometry.tile
    # counts of a program stay below 2^16 in a thread
    num_programs = min(plan.geometry.num_tiles, max(_NUM_PROGRAMS, plan.geometry.num_tiles // _MAX_TILES))
    sums = torch.empty(2 * num_programs + 2, dtype=torch.float64, device=x.device)
    max_errors = torch.empty(num_programs + 1, dtype=torch.float32, device=x.device)
    counts = torch.empty(5 * num_programs, dtype=torch.int32, device=x.device)
    totals = torch.empty(5, dtype=torch.int64, device=x.device)
    bins = torch.zeros((2, NUM_BINS), dtype=torch.int64, device=x.device) if histograms else totals
    tensors = (x, out, x if encode is None else encode, sums, max_errors, counts, bins)
    numbers = (*_seed(choices), *plan.sizes, plan.geometry.num_tiles, rule, tile, histograms)
    _launch("quantize_stats_kernel", num_programs, tensors, numbers, plan)
    sum_total, max_error = sums[2 * num_programs :], max_errors[num_programs]
    shares = (sums, max_errors, counts, sum_total, max_error, totals)
    _launch("finish_stats_kernel", 8, shares, (num_programs, rule.has_blocks, _FINISH_SIZE), None)
    squares, squared_error = sum_total.unbind()
    zeroed, clamped, clamped_blocks, nans, infs = totals.unbind()
    return ErrorStats(
        num_elements=x.numel(),
        sum_squares=squares,
        sum_squared_error=squared_error,
        max_error=max_error,
        num_zeroed=zeroed,
        num_clamped=clamped,
        num_clamped_blocks=clamped_blocks,
        num_nan=nans,
        num_inf=infs,
        exponent_counts=bins[0] if histograms else None,
        scale_counts=bins[1] if histograms and rule.has_blocks else None,
    )


def amax(x: Tensor, *, sees_nonfinite: bool = True) -> Tensor:
    """The abs max of ``x``, 0-dim float32: NaN over Inf over numbers, or of finite numbers alone (0 without one)."""
    return _amax(x, make_encode_rule(None, sees_nonfinite=sees_nonfinite, is_rceil=False))[0]


def amax_and_encode(x: Tensor, tensor_scale: TensorScale, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    """The abs max that the tensor's scale follows from, and what the tensor is multiplied with; 0-dim float32."""
    return _amax(
        x, make_encode_rule(tensor_scale, sees_nonfinite=tensor_scale.sees_nonfinite, is_rceil=rule == "rceil")
    )


def _amax(x: Tensor, rule: EncodeRule) -> tuple[Tensor, Tensor]:
    x = x.detach().contiguous()
    size = _AMAX_BYTES // x.element_size()
    num_programs = min(-(-x.numel() // size), _NUM_PROGRAMS)
    # two results, sixteen bytes apart, then what the programs found
    found = torch.empty(2 * _ALIGNED + num_programs, dtype=torch.float32, device=x.device)
    amax, encode, partial = found[0], found[_ALIGNED], found[2 * _ALIGNED :]
    is_large = x.numel() + size * _NUM_PROGRAMS >= 1 << 31
    numbers = (x.numel(), rule, size, is_large, num_programs == 1)
    _launch("amax_kernel", num_programs, (x, partial, amax, encode), numbers, None)
    if num_programs > 1:
        _launch("finish_amax_kernel", 1, (partial, amax, encode), (num_programs, rule, _NUM_PROGRAMS), None)
    return amax, encode


# ---------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------

_compiled: dict[tuple[object, ...], Any] = {}


def _launch(
    name: str, num_programs: int, tensors: tuple[Tensor, ...], numbers: tuple[object, ...], plan: _Plan | None
) -> None:
    """Starts a kernel on the device of its first tensor.

    Triton works out at every launch which compiled kernel its arguments belong to, which takes longer than a small
    launch itself; here that is kept for arguments of one kind. A plan, kept for good, stands for the numbers.
    """
    device = tensors[0].device
    if device.type != "cpu" and device.index != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(device.index):
            return _launch(name, num_programs, tensors, numbers, plan)
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    key = (name, device.index, aligned, numbers if plan is None else id(plan), tensors[0].dtype)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(num_programs, 1, 1)](*tensors, *numbers)
        return None
    num_warps = plan.geometry.tile.num_warps if plan else 4
    kernel = getattr(_kernels(), name)[(num_programs,)](*tensors, *numbers, num_warps=num_warps, **_OPTIONS)
    if kernel is not None and device.type != "cpu":
        if len(_compiled) >= _MAX_PLANS:
            _compiled.clear()
        _compiled[key] = kernel
    return None


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def _plan(x: Tensor, choices: Choices, has_encode: bool, with_tensor_scale: bool, purpose: str) -> _Plan:
    key = (*_key(choices), has_encode, with_tensor_scale, purpose, x.shape, x.dtype)
    plan = _plans.get(key)
    if plan is None:
        group = 1 if purpose == "plain" else _STATS_GROUP
        shape, rows, width = as_outer_rows_columns(x, choices, group=group)
        plan = _Plan(
            quant_types=(choices.quant_type,),
            rules=(make_rule(choices, x.dtype, has_encode=has_encode, with_tensor_scale=with_tensor_scale),),
            geometry=cut(shape, rows, width, _tile_size(rows, width, x.element_size(), purpose), x.element_size()),
        )
        _remember(key, plan)
    return plan


def _plan_both(
    x: Tensor, last: Choices, first: Choices, has_last: bool, has_first: bool, with_tensor_scale: bool
) -> _Plan:
    key = (*_key(last), *_key(first), has_last, has_first, with_tensor_scale, x.shape, x.dtype)
    plan = _plans.get(key)
    if plan is None:
        assert isinstance(last.block_size, int) and isinstance(first.block_size, int)
        rows, width = min(first.block_size, x.shape[0]), min(last.block_size, x.shape[1])
        plan = _Plan(
            quant_types=(last.quant_type, first.quant_type),
            rules=(
                make_rule(last, x.dtype, has_encode=has_last, with_tensor_scale=with_tensor_scale),
                make_rule(first, x.dtype, has_encode=has_first, with_tensor_scale=with_tensor_scale),
            ),
            geometry=cut(
                (1, *x.shape), rows, width, _tile_size(rows, width, x.element_size(), "both"), x.element_size()
            ),
        )
        _remember(key, plan)
    return plan


def _remember(key: tuple[object, ...], plan: _Plan) -> None:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
        _compiled.clear()
    _plans[key] = plan


def _key(choices: Choices) -> tuple[object, ...]:
    """Quant types by identity: hashing one costs more than all else."""
    return (
        id(choices.quant_type), choices.axis, choices.scale_rule, choices.rounding, choices.block_size,
        choices.saturate,
        choices.source,
    )  # fmt: skip


def _tile_size(rows: int, width: int, element_size: int, purpose: str) -> TileSize:
    """The fastest of those tried with 8192 x 8192 elements on an H200.

    Blocks along another axis than the last are best held by one warp, so that their maxima stay inside it.
    """
    is_large = power_of_two_above(rows) * power_of_two_above(width) > _MAX_WARP_ELEMENTS
    if is_large:
        return TileSize(elements=_MAX_BLOCK_ELEMENTS, num_warps=8)
    if purpose == "both":
        return TileSize(elements=1024, num_warps=2) if element_size == 2 else TileSize(elements=4096, num_warps=4)
    if purpose != "plain":
        return TileSize(elements=512 if rows == 1 else 1024, num_warps=1)
    if rows > 1:
        return TileSize(elements=2048, num_warps=1)
    return TileSize(elements=2048, num_warps=2) if element_size == 2 else TileSize(elements=1024, num_warps=4)


def _seed(choices: Choices) -> tuple[int, int]:
    """The seed as two signed 32-bit numbers, so that every seed has the same type in the kernel."""
    low, high = choices.seed & 0xFFFFFFFF, choices.seed >> 32
    return low - (low >> 31 << 32), high


def _is_on_device(x: Tensor) -> bool:
    if x.device.type == "cuda":
        return _has_triton()
    return x.device.type == "cpu" and _has_triton() and _is_interpreted()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch; asking Triton would import it


@cache
def _kernels() -> Any:
    from qcollect.formats import triton_kernels

    return triton_kernels
