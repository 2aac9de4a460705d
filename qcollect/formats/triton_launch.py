"""Quantization by the Triton kernels: what can be done by them, and the launches.

Nothing here waits for the device. Triton is imported when a tensor first asks for it; on a CPU only its interpreter
can work (``TRITON_INTERPRET=1``, set before the process starts). Further launches of the same kind cost two looks into
dictionaries: what a kernel is compiled with is worked out once for every shape and choice.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qcollect.formats.eager import Choices
from qcollect.formats.error_stats import NUM_BINS, NUM_TOTALS, ErrorStats, Totals
from qcollect.formats.pending import PendingShares
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
_NUM_PROGRAMS = 4096
_NUM_STATS_PROGRAMS = 2112
_AMAX_BYTES = 8192
_MAX_STEPS_OF_ONE = 4  # up to which one program alone is faster than several and another launch
_FINISH_SIZE = 4096
_MAX_TILES = 32  # of a program: one bit each
_STATS_GROUP = 32
_SHARE_SIZE = 5  # of a program, in float64 numbers
_MAX_PLANS = 4096
_PENDING_NUMBERS = 1 << 20
_NUM_ZEROS, _MIN_ZEROS = 256, 16  # numbers made at once, and how often they serve at least
_PAIRS_CAPABILITY = (9, 0)
# By purpose, whether blocks have several rows, and bytes of an element: the fastest of those tried with 8192 x 8192
# elements on an H200. A single warp keeps the maxima of blocks along another axis than the last inside it.
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
    ("counts", False, 2): TileSize(elements=1024, num_warps=1, max_registers=128),
    ("counts", False, 4): TileSize(elements=1024, num_warps=2, max_registers=128),
    ("counts", True, 2): TileSize(elements=1024, num_warps=1, max_registers=128),
    ("counts", True, 4): TileSize(elements=2048, num_warps=2),
    ("histograms", False, 2): TileSize(elements=1024, num_warps=1),
    ("histograms", False, 4): TileSize(elements=512, num_warps=1),
    ("histograms", True, 2): TileSize(elements=1024, num_warps=1),
    ("histograms", True, 4): TileSize(elements=1024, num_warps=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Launches worked out.

    Args:
        kept: what the plan's key names by identity, kept alive.
        numbers: those of the kernel's arguments that follow from the plan.
    """

    kept: tuple[object, ...]
    num_programs: int
    numbers: tuple[object, ...]
    num_warps: int
    max_registers: int | None = None
    has_blocks: bool = False


_FINISH_MANY = _Plan(kept=(), num_programs=NUM_TOTALS, numbers=(NUM_TOTALS, _FINISH_SIZE), num_warps=4)

_plans: dict[tuple[object, ...], _Plan] = {}
# answers, and what their keys name by identity, kept alive
_answers: dict[tuple[object, ...], tuple[bool, tuple[object, ...]]] = {}
_finish_plans: dict[tuple[object, ...], _Plan] = {}
_joined_plans: dict[tuple[object, ...], _Plan] = {}
_amax_plans: dict[tuple[object, ...], tuple[_Plan, _Plan]] = {}


def supports(x: Tensor, choices: Choices) -> bool:
    """Whether ``run`` can quantize ``x`` so."""
    return _ask(_supports, x, choices)


def supports_stats(x: Tensor, choices: Choices) -> bool:
    """Whether ``run_with_stats`` and ``count_limited`` can count what becomes of ``x``; of a cast only the counts."""
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


def supports_both_stats(x: Tensor, last: Choices, first: Choices) -> bool:
    """Whether ``run_both_and_count`` can do it: both by programs of as many threads."""
    if x.dim() != 2 or not (supports(x, last) and supports(x, first)):
        return False
    return _plan(x, last, False, True, "stats").num_warps == _plan(x, first, False, True, "stats").num_warps


