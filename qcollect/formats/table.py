"""The facts of the formats as people read them: a table computed from the data. Imports no torch."""

import math
from collections.abc import Iterable

from qcollect.formats.catalog import QUANT_TYPES, get_quant_type
from qcollect.formats.records import Element, QuantType

HEADERS = (
    "type",
    "element",
    "sign/exponent/mantissa",
    "bits per value",
    "block",
    "scale",
    "max",
    "min normal",
    "min subnormal",
    "special values",
    "scale rule",
    "rounding",
    "source",
)


Fact = str | int | float | list[str] | list[int] | None


def describe(quant_type: str | QuantType) -> dict[str, Fact]:
    """The facts of a quant type, JSON-ready; None where a fact does not apply. Defaults stand first in lists.

    ``max``, ``min_normal`` and ``min_subnormal`` are the element's; ``max_multiple`` is the largest multiple of a
    block's scale, which with exponents inside the block is more. ``micro_exponents`` are the sizes of the groups they
    belong to, ``tensor_scale`` tells whether the whole tensor has a scale (``always``, ``optional``).
    """
    entry = get_quant_type(quant_type)
    element = entry.element
    return {
        "name": entry.name,
        "description": entry.description,
        "element": element.name if element else None,
        "fields": _fields(element) if element else None,
        "element_bits": element.bits if element else None,
        "bits_per_value": entry.bits_per_value,
        "block_size": entry.block_size,
        "scale": _scale(entry),
        "scale_format": entry.scale_format.name if entry.scale_format else None,
        "micro_exponents": [size for size, _ in entry.micro_exponents],
        "tensor_scale": ("always" if entry.has_tensor_scale else "optional") if entry.tensor_scale else None,
        "max": element.max_value if element else None,
        "max_multiple": entry.max_element if entry.scale_format else None,
        "min_normal": _min_normal(element) if element else None,
        "min_subnormal": element.min_subnormal if element else None,
        "special_values": _special_values(element) if element else None,
        "overflow": element.overflow if element else None,
        "scale_rules": [str(rule) for rule in entry.scale_rules],
        "roundings": [str(rounding) for rounding in entry.roundings],
        "source": entry.source,
    }


def row(quant_type: str | QuantType) -> tuple[str, ...]:
    """One line of the format table as text, a cell for each of ``HEADERS``."""
    entry = get_quant_type(quant_type)
    facts = describe(entry)
    element = entry.element
    min_normal = _min_normal(element) if element else None
    cells = (
        entry.name,
        facts["element"],
        facts["fields"],
        None if entry.bits_per_value is None else f"{entry.bits_per_value:g}",
        facts["block_size"],
        facts["scale"],
        _largest(entry, element) if element else None,
        _number(min_normal) if min_normal else None,
        _number(element.min_subnormal) if element else None,
        facts["special_values"],
        entry.scale_rule,
        entry.rounding,
        entry.source,
    )
    return tuple("-" if cell is None else str(cell) for cell in cells)


def rows(quant_types: Iterable[str | QuantType] = tuple(QUANT_TYPES)) -> list[tuple[str, ...]]:
    """The format table as text, a row for each quant type."""
    return [row(quant_type) for quant_type in quant_types]


def markdown_table() -> str:
    """The format table in Markdown, as it stands in this folder's README."""
    lines = [HEADERS, tuple("---" for _ in HEADERS), *rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _scale(entry: QuantType) -> str | None:
    block = entry.scale_format.name if entry.scale_format else None
    micro = [f"{size} x 1 bit" for size, _ in entry.micro_exponents]
    tensor = "float32 per tensor" if entry.has_tensor_scale else "per tensor, optional" if entry.tensor_scale else None
    return " + ".join(part for part in (block, *micro, tensor) if part) or None


def _fields(element: Element) -> str:
    if element.encoding == "twos_complement":
        return f"integer/{1 << element.mantissa_bits}"
    bits = sorted({bits for _, bits in element.taper}) or [element.mantissa_bits]
    mantissa = str(bits[0]) if len(bits) == 1 else f"{bits[0]}-{bits[-1]}"
    return f"1/{element.exponent_bits}/{mantissa}"


def _min_normal(element: Element) -> float | None:
    """None for integers, whose values are all as far apart."""
    return None if element.encoding == "twos_complement" else element.min_normal


def _largest(entry: QuantType, element: Element) -> str:
    """The element's maximum, and what exponents inside a block multiply it with."""
    factor = entry.max_element / element.max_value
    return _number(element.max_value) if factor == 1 else f"{_number(element.max_value)} x {factor:g}"


def _special_values(element: Element) -> str:
    has_minus_zero = element.signed_zero and element.encoding != "twos_complement"
    have = [("Inf", element.has_inf), ("NaN", element.has_nan), ("-0", has_minus_zero)]
    return ", ".join(name for name, is_there in have if is_there) or "none"


def _number(value: float) -> str:
    """Small powers of two as ``2^-9``; other numbers as short decimals."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and value < 0.1:
        return f"2^{exponent - 1}"
    return f"{value:.6g}"
