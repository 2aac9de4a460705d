"""The number formats as data: elements, and quant types built from them. Imports no torch.

A format is a literal in this file, with its source; rounding, blocks and scales are functions
elsewhere that read the fields and never a name. Every number a table or a command shows about a
format is computed here from the same fields.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qcollect.errors import FormatError

Overflow = Literal["saturate", "infinity"]
ScaleRule = Literal["floor", "ceil", "even", "rceil"]
Rounding = Literal["nearest_even", "half_away"]

# Every rule and rounding that exists, whatever type takes it.
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "ceil", "even", "rceil")
ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "half_away")


# ---------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One number of a format: which values exist, and what becomes of the others.

    The spacing of values in the binade of exponent ``e`` is ``2^(e - mantissa bits)``; below
    ``min_exponent`` it stays what it is there, which is how subnormals come about.

    Args:
        min_exponent: lowest binade with a spacing of its own.
        mantissa_bits: explicit mantissa bits, the most any binade has.
        taper: for an element whose precision falls with the exponent, ``((n, bits), ...)``:
            binades with ``|e| <= n`` have ``bits``, first match; empty: ``mantissa_bits`` everywhere.
        min_normal_exponent: where it is not ``min_exponent`` (tapered elements).
        overflow: what a value that rounds beyond ``max_value`` becomes, and Inf with it.
        torch_dtype: name of the torch dtype whose cast is exactly this element's rule, if any.
    """

    name: str
    bits: int
    exponent_bits: str
    mantissa_bits: int
    min_exponent: int
    max_value: float
    taper: tuple[tuple[int, int], ...] = ()
    min_normal_exponent: int | None = None
    has_inf: bool
    has_nan: bool
    signed_zero: bool = True
    overflow: Overflow
    torch_dtype: str | None = None
    source: str

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two the element holds (``emax`` in the OCP text)."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def max_mantissa(self) -> float:
        """``max_value`` over the largest power of two, in [1, 2)."""
        return self.max_value / 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        exponent = self.min_exponent if self.min_normal_exponent is None else self.min_normal_exponent
        return 2.0**exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest value above zero."""
        lowest_bits = self.taper[-1][1] if self.taper else self.mantissa_bits
        return 2.0 ** (self.min_exponent - lowest_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFormat:
    """How the scale of a block is stored: a bare power of two with this range of exponents."""

    name: str
    bits: int
    min_exponent: int
    max_exponent: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantType:
    """What a user names: an element, the scale that goes with it, and the rules one may choose.

    Args:
        element: None quantizes nothing.
        block_size: elements that share a scale along an axis; None: the type has no blocks.
        scale_rules: how the scale may be chosen from a block's abs max, default first.
        roundings: how an element may be rounded, default first.
        tensor_scale_target: per-tensor scaling puts the abs max into ``[2^target, 2^(target + 1))``;
            None: the type has no per-tensor scaling.
    """

    name: str
    element: Element | None
    block_size: int | None = None
    scale_format: ScaleFormat | None = None
    scale_rules: tuple[ScaleRule, ...] = ()
    roundings: tuple[Rounding, ...] = ()
    tensor_scale_target: int | None = None
    description: str
    source: str

    @property
    def scale_rule(self) -> ScaleRule | None:
        return self.scale_rules[0] if self.scale_rules else None

    @property
    def rounding(self) -> Rounding | None:
        return self.roundings[0] if self.roundings else None

    @property
    def has_tensor_scale(self) -> bool:
        return self.tensor_scale_target is not None

    @property
    def can_saturate(self) -> bool:
        """Whether overflow goes to Inf unless saturation is asked for."""
        return self.element is not None and self.element.overflow == "infinity"

    @property
    def bits_per_value(self) -> float | None:
        """Bits of an element and its share of the block's scale; None where nothing is quantized."""
        if self.element is None:
            return None
        if self.scale_format is None or self.block_size is None:
            return float(self.element.bits)
        return self.element.bits + self.scale_format.bits / self.block_size


# ---------------------------------------------------------------------------------------------
# The formats
# ---------------------------------------------------------------------------------------------

E4M3 = Element(
    name="E4M3",
    bits=8,
    exponent_bits="4",
    mantissa_bits=3,
    min_exponent=-6,
    max_value=448.0,
    has_inf=False,
    has_nan=True,
    overflow="saturate",
    source="OCP MX v1.0 section 5.3.1, arXiv 2209.05433 table 1",
)
E5M2 = Element(
    name="E5M2",
    bits=8,
    exponent_bits="5",
    mantissa_bits=2,
    min_exponent=-14,
    max_value=57344.0,
    has_inf=True,
    has_nan=True,
    overflow="saturate",  # OCP MX 6.3, although E5M2 has a code for Inf
    source="OCP MX v1.0 section 5.3.1, arXiv 2209.05433 table 1",
)
E2M1 = Element(
    name="E2M1",
    bits=4,
    exponent_bits="2",
    mantissa_bits=1,
    min_exponent=0,
    max_value=6.0,
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    source="OCP MX v1.0 section 5.3.3 table 5",
)
HIF8 = Element(
    name="HiF8",
    bits=8,
    exponent_bits="0-4",
    mantissa_bits=3,
    min_exponent=-22,
    max_value=32768.0,
    taper=((3, 3), (7, 2), (15, 1), (22, 0)),
    min_normal_exponent=-15,
    has_inf=True,
    has_nan=True,
    signed_zero=False,
    overflow="infinity",
    source="arXiv 2409.16626 tables 1-4",
)
BF16 = Element(
    name="bf16",
    bits=16,
    exponent_bits="8",
    mantissa_bits=7,
    min_exponent=-126,
    max_value=(2.0 - 2.0**-7) * 2.0**127,
    has_inf=True,
    has_nan=True,
    overflow="infinity",
    torch_dtype="bfloat16",
    source="the upper half of IEEE 754 binary32",
)
FP16 = Element(
    name="fp16",
    bits=16,
    exponent_bits="5",
    mantissa_bits=10,
    min_exponent=-14,
    max_value=65504.0,
    has_inf=True,
    has_nan=True,
    overflow="infinity",
    torch_dtype="float16",
    source="IEEE 754 binary16",
)