def run(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> None:
    """Quantizes and dequantizes ``x`` into ``out``.

    Args:
        x: not empty, any strides (read as it lies if dense, else copied first).
        out: dense, of the shape, dtype and device of ``x``; may be ``x`` itself.
        choices: ones that ``supports`` takes.
        encode: 0-dim float32 on the device, what the whole tensor is multiplied with; None: nothing.
        with_tensor_scale: whether the result holds the tensor's scale.
    """
    x = _dense(x)
    plan = _plan(x, choices, encode is not None, with_tensor_scale, "plain")
    _launch("quantize_kernel", plan, (x, out, x if encode is None else encode), _seed(choices))


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
    x = _dense(x)
    plan = _plan_both(x, last, first, encode_last is not None, encode_first is not None, with_tensor_scale)
    encodes = (x if encode_last is None else encode_last, x if encode_first is None else encode_first)
    _launch("quantize_both_kernel", plan, (x, out_last, out_first, *encodes), (*_seed(last), *_seed(first)))


def run_with_stats(
    x: Tensor,
    out: Tensor,
    choices: Choices,
    encode: Tensor | None,
    *,
    with_tensor_scale: bool,
    histograms: bool,
) -> ErrorStats:
    """``run``, and what it does to the tensor, counted in the same pass."""
    x = _dense(x)
    plan = _plan(x, choices, encode is not None, with_tensor_scale, "histograms" if histograms else "stats")
    totals = Totals(torch.empty(NUM_TOTALS, dtype=torch.float64, device=x.device))
    bins = _zeroed((2, NUM_BINS), x.device) if histograms else totals.numbers
    _count(x, out, choices, encode, plan, bins, totals)
    return ErrorStats(
        num_elements=x.numel(),
        totals=totals.numbers,
        exponent_counts=bins[0] if histograms else None,
        scale_counts=bins[1] if histograms and plan.has_blocks else None,
    )


def run_and_count(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> None:
    """``run``, the tensor's scale included; what that does to the tensor goes to ``totals``.

    Args:
        choices: ones that ``supports_stats`` takes.
    """
    x = _dense(x)
    _count(x, out, choices, encode, _plan(x, choices, encode is not None, True, "stats"), totals.numbers, totals)


def run_both_and_count(
    x: Tensor,
    outs: tuple[Tensor, Tensor],
    pair: tuple[Choices, Choices],
    encodes: tuple[Tensor | None, Tensor | None],
    totals: tuple[Totals, Totals],
) -> None:
    """``run_and_count`` along axis 1 and along axis 0, by one launch.

    Args:
        x: two dimensions; the rest in this order.
        totals: whose results come later (``Totals.pending``).
    """
    x = _dense(x)
    last, first = (
        _plan(x, choices, encode is not None, True, "stats") for choices, encode in zip(pair, encodes, strict=True)
    )
    shares = [_take(plan, each) for plan, each in zip((last, first), totals, strict=True)]
    used = [x if encode is None else encode for encode in encodes]
    _launch(
        "quantize_both_stats_kernel", _join(last, first), (x, *outs, *used, *shares), (*_seed(pair[0]), *_seed(pair[1]))
    )


def count(x: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> None:
    """``run_and_count`` without the values."""
    x = _dense(x)
    _count(x, x, choices, encode, _plan(x, choices, encode is not None, True, "counts"), totals.numbers, totals)


class PreparedCount:
    """``run_and_count``, or ``count``, for tensors of one shape, dtype and device, many times: all else is found once.

    Args:
        x: such a tensor.
        choices: ones that ``supports`` takes, without stochastic rounding.
        with_values: whether the values are written, too.
    """

    def __init__(self, x: Tensor, choices: Choices, *, with_values: bool) -> None:
        self._plan = plan = _plan(x, choices, False, True, "stats" if with_values else "counts")
        self._num_numbers = _SHARE_SIZE * plan.num_programs
        self._seed = _seed(choices)
        self._numbers = (*self._seed, *plan.numbers)
        self._index = x.device.index
        self._compiled: Any = None

    def __call__(self, x: Tensor, out: Tensor, totals: Tensor, pending: PendingShares) -> None:
        """Counts.

        Args:
            x: contiguous; no factor of the whole tensor takes part.
            out: for the values; ``x`` where none are written.
            totals: as ``Totals.numbers``.
        """
        plan = self._plan
        shares = pending.take(self._num_numbers, totals, plan.num_programs, plan.has_blocks)
        address, out_address, shares_address = x.data_ptr(), out.data_ptr(), shares.data_ptr()
        if self._compiled is None or (address | out_address) % 16 or self._index != torch.cuda.current_device():
            _launch("quantize_stats_kernel", plan, (x, out, x, shares, totals), self._seed)
            self._compiled = _compiled.get(("quantize_stats_kernel", id(plan), self._index, None))
            return
        run, function, metadata, stream_of = self._compiled
        run(
            plan.num_programs, 1, 1, stream_of(self._index), function, metadata, None, None, None,
            address, out_address, address, shares_address, shares_address, *self._numbers,
        )  # fmt: skip


class PreparedPair:
    """``run_both_and_count`` for tensors of one shape, dtype and device, many times.

    Args:
        x: such a tensor.
        last, first: ones that ``supports_both_stats`` takes, without stochastic rounding.
    """

    def __init__(self, x: Tensor, last: Choices, first: Choices) -> None:
        self._plans = tuple(_plan(x, choices, False, True, "stats") for choices in (last, first))
        self._plan = plan = _join(*self._plans)
        self._seeds = (*_seed(last), *_seed(first))
        self._numbers = (*self._seeds, *plan.numbers)
        self._index = x.device.index
        self._compiled: Any = None

    def __call__(self, x: Tensor, outs: tuple[Tensor, Tensor], totals: tuple[Totals, Totals]) -> None:
        """As there; ``x`` contiguous, no factor of the whole tensor takes part."""
        last, first = (_take(plan, each) for plan, each in zip(self._plans, totals, strict=True))
        addresses = (x.data_ptr(), outs[0].data_ptr(), outs[1].data_ptr())
        is_aligned = not (addresses[0] | addresses[1] | addresses[2]) % 16
        if self._compiled is None or not is_aligned or self._index != torch.cuda.current_device():
            _launch("quantize_both_stats_kernel", self._plan, (x, *outs, x, x, last, first), self._seeds)
            self._compiled = _compiled.get(("quantize_both_stats_kernel", id(self._plan), self._index, None))
            return
        run, function, metadata, stream_of = self._compiled
        run(
            self._plan.num_programs, 1, 1, stream_of(self._index), function, metadata, None, None, None,
            *addresses, addresses[0], addresses[0], last.data_ptr(), first.data_ptr(), *self._numbers,
        )  # fmt: skip


def _count(
    x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, plan: "_Plan", bins: Tensor, totals: Totals
) -> None:
    if totals.pending is None:
        shares = torch.empty(_SHARE_SIZE * plan.num_programs, dtype=torch.float64, device=x.device)
    else:
        shares = _take(plan, totals)
    tensors = (x, out, x if encode is None else encode, shares, bins)
    _launch("quantize_stats_kernel", plan, tensors, _seed(choices))
    if totals.pending is None:
        _launch("finish_stats_kernel", _finish_plan(plan), (shares, totals.numbers), ())


def _take(plan: "_Plan", totals: Totals) -> Tensor:
    """Memory for the shares of a plan's programs, which are put together later."""
    assert totals.pending is not None
    return totals.pending.take(_SHARE_SIZE * plan.num_programs, totals.numbers, plan.num_programs, plan.has_blocks)


def pending_stats(device: torch.device) -> PendingShares:
    """Memory for the ``Totals.pending`` of some hundred tensors, on one stream."""
    return PendingShares(_finish_many, device, _PENDING_NUMBERS)


def _finish_many(memory: Tensor, rows: Tensor) -> None:
    _launch("finish_many_stats_kernel", _FINISH_MANY, (memory, rows), (), num_programs=NUM_TOTALS * rows.shape[0])


def count_limited(x: Tensor, choices: Choices, encode: Tensor | None) -> Tensor:
    """How many elements of ``x`` are clamped, 0-dim int64.

    Args:
        x, choices: ones that ``supports_stats`` takes.
    """
    x = _dense(x)
    count = _zeroed((), x.device)
    plan = _plan(x, choices, encode is not None, True, "plain")
    _launch("count_limited_kernel", plan, (x, x if encode is None else encode, count), _seed(choices))
    return count


_zeros: dict[tuple[int, int, tuple[int, ...]], list[Tensor]] = {}


def _zeroed(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros (int64) on the current stream, at a multiple of 16 bytes, at a fraction of what making them costs."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():  # a graph that runs again needs some that it makes itself
        return torch.zeros(shape, dtype=torch.int64, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if is_cuda else 0
    ready = _zeros.setdefault((device.index, stream, shape), [])
    if not ready:
        size = math.prod(shape)
        num, padded = max(_NUM_ZEROS // size, _MIN_ZEROS), size + size % 2
        zeros = torch.zeros(num * padded, dtype=torch.int64, device=device).view(num, padded)
        ready += [row[:size].view(shape) for row in zeros.unbind()]
    return ready.pop()


def amax(x: Tensor, *, sees_nonfinite: bool = True) -> Tensor:
    """The abs max of ``x``, 0-dim float32: NaN over Inf over numbers, or of finite numbers alone (0 without one)."""
    return _reduce(x, None, None, sees_nonfinite)


def encode(x: Tensor, tensor_scale: TensorScale, rule: ScaleRule | None) -> Tensor:
    """What ``x`` is multiplied with, from its abs max, 0-dim float32."""
    return _reduce(x, tensor_scale, rule, tensor_scale.sees_nonfinite)


def _reduce(x: Tensor, tensor_scale: TensorScale | None, scale_rule: ScaleRule | None, sees_nonfinite: bool) -> Tensor:
    x = _dense(x)
    key = (id(tensor_scale), scale_rule, sees_nonfinite, x.shape, x.dtype)
    plans = _amax_plans.get(key)
    if plans is None:
        plans = _make_amax_plans(x, tensor_scale, scale_rule, sees_nonfinite)
        _remember(_amax_plans, key, plans)
    plan, finish = plans
    if plan.num_programs == 1:
        found = torch.empty((), dtype=torch.float32, device=x.device)
        _launch("amax_kernel", plan, (x, found), ())
        return found
    # the result, then what the programs found
    found = torch.empty(1 + plan.num_programs, dtype=torch.float32, device=x.device)
    _launch("amax_kernel", plan, (x, found), ())
    _launch("finish_amax_kernel", finish, (found,), ())
    return found[0]


# ---------------------------------------------------------------------------------------------
# What can be done
# ---------------------------------------------------------------------------------------------


def _ask(supported: Callable[[Tensor, Choices], bool], x: Tensor, choices: Choices) -> bool:
    """The answer for a tensor of this shape, worked out once."""
    if not _is_on_device(x):
        return False
    key = (supported, choices.key, x.shape, x.dtype)
    found = _answers.get(key)
    if found is None:
        found = supported(x, choices), (choices.quant_type, choices.source)
        _remember(_answers, key, found)
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
# Launches
# ---------------------------------------------------------------------------------------------

_compiled: dict[tuple[object, ...], Any] = {}


def _launch(
    name: str, plan: _Plan, tensors: tuple[Tensor, ...], seeds: tuple[int, ...], num_programs: int | None = None
) -> None:
    """Starts a kernel on the device of its first tensor; by as many programs as the plan says, unless that varies.

    Triton works out at every launch which compiled kernel its arguments belong to, which takes longer than a small
    launch itself; here that is kept for arguments of one kind: of one plan, and alike in how they are aligned.
    """
    device = tensors[0].device
    if device.type != "cpu" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(name, plan, tensors, seeds, num_programs)
    num_programs = plan.num_programs if num_programs is None else num_programs
    addresses, any_bits = [], 0
    for tensor in tensors:
        address = tensor.data_ptr()
        addresses.append(address)
        any_bits |= address
    aligned = None if any_bits % 16 == 0 else tuple(address % 16 == 0 for address in addresses)
    key = (name, id(plan), device.index, aligned)
    compiled = _compiled.get(key)
    if compiled is not None:
        run, function, metadata, stream_of = compiled
        stream = stream_of(device.index)
        run(num_programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *seeds, *plan.numbers)
        return None
    kernel = _kernels()[name][(num_programs,)]
    options = {} if plan.max_registers is None else {"maxnreg": plan.max_registers}
    found = kernel(*tensors, *seeds, *plan.numbers, num_warps=plan.num_warps, enable_fp_fusion=False, **options)
    if found is not None and device.type != "cpu":
        stream_of = _kernels()["triton"].runtime.driver.active.get_current_stream
        _remember(_compiled, key, (found.run, found.function, found.packed_metadata, stream_of))
    return None


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.detach().contiguous()


# ---------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------


def _plan(x: Tensor, choices: Choices, has_encode: bool, with_tensor_scale: bool, purpose: str) -> _Plan:
    key = (choices.key, has_encode, with_tensor_scale, purpose, x.shape, x.dtype)
    plan = _plans.get(key)
    if plan is None:
        is_counted = purpose != "plain"
        shape, rows, width = as_outer_rows_columns(x, choices, group=_STATS_GROUP if is_counted else 1)
        rule = make_rule(choices, x.dtype, has_encode=has_encode, with_tensor_scale=with_tensor_scale)
        size = _tile_size(rows, width, x.element_size(), purpose)
        in_pairs = is_counted and rule.can_be_paired and _has_pairs(x)
        geometry = cut(shape, rows, width, size, x.element_size(), in_pairs=in_pairs)
        sizes, num_tiles, num_programs = _sizes(geometry), geometry.num_tiles, geometry.num_tiles
        if is_counted:
            num_programs = min(num_tiles, max(_NUM_STATS_PROGRAMS, -(-num_tiles // _MAX_TILES)))
            sizes = (*sizes, num_tiles)
        plan = _Plan(
            kept=(choices.quant_type, choices.source),
            num_programs=num_programs,
            numbers=(
                *sizes,
                rule,
                geometry.tile,
                *((purpose == "histograms", purpose != "counts") if is_counted else ()),
            ),
            num_warps=size.num_warps,
            max_registers=size.max_registers,
            has_blocks=rule.has_blocks,
        )
        _remember(_plans, key, plan)
    return plan


def _plan_both(
    x: Tensor, last: Choices, first: Choices, has_last: bool, has_first: bool, with_tensor_scale: bool
) -> _Plan:
    key = (last.key, first.key, has_last, has_first, with_tensor_scale, x.shape, x.dtype)
    plan = _plans.get(key)
    if plan is None:
        assert isinstance(last.block_size, int) and isinstance(first.block_size, int)
        rows, width = min(first.block_size, x.shape[0]), min(last.block_size, x.shape[1])
        size = _tile_size(rows, width, x.element_size(), "both")
        rules = (
            make_rule(last, x.dtype, has_encode=has_last, with_tensor_scale=with_tensor_scale),
            make_rule(first, x.dtype, has_encode=has_first, with_tensor_scale=with_tensor_scale),
        )
        in_pairs = all(rule.can_be_paired for rule in rules) and _has_pairs(x)
        geometry = cut((1, *x.shape), rows, width, size, x.element_size(), in_pairs=in_pairs)
        plan = _Plan(
            kept=(last.quant_type, last.source, first.quant_type, first.source),
            num_programs=geometry.num_tiles,
            numbers=(*_sizes(geometry), *rules, geometry.tile),
            num_warps=size.num_warps,
        )
        _remember(_plans, key, plan)
    return plan


def _join(last: _Plan, first: _Plan) -> _Plan:
    """Both plans by one launch."""
    key = (id(last), id(first))
    found = _joined_plans.get(key)
    if found is None:
        *last_sizes, last_rule, last_tile, _, _ = last.numbers
        *first_sizes, first_rule, first_tile, _, _ = first.numbers
        found = _Plan(
            kept=(last, first),
            num_programs=last.num_programs + first.num_programs,
            numbers=(last.num_programs, *last_sizes, *first_sizes, last_rule, last_tile, first_rule, first_tile),
            num_warps=last.num_warps,
            max_registers=last.max_registers or first.max_registers,
        )
        _remember(_joined_plans, key, found)
    return found


def _finish_plan(plan: _Plan) -> _Plan:
    """What puts the statistics of a plan's programs together."""
    key = (plan.num_programs, plan.has_blocks)
    found = _finish_plans.get(key)
    if found is None:
        found = _Plan(kept=(), num_programs=NUM_TOTALS, numbers=(*key, _FINISH_SIZE), num_warps=4)
        _remember(_finish_plans, key, found)
    return found


def _make_amax_plans(
    x: Tensor, tensor_scale: TensorScale | None, scale_rule: ScaleRule | None, sees_nonfinite: bool
) -> tuple[_Plan, _Plan]:
    rule = make_encode_rule(tensor_scale, sees_nonfinite=sees_nonfinite, is_rceil=scale_rule == "rceil")
    size = _AMAX_BYTES // x.element_size()
    num_programs = min(-(-x.numel() // size), _NUM_PROGRAMS)
    if num_programs <= _MAX_STEPS_OF_ONE:
        num_programs = 1
    is_large = x.numel() + size * _NUM_PROGRAMS >= 1 << 31
    numbers = (x.numel(), rule, size, is_large, num_programs == 1)
    return (
        _Plan(kept=(tensor_scale,), num_programs=num_programs, numbers=numbers, num_warps=4),
        _Plan(kept=(), num_programs=1, numbers=(num_programs, rule, _NUM_PROGRAMS), num_warps=4),
    )


def _sizes(geometry: Geometry) -> tuple[int, ...]:
    return geometry.rows, geometry.columns, geometry.row_blocks, geometry.column_blocks, geometry.num_bands


def _remember(found: dict[tuple[object, ...], Any], key: tuple[object, ...], value: object) -> None:
    """Keeps a plan or a compiled kernel; no key of the latter outlives the plan that it names."""
    if len(found) >= _MAX_PLANS:
        for kept in (_compiled, _plans, _amax_plans, _finish_plans, _joined_plans, _answers):
            kept.clear()
    found[key] = value


def _tile_size(rows: int, width: int, element_size: int, purpose: str) -> TileSize:
    if power_of_two_above(rows) * power_of_two_above(width) > _MAX_WARP_ELEMENTS:
        return TileSize(elements=_MAX_BLOCK_ELEMENTS, num_warps=8)
    return _TILE_SIZES[purpose, rows > 1 or purpose == "both", element_size]


def _seed(choices: Choices) -> tuple[int, int]:
    """The seed as two signed 32-bit numbers, so that every seed has the same type in the kernel."""
    low, high = choices.seed & 0xFFFFFFFF, choices.seed >> 32
    return low - (low >> 31 << 32), high


def _is_on_device(x: Tensor) -> bool:
    if x.device.type == "cuda":
        return has_triton()
    return x.device.type == "cpu" and has_triton() and _is_interpreted()


def _has_pairs(x: Tensor) -> bool:
    """Whether the device works on pairs of bfloat16, all of what the kernels do with them."""
    return x.device.type != "cuda" or _capability(x.device.index) >= _PAIRS_CAPABILITY


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch; asking Triton would import it


@cache
def _kernels() -> dict[str, Any]:
    from qcollect.formats import triton_kernels, triton_stats

    return {**vars(triton_kernels), **vars(triton_stats)}
