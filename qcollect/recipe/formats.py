"""Number formats that a recipe names by their file: read, and put under ``quant.formats`` by name."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qcollect.errors import FormatError
from qcollect.formats.custom import definition_of, is_format_file, load_quant_type, read_definition
from qcollect.formats.custom_reader import Problem

RECIPE_DIR = "$RECIPE_DIR"


def read_format_files(quant: Mapping[str, Any], resolve: Callable[[str], Path]) -> tuple[dict[str, Any], list[Problem]]:
    """A raw ``quant`` section in which every type stands by name, and what is wrong with its files.

    Args:
        quant: as it was written; whatever is of a wrong type in it is left for the schema to refuse.
        resolve: the path a text means.
    """
    if isinstance(types := quant.get("types"), str):
        quant = {**quant, "types": [name.strip() for name in types.split(",")]}
    formats = quant.get("formats")
    taken: dict[str, Any] = dict(formats) if isinstance(formats, Mapping) else {}
    names: dict[str, str] = {}
    problems: list[Problem] = []
    for key, text in _named_files(quant):
        if text in names:
            continue
        try:
            entry = load_quant_type(resolve(text), shown=text)
        except FormatError as error:
            problems += [(key, f"{key} is {text!r}: {line}{_hint(text, resolve)}") for line in str(error).splitlines()]
            continue
        names[text] = entry.name
        same_name = taken.setdefault(entry.name, definition_of(entry))
        if isinstance(same_name, Mapping) and read_definition(entry.name, same_name)[0] != entry:
            problems.append((key, f"{key} is {text!r}: {entry.name} is also defined otherwise; rename one of them"))
    if not names:
        return dict(quant), problems
    return {**_with_names(quant, names), "formats": taken}, problems


def read_shadow_files(
    sections: Mapping[str, Any], resolve: Callable[[str], Path]
) -> tuple[dict[str, Any], list[Problem]]:
    """The raw sections of a recipe with every type of ``capture.shadow`` by name, and what is wrong with its files.

    Args:
        sections: as they were written.
        resolve: the path a text means.
    """
    quant, capture = sections.get("quant"), sections.get("capture")
    shadow = capture.get("shadow") if isinstance(capture, Mapping) else None
    if not isinstance(capture, Mapping) or not isinstance(quant, Mapping | None) or not shadow:
        return dict(sections), []
    formats = (quant or {}).get("formats")
    read, problems = read_format_files({"types": shadow, "formats": formats}, resolve)
    if read["types"] == shadow:
        return dict(sections), [_in_capture(problem) for problem in problems]
    named = {"quant": {**(quant or {}), "formats": read["formats"]}, "capture": {**capture, "shadow": read["types"]}}
    return {**sections, **named}, [_in_capture(problem) for problem in problems]


def _in_capture(problem: Problem) -> Problem:
    key, text = problem
    return key.replace("quant.types", "capture.shadow"), text.replace("quant.types", "capture.shadow")


def _hint(text: str, resolve: Callable[[str], Path]) -> str:
    beside = f"{RECIPE_DIR}/{text}"
    is_beside = not resolve(text).exists() and resolve(beside).exists()
    return f"; the one beside the recipe is {beside}" if is_beside else ""


def _named_files(quant: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every type that is given by a file: its dotted key and the text."""
    places = [("quant.type", quant.get("type"))]
    types = quant.get("types")
    places += [(f"quant.types.{i}", name) for i, name in enumerate(types if isinstance(types, list | tuple) else ())]
    overrides = quant.get("overrides")
    for gemm, override in overrides.items() if isinstance(overrides, Mapping) else ():
        if isinstance(override, Mapping):
            places.append((f"quant.overrides.{gemm}.type", override.get("type")))
    return ((key, text) for key, text in places if isinstance(text, str) and is_format_file(text))


def _with_names(quant: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def name_of(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    named = dict(quant)
    if "type" in named:
        named["type"] = name_of(named["type"])
    if isinstance(types := named.get("types"), list | tuple):
        named["types"] = [name_of(item) for item in types]
    if isinstance(overrides := named.get("overrides"), Mapping):
        named["overrides"] = {
            gemm: {**override, "type": name_of(override["type"])}
            if isinstance(override, Mapping) and "type" in override
            else override
            for gemm, override in overrides.items()
        }
    return named
