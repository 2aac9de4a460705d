"""Codes of elements and scales, as tables made from the data: bit pattern -> number, and back.

An element of up to eight bits has at most 256 codes, and all its values are bfloat16 numbers: the
upper half of a value's float32 bits is an index into 65,536 codes.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from qcollect.formats.elements import BIAS, MANTISSA_WIDTH, limit_, round_to_element_
from qcollect.formats.records import Element, Encoding, ScaleFormat

_UPPER_HALF = 16
_NAN_UPPER_HALF = 0x7FC0
_NUM_UPPER_HALVES = 1 << 16
# What a table is read for at once: more does not stay in the cache, which halves the speed.
_CHUNK = 1 << 18


def decode_table(element: Element) -> tuple[float, ...]:
    """The number every code stands for, code 0 first.

    **Source:** OCP MX v1.0 section 5.3; arXiv 2409.16626 tables 1-4 (``prefix``).
    """
    sign_bit = 1 << (element.bits - 1)
    positive = _POSITIVE[element.encoding](element)
    if element.encoding == "twos_complement":
        # -2^(bits - 1) is a code that nothing is quantized to
        return positive + tuple(-(sign_bit - n) / 2.0**element.mantissa_bits for n in range(sign_bit))
    negative = tuple(-value for value in positive)
    if not element.signed_zero:
        negative = (math.nan if element.has_nan else 0.0, *negative[1:])  # the code -0 would have
    return positive + negative


def encode_table(element: Element) -> tuple[int, ...]:
    """The code of every value of the element, by the upper half of its float32 bits; 0 for what is no value."""
    codes = [0] * _NUM_UPPER_HALVES
    nan_code = 0
    for code, value in enumerate(decode_table(element)):
        if not math.isnan(value):
            codes[_upper_half(value)] = code
        elif code < 1 << (element.bits - 1) or not nan_code:
            nan_code = code  # the last without a sign, as in torch's own dtypes
    for half in range(_NUM_UPPER_HALVES):
        if (half & 0x7FFF) > 0x7F80:
            codes[half] = nan_code
    return tuple(codes)


def encode(values: Tensor, element: Element) -> Tensor:
    """Codes of float32 ``values`` that the element holds, uint8 of the same shape.

    A NaN becomes the element's last NaN code without a sign, or 0 in an element without one: there the scale says NaN.
    """
    halves = (values.view(torch.int32) >> _UPPER_HALF) & (_NUM_UPPER_HALVES - 1)
    halves = halves.masked_fill_(values.isnan(), _NAN_UPPER_HALF)  # what says NaN may be in the lower half
    return _tensor(encode_table, element, torch.uint8, values.device)[halves.to(torch.int64)]


def decode(codes: Tensor, element: Element) -> Tensor:
    """The values ``codes`` (uint8) stand for, float32."""
    return _look_up(_tensor(decode_table, element, torch.float32, codes.device), codes, torch.Tensor.int)


def encode_nearest(values: Tensor, element: Element, *, saturate: bool) -> Tensor:
    """Codes of the element's values nearest to float32 ``values``, which are no further off than bfloat16 tells.

    Args:
        saturate: beyond the maximum, the maximum; else Inf, or what the element has for it.
    """
    table = _nearest_codes(element, saturate).to(values.device)
    return _look_up(table, values, lambda v: v.bfloat16().view(torch.int16).int() & (_NUM_UPPER_HALVES - 1))


def _look_up(table: Tensor, keys: Tensor, index: Callable[[Tensor], Tensor]) -> Tensor:
    """``table[index(keys)]``, in the shape of ``keys``; ``index`` gives int32."""
    flat = keys.reshape(-1)
    found = torch.empty(flat.shape, dtype=table.dtype, device=table.device)
    chunk = _CHUNK if flat.device.type == "cpu" else max(1, flat.numel())
    for part, out in zip(torch.split(flat, chunk), torch.split(found, chunk), strict=True):
        torch.index_select(table, 0, index(part), out=out)
    return found.view(keys.shape)


def encode_scale(scale: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Codes of scales the format holds (float32), uint8; NaN becomes its NaN code."""
    bits = scale.view(torch.int32)
    width = scale_format.mantissa_bits
    lowest = 2.0**scale_format.min_exponent
    # counted in spacings of the lowest binade; above it every binade takes 2^width codes more
    normal = (bits >> (MANTISSA_WIDTH - width)) - ((scale_format.min_exponent + BIAS) << width)
    if scale_format.min_value < lowest:  # there are subnormals
        steps = (scale * 2.0 ** (width - scale_format.min_exponent)).nan_to_num(0.0).to(torch.int32)
        normal = torch.where(scale < lowest, steps, normal + (1 << width))
    return torch.where(scale.isnan(), scale_format.nan_code, normal).to(torch.uint8)


def decode_scale(codes: Tensor, scale_format: ScaleFormat) -> Tensor:
    """The scales that ``codes`` (uint8) stand for, float32; NaN for the NaN code."""
    return _tensor(_scale_table, scale_format, torch.float32, codes.device)[codes.to(torch.int64)]


