"""Quantization of tensors: to codes and scales (``quantize``), or straight to the values they stand for.

    y = fake_quantize(x, "mxfp8", axis=-1)
    q = quantize(x, "mxfp4", axis=-1)           # q.codes, q.scales, q.dequantize()
    quantizer = Quantizer.create("nvfp4")
    y, amax = quantizer(x)                      # amax: 0-dim tensor, nothing waits for the device

Work is done in float32 and the result rounded to the dtype of ``x``: exact for float32, and for
bfloat16 as far as its range goes; in float16 a value above 65504 becomes Inf.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats import backends
from qcollect.formats import codes as coding
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
from qcollect.formats.custom import definition_of, quant_type_of
from qcollect.formats.eager import Choices, Scaled, limit_values, restore_values, round_values, scale_values
from qcollect.formats.elements import HYBRID_SOURCES
from qcollect.formats.error_stats import ErrorStats, measure
from qcollect.formats.hadamard import rotate
from qcollect.formats.records import QuantType, Rounding, ScaleRule
from qcollect.formats.scales import power_of_two_scale, tensor_amax, tensor_decode, tensor_encode
from qcollect.formats.scope import global_amax, local_part


def fake_quantize(
    x: Tensor,
    quant_type: str | QuantType,
    axis: int | None = -1,
    *,
    scale_rule: str | None = None,
    rounding: str | None = None,
    block_size: BlockSize | None = None,
    scale: float | Tensor | None = None,
    amax: float | Tensor | None = None,
    saturate: bool | None = None,
    seed: int | None = None,
    source_dtype: str | None = None,
    hadamard: int | None = None,
    hadamard_seed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """``x`` quantized and dequantized: a fresh dense tensor of the same shape, dtype and device, no grad.

    Edge rules: a NaN stays NaN. In types with blocks a block with a NaN or an Inf is NaN as a whole, -0
    stays -0, beyond the maximum is clamped, an all-zero block is zero, a short last block has its own
    scale, and a 0-dim tensor is a block of one. In types without, beyond the maximum (Inf too) is Inf,
    or the maximum with ``saturate``; hifp8 has one zero, +0. With a scale for the whole tensor from its abs
    max (fp8), a NaN or an Inf makes all of it NaN. Empty gives empty.

    Args:
        x: float32, bfloat16 or float16; any strides.
        quant_type: a name of the catalog, or its record.
        axis: the axis blocks run along: the contraction axis of the gemm that takes ``x``. Of no
            consequence (and None allowed) for types without blocks and for tiles.
        scale_rule: how a scale follows from the abs max; None: the type's default.
        rounding: None: the type's default.
        block_size: elements in a block, or (rows, columns) of a tile of the last two dimensions; None: the type's own.
        scale: one power of two for the whole tensor, value = scale x element, for hifp8.
            A float is checked; a 0-dim tensor is not, since that would wait for the device.
        amax: the abs max that a tensor-wide scale follows from, where it is not that of ``x`` alone (a part of
            a larger tensor, or an earlier one); for types with such a scale.
        saturate: None and False: the type's own overflow.
        seed: of stochastic rounding, which needs one: 0 to 2^63 - 1. With it an element's place in ``x``
            (row by row) decides what it draws.
        source_dtype: what hybrid rounding takes the numbers for (``float32``, ``bfloat16``, ``float16``); None:
            the dtype of ``x``. Numbers of bfloat16 held in float32 are inflated if they are taken for float32.
        hadamard: size of a random Hadamard transform along ``axis`` before; the result stays transformed.
        hadamard_seed: of the transform's signs.
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
        source_dtype=source_dtype,
        hadamard=hadamard,
    )
    return quantizer.apply(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed, out=out)


def quantize(
    x: Tensor,
    quant_type: str | QuantType,
    axis: int | None = -1,
    *,
    scale: float | Tensor | None = None,
    amax: float | Tensor | None = None,
    seed: int | None = None,
    hadamard_seed: int = 0,
    **settings: Any,
) -> "Quantized":
    """``x`` as codes and scales in the bit layout of the type's specification.

    Args:
        settings: as ``Quantizer.create`` takes them; all as in ``fake_quantize``.

    Raises:
        FormatError: a name is unknown, a combination does not exist, or the type has no codes (``none``).
    """
    quantizer = Quantizer.create(quant_type, axis=axis, **settings)
    return quantizer.quantize(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed)


