"""A random Hadamard transform along an axis: outliers are spread over a group before it is quantized.

Both operands of a gemm transformed along the axis they contract give the same product, since the
transform is orthogonal. Sums run in a fixed order in float32, so every device gives the same bits.

**Source:** arXiv 2509.25149 (16 x 16 on the operands of wgrad); arXiv 2502.20586.
"""

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats.random import random_signs
from qcollect.formats.records import HADAMARD_SIZES


def rotate(x: Tensor, axis: int, size: int, seed: int) -> Tensor:
    """``x`` with groups of ``size`` along ``axis`` multiplied by random signs and a Hadamard matrix, float32.

    Args:
        x: at least one dimension.
        axis: 0 or more.
        seed: of the signs, which are the same for every group.

    Raises:
        FormatError: the axis is not a multiple of ``size`` long.
    """
    length = x.shape[axis]
    if length % size:
        raise FormatError(
            f"a Hadamard transform of {size} needs a multiple of {size} elements along axis {axis}, not {length}; "
            f"use another size ({', '.join(map(str, HADAMARD_SIZES))}) or none."
        )
    groups = x.detach().to(torch.float32).movedim(axis, -1).reshape(-1, size) * random_signs(seed, size, x.device)
    width = 1
    while width < size:
        pairs = groups.view(-1, size // (2 * width), 2, width)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((first + second, first - second), dim=2)
        width *= 2
    groups = groups.reshape(-1, size) * size**-0.5
    rotated: Tensor = groups.view(x.movedim(axis, -1).shape).movedim(-1, axis).contiguous()
    return rotated
