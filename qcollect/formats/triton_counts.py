"""What quantization does to a tensor, counted by the Triton kernels, mostly in the pass that quantizes it.

Programs of a kernel leave shares; another launch puts them together, at once or those of many tensors later
(``Totals.pending``). Nothing here waits for the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qcollect.formats.eager import Choices
from qcollect.formats.error_stats import NUM_BINS, NUM_TOTALS, ErrorStats, Totals
from qcollect.formats.kernel import Launch, stream_key
from qcollect.formats.pending import PendingShares
from qcollect.formats.records import TensorScale
from qcollect.formats.triton_launch import (
    STATS_KERNELS,
    Key,
    dense,
    plan,
    plan_amax,
    remember,
    scratch_of,
    seed_numbers,
    supports,
)

_FINISH_SIZE, _FINISH_WARPS = 4096, 4
_SHARE_SIZE = 5  # of a program, in float64 numbers
_PENDING_NUMBERS = 1 << 20
_NUM_ZEROS, _MIN_ZEROS = 256, 16  # numbers made at once, and how often they serve at least

_FINISH_MANY = Launch(
    module=STATS_KERNELS,
    name="finish_many_stats_kernel",
    numbers=(NUM_TOTALS, _FINISH_SIZE),
    num_warps=_FINISH_WARPS,
)

_finishes: dict[Key, Launch] = {}
_joined: dict[Key, Launch] = {}
_zeros: dict[tuple[int | None, int, tuple[int, ...]], list[Tensor]] = {}


def supports_both_stats(x: Tensor, last: Choices, first: Choices) -> bool:
    """Whether ``run_both_and_count`` can do it: both by programs of as many threads."""
    if x.dim() != 2 or not (supports(x, last) and supports(x, first)):
        return False
    last_warps, first_warps = (plan(x, each, "stats", has_encode=False).num_warps for each in (last, first))
    return last_warps == first_warps


def run_with_stats(
    x: Tensor,
    out: Tensor,
    choices: Choices,
    encode: Tensor | None,
    *,
    with_tensor_scale: bool,
    histograms: bool,
) -> ErrorStats:
    """``triton_launch.run``, and what it does to the tensor, counted in the same pass."""
    x = dense(x)
    purpose = "histograms" if histograms else "stats"
    launch = plan(x, choices, purpose, has_encode=encode is not None, with_tensor_scale=with_tensor_scale)
    totals = Totals(torch.empty(NUM_TOTALS, dtype=torch.float64, device=x.device))
    bins = _zeroed((2, NUM_BINS), x.device) if histograms else totals.numbers
    _count(x, out, choices, encode, launch, bins, totals)
    return ErrorStats(
        num_elements=x.numel(),
        totals=totals.numbers,
        exponent_counts=bins[0] if histograms else None,
        scale_counts=bins[1] if histograms and choices.block_size is not None else None,
    )


def run_and_count(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> None:
    """``run``, the tensor's scale included; what that does to the tensor goes to ``totals``.

    Args:
        choices: ones that ``triton_launch.supports_stats`` takes.
    """
    x = dense(x)
    launch = plan(x, choices, "stats", has_encode=encode is not None)
    _count(x, out, choices, encode, launch, totals.numbers, totals)


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
        pair: ones that ``supports_both_stats`` takes.
        totals: whose results come later, from the same (``Totals.pending``).
    """
    x = dense(x)
    last, first = (
        plan(x, choices, "stats", has_encode=encode is not None) for choices, encode in zip(pair, encodes, strict=True)
    )
    pending = totals[0].pending
    assert pending is not None and pending is totals[1].pending
    needs = _needs_of(last, pair[0]), _needs_of(first, pair[1])
    shares = _views(pending, needs, _take_both(needs, (totals[0].numbers, totals[1].numbers), pending))
    used = [x if encode is None else encode for encode in encodes]
    _join(last, first).start((x, *outs, *used, *shares), (*seed_numbers(pair[0]), *seed_numbers(pair[1])))