def consumed(x: Tensor, consumer: Mapping[str, Any]) -> Tensor:
    """The values a gemm consumed of an original, from one entry of ``metadata["consumers"]``, bit for bit.

    Args:
        x: the original, as it was captured.
        consumer: what the entry says; ``shape`` is that of the operand the gemm saw.
    """
    size = consumer["block_size"]
    # a scale that belongs to the type follows from the abs max, which says more than its reciprocal rounded
    name, definition = consumer["quant_type"], consumer.get("definition")
    entry = get_quant_type(name) if definition is None else quant_type_of(name, definition)
    by_amax = entry.has_tensor_scale
    return fake_quantize(
        x.reshape(consumer["shape"]),
        entry,
        consumer["axis"],
        scale_rule=consumer["scale_rule"],
        rounding=consumer["rounding"],
        block_size=tuple(size) if isinstance(size, list) else size,
        scale=None if by_amax else consumer["scale"],
        amax=consumer["amax"] if by_amax else None,
        saturate=consumer["saturate"],
        seed=consumer["seed"],
        source_dtype=consumer.get("source_dtype"),
        hadamard=consumer.get("hadamard"),
        hadamard_seed=consumer.get("hadamard_seed") or 0,
    )


def tensor_scale(x: Tensor, quant_type: str | QuantType) -> float:
    """The power of two that puts the largest finite magnitude of ``x`` where the type is most precise.

    1.0 if nothing in ``x`` is finite and not zero. The exponent is clamped to [-126, 126].

    Raises:
        FormatError: the type takes no per-tensor scale.
    """
    entry = get_quant_type(quant_type)
    if entry.tensor_scale is None or entry.tensor_scale.target is None:
        raise FormatError(does_not_apply(entry, "takes no per-tensor scale", "tensor_scale"))
    check_tensor(x, entry)
    return float(power_of_two_scale(tensor_amax(x, entry.tensor_scale), entry.tensor_scale.target))


def count_saturated(
    x: Tensor,
    quant_type: str | QuantType,
    axis: int | None = -1,
    *,
    scale: float | Tensor | None = None,
    amax: float | Tensor | None = None,
    seed: int | None = None,
    hadamard_seed: int = 0,
    **settings: Any,
) -> int:
    """How many elements of ``x`` a saturating quantization clamps: those that round beyond the maximum.

    Without blocks an Inf counts; in a type with blocks the Inf's block is NaN and none of it counts.
    Arguments as in ``quantize``. Waits for the device; ``Quantizer.num_saturated`` does not.
    """
    quantizer = Quantizer.create(quant_type, axis=axis, **settings)
    return int(quantizer.num_saturated(x, scale=scale, amax=amax, seed=seed, hadamard_seed=hadamard_seed))


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


