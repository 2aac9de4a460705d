"""Scales from abs maxima: powers of two by integer work on their bits, others by rounding a quotient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.formats.elements import (
    BIAS,
    INF_BITS,
    MANTISSA_MASK,
    MANTISSA_WIDTH,
    magnitude_bits,
    power_of_two,
)
from qcollect.formats.records import Element, QuantType, ScaleFormat, ScaleRule, TensorScale

_LARGEST = torch.finfo(torch.float32).max
# A tensor's power-of-two scale and its reciprocal are both normal float32 numbers.
MIN_TENSOR_EXPONENT, MAX_TENSOR_EXPONENT = -126, 126


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """The scales of blocks, float32: ``decode`` what an element is multiplied with, ``encode`` what a value is.

    NaN where a block holds a NaN or an Inf. ``scale`` is the scale as it is stored, without that of the tensor.
    """

    scale: Tensor
    encode: Tensor
    decode: Tensor


def block_scales(
    amax: Tensor, quant_type: QuantType, rule: ScaleRule, tensor_encode: Tensor | None = None
) -> BlockScales:
    """The scales of blocks whose abs max has these bits.

    Args:
        amax: int32, the magnitude bits of each block's abs max; NaN and Inf count.
        quant_type: with blocks.
        rule: one of the type's.
        tensor_encode: 0-dim float32, what the whole tensor is multiplied with; None: it has no scale.
    """
    assert quant_type.element is not None and quant_type.scale_format is not None
    is_bad = amax >= INF_BITS
    if rule in CARRY:
        exponents = scale_exponents(amax, quant_type.element, quant_type.scale_format, rule)
        scale = power_of_two(exponents).masked_fill_(is_bad, torch.nan)
        return BlockScales(scale=scale, encode=power_of_two(-exponents).masked_fill_(is_bad, torch.nan), decode=scale)
    values = amax.view(torch.float32).masked_fill(is_bad, torch.nan)
    return _nearest_scales(values, quant_type, quant_type.scale_format, tensor_encode)


def scale_exponents(amax_bits: Tensor, element: Element, scale_format: ScaleFormat, rule: ScaleRule) -> Tensor:
    """Exponents of the scales of blocks whose abs max has these float32 bits, int32, clamped to the format.

    With ``f = floor(log2 amax)`` and ``emax`` the element's largest exponent the scale is ``2^(f - emax)``,
    one step more where ``amax / 2^f`` is beyond what the rule lets stand (see ``CARRY``). An all-zero
    block gets the smallest scale. Inf and NaN give a number without meaning.

    Float32 subnormals count as what they are: for ``emax >= 1`` their scale is below the format's range
    anyway, for others they are made normal first.

    **Source:** OCP MX v1.0 section 6.3 (floor); arXiv 2506.08027 and the cuDNN block scaling page (rceil).
    """
    bits = amax_bits.clamp_max(INF_BITS)
    offset: int | Tensor = BIAS + element.max_exponent
    if element.max_exponent < 1:
        is_subnormal = bits < 1 << MANTISSA_WIDTH
        bits = torch.where(is_subnormal, (bits.view(torch.float32) * 2.0**MANTISSA_WIDTH).view(torch.int32), bits)
        offset = offset + is_subnormal.to(torch.int32) * MANTISSA_WIDTH
    exponents = ((bits + CARRY[rule](element)) >> MANTISSA_WIDTH) - offset
    return exponents.clamp_(scale_format.min_exponent, scale_format.max_exponent)


def _nearest_scales(
    amax: Tensor, quant_type: QuantType, scale_format: ScaleFormat, tensor_encode: Tensor | None
) -> BlockScales:
    """The scale nearest to ``amax / max``, every step rounded to the type's scale arithmetic.

    **Source:** arXiv 2509.25149 appendix B and TransformerEngine's reference (nvfp4); arXiv 2602.11287 (hif4).
    """
    step = ROUND_TO[quant_type.scale_arithmetic]
    factor = step(torch.full((), 1.0 / quant_type.max_element, device=amax.device))
    if tensor_encode is not None:
        factor = step(tensor_encode * factor)
    scale = round_scale(step(amax * factor), scale_format)
    decode = scale if tensor_encode is None else step(scale * tensor_decode(tensor_encode))
    encode = step(decode.reciprocal()).clamp_max(_LARGEST)
    return BlockScales(scale=scale, encode=encode, decode=decode)


def _to_bfloat16(values: Tensor) -> Tensor:
    """``values`` to the nearest bfloat16, ties to even, in float32, by their bits: a compiler may leave out casts."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isnan(), values, rounded)


