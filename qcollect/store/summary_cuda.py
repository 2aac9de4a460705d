"""The summary of a CUDA tensor by Triton kernels: one launch, or two.

Nothing waits for the device. Triton is imported when a tensor first asks for it. It works out at every launch which
compiled kernel its arguments belong to, which takes longer than a small launch itself; here that is kept, for all sizes
of a dtype.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from qcollect.formats.triton_launch import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_FIELDS = 9
_TILE_SIZE = 512  # of one warp
# The same number on every device, so that sums are the same too. 16 of a multiprocessor's are there at a time.
_NUM_PROGRAMS = 2048
_MAX_TILES_OF_ONE = 16  # up to which one program alone is faster than several and another launch
_FINISH_WARPS = 8
_MAX_INT32 = (1 << 31) - 1

_compiled: dict[tuple[object, ...], Any] = {}


def supports(tensor: Tensor) -> bool:
    """Whether the kernels can read a tensor, as soon as its values lie side by side."""
    is_strided = tensor.layout is torch.strided
    return tensor.device.type == "cuda" and is_strided and tensor.dtype in _DTYPES and has_triton()


def summarize(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """The summary of a contiguous tensor of one dimension, on its device.

    Args:
        flat: one that ``supports`` takes, not empty; on the CPU with Triton's interpreter.
        out: (9,) float64 there, written and returned; None: a new one.
    """
    device, num_elements = flat.device, flat.numel()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return summarize(flat, out)
    if flat.data_ptr() % 16:  # part of another tensor: rare enough for a copy
        flat = flat.clone()
    num_tiles = -(-num_elements // _TILE_SIZE)
    num_programs = min(num_tiles, _NUM_PROGRAMS) if num_tiles > _MAX_TILES_OF_ONE else 1
    summary = torch.empty(_NUM_FIELDS, dtype=torch.float64, device=device) if out is None else out
    is_one = num_programs == 1  # whose share is the summary
    shares = summary if is_one else torch.empty(_NUM_FIELDS * num_programs, dtype=torch.float64, device=device)
    is_large = num_elements + _TILE_SIZE * (2 * num_programs + 1) > _MAX_INT32
    sizes = (_TILE_SIZE, 16 // flat.element_size(), is_large)
    _launch("summarize_kernel", num_programs, (flat, shares), num_elements, sizes, num_warps=1)
    if is_one:
        return summary
    _launch("finish_summary_kernel", 1, (shares, summary), num_programs, (_NUM_PROGRAMS,), num_warps=_FINISH_WARPS)
    return summary


def _launch(
    name: str,
    num_programs: int,
    tensors: tuple[Tensor, Tensor],
    number: int,
    constants: tuple[int, ...],
    num_warps: int,
) -> None:
    """Starts a kernel on the current device, which is that of the tensors.

    Args:
        number, constants: what a kernel is not compiled for, but for its width, and what it is.
    """
    first, second = tensors[0].data_ptr(), tensors[1].data_ptr()
    device, dtype = tensors[0].device, tensors[0].dtype
    key = (name, device.index, dtype, number > _MAX_INT32, constants)
    compiled = _compiled.get(key)
    if compiled is not None:
        run, function, metadata, stream_of = compiled
        stream = stream_of(device.index)
        run(num_programs, 1, 1, stream, function, metadata, None, None, None, first, second, number, *constants)
        return
    kernels = _kernels()
    found = kernels[name][(num_programs,)](*tensors, number, *constants, num_warps=num_warps)
    if found is not None and device.type != "cpu":
        stream_of = kernels["triton"].runtime.driver.active.get_current_stream
        _compiled[key] = (found.run, found.function, found.packed_metadata, stream_of)


@cache
def _kernels() -> dict[str, Any]:
    from qcollect.store import summary_kernels

    return vars(summary_kernels)