def _spread(scales: Tensor, shape: torch.Size, sizes: dict[int, int]) -> Tensor:
    """``scales`` with every one repeated over its block, cut to ``shape``."""
    for dim, size in sizes.items():
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales


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

    def describe(self) -> dict[str, Any]:
        """What a capture's metadata holds of a quantizer; None where it does not apply.

        ``definition`` is that of a type which is not in the catalog: without it nobody could read the file later.
        """
        size = self.block_size
        return {
            "axis": self.axis,
            "quant_type": self.quant_type.name,
            "definition": definition_of(self.quant_type),
            "scale_rule": self.scale_rule,
            "rounding": self.rounding,
            "block_size": list(size) if isinstance(size, tuple) else size,
            "source_dtype": self.source_dtype,
            "hadamard": self.hadamard,
        }

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
        rotated = x if self.hadamard is None else self._rotated(part, hadamard_seed)
        return global_amax(rotated, self.quant_type.tensor_scale, group)

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
        return self._values(x, scale, amax, seed, hadamard_seed, out, with_tensor_scale=True)

    @torch.no_grad()
    def operand(
        self, x: Tensor, *, amax: float | Tensor | None = None, seed: int | None = None, hadamard_seed: int = 0
    ) -> Tensor:
        """``apply`` without the tensor's inherent scale: exact in bfloat16, to be multiplied into the gemm's result."""
        return self._values(
            x, None, amax, seed, hadamard_seed, None, with_tensor_scale=not self.quant_type.has_tensor_scale
        )

    @torch.no_grad()
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
        choices, encode, source = self._prepare(x, scale, amax, seed, hadamard_seed)
        entry, element = self.quant_type, self.quant_type.element
        if element is None:
            raise FormatError(f"{entry.name} quantizes nothing: it has no codes; choose another type.")
        if x.numel() == 0:
            raise FormatError(f"a tensor of shape {tuple(x.shape)} has nothing to make codes of.")
        torch_dtype = None if element.torch_dtype is None else getattr(torch, element.torch_dtype, None)
        scaled = self._rounded(source, choices, encode)
        limit_values(scaled, choices)
        values = scaled.blocks.cut(source.shape)
        if element.is_cast:
            assert torch_dtype is not None
            return Quantized(
                codes=values.to(torch_dtype),
                scales=None,
                micro=(),
                encode=encode,
                shape=x.shape,
                dtype=x.dtype,
                choices=choices,
            )
        codes = coding.encode(values, element).view(source.shape if source.dim() else (1,))
        if element.bits == 4:
            codes = coding.pack(codes, choices.axis)
        is_last = choices.axis == codes.dim() - 1
        if torch_dtype is not None and (element.bits != 4 or is_last):
            codes = codes.view(torch_dtype)
        return Quantized(
            codes=codes,
            scales=None if scaled.scales is None else self._scale_codes(scaled),
            micro=tuple(
                exponents.squeeze(dim + 1).flatten(dim - 1, dim).to(torch.uint8) for dim, _, exponents in scaled.micro
            ),
            encode=encode,
            shape=x.shape,
            dtype=x.dtype,
            choices=choices,
        )

    @torch.no_grad()
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
        choices, encode, source = self._prepare(x, scale, amax, seed, hadamard_seed)
        element = self.quant_type.element
        if element is None or x.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=x.device)
        return (self._rounded(source, choices, encode).blocks.values.abs_() > element.max_value).sum()

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
        choices, encode, source = self._prepare(x, scale, amax, seed, hadamard_seed)
        if self.quant_type.element is None or x.numel() == 0:
            what = "quantizes nothing" if self.quant_type.element is None else f"got a tensor of shape {tuple(x.shape)}"
            raise FormatError(f"{self.quant_type.name} {what}: there is no error to measure.")
        found = backends.run_with_stats(source, choices, encode, histograms=histograms)
        if found is not None:
            values = found[0].view(x.shape)
            return (values.to(x.dtype) if out is None else out.copy_(values)), found[1]
        scaled = self._rounded(source, choices, encode)
        clamped = scaled.blocks.view.abs() > self.quant_type.element.max_value
        clamped_blocks = clamped.any(dim=scaled.blocks.dims) if scaled.blocks.dims else clamped.any()
        values = self._finished(scaled, choices, x, out, with_tensor_scale=True)
        codes = self._scale_codes(scaled).view(torch.uint8) if scaled.scales is not None else None
        return values, measure(source, values, clamped, clamped_blocks, scale_codes=codes, histograms=histograms)

    # ---- one way through --------------------------------------------------------------------------

    def _values(
        self,
        x: Tensor,
        scale: float | Tensor | None,
        amax: float | Tensor | None,
        seed: int | None,
        hadamard_seed: int,
        out: Tensor | None,
        *,
        with_tensor_scale: bool,
    ) -> Tensor:
        choices, encode, source = self._prepare(x, scale, amax, seed, hadamard_seed)
        if self.quant_type.element is None or x.numel() == 0:
            copy = x.detach().clone(memory_format=torch.contiguous_format)
            return copy if out is None else out.copy_(copy)
        source = source.reshape(1) if source.dim() == 0 else source
        run = backends.find_run(source, choices, encode)
        if run is None:
            scaled = self._rounded(source, choices, encode)
            return self._finished(scaled, choices, x, out, with_tensor_scale=with_tensor_scale)
        is_own = out is not None and out.dtype == source.dtype and out.is_contiguous() and not _overlaps(out, x)
        values = torch.empty(source.shape, dtype=source.dtype, device=x.device) if out is None or not is_own else out
        run(source, values, choices, encode, with_tensor_scale=with_tensor_scale)
        if out is None:
            return values.view(x.shape).to(x.dtype)
        return out if is_own else out.copy_(values.view(x.shape))

    def _finished(
        self, scaled: Scaled, choices: Choices, x: Tensor, out: Tensor | None, *, with_tensor_scale: bool
    ) -> Tensor:
        """What was rounded, limited and multiplied with its scales again, in the dtype of ``x``."""
        limit_values(scaled, choices)
        restore_values(scaled, with_tensor_scale=with_tensor_scale)
        values = scaled.blocks.cut(x.shape)
        if out is not None:
            return out.copy_(values)
        # What is handed out has a storage of its own size, hence the copy of a cut one.
        is_cut = scaled.blocks.values.numel() > x.numel()
        return values.to(x.dtype, copy=is_cut, memory_format=torch.contiguous_format).view(x.shape)

    def _rounded(self, source: Tensor, choices: Choices, encode: Tensor | None) -> Scaled:
        scaled = scale_values(source, choices, encode)
        round_values(scaled, source, choices)
        return scaled

    def _scale_codes(self, scaled: Scaled) -> Tensor:
        scale_format = self.quant_type.scale_format
        assert scaled.scales is not None and scale_format is not None
        codes = coding.encode_scale(scaled.scales.scale, scale_format)
        for dim in reversed(scaled.blocks.dims):
            codes = codes.squeeze(dim)
        dtype = None if scale_format.torch_dtype is None else getattr(torch, scale_format.torch_dtype, None)
        return codes if dtype is None else codes.view(dtype)

    def _prepare(
        self, x: Tensor, scale: float | Tensor | None, amax: float | Tensor | None, seed: int | None, hadamard_seed: int
    ) -> tuple[Choices, Tensor | None, Tensor]:
        """Refuses what cannot be quantized; gives what was chosen, the tensor's factor, and the tensor to be scaled."""
        check_tensor(x, self.quant_type)
        check_scale(scale, self.quant_type)
        check_amax(amax, self.quant_type, self.has_tensor_scale)
        check_seed(seed, self.quant_type, self.rounding)
        choices = self._choices(self._axis_of(x), x.dtype, seed or 0)
        source = self._rotated(x, hadamard_seed)
        if scale is not None:
            return choices, _as_factor(scale, x).reciprocal(), source
        tensor_scale = self.quant_type.tensor_scale
        if amax is not None or not self.has_tensor_scale or tensor_scale is None or x.numel() == 0:
            return choices, None if amax is None else self._encode(_as_factor(amax, x)), source
        if tensor_scale.is_inherent and self.scale_rule is not None:
            return choices, backends.find_encode(source, tensor_scale, self.scale_rule), source
        return choices, self._encode(backends.find_amax(source, tensor_scale)), source

    def _choices(self, axis: int, dtype: torch.dtype, seed: int) -> Choices:
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