def round_scale(values: Tensor, scale_format: ScaleFormat) -> Tensor:
    """``values`` (not negative, float32) to the nearest scale the format holds, ties to even; NaN stays."""
    lowest = (scale_format.min_exponent + BIAS) << MANTISSA_WIDTH
    exponents = (magnitude_bits(values) >> MANTISSA_WIDTH << MANTISSA_WIDTH).clamp_(lowest, 254 << MANTISSA_WIDTH)
    spacing = (exponents - (scale_format.mantissa_bits << MANTISSA_WIDTH)).view(torch.float32)
    rounded = (values / spacing).round_() * spacing
    return rounded.clamp_(scale_format.min_value, scale_format.max_value)


# ---------------------------------------------------------------------------------------------
# Whole tensors
# ---------------------------------------------------------------------------------------------


def tensor_amax(x: Tensor, tensor_scale: TensorScale) -> Tensor:
    """The abs max of ``x`` that its scale follows from, 0-dim float32; 0 if nothing counts."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if x.device.type == "cpu":  # where asking for a value waits for nothing
        low, high = torch.aminmax(x.detach())
        amax = torch.maximum(low.abs(), high.abs()).to(torch.float32)
        if tensor_scale.sees_nonfinite or amax.isfinite():
            return amax
    bits = magnitude_bits(x.detach().to(torch.float32))
    if not tensor_scale.sees_nonfinite:
        bits = bits.masked_fill_(bits >= INF_BITS, 0)
    return bits.amax().view(torch.float32)


def power_of_two_scale(amax: Tensor, target: int) -> Tensor:
    """``2^(floor(log2 amax) - target)``, 0-dim float32, exponent clamped to [-126, 126]; 1 for 0."""
    exponents = ((magnitude_bits(amax) >> MANTISSA_WIDTH) - target).clamp_(
        MIN_TENSOR_EXPONENT + BIAS, MAX_TENSOR_EXPONENT + BIAS
    )
    return (exponents << MANTISSA_WIDTH).view(torch.float32).masked_fill_(amax == 0, 1.0)


def tensor_encode(amax: Tensor, tensor_scale: TensorScale, rule: ScaleRule) -> Tensor:
    """What a tensor with this abs max is multiplied with before it is rounded, 0-dim float32.

    ``float32(bound / amax)``, not above the largest float32; under ``rceil`` rounded down to a power of two.

    **Source:** torchao float8_utils.tensor_to_scale (fp8); TransformerEngine's reference (nvfp4).
    """
    assert tensor_scale.bound is not None
    counted = amax.to(torch.float64)
    if tensor_scale.min_amax:
        counted = counted.clamp_min(tensor_scale.min_amax)
    encode = (tensor_scale.bound / counted).to(torch.float32).clamp_max(_LARGEST)
    if rule == "rceil":
        bits = encode.view(torch.int32) & ~MANTISSA_MASK
        encode = torch.where(encode.isnan(), encode, bits.view(torch.float32))
    return encode


def tensor_decode(encode: Tensor) -> Tensor:
    """The tensor's scale, value = scale x element: the reciprocal, float32."""
    return encode.reciprocal()


# What each rule adds to the abs max's bits before the mantissa is cut off: the carry into the exponent
# is the step up. A mantissa above the threshold carries; the threshold is
#   floor: none;  ceil: 1;  even: halfway from the element's last mantissa below 2 to 2, which goes up;
#   rceil: the mantissa of the element's maximum, so that nothing is ever clamped.
CARRY: Mapping[ScaleRule, Callable[[Element], int]] = {
    "floor": lambda element: 0,
    "ceil": lambda element: MANTISSA_MASK,
    "even": lambda element: 1 << (MANTISSA_WIDTH - 1 - element.mantissa_bits),
    "rceil": lambda element: MANTISSA_MASK - int((element.max_mantissa - 1) * (MANTISSA_MASK + 1)),
}
ROUND_TO: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda values: values,
    "bfloat16": _to_bfloat16,
}
