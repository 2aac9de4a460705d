"""Which part of a tensor this rank holds, and the abs max over all of it.

A scale for the whole tensor follows from the whole tensor's abs max: of one that is sharded over ranks
(tensor parallel, FSDP outside forward) the maximum is taken over the ranks that hold its parts.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats.backends import find_amax
from qcollect.formats.records import TensorScale

LOCAL = "local"


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of ``x``: of a DTensor its shard, else ``x`` itself.

    Raises:
        FormatError: a DTensor whose values are partial sums, which nobody holds.
    """
    if not is_distributed(x):
        return x
    if any(placement.is_partial() for placement in x.placements):  # type: ignore[attr-defined]
        raise FormatError(
            f"a tensor of partial sums ({x.placements}) has no values to quantize; redistribute it first."  # type: ignore[attr-defined]
        )
    local: Tensor = x.to_local()  # type: ignore[attr-defined]
    return local


def global_amax(part: Tensor, tensor_scale: TensorScale, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """The abs max over all ranks that hold parts of a tensor, 0-dim float32; the same on each of them.

    Args:
        part: this rank's.
        groups: the ranks that hold the others (``holders``), all of which call this together.
    """
    amax = find_amax(part, tensor_scale)
    for group in groups:
        # as bits, whose order is that of magnitudes with NaN above all: a NaN must not get lost on the way
        bits = amax.view(torch.int32)
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        amax = bits.view(torch.float32)
    return amax


def amax_scope(x: Tensor, group: dist.ProcessGroup | None = None) -> str:
    """``local``, or ``N ranks``: over how many ranks ``global_amax`` looks."""
    num_ranks = 1
    for part_holders in holders(x, group):
        num_ranks *= dist.get_world_size(part_holders)
    return LOCAL if num_ranks == 1 else f"{num_ranks} ranks"


def holders(x: Tensor, group: dist.ProcessGroup | None = None) -> list[dist.ProcessGroup]:
    """The ranks that hold parts of ``x``, by group: of a DTensor its mesh says them, of a plain tensor ``group``."""
    if is_distributed(x):
        mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
        return [mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard()]
    return [] if group is None else [group]


def is_distributed(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor, spread over ranks in whatever way."""
    # its class is imported by whoever makes one, and takes long to import
    return type(x).__name__ == "DTensor"
