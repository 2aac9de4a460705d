"""Codes and scales of a tensor, in the bit layout of the type's specification."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.formats import codes as coding
from qcollect.formats.eager import Choices, Scaled
from qcollect.formats.scales import tensor_decode


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
        assert entry.scale_format is not None
        # as the codes were made: a tensor of element values and a scale of its own for every block
        factor = coding.decode_scale(self.scales.view(torch.uint8), entry.scale_format)
        if self.encode is not None:
            factor = factor * tensor_decode(self.encode)
        for (size, _), exponents in zip(entry.micro_exponents, self.micro, strict=True):
            values.mul_(_spread(torch.exp2(exponents.to(torch.float32)), shape, {self.choices.axis: size}))
        return values.mul_(_spread(factor, shape, self._sizes(shape))).view(self.shape).to(dtype or self.dtype)

    def _sizes(self, shape: torch.Size) -> dict[int, int]:
        size = self.choices.block_size
        assert size is not None
        return (
            {self.choices.axis: size} if isinstance(size, int) else {len(shape) - 2: size[0], len(shape) - 1: size[1]}
        )


def make_codes(scaled: Scaled, choices: Choices, shape: torch.Size, dtype: torch.dtype) -> Quantized:
    """What was scaled, rounded and limited, as codes.

    Args:
        shape, dtype: of the tensor.
    """
    element = choices.quant_type.element
    assert element is not None
    values, torch_dtype = scaled.blocks.cut(shape), _torch_dtype(element.torch_dtype)
    if element.is_cast:
        assert torch_dtype is not None
        codes = values.to(torch_dtype)
    else:
        codes = coding.encode(values, element).view(shape if len(shape) else (1,))
        if element.bits == 4:
            codes = coding.pack(codes, choices.axis)
        is_last = choices.axis == codes.dim() - 1
        if torch_dtype is not None and (element.bits != 4 or is_last):
            codes = codes.view(torch_dtype)
    scales = scale_codes(scaled, choices)
    if scales is not None:
        assert choices.quant_type.scale_format is not None
        scales = scales.view(_torch_dtype(choices.quant_type.scale_format.torch_dtype) or torch.uint8)
    return Quantized(
        codes=codes,
        scales=scales,
        micro=tuple(
            exponents.squeeze(dim + 1).flatten(dim - 1, dim).to(torch.uint8) for dim, _, exponents in scaled.micro
        ),
        encode=scaled.encode,
        shape=shape,
        dtype=dtype,
        choices=choices,
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


def _torch_dtype(name: str | None) -> torch.dtype | None:
    """Torch's own dtype of this name; None if this version has none."""
    return None if name is None else getattr(torch, name, None)


def _spread(scales: Tensor, shape: torch.Size, sizes: dict[int, int]) -> Tensor:
    """``scales`` with every one repeated over its block, cut to ``shape``."""
    for dim, size in sizes.items():
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales
