"""A quant type with every choice made and checked once, for any number of tensors."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats import backends
from qcollect.formats.binding import Binding
from qcollect.formats.blocks import BlockSize
from qcollect.formats.catalog import get_quant_type
from qcollect.formats.checks import (
    check_amax,
    check_out,
    check_scale,
    check_seed,
    check_tensor,
    does_not_apply,
    resolve_axis,
    resolve_block_size,
    resolve_hadamard,
    resolve_rounding,
    resolve_scale_rule,
    resolve_source_dtype,
)
from qcollect.formats.custom import definition_of
from qcollect.formats.eager import Choices
from qcollect.formats.elements import HYBRID_SOURCES
from qcollect.formats.error_stats import ErrorStats
from qcollect.formats.hadamard import rotate
from qcollect.formats.quantized import Quantized
from qcollect.formats.records import QuantType, Rounding, ScaleRule
from qcollect.formats.scales import power_of_two_scale, tensor_decode, tensor_encode
from qcollect.formats.scope import global_amax, holders, local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """A quant type with every choice made and checked; what it does is a function of the tensor and a seed.

    Make it with ``create``. A field that does not apply to the type is None, so that two quantizers that
    do the same are equal.
    """

    quant_type: QuantType
    axis: int | None
    scale_rule: ScaleRule | None
    rounding: Rounding | None
    block_size: BlockSize | None
    tensor_scale: bool
    saturate: bool
    source_dtype: str | None = None
    hadamard: int | None = None
    # what was found before: by the tensor's dimensions and dtype, and for all tensors
    _choices: dict[tuple[int, torch.dtype], Choices] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _description: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def create(
        cls,
        quant_type: str | QuantType,
        *,
        axis: int | None = -1,
        scale_rule: str | None = None,
        rounding: str | None = None,
        block_size: BlockSize | None = None,
        tensor_scale: bool = False,
        saturate: bool | None = None,
        source_dtype: str | None = None,
        hadamard: int | None = None,
    ) -> Self:
        """The quantizer with defaults filled in.

        Args:
            tensor_scale: each tensor gets a power-of-two scale from its own finite abs max.
            saturate: beyond the maximum, the maximum; None and False: the type's own overflow.

        Raises:
            FormatError: a name is unknown, or a combination does not exist.
        """
        entry = get_quant_type(quant_type)
        if tensor_scale and not entry.takes_tensor_scale:
            raise FormatError(does_not_apply(entry, "takes no power-of-two scale", "tensor_scale=True"))
        if saturate and not entry.can_saturate:
            raise FormatError(does_not_apply(entry, "clamps to its maximum in any case", "saturate=True"))
        rounding = resolve_rounding(entry, rounding)
        size = resolve_block_size(entry, block_size)
        return cls(
            quant_type=entry,
            axis=resolve_axis(entry, axis, size, hadamard),
            scale_rule=resolve_scale_rule(entry, scale_rule),
            rounding=rounding,
            block_size=size,
            tensor_scale=tensor_scale,
            saturate=bool(saturate),
            source_dtype=resolve_source_dtype(entry, rounding, source_dtype),
            hadamard=resolve_hadamard(entry, hadamard),
        )

    @property
    def is_identity(self) -> bool:
        return self.quant_type.element is None

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the whole tensor takes part."""
        return self.tensor_scale or self.quant_type.has_tensor_scale

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def draws(self) -> bool:
        """Whether something random takes part: stochastic rounding, or the signs of a Hadamard transform."""
        return self.hadamard is not None or self.rounding == "stochastic"

    def describe(self) -> dict[str, Any]:
        """What a capture's metadata holds of a quantizer; None where it does not apply.

        ``definition`` is that of a type which is not in the catalog: without it nobody could read the file later.
        """
        if not self._description:
            size = self.block_size
            self._description.update(
                axis=self.axis,
                quant_type=self.quant_type.name,
                definition=definition_of(self.quant_type),
                scale_rule=self.scale_rule,
                rounding=self.rounding,
                block_size=list(size) if isinstance(size, tuple) else size,
                source_dtype=self.source_dtype,
                hadamard=self.hadamard,
            )
        return dict(self._description)

    def __call__(self, x: Tensor, *, seed: int | None = None, hadamard_seed: int = 0) -> tuple[Tensor, Tensor | None]:
        """``x`` quantized, and the abs max its scale followed from (``amax_of``)."""
        amax = self.amax_of(x, hadamard_seed=hadamard_seed)
        return self.apply(x, amax=amax, seed=seed, hadamard_seed=hadamard_seed), amax

    @torch.no_grad()
    def amax_of(self, x: Tensor, *, hadamard_seed: int = 0, group: dist.ProcessGroup | None = None) -> Tensor | None:
        """The abs max that the scale of ``x`` follows from (0-dim float32, on its device); None without one.

        Args:
            group: the ranks that hold the parts of a larger tensor, all of which call this together (a DTensor
                knows its own); None: this rank holds all of it.
        """
        part = local_part(x)
        check_tensor(part, self.quant_type)
        if not self.has_tensor_scale or self.quant_type.tensor_scale is None:
            return None
        rotated = part if self.hadamard is None else self._rotated(part, hadamard_seed)
        return global_amax(rotated, self.quant_type.tensor_scale, holders(x, group))

    @torch.no_grad()
    def scale_of(self, amax: float | Tensor | None) -> Tensor | None:
        """The tensor's scale that follows from an abs max, 0-dim float32, value = scale x ...; None without one."""
        encode = None if amax is None else self._encode(torch.as_tensor(amax, dtype=torch.float32))
        return None if encode is None else tensor_decode(encode)

    @torch.no_grad()
    def apply(
        self,
        x: Tensor,
        *,
        scale: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        seed: int | None = None,
        hadamard_seed: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """``x`` quantized and dequantized, see ``fake_quantize``; without ``scale`` and ``amax`` by those of ``x``."""
        check_out(out, x)
        return self.bind(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed).values(out)

    def operand(
        self, x: Tensor, *, amax: float | Tensor | None = None, seed: int | None = None, hadamard_seed: int = 0
    ) -> Tensor:
        """``apply`` without the tensor's inherent scale: exact in bfloat16, to be multiplied into the gemm's result."""
        return self.bind(x, amax=amax, seed=seed, hadamard_seed=hadamard_seed).operand()

    def quantize(
        self,
        x: Tensor,
        *,
        scale: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        seed: int | None = None,
        hadamard_seed: int = 0,
    ) -> Quantized:
        """``x`` as codes and scales, see ``quantize``."""
        return self.bind(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed).codes()

    def num_saturated(
        self,
        x: Tensor,
        *,
        scale: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        seed: int | None = None,
        hadamard_seed: int = 0,
    ) -> Tensor:
        """``count_saturated`` as a 0-dim int64 tensor on the device of ``x``."""
        return self.bind(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed).num_saturated()

    @torch.no_grad()
    def apply_with_stats(
        self,
        x: Tensor,
        *,
        scale: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        seed: int | None = None,
        hadamard_seed: int = 0,
        histograms: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, ErrorStats]:
        """``apply``, and what it did to ``x`` (transformed, with a Hadamard transform); nothing waits for the device.

        Args:
            histograms: count exponents and scale codes, too.

        Raises:
            FormatError: as ``apply``, or there is nothing to measure: no elements, or the type quantizes nothing.
        """
        check_out(out, x)
        binding = self.bind(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed)
        return binding.with_stats(out, histograms=histograms)

    def bind(
        self,
        x: Tensor,
        *,
        scale: float | Tensor | None = None,
        amax: float | Tensor | None = None,
        seed: int | None = None,
        hadamard_seed: int = 0,
    ) -> Binding:
        """All that the values of ``x`` follow from, found once for whatever is made of them. Arguments as in ``apply``.

        Raises:
            FormatError: ``x`` cannot be quantized so.
        """
        check_tensor(x, self.quant_type)
        check_scale(scale, self.quant_type)
        check_amax(amax, self.quant_type, self.has_tensor_scale)
        if seed is not None or self.rounding == "stochastic":
            check_seed(seed, self.quant_type)
        x = x.detach() if x.requires_grad else x
        source = x if self.hadamard is None else self._rotated(x, hadamard_seed)
        choices = self.choices_for(x, seed or 0)
        is_own = scale is None and amax is None and self.has_tensor_scale and source.numel() > 0
        own_scale = self.quant_type.tensor_scale if is_own else None
        if own_scale is None:
            encode = self._given_encode(source, scale, amax)
        else:
            encode = backends.find_encode(source, own_scale, self.scale_rule)
        return Binding(x=x, source=source, choices=choices, encode=encode, own_scale=own_scale)

    def choices_for(self, x: Tensor, seed: int = 0) -> Choices:
        """``choices`` for a tensor of this shape and dtype; its values are not looked at.

        Raises:
            FormatError: it has no such axis.
        """
        if self.rounding == "stochastic":
            return self.choices(self._axis_of(x), x.dtype, seed)
        key = (x.dim(), x.dtype)
        choices = self._choices.get(key)
        if choices is None:
            choices = self._choices[key] = self.choices(self._axis_of(x), x.dtype)
        return choices

    def choices(self, axis: int, dtype: torch.dtype, seed: int = 0) -> Choices:
        """What the values of a tensor follow from, but for its own scale.

        Args:
            axis: 0 or more.
            dtype: of the tensor.
        """
        return Choices(
            quant_type=self.quant_type,
            axis=axis,
            scale_rule=self.scale_rule,
            rounding=self.rounding or "nearest_even",
            block_size=self.block_size,
            saturate=self.saturate,
            source=HYBRID_SOURCES[getattr(torch, self.source_dtype) if self.source_dtype else dtype],
            seed=seed,
        )

    def _rotated(self, x: Tensor, seed: int) -> Tensor:
        if self.hadamard is None or x.numel() == 0:
            return x
        return rotate(x.reshape(1) if x.dim() == 0 else x, self._given_axis(x), self.hadamard, seed)

    def _given_encode(self, source: Tensor, scale: float | Tensor | None, amax: float | Tensor | None) -> Tensor | None:
        """What the whole tensor is multiplied with by the scale or abs max given."""
        if scale is not None:
            return _as_factor(scale, source).reciprocal()
        return None if amax is None else self._encode(_as_factor(amax, source))

    def _encode(self, amax: Tensor) -> Tensor | None:
        tensor_scale = self.quant_type.tensor_scale
        if not self.has_tensor_scale or tensor_scale is None:
            return None
        if tensor_scale.target is not None:
            return power_of_two_scale(amax, tensor_scale.target).reciprocal()
        assert self.scale_rule is not None
        return tensor_encode(amax, tensor_scale, self.scale_rule)

    def _axis_of(self, x: Tensor) -> int:
        """The axis as a whole number from 0 (0 without blocks)."""
        if isinstance(self.block_size, tuple):
            if x.dim() < 2:
                raise FormatError(f"tiles of {self.block_size} need two dimensions; the tensor has {x.dim()}.")
            return x.dim() - 1
        return self._given_axis(x)

    def _given_axis(self, x: Tensor) -> int:
        if self.axis is None:
            return 0
        num_dims = max(x.dim(), 1)
        if not -num_dims <= self.axis < num_dims:
            raise FormatError(
                f"axis {self.axis} is out of range for a tensor of shape {tuple(x.shape)}; "
                f"use {-num_dims} to {num_dims - 1}."
            )
        return self.axis % num_dims


def _as_factor(value: float | Tensor, x: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=x.device).detach()
