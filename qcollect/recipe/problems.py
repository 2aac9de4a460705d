"""What pydantic found wrong -> sentences a user can act on, each with its place."""

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from qcollect.document import KeyPath
from qcollect.recipe.fields import SEVERAL_SENTENCES, WHOLE_SENTENCE, known
from qcollect.recipe.origins import Origin, Origins
from qcollect.recipe.schema import keys_named, known_keys

_MAX_SHOWN = 80
_QUOTED = re.compile(r"'([^']*)'")
_EXPECTATIONS = {
    "string_type": "must be text",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


def explain(error: ValidationError, origins: Origins) -> list[tuple[Origin, str]]:
    """One sentence for each error, with where the value came from."""
    found = []
    for details in error.errors(include_url=False):
        if details["type"] == SEVERAL_SENTENCES:
            found += [(origins.of(_path_of(key)), text) for key, text in details["ctx"]["found"]]
        else:
            found.append(_explain_one(details, origins))
    return found


def _explain_one(details: ErrorDetails, origins: Origins) -> tuple[Origin, str]:
    path: KeyPath = details["loc"]
    context = details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            return origins.of(path), _unknown_key(path)
        case "missing":
            return origins.of(path[:-1]), _missing(path)
        case kind if kind == WHOLE_SENTENCE:
            return origins.of(_path_of(context["key"]) or path), str(context["text"])
    return origins.of(path), f"{_dotted(path)} is {show(details['input'])}{_expectation(details, path)}"


def _unknown_key(path: KeyPath) -> str:
    siblings = known_keys(_keys(path[:-1])) or []
    text = f"unknown key {_dotted(path)!r}; {known(path[-1], siblings)}"
    elsewhere = [] if text.endswith("?") else keys_named(str(path[-1]))
    return f"{text} Did you mean {' or '.join(map(repr, elsewhere))}?" if elsewhere else text


def _expectation(details: ErrorDetails, path: KeyPath) -> str:
    """What follows ``KEY is VALUE``."""
    context: dict[str, Any] = details.get("ctx", {})
    match details["type"]:
        case "value_error":
            return f"; {context['error']}"
        case "literal_error":
            return f"; {known(details['input'], _QUOTED.findall(context['expected']))}"
        case "model_type" | "model_attributes_type" | "dict_type":
            keys = known_keys(_keys(path)) or []
            return f"; must be a section with keys of: {', '.join(keys)}"
        case kind if kind in _EXPECTATIONS:
            return f"; {_EXPECTATIONS[kind].format(**context)}"
    return f": {details['msg']}"


def _missing(path: KeyPath) -> str:
    keys = known_keys(_keys(path))
    return f"{_dotted(path)} is missing" + (f"; its keys are: {', '.join(keys)}" if keys else "")


def show(value: Any) -> str:
    """A value as a user would write it, in a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _keys(path: KeyPath) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def _path_of(key: str | None) -> KeyPath:
    return tuple(key.split(".")) if key else ()


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