def count(x: Tensor, choices: Choices, encode: Tensor | None, totals: Totals) -> None:
    """``run_and_count`` without the values."""
    x = dense(x)
    launch = plan(x, choices, "counts", has_encode=encode is not None)
    _count(x, x, choices, encode, launch, totals.numbers, totals)


def count_limited(x: Tensor, choices: Choices, encode: Tensor | None) -> Tensor:
    """How many elements of ``x`` are clamped, 0-dim int64.

    Args:
        x, choices: ones that ``triton_launch.supports_stats`` takes.
    """
    x = dense(x)
    num = _zeroed((), x.device)
    launch = plan(x, choices, "limited", has_encode=encode is not None)
    launch.start((x, x if encode is None else encode, num), seed_numbers(choices))
    return num


class PreparedCount:
    """``run_and_count``, or ``count``, for tensors of one shape, dtype and device, many times: all else is found once.

    Args:
        x: such a tensor.
        choices: ones that ``triton_launch.supports`` takes, without stochastic rounding.
        with_values: whether the values are written, too.
        tensor_scale: what the factor of the whole tensor follows from its own abs max by; None: it has none.
    """

    def __init__(
        self, x: Tensor, choices: Choices, *, with_values: bool, tensor_scale: TensorScale | None = None
    ) -> None:
        has_encode = tensor_scale is not None
        self._launch = plan(x, choices, "stats" if with_values else "counts", has_encode=has_encode)
        self._find_encode: Launch | None = None
        if tensor_scale is not None:
            sees_nonfinite = tensor_scale.sees_nonfinite
            self._find_encode = plan_amax(x, tensor_scale, choices.scale_rule, sees_nonfinite=sees_nonfinite)
        self._seed = seed_numbers(choices)
        self._needs = _needs_of(self._launch, choices)
        self._index = x.device.index

    def __call__(self, x: Tensor, out: Tensor, totals: Tensor, pending: PendingShares) -> None:
        """Counts.

        Args:
            x: contiguous.
            out: for the values; ``x`` where none are written.
            totals: as ``Totals.numbers``.
        """
        encode = x
        if self._find_encode is not None:
            zeros, encode = scratch_of(x.device)
            self._find_encode.start((x, encode, zeros))
        num_numbers, num_programs, has_blocks = self._needs
        shares = pending.take_address(num_numbers, totals, num_programs, has_blocks)
        addresses = (x.data_ptr(), out.data_ptr(), encode.data_ptr(), shares, shares)
        if not self._launch.start_known(self._index, addresses, self._seed):
            memory = pending.view(shares, num_numbers)
            self._launch.start((x, out, encode, memory, memory), self._seed)


class PreparedPair:
    """``run_both_and_count``, or ``count`` along both axes, for tensors of one shape, dtype and device, many times.

    Args:
        x: such a tensor; no factor of the whole tensor takes part.
        last, first: ones that ``supports_both_stats`` takes, without stochastic rounding.
        with_values: whether the values are written, too.
    """

    def __init__(self, x: Tensor, last: Choices, first: Choices, *, with_values: bool) -> None:
        purpose = "stats" if with_values else "counts"
        launches = [plan(x, choices, purpose, has_encode=False) for choices in (last, first)]
        self._needs = _needs_of(launches[0], last), _needs_of(launches[1], first)
        self._launch = _join(*launches)
        self._seeds = (*seed_numbers(last), *seed_numbers(first))
        self._index = x.device.index

    def __call__(
        self, x: Tensor, outs: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor], pending: PendingShares
    ) -> None:
        """Counts; arguments as in ``PreparedCount``, for each of the two."""
        last, first = _take_both(self._needs, totals, pending)
        along_last, along_first = outs
        address = x.data_ptr()
        addresses = (address, along_last.data_ptr(), along_first.data_ptr(), address, address, last, first)
        if not self._launch.start_known(self._index, addresses, self._seeds):
            shares = _views(pending, self._needs, (last, first))
            self._launch.start((x, along_last, along_first, x, x, *shares), self._seeds)


