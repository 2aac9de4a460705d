"""Users' own number formats: a definition in YAML -> a quant type like the catalog's. Imports no torch.

    name: my_fp6                      # of the run's folder and in every file's name
    description: 6 bits, a wider exponent
    element:                          # a sign, exponent bits, mantissa bits: 2 to 8 bits together
      exponent_bits: 4
      mantissa_bits: 1
      bias: 7                         # or min_exponent: 1 - bias; default 2^(exponent_bits - 1) - 1
      max_value: 384                  # default: the largest code that is neither Inf nor NaN
      inf: false                      # whether there are codes for Inf, NaN and -0
      nan: false
      signed_zero: true
      saturate: true                  # beyond max_value: the maximum, or Inf (which needs inf: true)
    block_size: 32
    scale: E8M0                       # E8M0, E4M3, E6M2, tensor, none, [E4M3, tensor] or [E6M2, tensor]
    scale_rules: [floor, rceil]       # default first; left out: all that the scale takes
    roundings: [nearest_even, stochastic]

Only ``name``, ``element`` with its bits, ``scale`` and (for a block scale) ``block_size`` must be there. A
definition is this mapping without its name; in a recipe it stands under ``quant.formats``. What the
arithmetic cannot honour is refused. No algorithm knows whether a type comes from here or from the catalog.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qcollect.errors import FormatError
from qcollect.formats.catalog import (
    BLOCK_ROUNDINGS,
    POWER_OF_TWO_RULES,
    QUANT_TYPES,
    SCALE_FORMATS,
    get_quant_type,
)
from qcollect.formats.records import Element, QuantType, ScaleFormat, ScaleRule, TensorScale
from qcollect.vocab import CaptureName, Component, LayerType, Operation, Phase

SUFFIXES = (".yaml", ".yml")
SOURCE = "a user's own definition"

_MAX_BITS = 8
# Every value, step and scaled value is then a normal float32 number with room to spare, and a bfloat16 number.
_LOWEST_STEP_EXPONENT, _LARGEST_EXPONENT = -100, 100
_MAX_BIAS = 256
_BFLOAT16_BITS = 8  # of its significand: gemms consume values in it
_KEYS = ("name", "description", "element", "block_size", "scale", "scale_rules", "roundings")
_FLAGS = {"inf": False, "nan": False, "signed_zero": True, "saturate": True}
_ELEMENT_KEYS = ("exponent_bits", "mantissa_bits", "bias", "min_exponent", "max_value", *_FLAGS)
_TENSOR, _NONE = "tensor", "none"
_SCALES = (*SCALE_FORMATS, _TENSOR, _NONE, "[E4M3, tensor]", "[E6M2, tensor]")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# What neither the values nor the codes follow from.
_LABELS = frozenset({"name", "description", "source"})
_ELEMENT_LABELS = frozenset({"name", "source", "torch_dtype"})

Problem = tuple[str, str]
"""A dotted key, and a sentence that names it."""


def is_format_file(name: object) -> bool:
    """Whether a quant type given by this text is one in a file."""
    return isinstance(name, str | os.PathLike) and os.fspath(name).endswith(SUFFIXES)


def load_quant_type(path: str | os.PathLike[str], *, shown: str | None = None) -> QuantType:
    """The quant type a YAML file defines.

    Args:
        path: relative to the current directory.
        shown: what messages call it; None: ``path``.

    Raises:
        FormatError: all that is wrong with it, a line each.
    """
    from qcollect.document import parse_yaml

    shown = os.fspath(path) if shown is None else shown
    document = parse_yaml(_read(Path(path), shown))
    found = [(problem.line, problem.message) for problem in document.problems]
    entry, values = None, document.value
    if isinstance(values, Mapping):
        entry, problems = read_definition(values.get("name"), {k: v for k, v in values.items() if k != "name"})
        found += [(_line_of(document.lines, key), message) for key, message in problems]
    elif not found:
        found = [(1, "must be a mapping (name: ..., element: ..., scale: ...)")]
    if found or entry is None:
        raise FormatError(
            "\n".join(f"{shown}:{line}: {message}" for line, message in sorted(found, key=lambda f: f[0]))
        )
    return entry


def quant_type_of(name: str, definition: Mapping[str, Any]) -> QuantType:
    """The quant type of a stored definition.

    Raises:
        FormatError: all that is wrong with it, a line each.
    """
    entry, problems = read_definition(name, definition)
    if entry is None:
        raise FormatError("\n".join(f"{name}: {message}" for _, message in problems))
    return entry


def find_quant_type(name: str, definitions: Mapping[str, Mapping[str, Any]]) -> QuantType:
    """The quant type of this name, among definitions or in the catalog.

    Raises:
        FormatError: there is none.
    """
    return quant_type_of(name, definitions[name]) if name in definitions else get_quant_type(name)


def definition_of(entry: QuantType) -> dict[str, Any] | None:
    """The definition of a type, every key of it set, JSON-ready; None for the catalog's own.

    Raises:
        FormatError: no definition can say what the type is (a record made by hand, with micro exponents, ...).
    """
    if QUANT_TYPES.get(entry.name) == entry:
        return None
    scales = [entry.scale_format.name] if entry.scale_format else []
    scales += [_TENSOR] if entry.has_tensor_scale else []
    definition = {
        "description": entry.description,
        "element": None if entry.element is None else _describe_element(entry.element),
        "block_size": entry.block_size,
        "scale": scales[0] if len(scales) == 1 else scales or _NONE,
        "scale_rules": list(entry.scale_rules),
        "roundings": list(entry.roundings),
    }
    definition = {key: value for key, value in definition.items() if value not in (None, [])}
    again, problems = read_definition(entry.name, definition)
    if again is None or _arithmetic(again) != _arithmetic(entry):
        why = "; ".join(message for _, message in problems) or "it holds more than a definition can say"
        raise FormatError(f"{entry.name} is not the catalog's and cannot be written down as a definition: {why}.")
    return definition


def read_definition(
    name: object, definition: Mapping[str, Any], *, prefix: str = "", name_key: str = "name"
) -> tuple[QuantType | None, list[Problem]]:
    """The quant type of a definition and nothing, or None and all that is wrong with it.

    Args:
        name: of the type.
        definition: the mapping without its name.
        prefix: what stands in front of every key, ``quant.formats.my_fp6.``.
        name_key: the key that holds the name.
    """
    reader = _Reader(definition, prefix, _KEYS if name_key == "name" else _KEYS[1:])
    if name is None:
        reader.miss("name", "it names the run's folder and its files")
    elif (fault := _find_name_fault(name)) is not None:
        reader.problems.append((name_key, f"{name_key} is {_show(name)}; {fault}"))
    element, levels = _read_element(reader), _read_scale(reader)
    values: dict[str, Any] = {
        "description": reader.text("description", default=""),
        "roundings": reader.choices("roundings", BLOCK_ROUNDINGS),
    }
    if levels is not None:
        values["block_size"] = _read_block_size(reader, levels)
        values["scale_rules"] = reader.choices("scale_rules", levels.rules)
        if element is not None and levels.num_bits(element) > _BFLOAT16_BITS:
            reader.refuse(
                "scale",
                f"a value would have {levels.num_bits(element)} significant bits, and bfloat16 holds {_BFLOAT16_BITS}; "
                f"use E8M0, or an element with fewer mantissa bits than {element.mantissa_bits}",
            )
        tensor_scale = None if element is None else levels.tensor_scale(element)
        bound = None if tensor_scale is None else tensor_scale.bound
        if bound is not None and bound < 1:  # its quotient by a large abs max is no float32
            reader.refuse(
                "scale",
                f"the largest value is {bound:g}, and what a float32 scale brings a tensor's maximum to must be 1 or "
                "more; raise element.min_exponent",
            )
        if element is not None and not levels.holds_nan and not element.has_nan:
            reader.refuse("element.nan", "must be true with scale: none, where nothing else holds a NaN")
    if reader.problems or element is None or levels is None:
        return None, reader.problems
    return QuantType(
        name=str(name),
        element=element,
        scale_format=levels.block,
        tensor_scale=levels.tensor_scale(element),
        source=SOURCE,
        **values,
    ), []


# ---------------------------------------------------------------------------------------------
# Parts of a definition
# ---------------------------------------------------------------------------------------------


def _find_name_fault(name: object) -> str | None:
    """What is wrong with a name; None if it is a good one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "must be a letter, then letters, digits and underscores, 64 at most"
    taken = next((known for known in QUANT_TYPES if known.lower() == name.lower()), None)
    if taken is not None:
        return f"the catalog has {taken} already; choose another name"
    if not all(_survives_file_name(name, layer_type) for layer_type in LayerType):
        return "a file's name with it would be read as one of another type; choose another name"
    return None


