"""Tensors in fewer bytes: codes and scales, or zstd. What a file holds instead of ``tensor``, and the way back.

    values    tensor                                as it is
    codes     codes, [scales, micro_exponents, encode, minus_zero, nan]    a quantized copy in its type's own layout
    zstd      zstd                                  the bytes compressed, those of equal place together

``storage`` says which, and the tensor's shape and dtype; ``restore`` gives that tensor bit for bit. Whatever
does not come back exactly, or is no smaller, is stored as values. What another file holds already: ``reference``.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qcollect.errors import CaptureError, MissingExtraError
from qcollect.formats.codes import pack_bits, unpack_bits
from qcollect.formats.quantized import Quantized, ScaleCodes, codes_of_values
from qcollect.formats.quantizer import bind_consumer, quantizer_of

Entries = dict[str, Any]  # what stands beside tensor_info and metadata in a file

# Level 1 with planes gives more than level 9 without, at five times the speed (bf16 of a trained model).
_ZSTD_LEVEL = 1
_NOT_EXACT = "its codes do not give back every value: some product of scale and element is beyond the dtype"
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_SCALES = "the scales of its blocks are not known"


def check_compression() -> None:
    """Nothing, if zstd is there.

    Raises:
        MissingExtraError: it is not.
    """
    _zstandard()


def value_entries(tensor: torch.Tensor) -> Entries:
    """A tensor as it is."""
    return {"tensor": tensor}


def zstd_entries(tensor: torch.Tensor) -> Entries | None:
    """A dense CPU tensor compressed; None if that makes it no smaller."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return None
    planes = _to_planes(tensor)
    compressed = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(buffer_of(planes))
    if len(compressed) >= num_bytes:
        return None
    return {"zstd": _tensor_of(compressed), "storage": _describe("zstd", tensor)}


def code_entries(
    values: torch.Tensor, consumer: Mapping[str, Any], scales: ScaleCodes | None
) -> tuple[Entries | None, str | None]:
    """The codes of what one gemm consumed.

    Args:
        values: dense CPU tensor, quantized as ``consumer`` says and dequantized.
        consumer: its entry of ``metadata["consumers"]``.
        scales: of its blocks, on the CPU; None for a type without blocks, or where they are not known.

    Returns:
        The entries, or None and why there are none (None: the type has no codes, or none that are smaller).
    """
    element = quantizer_of(consumer).quant_type.element
    if element is None or values.numel() == 0 or element.bits >= 8 * values.element_size():
        return None, None
    binding = bind_consumer(values, consumer, is_quantized=True)
    if scales is None and binding.choices.block_size is not None:
        return None, _NO_SCALES
    quantized = codes_of_values(values, binding.choices, encode=binding.encode, scales=scales)
    decoded = quantized.dequantize()
    is_told = is_same(decoded, values)
    untold = _untold(decoded, values, is_told)
    if not is_told and not is_same(_tell(decoded, untold), values):
        return None, _NOT_EXACT
    gemm = str(consumer["gemm"])
    entries: Entries = {"codes": quantized.codes, **untold}
    if scales is not None:
        entries |= scale_entries({gemm: (scales, binding.choices.axis)})
    if quantized.encode is not None:
        entries["encode"] = quantized.encode
    return {**entries, "storage": _describe("codes", values) | {"gemm": gemm}}, None


def scale_entries(scales: Mapping[str, tuple[ScaleCodes, int]]) -> Entries:
    """The scales of blocks, by the gemm that consumes them, each with the axis of its blocks; of nothing, nothing.

    Exponents inside blocks stand beside them, eight to a byte along that axis.
    """
    entries: Entries = {"scales": {gemm: codes.scales for gemm, (codes, _) in scales.items()}} if scales else {}
    micro = {gemm: [pack_bits(bits, axis) for bits in codes.micro] for gemm, (codes, axis) in scales.items()}
    has_micro = any(micro.values())
    return {**entries, "micro_exponents": micro} if has_micro else entries


def holds_tensor(content: Any) -> bool:
    """Whether what a file holds is a tensor, in one of the forms above."""
    if not isinstance(content, dict):
        return False
    if isinstance(content.get("tensor"), torch.Tensor):
        return True
    storage = content.get("storage")
    form = storage.get("form") if isinstance(storage, dict) else None
    return form in _RESTORE and isinstance(content.get(form), torch.Tensor)