E8M0 = ScaleFormat(name="E8M0", bits=8, min_exponent=-127, max_exponent=127, source="OCP MX v1.0 section 5.4.1 table 7")


def _mx(name: str, element: Element, description: str) -> QuantType:
    return QuantType(
        name=name,
        element=element,
        block_size=32,
        scale_format=E8M0,
        scale_rules=SCALE_RULES,
        roundings=ROUNDINGS,
        description=description,
        source=f"OCP MX v1.0 sections 5.2, 6.3; element: {element.source}",
    )


_ALL = (
    _mx("mxfp8", E4M3, "blocks of 8-bit floats, three mantissa bits"),
    _mx("mxfp8_e5m2", E5M2, "blocks of 8-bit floats, more range and two mantissa bits"),
    _mx("mxfp4", E2M1, "blocks of 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6"),
    QuantType(
        name="hifp8",
        element=HIF8,
        roundings=("half_away",),
        tensor_scale_target=3,  # [8, 16): the top of the binades with three mantissa bits
        description="HiFloat8: 8 bits whose mantissa shrinks as the exponent grows; no block scale",
        source="arXiv 2409.16626 sections 2-3 (rounding TA)",
    ),
    QuantType(
        name="bf16",
        element=BF16,
        roundings=("nearest_even",),
        description="plain cast",
        source=BF16.source,
    ),
    QuantType(
        name="fp16",
        element=FP16,
        roundings=("nearest_even",),
        description="plain cast",
        source=FP16.source,
    ),
    QuantType(name="none", element=None, description="quantizes nothing", source="-"),
)
QUANT_TYPES: dict[str, QuantType] = {quant_type.name: quant_type for quant_type in _ALL}


def get_quant_type(name: str | QuantType) -> QuantType:
    """The quant type of this name (a quant type is given back as it is).

    Raises:
        FormatError: no type has this name.
    """
    if isinstance(name, QuantType):
        return name
    if name in QUANT_TYPES:
        return QUANT_TYPES[name]
    raise FormatError(f"quant type {unknown(name, sorted(QUANT_TYPES))} See 'qcollect formats'.")


def unknown(name: object, known: Iterable[str]) -> str:
    """``'mxfp9' is not known; known: ...; did you mean 'mxfp8'?`` The question only if a name is near."""
    names = list(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    question = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r} is not known; known: {', '.join(names)}{question}"


# ---------------------------------------------------------------------------------------------
# What people read
# ---------------------------------------------------------------------------------------------

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


def describe(quant_type: str | QuantType) -> dict[str, str | int | float | list[str] | None]:
    """The facts of a quant type, JSON-ready; None where a fact does not apply. Defaults stand first in lists."""
    entry = get_quant_type(quant_type)
    element, scale = entry.element, entry.scale_format
    return {
        "name": entry.name,
        "description": entry.description,
        "element": element.name if element else None,
        "fields": _fields(element) if element else None,
        "bits_per_value": entry.bits_per_value,
        "block_size": entry.block_size,
        "scale": scale.name if scale else "per tensor, optional" if entry.has_tensor_scale else None,
        "max": element.max_value if element else None,
        "min_normal": element.min_normal if element else None,
        "min_subnormal": element.min_subnormal if element else None,
        "special_values": _special_values(element) if element else None,
        "scale_rules": list(entry.scale_rules),
        "roundings": list(entry.roundings),
        "source": entry.source,
    }


def row(quant_type: str | QuantType) -> tuple[str, ...]:
    """One line of the format table as text, a cell for each of ``HEADERS``."""
    entry = get_quant_type(quant_type)
    facts = describe(entry)
    element = entry.element
    cells = (
        entry.name,
        facts["element"],
        facts["fields"],
        None if entry.bits_per_value is None else f"{entry.bits_per_value:g}",
        facts["block_size"],
        facts["scale"],
        _number(element.max_value) if element else None,
        _number(element.min_normal) if element else None,
        _number(element.min_subnormal) if element else None,
        facts["special_values"],
        entry.scale_rule,
        entry.rounding,
        entry.source,
    )
    return tuple("-" if cell is None else str(cell) for cell in cells)


def rows() -> list[tuple[str, ...]]:
    """The format table as text, a row for each quant type in catalog order."""
    return [row(entry) for entry in QUANT_TYPES.values()]


def markdown_table() -> str:
    """The format table in Markdown, as it stands in this folder's README."""
    lines = [HEADERS, tuple("---" for _ in HEADERS), *rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fields(element: Element) -> str:
    bits = sorted({bits for _, bits in element.taper}) or [element.mantissa_bits]
    mantissa = str(bits[0]) if len(bits) == 1 else f"{bits[0]}-{bits[-1]}"
    return f"1/{element.exponent_bits}/{mantissa}"


def _special_values(element: Element) -> str:
    have = [("Inf", element.has_inf), ("NaN", element.has_nan), ("-0", element.signed_zero)]
    return ", ".join(name for name, is_there in have if is_there) or "none"


def _number(value: float) -> str:
    """Small powers of two as ``2^-9``; other numbers as short decimals."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and value < 0.1:
        return f"2^{exponent - 1}"
    return f"{value:.6g}"
