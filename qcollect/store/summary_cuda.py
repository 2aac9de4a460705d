"""The summary of a CUDA tensor by Triton kernels: one launch, or two; a copy of it on the way, if that is wanted.

Nothing waits for the device. Triton is imported when a tensor first asks for it. It works out at every launch which
compiled kernel its arguments belong to, which takes longer than a small launch itself; here that is kept, for all sizes
of a dtype.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcollect.formats.pending import PendingShares
from qcollect.formats.triton_launch import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_FIELDS = 9
_TILE_SIZE = 512  # of one warp
# The same number on every device, so that sums are the same too. 16 of a multiprocessor's are there at a time.
_NUM_PROGRAMS = 2048
_MAX_TILES_OF_ONE = 16  # up to which one program alone is faster than several and another launch
_FINISH_WARPS = 8
_MAX_INT32 = (1 << 31) - 1
_PENDING_NUMBERS = 1 << 20

_compiled: dict[tuple[object, ...], Any] = {}


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
    constants = (_TILE_SIZE, 16 // flat.element_size(), is_large, room is not None)
    key: tuple[Any, ...] = ("summarize_kernel", device.index, flat.dtype, num_elements > _MAX_INT32, constants)
    copy = flat.data_ptr() if room is None else room.memory.data_ptr() + room.start
    addresses = (flat.data_ptr(), copy, shares.data_ptr())
    if not _start(key, num_programs, (*addresses, num_elements, *constants)):
        copied = flat if room is None else room.view(num_elements, flat.dtype)
        _compile(key, num_programs, (flat, copied, shares, num_elements, *constants), num_warps=1)
    if num_programs > 1 and pending is None:
        key = ("finish_summary_kernel", device.index)
        if not _start(key, 1, (shares.data_ptr(), summary.data_ptr(), num_programs, _NUM_PROGRAMS)):
            _compile(key, 1, (shares, summary, num_programs, _NUM_PROGRAMS), num_warps=_FINISH_WARPS)
    return summary


def _finish_many(memory: Tensor, rows: Tensor) -> None:
    key = ("finish_many_summaries_kernel", memory.device.index)
    if not _start(key, rows.shape[0], (memory.data_ptr(), rows.data_ptr(), _NUM_PROGRAMS)):
        _compile(key, rows.shape[0], (memory, rows, _NUM_PROGRAMS), num_warps=_FINISH_WARPS)


def _start(key: tuple[Any, ...], num_programs: int, arguments: tuple[object, ...]) -> bool:
    """Starts a kernel on the current device, if it was compiled before for such arguments.

    Args:
        key: its name, the index of the device, and all that it is compiled for.
        arguments: tensors by their addresses, at multiples of 16 bytes.
    """
    compiled = _compiled.get(key)
    if compiled is None:
        return False
    run, function, metadata, stream_of = compiled
    run(num_programs, 1, 1, stream_of(key[1]), function, metadata, None, None, None, *arguments)
    return True


def _compile(key: tuple[Any, ...], num_programs: int, arguments: tuple[object, ...], *, num_warps: int) -> None:
    """``_start`` for the first time, with tensors themselves."""
    kernels = _kernels()
    found = kernels[key[0]][(num_programs,)](*arguments, num_warps=num_warps)
    if found is not None and key[1] is not None:
        stream_of = kernels["triton"].runtime.driver.active.get_current_stream
        _compiled[key] = (found.run, found.function, found.packed_metadata, stream_of)


@cache
def _kernels() -> dict[str, Any]:
    from qcollect.store import summary_kernels

    return vars(summary_kernels)
