"""What one rank holds of a tensor that is spread over ranks, and where in the whole it lies.

Under tensor parallelism a module's weight, operands and results are DTensors. Gemms run on them as torch has
them run; quantizers and files take this rank's part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qcollect.formats.scope import is_distributed


def is_sharded(tensor: Tensor) -> bool:
    """Whether some rank holds less of a DTensor than all: its scales depend on others' parts."""
    return is_distributed(tensor) and any(p.is_shard() for p in tensor.placements)  # type: ignore[attr-defined]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor (of partial sums its own sum); any other tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # a collective may still be under way
    return local if wait is None else wait()


def like(original: Tensor, local: Tensor) -> Tensor:
    """``local``, dense, as this rank's part of a tensor that is spread as ``original`` is; of a plain one itself."""
    if not is_distributed(original):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements, shape = original.device_mesh, original.placements, original.shape  # type: ignore[attr-defined]
    strides = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)
    return whole


def describe_sharding(tensor: Tensor) -> dict[str, Any] | None:
    """Of a DTensor: the whole's shape, where in it this rank's part begins, and how it is laid over the mesh.

    ``offset`` is None where the layout is none of torch's plain ones. None for a tensor that is no DTensor.
    """
    if not is_distributed(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names
    return {
        "global_shape": list(tensor.shape),
        "offset": _offset(tensor.shape, placements, mesh.shape, mesh.get_coordinate()),
        "placements": [_describe_placement(placement) for placement in placements],
        "mesh_shape": list(mesh.shape),
        "mesh_dim_names": None if names is None else list(names),
        "mesh_coordinate": list(mesh.get_coordinate()),
    }


def _describe_placement(placement: Any) -> str:
    if type(placement).__name__ == "Shard":
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate"
    return f"Partial({placement.reduce_op})" if placement.is_partial() else repr(placement)


def _offset(shape: Any, placements: Any, mesh_shape: Any, coordinate: Any) -> list[int] | None:
    """Shards are cut as ``torch.chunk`` cuts, one mesh dimension after the other."""
    sizes, offset = list(shape), [0] * len(shape)
    for placement, num_parts, place in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_shard():
            continue
        if type(placement).__name__ != "Shard":
            return None
        dim = placement.dim
        part = -(-sizes[dim] // num_parts)
        begin = min(part * place, sizes[dim])
        offset[dim] += begin
        sizes[dim] = min(part, sizes[dim] - begin)
    return offset


def spread_heads(module: nn.Module) -> Callable[[Tensor, int], Tensor] | None:
    """How an attention kernel's plain tensors, cut by heads, are parts of a whole; None where they are the whole.

    Under tensor parallelism the projections before a kernel give each rank some of the heads, as plain tensors.
    It shows in the weights of the module's own linears: spread along the features they give.
    """
    for child in module.children():
        weight = getattr(child, "weight", None)
        if isinstance(child, nn.Linear) and weight is not None and is_distributed(weight):
            mesh_dims = [i for i, p in enumerate(weight.placements) if type(p).__name__ == "Shard" and p.dim == 0]
            if mesh_dims:
                return _Heads(weight.device_mesh, mesh_dims)
    return None


class _Heads:
    """Makes DTensors of tensors that hold a rank's heads."""

    def __init__(self, mesh: Any, mesh_dims: list[int]) -> None:
        self.mesh, self.mesh_dims = mesh, mesh_dims

    def __call__(self, tensor: Tensor, head_dim: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Shard(head_dim) if i in self.mesh_dims else Replicate() for i in range(self.mesh.ndim)]
        whole: Tensor = DTensor.from_local(tensor, self.mesh, placements, run_check=False)
        return whole
