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

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qcollect.errors import FormatError
from qcollect.formats.catalog import BLOCK_ROUNDINGS, QUANT_TYPES, get_quant_type
from qcollect.formats.custom_parts import (
    NONE,
    SOURCE,
    TENSOR,
    describe_element,
    read_block_size,
    read_element,
    read_scale,
)
from qcollect.formats.custom_reader import Problem, Reader, show
from qcollect.formats.records import QuantType
from qcollect.vocab import CaptureName, Component, LayerType, Operation, Phase

SUFFIXES = (".yaml", ".yml")

_BFLOAT16_BITS = 8  # of its significand: gemms consume values in it
_KEYS = ("name", "description", "element", "block_size", "scale", "scale_rules", "roundings")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# What neither the values nor the codes follow from.
_LABELS = frozenset({"name", "description", "source"})
_ELEMENT_LABELS = frozenset({"name", "source", "torch_dtype"})


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
    scales += [TENSOR] if entry.has_tensor_scale else []
    definition = {
        "description": entry.description,
        "element": None if entry.element is None else describe_element(entry.element),
        "block_size": entry.block_size,
        "scale": scales[0] if len(scales) == 1 else scales or NONE,
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
    reader = Reader(definition, prefix, _KEYS if name_key == "name" else _KEYS[1:])
    if name is None:
        reader.miss("name", "it names the run's folder and its files")
    elif (fault := _find_name_fault(name)) is not None:
        reader.problems.append((name_key, f"{name_key} is {show(name)}; {fault}"))
    element, levels = read_element(reader), read_scale(reader)
    values: dict[str, Any] = {
        "description": reader.text("description", default=""),
        "roundings": reader.choices("roundings", BLOCK_ROUNDINGS),
    }
    if levels is not None:
        values["block_size"] = read_block_size(reader, levels)
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