def _survives_file_name(name: str, layer_type: LayerType) -> bool:
    written = CaptureName(
        timestamp="20240101_000000",
        counter=1,
        iteration=0,
        layer_type=layer_type,
        layer_idx=0,
        operation=Operation.FORWARD,
        phase=Phase.PRE,
        component=Component.FA if layer_type == LayerType.ATTENTION else Component.LINEAR,
        quant_type=name,
        rank=0,
        sample_idx=0,
        tensor="query" if layer_type == LayerType.ATTENTION else "q_proj_input",
    )
    return CaptureName.parse(written.build()) == written


def _read_element(parent: "_Reader") -> Element | None:
    num_problems = len(parent.problems)
    reader = parent.section("element", _ELEMENT_KEYS)
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


def _read_min_exponent(reader: "_Reader", exponent_bits: int) -> int | None:
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
    reader: "_Reader", values: Sequence[float], exponent_bits: int, mantissa_bits: int, has: Mapping[str, bool]
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
class _Levels:
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


def _read_scale(reader: "_Reader") -> _Levels | None:
    value = reader.values.get("scale")
    if value is None:
        reader.miss("scale", f"known: {', '.join(_SCALES)}")
        return None
    match [value] if isinstance(value, str) else value:
        case ["none"]:
            return _Levels(block=None, has_tensor=False)
        case ["tensor"]:
            return _Levels(block=None, has_tensor=True)
        case [str(name)] if name in SCALE_FORMATS:
            return _Levels(block=SCALE_FORMATS[name], has_tensor=False)
        case [str(name), "tensor"] if name in SCALE_FORMATS and SCALE_FORMATS[name].mantissa_bits:
            return _Levels(block=SCALE_FORMATS[name], has_tensor=True)
    reader.refuse("scale", f"known: {', '.join(_SCALES)}")
    return None