def prepare(quantizers: Iterable[Quantizer], dtype: torch.dtype) -> tuple[bool, str]:
    """Have what these do to large tensors of ``dtype`` on the CPU compiled now, or loaded if it was before.

    Returns:
        Whether that worked, and if not why: then plain torch does it, with the same bits.
    """
    ready = (True, "")
    for quantizer in dict.fromkeys(quantizers):
        if not quantizer.is_identity and ready[0]:
            choices = quantizer._choices(quantizer.axis or 0, dtype, 0)
            ready = backends.prepare(choices, dtype, has_encode=quantizer.has_tensor_scale)
    return ready


def apply_both(
    x: Tensor,
    last: Quantizer,
    first: Quantizer,
    *,
    amax: tuple[Tensor | None, Tensor | None] = (None, None),
    seeds: tuple[int | None, int | None] = (None, None),
    with_tensor_scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """``x`` as two gemms consume it, with blocks along axis 1 and with blocks along axis 0, read once where it can be.

    Args:
        x: two dimensions.
        last, first: quantizers with these axes, without a Hadamard transform.
        amax: of each quantizer's scale, None: its own.
        with_tensor_scale: False leaves out scales that belong to the types (``Quantizer.operand``).
    """
    with torch.no_grad():
        prepared = [q._prepare(x, None, a, seed, 0) for q, a, seed in zip((last, first), amax, seeds, strict=True)]
        choices, encodes = [p[0] for p in prepared], (prepared[0][1], prepared[1][1])
        scaled = [with_tensor_scale or not q.quant_type.has_tensor_scale for q in (last, first)]
        if x.numel() and scaled[0] == scaled[1] and not (last.is_identity or first.is_identity):
            found = backends.run_both(x.detach(), choices[0], choices[1], encodes, with_tensor_scale=scaled[0])
            if found is not None:
                return found
        values = [
            q._values(x, None, a, seed, 0, None, with_tensor_scale=s)
            for q, a, seed, s in zip((last, first), amax, seeds, scaled, strict=True)
        ]
    return values[0], values[1]


def _overlaps(out: Tensor, x: Tensor) -> bool:
    """Whether the two share memory otherwise than by being the same."""
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return False
    return (out.data_ptr(), out.shape, out.stride()) != (x.data_ptr(), x.shape, x.stride())


def _as_factor(value: float | Tensor, x: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=x.device).detach()
