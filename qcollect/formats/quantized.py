"""Codes and scales of a tensor, in the bit layout of the type's specification."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.formats import codes as coding
from qcollect.formats.eager import Choices, Scaled
from qcollect.formats.records import Element
from qcollect.formats.scales import tensor_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCodes:
    """The scales of a tensor's blocks as codes, and the exponents inside blocks: what ``Quantized`` says of them."""

    scales: Tensor
    micro: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Codes and scales of a tensor.

    Args:
        codes: of torch's own dtype where it has one (``float8_e4m3fn``, ``float8_e5m2``, ``float4_e2m1fn_x2``,
            ``bfloat16``, ``float16``), else uint8. One code to a byte in the shape of the tensor, 4-bit codes two to a
            byte along ``axis`` (the first in the lower half; the dtype of torch's own only along the last).
        scales: of the blocks, ``float8_e8m0fnu``, ``float8_e4m3fn`` or uint8, in the shape of the tensor with the
            number of blocks along the blocked dimensions; None without blocks.
        micro: exponents inside a block, uint8 0 or 1, one tensor for each group size; () without.
        encode: what the whole tensor was multiplied with, 0-dim float32; None: nothing.
        shape, dtype: of the tensor.
        choices: what it was quantized with.
    """

    codes: Tensor
    scales: Tensor | None
    micro: tuple[Tensor, ...]
    encode: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    choices: Choices

    @property
    def tensor_scale(self) -> Tensor | None:
        """The scale of the whole tensor (0-dim float32), None without one: value = tensor scale x scale x element."""
        return None if self.encode is None else tensor_decode(self.encode)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values: what ``fake_quantize`` gives, in ``dtype`` (None: the tensor's own)."""
        entry, element = self.choices.quant_type, self.choices.quant_type.element
        assert element is not None
        if element.is_cast:
            values = self.codes.to(torch.float32)
            return (values if self.encode is None else values.div_(self.encode)).to(dtype or self.dtype)
        shape = self.shape if len(self.shape) else torch.Size((1,))
        bits = self.codes.view(torch.uint8)
        if element.bits == 4:
            bits = coding.unpack(bits, self.choices.axis, shape[self.choices.axis])
        values = coding.decode(bits, element)
        if self.scales is None:
            if self.encode is not None:
                values.div_(self.encode)
            return values.view(self.shape).to(dtype or self.dtype)
        # as the codes were made: a tensor of element values and a scale of its own for every block
        for (size, _), exponents in zip(entry.micro_exponents, self.micro, strict=True):
            values.mul_(_spread(torch.exp2(exponents.to(torch.float32)), shape, {self.choices.axis: size}))
        factor = _block_factors(self.scales, self.encode, self.choices)
        return values.mul_(_spread(factor, shape, _sizes(self.choices, shape))).view(self.shape).to(dtype or self.dtype)


@torch.no_grad()
def codes_of_values(values: Tensor, choices: Choices, *, encode: Tensor | None, scales: ScaleCodes | None) -> Quantized:
    """The codes that stand for ``values``: ``dequantize`` gives them back bit for bit, but for the bits of a NaN.

    Where a product of scale and element is none of the dtype's numbers (too small, or too large) these may be other
    codes than the tensor was quantized to, of the same values.

    Args:
        values: what was quantized and dequantized with these choices; not empty.
        encode: what the whole tensor was multiplied with, 0-dim float32; None: nothing.
        scales: of its blocks; None for a type without blocks.
    """
    entry, element = choices.quant_type, choices.quant_type.element
    assert element is not None
    shape = values.shape if values.dim() else torch.Size((1,))
    steps = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(shape)
    if scales is not None:
        factor = _block_factors(scales.scales, encode, choices)
        # of a scale that is zero nothing but zeros can come
        steps.div_(_spread(factor.masked_fill(factor == 0, 1.0), shape, _sizes(choices, shape)))
        for (size, _), exponents in zip(entry.micro_exponents, scales.micro, strict=True):
            steps.div_(_spread(torch.exp2(exponents.to(torch.float32)), shape, {choices.axis: size}))
    elif encode is not None:
        steps.mul_(encode)
    if element.is_cast:
        codes = _element_codes(steps.view(values.shape), element, choices.axis)
    else:
        # a quotient is an element, or as near to one as the dtype of the values told
        saturate = choices.saturate or element.overflow == "saturate"
        codes = _packed(coding.encode_nearest(steps, element, saturate=saturate), element, choices.axis)
    return Quantized(
        codes=codes,
        scales=None if scales is None else scales.scales,
        micro=() if scales is None else scales.micro,
        encode=encode,
        shape=values.shape,
        dtype=values.dtype,
        choices=choices,
    )


def make_codes(scaled: Scaled, choices: Choices, shape: torch.Size, dtype: torch.dtype) -> Quantized:
    """What was scaled, rounded and limited, as codes.

    Args:
        shape, dtype: of the tensor.
    """
    element = choices.quant_type.element
    assert element is not None
    scales = block_scale_codes(scaled, choices)
    return Quantized(
        codes=_element_codes(scaled.blocks.cut(shape), element, choices.axis),
        scales=None if scales is None else scales.scales,
        micro=() if scales is None else scales.micro,
        encode=scaled.encode,
        shape=shape,
        dtype=dtype,
        choices=choices,
    )


def block_scale_codes(scaled: Scaled, choices: Choices) -> ScaleCodes | None:
    """The scales of what was scaled, as ``Quantized`` has them; None without blocks."""
    scales = scale_codes(scaled, choices)
    if scales is None:
        return None
    assert choices.quant_type.scale_format is not None
    micro = (e.squeeze(dim + 1).flatten(dim - 1, dim).to(torch.uint8) for dim, _, e in scaled.micro)
    return ScaleCodes(
        scales=scales.view(_torch_dtype(choices.quant_type.scale_format.torch_dtype) or torch.uint8),
        micro=tuple(micro),
    )


def scale_codes(scaled: Scaled, choices: Choices) -> Tensor | None:
    """The code of every block's scale, uint8; None without blocks."""
    if scaled.scales is None:
        return None
    assert choices.quant_type.scale_format is not None
    codes = coding.encode_scale(scaled.scales.scale, choices.quant_type.scale_format)
    for dim in reversed(scaled.blocks.dims):
        codes = codes.squeeze(dim)
    return codes


def _element_codes(values: Tensor, element: Element, axis: int) -> Tensor:
    """Codes of float32 values that the element holds, in torch's own dtype where there is one."""
    torch_dtype = _torch_dtype(element.torch_dtype)
    if element.is_cast:
        assert torch_dtype is not None
        return values.to(torch_dtype)
    return _packed(coding.encode(values, element).view(values.shape if values.dim() else (1,)), element, axis)


def _packed(codes: Tensor, element: Element, axis: int) -> Tensor:
    """Codes one to a byte as ``Quantized`` has them: those of 4 bits two to a byte, of torch's own dtype."""
    torch_dtype = _torch_dtype(element.torch_dtype)
    if element.bits == 4:
        codes = coding.pack(codes, axis)
    is_last = axis == codes.dim() - 1
    return codes.view(torch_dtype) if torch_dtype is not None and (element.bits != 4 or is_last) else codes


def _block_factors(scales: Tensor, encode: Tensor | None, choices: Choices) -> Tensor:
    """What the elements of each block are multiplied with, float32."""
    assert choices.quant_type.scale_format is not None
    factor = coding.decode_scale(scales.view(torch.uint8), choices.quant_type.scale_format)
    return factor if encode is None else factor * tensor_decode(encode)


def _sizes(choices: Choices, shape: torch.Size) -> dict[int, int]:
    """By dimension, how many elements share a scale along it."""
    size = choices.block_size
    assert size is not None
    return {choices.axis: size} if isinstance(size, int) else {len(shape) - 2: size[0], len(shape) - 1: size[1]}


def _torch_dtype(name: str | None) -> torch.dtype | None:
    """Torch's own dtype of this name; None if this version has none."""
    return None if name is None else getattr(torch, name, None)


def _spread(scales: Tensor, shape: torch.Size, sizes: dict[int, int]) -> Tensor:
    """``scales`` with every one repeated over its block, cut to ``shape``."""
    for dim, size in sizes.items():
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales
