"""The field types of the schema: what a value in a recipe may be, and what is said when it is not.

A validator here raises ValueError with what follows ``PLACE: KEY is VALUE;``, mostly ``must be ...``;
``problems`` puts that in front. ``problem`` is for a whole sentence.
"""

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from qcollect.errors import SelectionError
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.custom import definition_of, read_definition
from qcollect.formats.records import HADAMARD_SIZES
from qcollect.recipe.records import IndexSelector
from qcollect.recipe.selectors import check_selector, match_names
from qcollect.vocab import TENSOR_NAMES, LayerType, Operation, Phase, Trigger

WHOLE_SENTENCE, SEVERAL_SENTENCES = "whole_sentence", "several_sentences"
BUNDLED_DIR = "$BUNDLED_DIR"


def problem(text: str, key: str | None = None) -> PydanticCustomError:
    """An error whose message is ``text``, placed at ``key`` (dotted) instead of where it was raised."""
    return PydanticCustomError(WHOLE_SENTENCE, "{text}", {"text": text, "key": key})


def several_problems(found: Sequence[tuple[str, str]]) -> PydanticCustomError:
    """One error for several pairs of key (dotted) and whole sentence."""
    return PydanticCustomError(SEVERAL_SENTENCES, "{texts}", {"texts": str(found), "found": list(found)})


def known(value: Any, names: Sequence[str]) -> str:
    """``known: a, b.``, with a question if ``value`` is near one of them."""
    # 'gpu' is two thirds of 'cpu' and not meant by it: only near misses are asked about
    near = get_close_matches(str(value).lower(), names, n=1, cutoff=0.78)
    return f"known: {', '.join(names)}." + (f" Did you mean {near[0]!r}?" if near else "")


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _power_of_two(value: float) -> float:
    if value <= 0 or math.frexp(value)[0] != 0.5:
        raise ValueError("must be a power of two above 0, like 1, 1024 or 65536")
    return value


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    first, second = (_real(item) for item in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError("must be two numbers from 0 to below 1")
    return first, second


def _path_text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be a path (text)")
    if value == "~" or value.startswith("~/"):
        raise ValueError("'~' is not expanded; write the whole path")
    return value


def _path_list(value: Any) -> tuple[str, ...]:
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths:
        raise ValueError("must be a path, or a list of at least one")
    return tuple(_path_text(path) for path in paths)


def _texts(value: Any) -> tuple[str, ...]:
    """A list of texts, or one text with commas."""
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ValueError("must be a list of texts")
    return tuple(value)


def _some_texts(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    if not texts:
        raise ValueError("it selects nothing; leave it out to select all")
    return texts


def _vocabulary(words: tuple[str, ...]) -> PlainValidator:
    def check(value: Any, info: ValidationInfo) -> tuple[str, ...]:
        patterns = _some_texts(value)
        try:
            match_names(patterns, words, key=f"capture.{info.field_name}")
        except SelectionError as error:
            raise problem(str(error)) from None
        return patterns

    return PlainValidator(check)


def _triggers(value: Any) -> tuple[str, ...]:
    names, words = _texts(value), [str(trigger) for trigger in Trigger]
    if not names:
        raise ValueError(f"must name at least one; {known('', words)}")
    for name in names:
        if name not in words:
            raise ValueError(f"{name!r} is not one; {known(name, words)}")
    return tuple(dict.fromkeys(names))


def _selector_of(section: str) -> PlainValidator:
    def check(value: Any, info: ValidationInfo) -> IndexSelector:
        try:
            check_selector(value, key=f"{section}.{info.field_name}")
        except SelectionError as error:
            raise problem(str(error)) from None
        if isinstance(value, str):
            return value
        return (value,) if isinstance(value, int) else tuple(value)

    return PlainValidator(check)


def _duration(value: Any) -> float:
    """Seconds of ``90``, ``90s``, ``15m``, ``1h30m``, ``2d`` or ``HH:MM:SS``."""
    text = str(value).strip().lower()
    clock = re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", text)
    parts = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+(?:\.\d+)?)s?)?", text)
    if isinstance(value, bool) or not (clock or (parts and any(parts.groups()))):
        raise ValueError("must be a duration, like 90 (seconds), 45m, 1h30m or 01:30:00")
    numbers = [0, *clock.groups()] if clock else list(parts.groups()) if parts else []
    seconds = sum(float(n or 0) * unit for n, unit in zip(numbers, (86400, 3600, 60, 1), strict=True))
    if seconds <= 0:
        raise ValueError("must be a duration above 0")
    return seconds