def pack(codes: Tensor, axis: int) -> Tensor:
    """4-bit codes two to a byte along ``axis``, the first in the lower half; an odd last one is beside a zero."""
    if codes.shape[axis] % 2:
        filler = codes.new_zeros([1 if dim == axis else length for dim, length in enumerate(codes.shape)])
        codes = torch.cat((codes, filler), axis)
    pairs: Tensor = codes.unflatten(axis, (-1, 2))  # type: ignore[no-untyped-call]
    return pairs.select(axis + 1, 0) | (pairs.select(axis + 1, 1) << 4)


def unpack(codes: Tensor, axis: int, length: int) -> Tensor:
    """What ``pack`` packed: ``length`` codes along ``axis``, one to a byte."""
    halves = torch.stack((codes & 0xF, codes >> 4), axis + 1)
    codes = halves.flatten(axis, axis + 1)
    return codes.narrow(axis, 0, length)


def pack_bits(bits: Tensor, axis: int) -> Tensor:
    """Zeros and ones (uint8) eight to a byte along ``axis``, the first lowest; the last byte is filled with zeros."""
    missing = -bits.shape[axis] % 8
    if missing:
        filler = bits.new_zeros([missing if dim == axis else length for dim, length in enumerate(bits.shape)])
        bits = torch.cat((bits, filler), axis)
    groups: Tensor = bits.movedim(axis, -1).unflatten(-1, (-1, 8))  # type: ignore[no-untyped-call]
    weights = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=bits.device)
    return (groups * weights).sum(-1, dtype=torch.uint8).movedim(-1, axis).contiguous()


def unpack_bits(packed: Tensor, axis: int) -> Tensor:
    """What ``pack_bits`` packed, a multiple of eight along ``axis``."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.movedim(axis, -1).unsqueeze(-1) >> places) & 1).flatten(-2).movedim(-1, axis)


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------


def _float_values(element: Element) -> tuple[float, ...]:
    """A sign, an exponent, a mantissa; beyond the largest value Inf if there is one, then NaN."""
    width = element.mantissa_bits
    values = []
    for code in range(1 << (element.bits - 1)):
        exponent, mantissa = code >> width, code & ((1 << width) - 1)
        leading = 1 if exponent else 0
        value = (leading + mantissa / 2.0**width) * 2.0 ** (max(exponent, 1) - 1 + element.min_exponent)
        if value > element.max_value:
            value = math.inf if element.has_inf and mantissa == 0 else math.nan
        values.append(value)
    return tuple(values)


def _integer_values(element: Element) -> tuple[float, ...]:
    return tuple(n / 2.0**element.mantissa_bits for n in range(1 << (element.bits - 1)))


def _prefix_values(element: Element) -> tuple[float, ...]:
    """A prefix says how many bits the exponent has, of which the first is its sign and a leading one is left out."""
    width = element.bits - 1
    values = []
    for code in range(1 << width):
        bits = f"{code:0{width}b}"
        prefix, num_exponent_bits = next(
            ((p, n) for p, n in element.prefixes if bits.startswith(p)), (bits[: width - element.mantissa_bits], None)
        )
        rest = bits[len(prefix) :]
        if num_exponent_bits is None:  # the smallest: the mantissa is the exponent
            mantissa = int(rest, 2)
            values.append(2.0 ** (mantissa + element.min_exponent - 1) if mantissa else 0.0)
            continue
        field, fraction = rest[:num_exponent_bits], rest[num_exponent_bits:]
        exponent = int("1" + field[1:], 2) * (-1 if field[0] == "1" else 1) if field else 0
        value = (1 + int(fraction, 2) / 2.0 ** len(fraction)) * 2.0**exponent
        values.append(value if value <= element.max_value else math.inf)
    return tuple(values)


@cache
def _nearest_codes(element: Element, saturate: bool) -> Tensor:
    """The code of the element's value nearest to each bfloat16 number, by its bits."""
    bits = torch.arange(_NUM_UPPER_HALVES, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).to(torch.float32)
    round_to_element_(values, element, "nearest_even")
    return encode(limit_(values, element, saturate=saturate), element)


_POSITIVE: Mapping[Encoding, Callable[[Element], tuple[float, ...]]] = {
    "float": _float_values,
    "twos_complement": _integer_values,
    "prefix": _prefix_values,
}


def _scale_table(scale_format: ScaleFormat) -> tuple[float, ...]:
    values = []
    has_subnormals = scale_format.min_value < 2.0**scale_format.min_exponent
    width = scale_format.mantissa_bits
    for code in range(1 << scale_format.bits):
        exponent, mantissa = code >> width, code & ((1 << width) - 1)
        leading = 0 if has_subnormals and exponent == 0 else 1
        exponent = max(exponent - 1, 0) if has_subnormals else exponent
        value = (leading + mantissa / 2.0**width) * 2.0 ** (exponent + scale_format.min_exponent)
        values.append(value if value <= scale_format.max_value and code != scale_format.nan_code else math.nan)
    return tuple(values)


def _upper_half(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) >> _UPPER_HALF & 0xFFFF


@cache
def _tensor(
    table: Callable[..., tuple[float, ...]], record: Element | ScaleFormat, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(table(record), dtype=dtype, device=device)
