"""Blocks along an axis, or tiles of two: a tensor cut into elements that share a scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements along the axis, or (rows, columns) of the last two dimensions.
BlockSize = int | tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A dense float32 copy of a tensor and a view of it as blocks.

    ``values`` is the copy, filled up with zeros where a last block is short; ``view`` the same memory
    with every blocked dimension as (blocks, elements); ``dims`` those of ``view`` that lie inside a block.
    """

    values: Tensor
    view: Tensor
    dims: tuple[int, ...]

    def cut(self, shape: torch.Size) -> Tensor:
        """``values`` without what was filled up, as a view of the shape given."""
        cut = self.values
        for dim, length in enumerate(cut.shape):
            target = shape[dim] if shape else 1
            if length != target:
                cut = cut.narrow(dim, 0, target)
        return cut.reshape(shape)


def split(x: Tensor, axis: int, block_size: BlockSize, *, multiple: int = 1) -> Blocks:
    """``x`` as blocks. A short last block is filled up with zeros, which changes no scale.

    Blocks never reach over into the next row.

    Args:
        x: at least one dimension, not empty; two for tiles.
        axis: 0 or more; of no consequence for tiles.
        multiple: what the length of a short block is a multiple of.
    """
    sizes = {axis: block_size} if isinstance(block_size, int) else _tile_sizes(x, block_size)
    padded, seen, dims = list(x.shape), [], []
    for dim, length in enumerate(x.shape):
        if dim not in sizes:
            seen.append(length)
            continue
        width = min(sizes[dim], -(-length // multiple) * multiple)
        num_blocks = -(-length // width)
        padded[dim] = num_blocks * width
        seen += [num_blocks, width]
        dims.append(len(seen) - 1)
    values = torch.empty(padded, dtype=torch.float32, device=x.device)
    if list(x.shape) != padded:
        values.zero_()
    values[tuple(slice(0, length) for length in x.shape)].copy_(x)
    return Blocks(values=values, view=values.view(seen), dims=tuple(dims))


def _tile_sizes(x: Tensor, block_size: tuple[int, int]) -> dict[int, int]:
    return {x.dim() - 2: block_size[0], x.dim() - 1: block_size[1]}


def grouped(view: Tensor, dim: int, size: int) -> Tensor:
    """``view`` with ``dim`` as (groups, ``size``)."""
    shape = view.shape
    return view.view(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])
