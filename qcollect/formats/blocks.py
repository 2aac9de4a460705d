"""Blocks along an axis and their shared scale, chosen by integer arithmetic on the abs max's bits."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qcollect.formats.catalog import Element, ScaleFormat, ScaleRule
from qcollect.formats.elements import (
    BIAS,
    INF_BITS,
    MANTISSA_MASK,
    MANTISSA_WIDTH,
    magnitude_bits,
    power_of_two,
)


def split(x: Tensor, axis: int, block_size: int) -> tuple[Tensor, Tensor]:
    """A dense float32 copy of ``x``, and a view of it as blocks: ``axis`` becomes (blocks, elements).

    A short last block is filled up with zeros, which changes no scale; so the copy may be longer than
    ``x`` along ``axis``. Blocks never reach over into the next row.

    Args:
        x: at least one dimension, not empty.
        axis: 0 or more.
    """
    length = x.shape[axis]
    width = min(block_size, length)
    num_blocks = -(-length // width)
    padded = num_blocks * width
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    work = torch.empty((*before, padded, *after), dtype=torch.float32, device=x.device)
    work.narrow(axis, 0, length).copy_(x)
    work.narrow(axis, length, padded - length).zero_()
    return work, work.view(*before, num_blocks, width, *after)


def scale_exponents(amax_bits: Tensor, element: Element, scale_format: ScaleFormat, rule: ScaleRule) -> Tensor:
    """Exponents of the scales of blocks whose abs max has these float32 bits, int32, clamped to the format.

    With ``f = floor(log2 amax)`` and ``emax`` the element's largest exponent the scale is ``2^(f - emax)``,
    one step more where ``amax / 2^f`` is beyond what the rule lets stand (see ``_CARRY``). An all-zero
    block gets the smallest scale. Inf and NaN give a number without meaning.

    Exact for float32 subnormals as well, because their scale is below the format's range for every
    ``emax >= 1``.

    **Source:** OCP MX v1.0 section 6.3 (floor); arXiv 2506.08027 and the cuDNN block scaling page (rceil).
    """
    carry = _CARRY[rule](element)
    exponents = ((amax_bits.clamp_max(INF_BITS) + carry) >> MANTISSA_WIDTH) - (BIAS + element.max_exponent)
    return exponents.clamp_(scale_format.min_exponent, scale_format.max_exponent)


def scale_(blocks: Tensor, axis: int, element: Element, scale_format: ScaleFormat, rule: ScaleRule) -> Tensor:
    """Divides ``blocks`` in place by their scales (along ``axis``) and gives the scales back, float32.

    A block with a NaN or an Inf becomes NaN as a whole, its scale too: the scale format's NaN code says
    so, and a block that silently lost its other values would look healthy.
    """
    amax = magnitude_bits(blocks).amax(axis, keepdim=True)
    exponents = scale_exponents(amax, element, scale_format, rule)
    is_bad = amax >= INF_BITS
    blocks.mul_(power_of_two(-exponents).masked_fill_(is_bad, torch.nan))
    return power_of_two(exponents).masked_fill_(is_bad, torch.nan)


# What each rule adds to the abs max's bits before the mantissa is cut off: the carry into the exponent
# is the step up. A mantissa above the threshold carries; the threshold is
#   floor: none;  ceil: 1;  even: halfway from the element's last mantissa below 2 to 2, which goes up;
#   rceil: the mantissa of the element's maximum, so that nothing is ever clamped.
_CARRY: Mapping[ScaleRule, Callable[[Element], int]] = {
    "floor": lambda element: 0,
    "ceil": lambda element: MANTISSA_MASK,
    "even": lambda element: 1 << (MANTISSA_WIDTH - 1 - element.mantissa_bits),
    "rceil": lambda element: MANTISSA_MASK - int((element.max_mantissa - 1) * (MANTISSA_MASK + 1)),
}