def _read_block_size(reader: "_Reader", levels: _Levels) -> int | None:
    if levels.block is not None:
        return reader.whole("block_size", 1, 1 << 30)
    if reader.has("block_size"):
        reader.refuse("block_size", "this scale belongs to no block; leave it out, or name the scale of a block")
    return None


class _Reader:
    """Typed values of a section; what is wrong is noted, and what is asked for then None."""

    def __init__(
        self, values: Mapping[str, Any], prefix: str, known: Sequence[str], problems: list[Problem] | None = None
    ) -> None:
        self.values, self.prefix = values, prefix
        self.problems: list[Problem] = [] if problems is None else problems
        for key in values:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                question = f" Did you mean {near[0]!r}?" if near else ""
                full = f"{prefix}{key}"
                self.problems.append((full, f"unknown key {full!r}; known: {', '.join(known)}.{question}"))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def refuse(self, key: str, why: str) -> None:
        full = f"{self.prefix}{key}"
        value = f" is {_show(self.values[key])};" if key in self.values else ""
        self.problems.append((full, f"{full}{value} {why}"))

    def miss(self, key: str, what: str) -> None:
        full = f"{self.prefix}{key}"
        self.problems.append((full, f"{full} is missing; {what}"))

    def section(self, key: str, known: Sequence[str]) -> "_Reader | None":
        value = self.values.get(key)
        if isinstance(value, Mapping):
            return _Reader(value, f"{self.prefix}{key}.", known, self.problems)
        if value is None:
            self.miss(key, f"its keys are: {', '.join(known)}")
        else:
            self.refuse(key, f"must be a section with keys of: {', '.join(known)}")
        return None

    def whole(self, key: str, low: int, high: int, *, default: int | None = None) -> int | None:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.miss(key, f"it is a whole number from {low} to {high}")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(key, f"must be a whole number from {low} to {high}")
            return None
        return value

    def number(self, key: str) -> float | None:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, "must be a number")
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return default if value is None else bool(value)

    def text(self, key: str, *, default: str) -> str:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "must be text")
        return default if value is None else str(value)

    def choices(self, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        """Some of ``allowed``, default first; all if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return tuple(allowed)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or any(name not in allowed for name in names):
            self.refuse(key, f"known: {', '.join(allowed)}" if allowed else "there is none to choose; leave it out")
        elif len(set(names)) != len(names):
            self.refuse(key, "one is named twice")
        else:
            return tuple(names)
        return tuple(allowed)


# ---------------------------------------------------------------------------------------------
# Back, and files
# ---------------------------------------------------------------------------------------------


def _describe_element(element: Element) -> dict[str, Any]:
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


def _arithmetic(entry: QuantType) -> dict[str, Any]:
    """All of a type but what it is called."""
    fields = {key: value for key, value in asdict(entry).items() if key not in _LABELS}
    if fields["element"] is not None:
        fields["element"] = {k: v for k, v in fields["element"].items() if k not in _ELEMENT_LABELS}
    return fields


def _line_of(lines: Mapping[tuple[str | int, ...], int], key: str) -> int:
    """The line of a dotted key, else of what it belongs to, else the first."""
    path = tuple(key.split("."))
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def _read(path: Path, shown: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FormatError(
            f"no number format file {shown} (in {Path.cwd()}); the types that need none: 'qcollect formats'"
        ) from None
    except OSError as error:
        raise FormatError(f"{shown}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{shown}:{line}: is not UTF-8 text (byte 0x{error.object[error.start]:02x})") from error


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
