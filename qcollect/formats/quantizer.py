"""Quantization of tensors: to codes and scales (``quantize``), or straight to the values they stand for.

    y = fake_quantize(x, "mxfp8", axis=-1)
    q = quantize(x, "mxfp4", axis=-1)           # q.codes, q.scales, q.dequantize()
    quantizer = Quantizer.create("nvfp4")
    y, amax = quantizer(x)                      # amax: 0-dim tensor, nothing waits for the device

Work is done in float32 and the result rounded to the dtype of ``x``: exact for float32, and for
bfloat16 as far as its range goes; in float16 a value above 65504 becomes Inf.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats import backends
from qcollect.formats.binding import Binding, values_of_both
from qcollect.formats.blocks import BlockSize
from qcollect.formats.catalog import get_quant_type
from qcollect.formats.checks import check_tensor, does_not_apply
from qcollect.formats.custom import quant_type_of
from qcollect.formats.quantized import Quantized
from qcollect.formats.records import QuantType
from qcollect.formats.resolved import Quantizer
from qcollect.formats.scales import power_of_two_scale, tensor_amax

__all__ = [
    "Quantizer",
    "apply_both",
    "bind_consumer",
    "consumed",
    "count_saturated",
    "fake_quantize",
    "prepare",
    "quantize",
    "quantizer_of",
    "tensor_scale",
]


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
) -> Quantized:
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
        consumer: what the entry says; ``shape`` is that of the operand the gemm saw, or of its rows that are stored.

    Raises:
        FormatError: they do not follow from the rows that are stored (``not_from_rows`` says why).
    """
    reason = consumer.get("not_from_rows")
    if reason is not None:
        raise FormatError(f"what {consumer['gemm']} consumed does not follow from the rows on file: {reason}.")
    return bind_consumer(x.reshape(consumer["shape"]), consumer).values()


def bind_consumer(x: Tensor, consumer: Mapping[str, Any], *, is_quantized: bool = False) -> Binding:
    """``x`` bound to what an entry of ``metadata["consumers"]`` says of its quantization.

    Args:
        x: in the shape the gemm saw.
        consumer: as it is on file, or with 0-dim tensors for what was computed on a device.
        is_quantized: ``x`` are values that were quantized so, transformed already where there is a transform.
    """
    quantizer = quantizer_of(consumer, is_quantized=is_quantized)
    # a scale that belongs to the type follows from the abs max, which says more than its reciprocal rounded
    by_amax, amax = quantizer.quant_type.has_tensor_scale, consumer["amax"]
    return quantizer.bind(
        x,
        scale=None if by_amax else consumer["scale"],
        # on file a number that is not finite is a text
        amax=(torch.tensor(float(amax)) if isinstance(amax, str) else amax) if by_amax else None,
        seed=consumer["seed"],
        hadamard_seed=consumer.get("hadamard_seed") or 0,
    )


def quantizer_of(consumer: Mapping[str, Any], *, is_quantized: bool = False) -> Quantizer:
    """The quantizer an entry of ``metadata["consumers"]`` describes; ``is_quantized``: without its transform."""
    size = consumer["block_size"]
    name, definition = consumer["quant_type"], consumer.get("definition")
    return Quantizer.create(
        get_quant_type(name) if definition is None else quant_type_of(name, definition),
        axis=consumer["axis"],
        scale_rule=consumer["scale_rule"],
        rounding=consumer["rounding"],
        block_size=tuple(size) if isinstance(size, list) else size,
        saturate=consumer["saturate"],
        source_dtype=consumer.get("source_dtype"),
        hadamard=None if is_quantized else consumer.get("hadamard"),
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


def prepare(quantizers: Iterable[Quantizer], dtype: torch.dtype) -> tuple[bool, str]:
    """Have what these do to large tensors of ``dtype`` on the CPU compiled now, or loaded if it was before.

    Returns:
        Whether that worked, and if not why: then plain torch does it, with the same bits.
    """
    ready = (True, "")
    for quantizer in dict.fromkeys(quantizers):
        if not quantizer.is_identity and ready[0]:
            choices = quantizer.choices(quantizer.axis or 0, dtype)
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
    last_binding, first_binding = (
        quantizer.bind(x, amax=own_amax, seed=seed)
        for quantizer, own_amax, seed in zip((last, first), amax, seeds, strict=True)
    )
    return values_of_both(last_binding, first_binding, with_tensor_scale=with_tensor_scale)
