"""Quantization by the Triton kernels: what can be done by them, and the launches (``triton_counts``: those that count).

Nothing here waits for the device. Further launches of the same kind cost two looks into dictionaries: what a kernel is
compiled with is worked out once for every shape and choice.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcollect.formats.eager import Choices
from qcollect.formats.kernel import Launch, runs_on, stream_key
from qcollect.formats.records import ScaleRule, TensorScale
from qcollect.formats.triton_constants import (
    Geometry,
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
_NUM_STATS_PROGRAMS = 2112
_MAX_TILES = 32  # of a program: one bit each
_STATS_GROUP = 32
_NUM_AMAX_PROGRAMS = 2112
_AMAX_BYTES = 8192
_MAX_STEPS_OF_ONE = 4  # up to which one program alone is faster than several
_MAX_KEPT = 4096
_PAIRS_CAPABILITY = (9, 0)
_KERNELS, STATS_KERNELS = "qcollect.formats.triton_kernels", "qcollect.formats.triton_stats"
# By ``_Purpose.sizes``, whether blocks have several rows, and bytes of an element: the fastest of those tried with
# 8192 x 8192 elements on an H200. A single warp keeps the maxima of blocks along another axis than the last inside it.
_TILE_SIZES = {
    ("plain", False, 2): TileSize(elements=1024, num_warps=1),
    ("plain", False, 4): TileSize(elements=1024, num_warps=1),
    ("plain", True, 2): TileSize(elements=2048, num_warps=1),
    ("plain", True, 4): TileSize(elements=2048, num_warps=1),
    ("both", True, 2): TileSize(elements=2048, num_warps=1),
    ("both", True, 4): TileSize(elements=2048, num_warps=4),
    ("stats", False, 2): TileSize(elements=1024, num_warps=1, max_registers=128),
    ("stats", False, 4): TileSize(elements=1024, num_warps=2, max_registers=128),
    ("stats", True, 2): TileSize(elements=1024, num_warps=1, max_registers=128),
    ("stats", True, 4): TileSize(elements=2048, num_warps=2),
    ("histograms", False, 2): TileSize(elements=1024, num_warps=1),
    ("histograms", False, 4): TileSize(elements=512, num_warps=1),
    ("histograms", True, 2): TileSize(elements=2048, num_warps=1),
    ("histograms", True, 4): TileSize(elements=1024, num_warps=1),
}


class _Purpose(NamedTuple):
    """What quantizes one tensor for some purpose.

    Args:
        module, name: of the kernel.
        sizes: what its tiles are sized as.
        wanted: of a kernel that adds up: whether histograms are, and whether the values; None: it does not.
    """

    module: str
    name: str
    sizes: str
    wanted: tuple[bool, bool] | None = None


_PURPOSES = {
    "plain": _Purpose(_KERNELS, "quantize_kernel", "plain"),
    "limited": _Purpose(_KERNELS, "count_limited_kernel", "plain"),
    "stats": _Purpose(STATS_KERNELS, "quantize_stats_kernel", "stats", (False, True)),
    "counts": _Purpose(STATS_KERNELS, "quantize_stats_kernel", "stats", (False, False)),
    "histograms": _Purpose(STATS_KERNELS, "quantize_stats_kernel", "histograms", (True, True)),
}

Key = tuple[Hashable, ...]

_plans: dict[Key, Launch] = {}
# answers, and what their keys name by identity, kept alive
_answers: dict[Key, tuple[bool, tuple[object, ...]]] = {}


class _Scratch(NamedTuple):
    """Memory of a stream for what its kernels do one after the other.

    Args:
        zeros: (2,) int64, which every kernel leaves zero.
        factor: 0-dim float32, of the kernel that comes next.
    """

    zeros: Tensor
    factor: Tensor


_scratches: dict[tuple[int | None, int], _Scratch] = {}


def supports(x: Tensor, choices: Choices) -> bool:
    """Whether ``run`` can quantize ``x`` so."""
    return _ask(_supports, x, choices)


def supports_stats(x: Tensor, choices: Choices) -> bool:
    """Whether ``triton_counts`` can count what becomes of ``x``; of a cast only the counts."""
    return _ask(_supports_stats, x, choices)


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
    x = dense(x)
    launch = plan(x, choices, "plain", has_encode=encode is not None, with_tensor_scale=with_tensor_scale)
    launch.start((x, out, x if encode is None else encode), seed_numbers(choices))


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
    x = dense(x)
    launch = _plan_both(x, last, first, encode_last is not None, encode_first is not None, with_tensor_scale)
    encodes = (x if encode_last is None else encode_last, x if encode_first is None else encode_first)
    launch.start((x, out_last, out_first, *encodes), (*seed_numbers(last), *seed_numbers(first)))


def amax(x: Tensor, *, sees_nonfinite: bool = True) -> Tensor:
    """The abs max of ``x``, 0-dim float32: NaN over Inf over numbers, or of finite numbers alone (0 without one)."""
    return _reduce(x, plan_amax(x, None, None, sees_nonfinite=sees_nonfinite))


def encode(x: Tensor, tensor_scale: TensorScale, rule: ScaleRule | None) -> Tensor:
    """What ``x`` is multiplied with, from its abs max, 0-dim float32."""
    return _reduce(x, plan_amax(x, tensor_scale, rule, sees_nonfinite=tensor_scale.sees_nonfinite))


def _reduce(x: Tensor, launch: Launch) -> Tensor:
    found = torch.empty((), dtype=torch.float32, device=x.device)
    zeros = found if launch.num_programs == 1 else scratch_of(x.device).zeros  # one alone needs none
    launch.start((dense(x), found, zeros))
    return found


def scratch_of(device: torch.device) -> _Scratch:
    """That of the current stream; a graph has some of its own."""
    key = stream_key(device)
    found = None if key is None else _scratches.get(key)
    if found is None:
        zeros = torch.zeros(4, dtype=torch.int64, device=device)
        # the factor at a multiple of 16 bytes, too
        found = _Scratch(zeros[:2], zeros[2:].view(torch.float32)[0])
        if key is not None:
            _scratches[key] = found
    return found


# ---------------------------------------------------------------------------------------------
# What can be done
# ---------------------------------------------------------------------------------------------


def _ask(supported: Callable[[Tensor, Choices], bool], x: Tensor, choices: Choices) -> bool:
    """The answer for a tensor of this shape, worked out once."""
    if not runs_on(x.device):
        return False
    key = (supported, choices.key, x.shape, x.dtype)
    found = _answers.get(key)
    if found is None:
        found = supported(x, choices), (choices.quant_type, choices.source)
        remember(_answers, key, found)
    return found[0]


def _supports(x: Tensor, choices: Choices) -> bool:
    if x.dtype not in _DTYPES:
        return False
    entry, element = choices.quant_type, choices.quant_type.element
    if element is None or element.is_cast or not is_expressible(element, entry.scale_format):
        return False
    if choices.block_size is None or x.numel() == 0:
        return True
    _, rows, width = as_outer_rows_columns(x, choices)
    return power_of_two_above(rows) * power_of_two_above(width) <= _MAX_BLOCK_ELEMENTS


def _supports_stats(x: Tensor, choices: Choices) -> bool:
    entry, element = choices.quant_type, choices.quant_type.element
    if element is None or not element.is_cast:
        return _supports(x, choices)
    is_own = element.torch_dtype is not None and x.dtype == getattr(torch, element.torch_dtype)
    can_round = is_own or is_expressible(element, entry.scale_format)
    return can_round and choices.block_size is None and x.dtype in _DTYPES


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def plan(x: Tensor, choices: Choices, purpose: str, *, has_encode: bool, with_tensor_scale: bool = True) -> Launch:
    """The launch that quantizes tensors like ``x``, one whose values lie side by side.

    Args:
        purpose: ``plain``, or what is counted on the way: how many are ``limited`` and nothing else, the ``stats`` of
            values that are written, the ``counts`` of some that are not, ``histograms``.
    """
    key = (choices.key, purpose, has_encode, with_tensor_scale, x.shape, x.dtype)
    launch = _plans.get(key)
    if launch is None:
        module, name, sizes, wanted = _PURPOSES[purpose]
        adds_up = wanted is not None
        shape, rows, width = as_outer_rows_columns(x, choices, group=_STATS_GROUP if adds_up else 1)
        rule = make_rule(choices, x.dtype, has_encode=has_encode, with_tensor_scale=with_tensor_scale)
        size = _tile_size(rows, width, x.element_size(), sizes)
        in_pairs = adds_up and rule.can_be_paired and _has_pairs(x)
        geometry = cut(shape, rows, width, size, x.element_size(), in_pairs=in_pairs)
        numbers: tuple[object, ...] = (*_sizes(geometry), rule, geometry.tile)
        num_programs = geometry.num_tiles
        if wanted is not None:
            num_programs = min(num_programs, max(_NUM_STATS_PROGRAMS, -(-num_programs // _MAX_TILES)))
            numbers = (*_sizes(geometry), geometry.num_tiles, rule, geometry.tile, *wanted)
        launch = Launch(
            module=module,
            name=name,
            numbers=numbers,
            num_warps=size.num_warps,
            num_programs=num_programs,
            max_registers=size.max_registers,
            kept=(choices.quant_type, choices.source),
        )
        remember(_plans, key, launch)
    return launch


def _plan_both(
    x: Tensor, last: Choices, first: Choices, has_last: bool, has_first: bool, with_tensor_scale: bool
) -> Launch:
    key = (last.key, first.key, has_last, has_first, with_tensor_scale, x.shape, x.dtype)
    launch = _plans.get(key)
    if launch is None:
        assert isinstance(last.block_size, int) and isinstance(first.block_size, int)
        rows, width = min(first.block_size, x.shape[0]), min(last.block_size, x.shape[1])
        size = _tile_size(rows, width, x.element_size(), "both")
        rules = (
            make_rule(last, x.dtype, has_encode=has_last, with_tensor_scale=with_tensor_scale),
            make_rule(first, x.dtype, has_encode=has_first, with_tensor_scale=with_tensor_scale),
        )
        in_pairs = all(rule.can_be_paired for rule in rules) and _has_pairs(x)
        geometry = cut((1, *x.shape), rows, width, size, x.element_size(), in_pairs=in_pairs)
        launch = Launch(
            module=_KERNELS,
            name="quantize_both_kernel",
            numbers=(*_sizes(geometry), *rules, geometry.tile),
            num_warps=size.num_warps,
            num_programs=geometry.num_tiles,
            kept=(last.quant_type, last.source, first.quant_type, first.source),
        )
        remember(_plans, key, launch)
    return launch


def plan_amax(
    x: Tensor, tensor_scale: TensorScale | None, scale_rule: ScaleRule | None, *, sees_nonfinite: bool
) -> Launch:
    """The launch that finds the abs max of tensors like ``x``, or what follows for the whole tensor."""
    key = ("amax", id(tensor_scale), scale_rule, sees_nonfinite, x.shape, x.dtype)
    launch = _plans.get(key)
    if launch is None:
        rule = make_encode_rule(tensor_scale, sees_nonfinite=sees_nonfinite, is_rceil=scale_rule == "rceil")
        size = _AMAX_BYTES // x.element_size()
        num_programs = min(-(-x.numel() // size), _NUM_AMAX_PROGRAMS)
        if num_programs <= _MAX_STEPS_OF_ONE:
            num_programs = 1
        is_large = x.numel() + size * _NUM_AMAX_PROGRAMS >= 1 << 31
        launch = Launch(
            module=_KERNELS,
            name="amax_kernel",
            numbers=(x.numel(), rule, size, is_large, num_programs == 1),
            num_warps=4,
            num_programs=num_programs,
            kept=(tensor_scale,),
        )
        remember(_plans, key, launch)
    return launch


def _sizes(geometry: Geometry) -> tuple[int, ...]:
    return geometry.rows, geometry.columns, geometry.row_blocks, geometry.column_blocks, geometry.num_bands


def remember(found: dict[Key, Any], key: Key, value: object) -> None:
    """Keeps what was found, and not more than so much of it."""
    if len(found) >= _MAX_KEPT:
        found.clear()
    found[key] = value


def _tile_size(rows: int, width: int, element_size: int, sizes: str) -> TileSize:
    if power_of_two_above(rows) * power_of_two_above(width) > _MAX_WARP_ELEMENTS:
        return TileSize(elements=_MAX_BLOCK_ELEMENTS, num_warps=8)
    return _TILE_SIZES[sizes, rows > 1 or sizes == "both", element_size]


def seed_numbers(choices: Choices) -> tuple[int, int]:
    """The seed as two signed 32-bit numbers, so that every seed has the same type in the kernel."""
    low, high = choices.seed & 0xFFFFFFFF, choices.seed >> 32
    return low - (low >> 31 << 32), high


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.detach().contiguous()


def _has_pairs(x: Tensor) -> bool:
    """Whether the device works on pairs of bfloat16, all of what the kernels do with them."""
    return x.device.type != "cuda" or _capability(x.device.index) >= _PAIRS_CAPABILITY


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
