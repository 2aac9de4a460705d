"""Fake quantization: a tensor in, the same tensor with only values a quant type can hold out.

    y = fake_quantize(x, "mxfp8", axis=-1)
    quantizer = Quantizer.create("hifp8", tensor_scale=True, saturate=True)
    y, scale = quantizer(x)                     # scale: 0-dim tensor, nothing waits for the device

Work is done in float32 and the result rounded to the dtype of ``x``: exact for float32, and for
bfloat16 as far as its range goes; in float16 a value above 65504 becomes Inf.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats.blocks import scale_, split
from qcollect.formats.catalog import Element, QuantType, Rounding, ScaleRule, get_quant_type
from qcollect.formats.checks import (
    MAX_TENSOR_EXPONENT,
    MIN_TENSOR_EXPONENT,
    check_out,
    check_scale,
    check_tensor,
    does_not_apply,
    resolve_axis,
    resolve_block_size,
    resolve_rounding,
    resolve_scale_rule,
)
from qcollect.formats.elements import BIAS, INF_BITS, MANTISSA_WIDTH, limit_, magnitude_bits, round_to_element_


def fake_quantize(
    x: Tensor,
    quant_type: str | QuantType,
    axis: int | None = -1,
    *,
    scale_rule: str | None = None,
    rounding: str | None = None,
    block_size: int | None = None,
    scale: float | Tensor | None = None,
    saturate: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x`` quantized and dequantized: a fresh dense tensor of the same shape, dtype and device, no grad.

    Edge rules: a NaN stays NaN. In types with blocks a block with a NaN or an Inf is NaN as a whole, -0
    stays -0, beyond the maximum is clamped, an all-zero block is zero, a short last block has its own
    scale, and a 0-dim tensor is a block of one. In types without, beyond the maximum (Inf too) is Inf,
    or the maximum with ``saturate``; hifp8 has one zero, +0. Empty gives empty.

    Args:
        x: float32, bfloat16 or float16; any strides.
        quant_type: a name of the catalog, or its record.
        axis: the axis blocks run along: the contraction axis of the gemm that takes ``x``. Of no
            consequence (and None allowed) for types without blocks.
        scale_rule: how a block's scale follows from its abs max; None: the type's default.
        rounding: None: the type's default.
        block_size: elements in a block; None: the type's own.
        scale: one power of two for the whole tensor, value = scale x element, for types without blocks.
            A float is checked; a 0-dim tensor is not, since that would wait for the device.
        saturate: None and False: the type's own overflow.
        out: written and returned; may be ``x`` itself.

    Raises:
        FormatError: a name is unknown, or a combination does not exist.
    """
    quantizer = Quantizer.create(
        quant_type,
        axis=axis,
        scale_rule=scale_rule,
        rounding=rounding,
        block_size=block_size,
        saturate=saturate,
    )
    return quantizer.apply(x, scale=scale, out=out)


def tensor_scale(x: Tensor, quant_type: str | QuantType) -> float:
    """The power of two that puts the largest finite magnitude of ``x`` where the type is most precise.

    1.0 if nothing in ``x`` is finite and not zero. The exponent is clamped to [-126, 126].

    Raises:
        FormatError: the type has no per-tensor scale.
    """
    entry = get_quant_type(quant_type)
    if entry.tensor_scale_target is None:
        raise FormatError(does_not_apply(entry, "has no per-tensor scale", "tensor_scale"))
    check_tensor(x, entry)
    return float(_tensor_scale(x, entry.tensor_scale_target))


