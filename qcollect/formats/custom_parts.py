"""The element and the scales of a definition, read and checked, and an element written down again. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qcollect.formats.catalog import POWER_OF_TWO_RULES, SCALE_FORMATS
from qcollect.formats.custom_reader import Reader
from qcollect.formats.records import Element, ScaleFormat, ScaleRule, TensorScale

SOURCE = "a user's own definition"
TENSOR, NONE = "tensor", "none"

_MAX_BITS = 8
# Every value, step and scaled value is then a normal float32 number with room to spare, and a bfloat16 number.
_LOWEST_STEP_EXPONENT, _LARGEST_EXPONENT = -100, 100
_MAX_BIAS = 256
_FLAGS = {"inf": False, "nan": False, "signed_zero": True, "saturate": True}
_KEYS = ("exponent_bits", "mantissa_bits", "bias", "min_exponent", "max_value", *_FLAGS)
_SCALES = (*SCALE_FORMATS, TENSOR, NONE, "[E4M3, tensor]", "[E6M2, tensor]")


def read_element(parent: Reader) -> Element | None:
    """The element a definition describes; None where something is wrong, which ``parent`` then notes."""
    num_problems = len(parent.problems)
    reader = parent.section("element", _KEYS)
    if reader is None:
        return None
    exponent_bits = reader.whole("exponent_bits", 1, _MAX_BITS - 1)
    mantissa_bits = reader.whole("mantissa_bits", 0, _MAX_BITS - 2)
    has = {key: reader.flag(key, default) for key, default in _FLAGS.items()}
    if exponent_bits is None or mantissa_bits is None or len(reader.problems) > num_problems:
        return None
    num_bits = 1 + exponent_bits + mantissa_bits
    if num_bits > _MAX_BITS:
        reader.refuse(
            "mantissa_bits",
            f"with the sign and exponent_bits: {exponent_bits} it makes {num_bits} bits; {_MAX_BITS} are the most",
        )
        return None
    min_exponent = _read_min_exponent(reader, exponent_bits)
    if min_exponent is None:
        return None
    values = _positive_values(exponent_bits, mantissa_bits, min_exponent)
    top = _read_top(reader, values, exponent_bits, mantissa_bits, has)
    if top is None:
        return None
    lowest, highest = min_exponent - mantissa_bits, math.frexp(values[top])[1] - 1
    if lowest < _LOWEST_STEP_EXPONENT or highest > _LARGEST_EXPONENT:
        reader.refuse(
            "min_exponent" if reader.has("min_exponent") else "bias",
            f"the element reaches from 2^{lowest} to 2^{highest}, and the arithmetic holds 2^{_LOWEST_STEP_EXPONENT} "
            f"to 2^{_LARGEST_EXPONENT}; move it",
        )
        return None
    return Element(
        name=f"E{exponent_bits}M{mantissa_bits}",
        bits=num_bits,
        exponent_bits=str(exponent_bits),
        mantissa_bits=mantissa_bits,
        min_exponent=min_exponent,
        max_value=values[top],
        has_inf=has["inf"],
        has_nan=has["nan"],
        signed_zero=has["signed_zero"],
        overflow="saturate" if has["saturate"] else "infinity",
        source=SOURCE,
    )


def _read_min_exponent(reader: Reader, exponent_bits: int) -> int | None:
    if reader.has("bias") and reader.has("min_exponent"):
        reader.refuse("min_exponent", "says what bias says (1 - bias); leave one of them out")
        return None
    if reader.has("min_exponent"):
        return reader.whole("min_exponent", -_MAX_BIAS, _MAX_BIAS)
    bias = reader.whole("bias", -_MAX_BIAS, _MAX_BIAS, default=(1 << (exponent_bits - 1)) - 1)
    return None if bias is None else 1 - bias


def _positive_values(exponent_bits: int, mantissa_bits: int, min_exponent: int) -> list[float]:
    """What every code without a sign would be without Inf and NaN."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        leading = 1 if exponent else 0
        values.append(math.ldexp(leading + mantissa / 2.0**mantissa_bits, max(exponent, 1) - 1 + min_exponent))
    return values


