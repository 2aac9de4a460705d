"""The summary of a CUDA tensor by Triton kernels: one launch, or two; a copy of it on the way, if that is wanted.

Nothing waits for the device.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qcollect.formats.kernel import Launch, has_triton
from qcollect.formats.pending import PendingShares

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_FIELDS = 9
_TILE_SIZE = 512  # of one warp
# The same number on every device, so that sums are the same too. 16 of a multiprocessor's are there at a time.
_NUM_PROGRAMS = 2048
_MAX_TILES_OF_ONE = 16  # up to which one program alone is faster than several and another launch
_FINISH_WARPS = 8
_MAX_INT32 = (1 << 31) - 1
_PENDING_NUMBERS = 1 << 20
_KERNELS = "qcollect.store.summary_kernels"


class Room(NamedTuple):
    """Where a copy goes: memory of a device (uint8), from a byte on that is a multiple of 16."""

    memory: Tensor
    start: int

    def view(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Room for a flat tensor."""
        typed = self.memory.view(dtype)
        first = self.start // typed.element_size()
        return typed[first : first + num_elements]


def supports(tensor: Tensor) -> bool:
    """Whether the kernels can read a tensor, as soon as its values lie side by side."""
    is_strided = tensor.layout is torch.strided
    return tensor.device.type == "cuda" and is_strided and tensor.dtype in _DTYPES and has_triton()


def can_copy(tensor: Tensor) -> bool:
    """Whether ``summarize`` can copy a tensor on the way: one whose values lie side by side already."""
    return tensor.is_contiguous() and tensor.numel() > 0 and tensor.data_ptr() % 16 == 0 and supports(tensor)


def max_shares(num_bytes: int, num_values: int) -> int:
    """Numbers of ``pending_summaries`` that so many values of together so many bytes take, at most."""
    tile_bytes = _TILE_SIZE * min(dtype.itemsize for dtype in _DTYPES)
    return _NUM_FIELDS * (num_bytes // tile_bytes + num_values) + num_values


def pending_summaries(device: torch.device, num_numbers: int = _PENDING_NUMBERS) -> PendingShares:
    """Memory for summaries that are put together later, on one stream."""
    return PendingShares(_finish_many, device, num_numbers)


def summarize(
    flat: Tensor, out: Tensor | None = None, *, pending: PendingShares | None = None, room: Room | None = None
) -> Tensor:
    """The summary of a contiguous tensor of one dimension, on its device.

    Args:
        flat: one that ``supports`` takes, not empty; on the CPU with Triton's interpreter.
        out: (9,) float64 there, written and returned; None: a new one.
        pending: what puts it there later; None: at once.
        room: where ``flat``, one that ``can_copy`` takes, is copied to.
    """
    device, num_elements = flat.device, flat.numel()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return summarize(flat, out, pending=pending, room=room)
    if flat.data_ptr() % 16:  # part of another tensor: rare enough for a copy
        flat = flat.clone()
    num_tiles = -(-num_elements // _TILE_SIZE)
    num_programs = min(num_tiles, _NUM_PROGRAMS) if num_tiles > _MAX_TILES_OF_ONE else 1
    summary = torch.empty(_NUM_FIELDS, dtype=torch.float64, device=device) if out is None else out
    if num_programs == 1:
        shares = summary  # a single program's share is the summary
    elif pending is None:
        shares = torch.empty(_NUM_FIELDS * num_programs, dtype=torch.float64, device=device)
    else:
        shares = pending.take(_NUM_FIELDS * num_programs, summary, num_programs)
    is_large = num_elements + _TILE_SIZE * (2 * num_programs + 1) > _MAX_INT32
    launch = _summarize(flat.dtype, is_large, room is not None, num_elements > _MAX_INT32)
    copy = flat.data_ptr() if room is None else room.memory.data_ptr() + room.start
    addresses = (flat.data_ptr(), copy, shares.data_ptr())
    if not launch.start_known(device.index, addresses, (num_elements,), num_programs):
        copied = flat if room is None else room.view(num_elements, flat.dtype)
        launch.start((flat, copied, shares), (num_elements,), num_programs=num_programs)
    if num_programs > 1 and pending is None:
        _finish("finish_summary_kernel", _NUM_PROGRAMS).start((shares, summary), (num_programs,))
    return summary


def _finish_many(memory: Tensor, rows: Tensor) -> None:
    _finish("finish_many_summaries_kernel", _NUM_PROGRAMS).start((memory, rows), num_programs=rows.shape[0])


@cache
def _summarize(dtype: torch.dtype, is_large: bool, copies: bool, has_large_size: bool) -> Launch:
    """For all sizes, below 2^31 or not (``has_large_size``): what is compiled is kept for each of the two."""
    numbers = (_TILE_SIZE, 16 // dtype.itemsize, is_large, copies)
    return Launch(module=_KERNELS, name="summarize_kernel", numbers=numbers, num_warps=1, fuses=True)


@cache
def _finish(name: str, size: int) -> Launch:
    return Launch(module=_KERNELS, name=name, numbers=(size,), num_warps=_FINISH_WARPS, fuses=True)