def count_saturated(
    x: Tensor,
    quant_type: str | QuantType,
    axis: int | None = -1,
    *,
    scale_rule: str | None = None,
    rounding: str | None = None,
    block_size: int | None = None,
    scale: float | Tensor | None = None,
) -> int:
    """How many elements of ``x`` a saturating quantization clamps: those that round beyond the maximum.

    Without blocks an Inf counts; in a type with blocks the Inf's block is NaN and none of it counts.
    Arguments as in ``fake_quantize``. Waits for the device; ``Quantizer.num_saturated`` does not.
    """
    quantizer = Quantizer.create(quant_type, axis=axis, scale_rule=scale_rule, rounding=rounding, block_size=block_size)
    return int(quantizer.num_saturated(x, scale=scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """A quant type with every choice made and checked; what it does is a function of the tensor alone.

    Make it with ``create``. A field that does not apply to the type is None, so that two quantizers that
    do the same are equal.
    """

    quant_type: QuantType
    axis: int | None
    scale_rule: ScaleRule | None
    rounding: Rounding | None
    block_size: int | None
    tensor_scale: bool
    saturate: bool

    @classmethod
    def create(
        cls,
        quant_type: str | QuantType,
        *,
        axis: int | None = -1,
        scale_rule: str | None = None,
        rounding: str | None = None,
        block_size: int | None = None,
        tensor_scale: bool = False,
        saturate: bool | None = None,
    ) -> Self:
        """The quantizer with defaults filled in.

        Args:
            tensor_scale: each tensor gets a power-of-two scale from its own finite abs max.
            saturate: beyond the maximum, the maximum; None and False: the type's own overflow.

        Raises:
            FormatError: a name is unknown, or a combination does not exist.
        """
        entry = get_quant_type(quant_type)
        if tensor_scale and not entry.has_tensor_scale:
            raise FormatError(does_not_apply(entry, "has no per-tensor scale", "tensor_scale=True"))
        if saturate and not entry.can_saturate:
            raise FormatError(does_not_apply(entry, "clamps to its maximum in any case", "saturate=True"))
        return cls(
            quant_type=entry,
            axis=resolve_axis(entry, axis),
            scale_rule=resolve_scale_rule(entry, scale_rule),
            rounding=resolve_rounding(entry, rounding),
            block_size=resolve_block_size(entry, block_size),
            tensor_scale=tensor_scale,
            saturate=bool(saturate),
        )

    @property
    def is_identity(self) -> bool:
        return self.quant_type.element is None

    def describe(self) -> dict[str, str | int | None]:
        """What a capture's metadata holds of a quantizer; None where it does not apply."""
        return {
            "axis": self.axis,
            "quant_type": self.quant_type.name,
            "scale_rule": self.scale_rule,
            "rounding": self.rounding,
            "block_size": self.block_size,
        }

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """``x`` quantized, and the tensor's scale (0-dim float32, on its device) or None without one."""
        scale = self.scale_of(x)
        return self.apply(x, scale=scale), scale

    @torch.no_grad()
    def scale_of(self, x: Tensor) -> Tensor | None:
        """The scale this quantizer gives ``x`` (0-dim float32, on its device), None without per-tensor scaling."""
        check_tensor(x, self.quant_type)
        target = self.quant_type.tensor_scale_target
        return _tensor_scale(x, target) if self.tensor_scale and target is not None else None

    @torch.no_grad()
    def apply(self, x: Tensor, *, scale: float | Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``x`` quantized with the scale given (None: no scale), see ``fake_quantize``."""
        axis = self._check(x, scale)
        check_out(out, x)
        element = self.quant_type.element
        if element is None or x.numel() == 0:
            result = x.detach().clone(memory_format=torch.contiguous_format)
        elif self.block_size is None:
            values = self._rounded_values(x, element, scale)
            result = _times_(limit_(values, element, saturate=self.saturate), scale)
        else:
            result, blocks, scales = self._rounded_blocks(x, axis, element)
            limit_(blocks, element, saturate=True).mul_(scales)
        is_padded = result.numel() > x.numel()
        if is_padded:
            result = result.narrow(axis, 0, x.shape[axis])
        if out is not None:
            return out.copy_(result.view(x.shape))
        # What is handed out has a storage of its own size, hence the copy of a cut one.
        return result.to(x.dtype, copy=is_padded, memory_format=torch.contiguous_format).view(x.shape)

    @torch.no_grad()
    def num_saturated(self, x: Tensor, *, scale: float | Tensor | None = None) -> Tensor:
        """``count_saturated`` as a 0-dim int64 tensor on the device of ``x``."""
        axis = self._check(x, scale)
        element = self.quant_type.element
        if element is None or x.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=x.device)
        if self.block_size is None:
            values = self._rounded_values(x, element, scale)
        else:
            _, values, _ = self._rounded_blocks(x, axis, element)
        return (values.abs_() > element.max_value).sum()

    def _check(self, x: Tensor, scale: float | Tensor | None) -> int:
        """Refuses what cannot be quantized; gives the axis as a whole number from 0 (0 without blocks)."""
        check_tensor(x, self.quant_type)
        check_scale(scale, self.quant_type)
        if self.axis is None:
            return 0
        num_dims = max(x.dim(), 1)
        if not -num_dims <= self.axis < num_dims:
            raise FormatError(
                f"axis {self.axis} is out of range for a tensor of shape {tuple(x.shape)}; "
                f"use {-num_dims} to {num_dims - 1}."
            )
        return self.axis % num_dims

    def _rounded_values(self, x: Tensor, element: Element, scale: float | Tensor | None) -> Tensor:
        """``x / scale`` rounded, the element's upper end not yet applied: fresh, dense, float32."""
        assert self.rounding is not None
        values = x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if scale is not None:
            values.div_(_as_factor(scale, values))
        return round_to_element_(values, element, self.rounding)

    def _rounded_blocks(self, x: Tensor, axis: int, element: Element) -> tuple[Tensor, Tensor, Tensor]:
        """The padded copy of ``x``, its view as blocks and their scales.

        The blocks hold ``x / scale`` rounded, the element's upper end not yet applied.
        """
        scale_format = self.quant_type.scale_format
        assert self.block_size is not None and scale_format is not None
        assert self.scale_rule is not None and self.rounding is not None
        source = x.detach().reshape(1) if x.dim() == 0 else x.detach()
        work, blocks = split(source, axis, self.block_size)
        scales = scale_(blocks, axis + 1, element, scale_format, self.scale_rule)
        return work, round_to_element_(blocks, element, self.rounding), scales


# ---------------------------------------------------------------------------------------------
# Scales of whole tensors
# ---------------------------------------------------------------------------------------------


def _tensor_scale(x: Tensor, target: int) -> Tensor:
    """``2^(floor(log2 amax) - target)`` of the finite abs max, 0-dim float32; 1 without one."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    bits = magnitude_bits(x.detach().to(torch.float32))
    amax = bits.masked_fill_(bits >= INF_BITS, 0).amax()
    exponents = ((amax >> MANTISSA_WIDTH) - target).clamp_(MIN_TENSOR_EXPONENT + BIAS, MAX_TENSOR_EXPONENT + BIAS)
    return (exponents << MANTISSA_WIDTH).view(torch.float32).masked_fill_(amax == 0, 1.0)


def _as_factor(scale: float | Tensor, values: Tensor) -> float | Tensor:
    return scale.detach().to(values.device, torch.float32) if isinstance(scale, Tensor) else scale


def _times_(values: Tensor, scale: float | Tensor | None) -> Tensor:
    return values if scale is None else values.mul_(_as_factor(scale, values))
