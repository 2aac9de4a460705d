"""Which part of a tensor this rank holds, and the abs max over all of it.

A scale for the whole tensor follows from the whole tensor's abs max: of one that is sharded over ranks
(tensor parallel, FSDP outside forward) the maximum is taken over the ranks that hold its parts.
"""

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
    if not _is_sharded_kind(x):
        return x
    if any(placement.is_partial() for placement in x.placements):  # type: ignore[attr-defined]
        raise FormatError(
            f"a tensor of partial sums ({x.placements}) has no values to quantize; redistribute it first."  # type: ignore[attr-defined]
        )
    local: Tensor = x.to_local()  # type: ignore[attr-defined]
    return local


def global_amax(x: Tensor, tensor_scale: TensorScale, group: dist.ProcessGroup | None = None) -> Tensor:
    """The abs max over all ranks that hold parts of ``x``, 0-dim float32; the same on each of them.

    Args:
        x: a plain tensor, or a DTensor, whose mesh says which ranks hold its shards.
        group: the ranks that hold the parts of a plain tensor; None: this one alone holds all of it. All of them
            call this together.
    """
    amax = find_amax(local_part(x), tensor_scale)
    for holders in _groups(x, group):
        # as bits, whose order is that of magnitudes with NaN above all: a NaN must not get lost on the way
        bits = amax.view(torch.int32)
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=holders)
        amax = bits.view(torch.float32)
    return amax


def amax_scope(x: Tensor, group: dist.ProcessGroup | None = None) -> str:
    """``local``, or ``N ranks``: over how many ranks ``global_amax`` looks."""
    num_ranks = 1
    for holders in _groups(x, group):
        num_ranks *= dist.get_world_size(holders)
    return LOCAL if num_ranks == 1 else f"{num_ranks} ranks"


def _groups(x: Tensor, group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    if _is_sharded_kind(x):
        mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
        return [mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard()]
    return [] if group is None else [group]


def _is_sharded_kind(x: Tensor) -> bool:
    # its class is imported by whoever makes one, and takes long to import
    return type(x).__name__ == "DTensor"