def restore(content: Mapping[str, Any]) -> torch.Tensor:
    """The tensor a file holds.

    Raises:
        CaptureError: what is said of it does not fit.
        MissingExtraError: it is compressed, and zstandard is not installed.
    """
    if isinstance(content.get("tensor"), torch.Tensor):
        tensor: torch.Tensor = content["tensor"]
        return tensor
    try:
        return _RESTORE[content["storage"]["form"]](content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CaptureError(f"what it stores cannot be made a tensor: {type(error).__name__}: {error}") from error


def stored_part(content: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """Of a whole tensor, the rows a file has; all of it where the file does not leave any out."""
    rows, described = content.get("rows"), content["metadata"].get("stored_rows")
    return tensor if rows is None or described is None else tensor.index_select(described["axis"], rows)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors are equal bit for bit: NaN is equal to itself here, and -0 not to 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    word = _WORDS.get(a.element_size(), torch.uint8)  # byte by byte takes six times as long
    return torch.equal(*(tensor.contiguous().reshape(-1).view(word) for tensor in (a, b)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in order, uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def buffer_of(data: torch.Tensor) -> Any:
    """The memory of a dense uint8 tensor, which must outlive it, as an object with the buffer protocol."""
    if data.dtype != torch.uint8:
        raise TypeError(f"bytes are kept as {data.dtype}")
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr())


# ---------------------------------------------------------------------------------------------
# Codes
# ---------------------------------------------------------------------------------------------


def _restore_codes(content: Mapping[str, Any]) -> torch.Tensor:
    storage = content["storage"]
    gemm, dtype, shape = storage["gemm"], _dtype(storage["dtype"]), torch.Size(storage["shape"])
    consumer = {c["gemm"]: c for c in content["metadata"]["consumers"]}[gemm]
    choices = quantizer_of(consumer, is_quantized=True).choices_for(torch.empty(shape, dtype=dtype, device="meta"))
    packed: Sequence[torch.Tensor] = content.get("micro_exponents", {}).get(gemm, ())
    quantized = Quantized(
        codes=content["codes"],
        scales=content["scales"][gemm] if choices.block_size is not None else None,
        micro=tuple(unpack_bits(bits, choices.axis) for bits in packed),
        encode=content.get("encode"),
        shape=shape,
        dtype=dtype,
        choices=choices,
    )
    return _tell(quantized.dequantize(), content)


def _untold(decoded: torch.Tensor, values: torch.Tensor, is_same: bool) -> Entries:
    """What codes do not tell: which zeros are -0, where the element has no such code, and the bits of a NaN.

    The latter even where they are the same: another machine may make another NaN of the code. ``minus_zero`` has
    one bit a value. ``nan`` is one number where all are the same, as on one device they mostly are.
    """
    entries: Entries = {}
    if not is_same:
        is_minus_zero = (values == 0) & (values.signbit() != decoded.signbit())
        if bool(is_minus_zero.any()):
            entries["minus_zero"] = pack_bits(is_minus_zero.reshape(-1).to(torch.uint8), 0)
    is_nan = values.isnan()
    if bool(is_nan.any()):
        nans = _bits(values)[is_nan].view(values.dtype)
        is_one = bool((_bits(nans) == _bits(nans)[0]).all())
        entries["nan"] = nans[0].clone() if is_one else nans
    return entries


def _tell(decoded: torch.Tensor, content: Mapping[str, Any]) -> torch.Tensor:
    """Decoded values with what ``_untold`` found out about them, in place."""
    if "minus_zero" in content:
        is_minus_zero = unpack_bits(content["minus_zero"], 0)[: decoded.numel()].view(decoded.shape)
        decoded.masked_fill_(is_minus_zero.bool(), -0.0)
    if "nan" in content:
        is_nan = decoded.isnan()
        _bits(decoded)[is_nan] = _bits(content["nan"])
    return decoded


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: what is copied so keeps every bit of a NaN."""
    return values.view(_WORDS[values.element_size()])


# ---------------------------------------------------------------------------------------------
# zstd
# ---------------------------------------------------------------------------------------------


def _restore_zstd(content: Mapping[str, Any]) -> torch.Tensor:
    storage, compressed = content["storage"], content["zstd"].contiguous()
    dtype, shape = _dtype(storage["dtype"]), torch.Size(storage["shape"])
    zstandard = _zstandard()
    data, num_bytes = buffer_of(compressed), shape.numel() * dtype.itemsize
    try:
        if zstandard.frame_content_size(data) != num_bytes:
            raise CaptureError(f"its compressed bytes are not those of a tensor of {num_bytes:,} bytes")
        planes = _tensor_of(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise CaptureError(f"its compressed bytes are damaged: {error}") from error
    return _from_planes(planes, dtype).view(shape)


def _to_planes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes with those of equal place together, the highest first: there signs and exponents repeat themselves."""
    width = tensor.element_size()
    planes = torch.empty((width, tensor.numel()), dtype=torch.uint8)
    source = bytes_of(tensor).view(-1, width)
    for place in range(width):  # a transposed copy takes ten times as long
        planes[place].copy_(source[:, width - 1 - place])
    return planes


def _from_planes(planes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    width = dtype.itemsize
    values = torch.empty((planes.numel() // width, width), dtype=torch.uint8)
    for place, plane in enumerate(planes.view(width, -1)):
        values[:, width - 1 - place].copy_(plane)
    return values.view(-1).view(dtype)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError("zstandard", "zstd", "capture.compress: zstd") from None
    return zstandard


def _describe(form: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {"form": form, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CaptureError(f"it holds a tensor of {name!r}, which this torch does not know")
    return dtype


_RESTORE = {"codes": _restore_codes, "zstd": _restore_zstd}