def _size(value: Any) -> int:
    """Bytes of ``1000000``, ``20GB`` (powers of 1000) or ``20GiB`` (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", str(value).strip().lower())
    if isinstance(value, bool) or match is None or (match[3] and not match[2]):
        raise ValueError("must be a size, like 500000000 (bytes), 20GB or 20GiB")
    num_bytes = int(float(match[1]) * (1024 if match[3] else 1000) ** (" kmgtp".index(match[2] or " ")))
    if num_bytes < 1:
        raise ValueError("must be a size above 0")
    return num_bytes


def _device_ids(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")]
    items = value if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
        raise ValueError("must be a list of device indices or UUIDs, like [0, 2]")
    ids = tuple(str(item) for item in items)
    if not all(ids) or any(item.startswith("-") for item in ids):
        raise ValueError("must be a list of device indices or UUIDs, like [0, 2]")
    if len(set(ids)) != len(ids):
        raise ValueError("a device is named twice")
    return ids


def _formats(value: Any) -> dict[str, dict[str, Any]]:
    """Definitions with every key set, so that equal ones compare equal however they were written."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("must be a section with a number format's definition under each name")
    formats, problems = {}, []
    for name, definition in value.items():
        key = f"quant.formats.{name}"
        if not isinstance(definition, Mapping):
            problems.append((key, f"{key} is {definition!r}; must be a section (element: ..., scale: ...)"))
            continue
        entry, found = read_definition(name, definition, prefix=f"{key}.", name_key=key)
        problems += found
        if entry is not None:
            formats[str(name)] = definition_of(entry) or {}
    if problems:
        raise several_problems(problems)
    return formats


def _own_names(info: ValidationInfo) -> tuple[str, ...] | None:
    """Names of the recipe's own formats, which come first in the section; None: they are faulty."""
    formats = info.data.get("formats")
    return None if formats is None else tuple(formats)


def _quant_name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{known(value, sorted(QUANT_TYPES))} See 'qcollect formats'.")
    return value


def _quant_type(value: Any, info: ValidationInfo) -> str:
    own = _own_names(info)
    if not isinstance(value, str) or (own is not None and value not in (*QUANT_TYPES, *own)):
        raise ValueError(f"{known(value, sorted((*QUANT_TYPES, *(own or ()))))} See 'qcollect formats'.")
    return value


def _quant_types(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    names, own = _texts(value), _own_names(info)
    if not names:
        raise ValueError("must name at least one quant type")
    for name in names if own is not None else ():
        if name not in (*QUANT_TYPES, *(own or ())):
            there_are = known(name, sorted((*QUANT_TYPES, *(own or ()))))
            raise ValueError(f"{name!r} is not one; {there_are} See 'qcollect formats'.")
    if len(set(names)) != len(names):
        raise ValueError("a quant type is named twice")
    return names


def _maybe_names(value: Any) -> tuple[str, ...]:
    names = () if value is None else _texts(value)
    if len(set(names)) != len(names):
        raise ValueError("a quant type is named twice")
    return names


def _block_size(value: Any) -> int | tuple[int, int]:
    match value:
        case bool():
            pass
        case int() if value >= 1:
            return value
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            return (rows, columns)
    raise ValueError("must be a whole number, 1 or more, or two of them (rows and columns), like [16, 16]")


def _hadamard_size(value: Any) -> int:
    if isinstance(value, bool) or value not in HADAMARD_SIZES:
        raise ValueError(f"must be one of {', '.join(map(str, HADAMARD_SIZES))}")
    return int(value)


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
BlockSize = Annotated[int | tuple[int, int], PlainValidator(_block_size)]
HadamardSize = Annotated[int, PlainValidator(_hadamard_size)]
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]
Real = Annotated[float, PlainValidator(_real)]
Flag = Annotated[bool, PlainValidator(_flag)]
PowerOfTwo = Annotated[float, PlainValidator(_real), AfterValidator(_power_of_two)]
Betas = Annotated[tuple[float, float], PlainValidator(_betas)]
PathText = Annotated[str, PlainValidator(_path_text)]
PathList = Annotated[tuple[str, ...], PlainValidator(_path_list)]
Globs = Annotated[tuple[str, ...], PlainValidator(_some_texts)]
MaybeGlobs = Annotated[tuple[str, ...], PlainValidator(_texts)]
LayerTypes = Annotated[tuple[str, ...], _vocabulary(tuple(LayerType))]
Operations = Annotated[tuple[str, ...], _vocabulary(tuple(Operation))]
Phases = Annotated[tuple[str, ...], _vocabulary(tuple(Phase))]
TensorNames = Annotated[tuple[str, ...], _vocabulary(TENSOR_NAMES)]
Triggers = Annotated[tuple[str, ...], PlainValidator(_triggers)]
Selector = Annotated[IndexSelector, _selector_of("capture")]
Ranks = Annotated[IndexSelector, _selector_of("launch")]
Duration = Annotated[float, PlainValidator(_duration)]
Size = Annotated[int, PlainValidator(_size)]
DeviceIds = Annotated[tuple[str, ...], PlainValidator(_device_ids)]
Formats = Annotated[dict[str, dict[str, Any]], PlainValidator(_formats)]
QuantName = Annotated[str, PlainValidator(_quant_type)]
OverrideName = Annotated[str, PlainValidator(_quant_name)]
MaybeNames = Annotated[tuple[str, ...], PlainValidator(_maybe_names)]
QuantNames = Annotated[tuple[str, ...], PlainValidator(_quant_types)]
