"""``--set key=value``: one value of a recipe, from outside the file.

The value is read as YAML, so numbers, lists (``[0, 4]``), mappings (``{dgrad: {type: mxfp8_e5m2}}``) and
``null`` are what they are in the file. Two exceptions, for what people type: keys that hold a path
take text as it stands (spaces, ``#``, quotes inside), and so does text that begins with a character
YAML keeps for itself, like the ``*`` of a glob.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from qcollect.document import parse_yaml
from qcollect.errors import RecipeError
from qcollect.recipe.origins import Origin, Origins
from qcollect.recipe.schema import all_keys, keys_named, known_keys

PATH_KEYS = frozenset({"model.checkpoint", "model.tokenizer", "data.path", "data.tokenizer", "script"})
_RESERVED = tuple("*&!%@`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value.

    Args:
        key: dotted.
        value: as the recipe's YAML would give it.
        origin: what a message about it begins with: ``--set capture.target``, ``--target``.
    """

    key: str
    value: Any
    origin: str


def parse_override(text: str) -> Override:
    """The override ``key=value`` says.

    Raises:
        RecipeError: it has no ``=`` or no key, or its value is not YAML.
    """
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise RecipeError(f"--set {text!r}: must be key=value, like capture.target=100")
    return Override(key=key, value=_parse_value(key, value_text), origin=f"--set {key}")


def apply_overrides(
    values: dict[str, Any], overrides: Sequence[str | Override], origins: Origins
) -> list[tuple[Origin, str]]:
    """Puts ``overrides`` into ``values`` and ``origins`` in order, so that later ones win; returns the problems."""
    problems = []
    for given in overrides:
        try:
            override = parse_override(given) if isinstance(given, str) else given
        except RecipeError as error:
            problems.append((origins.override(""), str(error)))
            continue
        path = tuple(override.key.split("."))
        origin = origins.override(override.origin)
        if path[-1] not in (known_keys(path[:-1]) or []):
            problems.append((origin, _unknown_key(path)))
        elif _put(values, path, override.value):
            origins.replace(path, origin)
    return problems


def _parse_value(key: str, text: str) -> Any:
    stripped = text.strip()
    is_path = key in PATH_KEYS and not stripped.startswith(("[", '"', "'"))
    if stripped not in ("", "~", "null") and (is_path or stripped.startswith(_RESERVED)):
        return text
    document = parse_yaml(text)
    if document.problems:
        raise RecipeError(f"--set {key}: {'; '.join(p.message for p in document.problems)} (value: {text!r})")
    return document.value


def _unknown_key(path: tuple[str, ...]) -> str:
    sections = {".".join(path[:end]) for end in range(1, len(path))}
    candidates = [key for key in all_keys() if key not in sections]
    near = get_close_matches(".".join(path), candidates, n=1, cutoff=0.75)
    if len(path) == 1 or not near:
        near = keys_named(path[-1]) or near
    if near:
        return f"unknown key; did you mean {' or '.join(map(repr, near))}?"
    section = next(path[:end] for end in range(len(path) - 1, -1, -1) if known_keys(path[:end]))
    where = f" in {'.'.join(section)}" if section else ""
    return f"unknown key; known{where}: {', '.join(known_keys(section) or [])}"


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> bool:
    """Whether it could be put; where the file holds no mapping on the way, that is an error of its own."""
    section = values
    for key in path[:-1]:
        inner: Any = section.get(key)
        if inner is None:
            inner = section[key] = {}
        if not isinstance(inner, dict):
            return False
        section = inner
    section[path[-1]] = value
    return True