def pending_stats(device: torch.device) -> PendingShares:
    """Memory for the ``Totals.pending`` of some hundred tensors, on one stream."""
    return PendingShares(_finish_many, device, _PENDING_NUMBERS)


def _finish_many(memory: Tensor, rows: Tensor) -> None:
    _FINISH_MANY.start((memory, rows), num_programs=NUM_TOTALS * rows.shape[0])


def _count(
    x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, launch: Launch, bins: Tensor, totals: Totals
) -> None:
    num_numbers, num_programs, has_blocks = _needs_of(launch, choices)
    if totals.pending is None:
        shares = torch.empty(num_numbers, dtype=torch.float64, device=x.device)
    else:
        shares = totals.pending.take(num_numbers, totals.numbers, num_programs, has_blocks)
    launch.start((x, out, x if encode is None else encode, shares, bins), seed_numbers(choices))
    if totals.pending is None:
        _finish(num_programs, has_blocks).start((shares, totals.numbers))


class _Needs(NamedTuple):
    """What a launch takes of the memory for shares."""

    num_numbers: int
    num_programs: int
    has_blocks: bool


def _needs_of(launch: Launch, choices: Choices) -> _Needs:
    return _Needs(_SHARE_SIZE * launch.num_programs, launch.num_programs, choices.block_size is not None)


def _take_both(needs: tuple[_Needs, _Needs], totals: tuple[Tensor, Tensor], pending: PendingShares) -> tuple[int, int]:
    """Where the shares of two go that one launch makes: none of it is finished before."""
    last, first = needs
    pending.make_room(last.num_numbers + first.num_numbers + 2)  # each is rounded up to an even number
    return (
        pending.take_address(last.num_numbers, totals[0], last.num_programs, last.has_blocks),
        pending.take_address(first.num_numbers, totals[1], first.num_programs, first.has_blocks),
    )


def _views(pending: PendingShares, needs: tuple[_Needs, _Needs], addresses: tuple[int, int]) -> list[Tensor]:
    return [pending.view(address, each.num_numbers) for address, each in zip(addresses, needs, strict=True)]


def _join(last: Launch, first: Launch) -> Launch:
    """Both by one launch."""
    key = (id(last), id(first))
    found = _joined.get(key)
    if found is None:
        *last_sizes, last_rule, last_tile, _, writes = last.numbers
        *first_sizes, first_rule, first_tile, _, _ = first.numbers
        found = Launch(
            module=STATS_KERNELS,
            name="quantize_both_stats_kernel",
            numbers=(
                last.num_programs,
                *last_sizes,
                *first_sizes,
                last_rule,
                last_tile,
                first_rule,
                first_tile,
                writes,
            ),
            num_warps=last.num_warps,
            num_programs=last.num_programs + first.num_programs,
            max_registers=last.max_registers or first.max_registers,
            kept=(last, first),
        )
        remember(_joined, key, found)
    return found


def _finish(num_programs: int, has_blocks: bool) -> Launch:
    """What puts the shares of so many programs together."""
    key = (num_programs, has_blocks)
    found = _finishes.get(key)
    if found is None:
        found = Launch(
            module=STATS_KERNELS,
            name="finish_stats_kernel",
            numbers=(*key, _FINISH_SIZE),
            num_warps=_FINISH_WARPS,
            num_programs=NUM_TOTALS,
        )
        remember(_finishes, key, found)
    return found


def _zeroed(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros (int64) on the current stream, at a multiple of 16 bytes, at a fraction of what making them costs."""
    key = stream_key(device)
    if key is None:  # a graph that runs again needs some that it makes itself
        return torch.zeros(shape, dtype=torch.int64, device=device)
    ready = _zeros.setdefault((*key, shape), [])
    if not ready:
        size = math.prod(shape)
        num, padded = max(_NUM_ZEROS // size, _MIN_ZEROS), size + size % 2
        zeros = torch.zeros(num, padded, dtype=torch.int64, device=device)
        ready += zeros[:, :size].view(num, *shape).unbind()
    return ready.pop()