def _read_top(
    reader: Reader, values: Sequence[float], exponent_bits: int, mantissa_bits: int, has: Mapping[str, bool]
) -> int | None:
    """The code of the largest value; above it there are codes for Inf and NaN as far as the element has them."""
    last, infinity = len(values) - 1, ((1 << exponent_bits) - 1) << mantissa_bits
    nan_is_above = has["nan"] and has["signed_zero"]  # without a -0 its code is the NaN
    top = infinity - 1 if has["inf"] else last - 1 if nan_is_above else last
    if reader.has("max_value"):
        value = reader.number("max_value")
        if value is None:
            return None
        if value not in values:
            near = sorted(sorted(values, key=lambda other: abs(other - value))[:2])
            reader.refuse("max_value", f"is no value of the element; the nearest are {near[0]:g} and {near[1]:g}")
            return None
        top = values.index(value)
    faults = (
        (not has["saturate"] and not has["inf"], "saturate", "must be true without inf: there is no code for Inf"),
        (has["inf"] and top >= infinity, "max_value" if reader.has("max_value") else "inf", "leaves no code for Inf"),
        (has["inf"] and mantissa_bits > 0 and not has["nan"], "nan", "must be true with inf: the codes behind Inf"),
        (has["inf"] and mantissa_bits == 0 and nan_is_above, "nan", "leaves it no code beside Inf"),
        (nan_is_above and top == last, "max_value", "leaves no code for NaN, which takes the largest"),
        (
            values[top] < values[1 << mantissa_bits],
            "max_value" if reader.has("max_value") else "exponent_bits",
            f"leaves {values[top]:g} as the largest value, below the smallest normal number "
            f"{values[1 << mantissa_bits]:g}",
        ),
    )
    for is_fault, key, why in faults:
        if is_fault:
            reader.refuse(key, why)
            return None
    return top


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The scales of a type: of its blocks, of the whole tensor, of both or none."""

    block: ScaleFormat | None
    has_tensor: bool

    @property
    def rules(self) -> tuple[ScaleRule, ...]:
        if self.block is not None:
            return ("nearest",) if self.block.mantissa_bits else POWER_OF_TWO_RULES
        return ("nearest", "rceil") if self.has_tensor else ()

    def num_bits(self, element: Element) -> int:
        """Significant bits of element x block scale."""
        scale_bits = self.block.mantissa_bits + 1 if self.block is not None and self.block.mantissa_bits else 0
        return element.mantissa_bits + 1 + scale_bits

    @property
    def holds_nan(self) -> bool:
        return self.block is not None or self.has_tensor

    def tensor_scale(self, element: Element) -> TensorScale | None:
        """As nvfp4's above blocks, as fp8's without."""
        if not self.has_tensor:
            return None
        if self.block is not None:
            return TensorScale(bound=self.block.max_value * element.max_value)
        return TensorScale(bound=element.max_value, min_amax=1e-12, sees_nonfinite=True)


def read_scale(reader: Reader) -> Levels | None:
    """The scales a definition asks for; None where something is wrong, which ``reader`` then notes."""
    value = reader.values.get("scale")
    if value is None:
        reader.miss("scale", f"known: {', '.join(_SCALES)}")
        return None
    match [value] if isinstance(value, str) else value:
        case ["none"]:
            return Levels(block=None, has_tensor=False)
        case ["tensor"]:
            return Levels(block=None, has_tensor=True)
        case [str(name)] if name in SCALE_FORMATS:
            return Levels(block=SCALE_FORMATS[name], has_tensor=False)
        case [str(name), "tensor"] if name in SCALE_FORMATS and SCALE_FORMATS[name].mantissa_bits:
            return Levels(block=SCALE_FORMATS[name], has_tensor=True)
    reader.refuse("scale", f"known: {', '.join(_SCALES)}")
    return None


def read_block_size(reader: Reader, levels: Levels) -> int | None:
    """Elements that share a block's scale; None without one, or where something is wrong."""
    if levels.block is not None:
        return reader.whole("block_size", 1, 1 << 30)
    if reader.has("block_size"):
        reader.refuse("block_size", "this scale belongs to no block; leave it out, or name the scale of a block")
    return None


def describe_element(element: Element) -> dict[str, Any]:
    """What ``read_element`` reads, every key of it."""
    return {
        "exponent_bits": int(element.exponent_bits) if element.exponent_bits.isdecimal() else element.exponent_bits,
        "mantissa_bits": element.mantissa_bits,
        "min_exponent": element.min_exponent,
        "max_value": element.max_value,
        "inf": element.has_inf,
        "nan": element.has_nan,
        "signed_zero": element.signed_zero,
        "saturate": element.overflow == "saturate",
    }
