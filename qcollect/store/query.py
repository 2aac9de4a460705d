"""Captures of one or several folders, chosen by the value of any field.

Manifests are asked through their catalog. A file that none lists, an older one or one of this instant, is
there with what its name says; what the name does not hold is None.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qcollect.errors import UsageError
from qcollect.paths import RunPaths
from qcollect.store.catalog import ROW_ID, Catalog
from qcollect.store.folder import parse_name, pt_files

# fields that are there whatever the captures say of themselves
_PLACE_FIELDS = ("run", "path")
_OWN_FIELDS = (*_PLACE_FIELDS, "file", "bytes", "xxh3_128", "timestamp", "counter", "gemm")
_NAME_FIELDS = (
    "iteration", "layer_type", "layer_idx", "operation", "phase", "component", "quant_type", "rank", "sample_idx",
)  # fmt: skip
_CHUNK_ROWS = 500
_SECTIONS = ("metadata.", "tensor_info.", "errors.")
_RANGE = re.compile(r"(-?\d+)-(-?\d+)")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None, "none": None}


# ---------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """``field=a,b``: the field's value is one of these, compared by its own type.

    A string is equal to the text or matches it as a glob; a number is equal or lies in a range ``0-3``; true,
    false and null are written so; a list is given as JSON, or as it is shown (``2x128x64``, also as a glob).
    """

    field: str
    text: str
    wanted: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The condition of ``field=value``.

        Raises:
            UsageError: it has not that form.
        """
        field, equals, value = text.partition("=")
        if not equals or not field.strip():
            raise UsageError(f"--where {text!r} is no condition; write field=value, for example layer_idx=3")
        wanted = (value,) if value[:1] in ("[", "{", '"') else tuple(part.strip() for part in value.split(","))
        return cls(field=field.strip(), text=text, wanted=wanted)

    def holds(self, value: Any) -> bool:
        return any(_is(value, wanted) for wanted in self.wanted)


def _is(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        return value == wanted or fnmatchcase(value, wanted) or wanted == json.dumps(value)
    if value is None or isinstance(value, bool):
        return wanted in _WORDS and _WORDS[wanted] is value
    if isinstance(value, int | float):
        return _is_number(value, wanted)
    try:
        return bool(json.loads(wanted) == value)
    except ValueError:
        return fnmatchcase(show(value), wanted)


def _is_number(value: float, wanted: str) -> bool:
    limits = _RANGE.fullmatch(wanted)
    if limits is not None:
        return int(limits[1]) <= value <= int(limits[2])
    try:
        return float(wanted) == value if "_" not in wanted else False
    except ValueError:
        return False


def show(value: Any) -> str:
    """A value as a cell of a table: ``-`` for None, ``2x128x64`` for a shape, six digits of a fraction."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return "x".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------------------------


class Captures:
    """The captures of some folders; a context manager. ``fields`` are those a condition may name."""

    def __init__(self, folders: Iterable[RunPaths]) -> None:
        self._stack = ExitStack()
        with self._stack:
            self.folders = [Folder(paths, self._stack.enter_context(Catalog(paths))) for paths in folders]
            self._stack = self._stack.pop_all()
        self._known = {*_OWN_FIELDS, *(f"metadata.{name}" for name in _NAME_FIELDS)}
        self._known |= {name for folder in self.folders for name in folder.fields}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __len__(self) -> int:
        return sum(len(folder) for folder in self.folders)

    @property
    def fields(self) -> list[str]:
        """Every field by the shortest name that means it."""
        return sorted({_short(name) if self.find(_short(name)) == name else name for name in self._known})

    def find(self, name: str) -> str | None:
        """The field ``name`` means, as the catalog calls it: our own, the metadata's, tensor_info's, the errors'."""
        candidates = (name, *(section + name for section in _SECTIONS))
        return next((candidate for candidate in candidates if candidate in self._known), None)

    def resolve(self, name: str) -> str:
        """As ``find``.

        Raises:
            UsageError: no capture has the field.
        """
        found = self.find(name)
        if found is None:
            near = get_close_matches(name, self.fields, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"no capture has the field {name!r}; {hint}fields: {', '.join(self.fields)}")
        return found

    def select(self, conditions: Sequence[Condition], names: Sequence[str]) -> Iterator["Row"]:
        """The captures for which all conditions hold, folder by folder, with the values of these fields.

        Args:
            conditions: their fields may be named in short.
            names: as ``resolve`` gives them; what a capture has not is None.
        """
        tested = [self.resolve(condition.field) for condition in conditions]
        for folder in self.folders:
            places = None
            if conditions:  # first what is tested of all, then what is asked for of those that are left
                places = [place for values, place in folder.rows(tested) if _hold(conditions, values)]
            for values, place in folder.rows(names, places):
                yield Row(folder=folder, place=place, values=values)


def _hold(conditions: Sequence[Condition], values: Sequence[Any]) -> bool:
    return all(condition.holds(value) for condition, value in zip(conditions, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One capture: its values, and where the rest of it is (``Folder.describe``)."""

    folder: "Folder"
    place: int
    values: list[Any]

    def describe(self) -> dict[str, Any]:
        return self.folder.describe(self.place)


class Folder:
    """The captures of one folder: those its manifests list, then the other files with a capture's name."""

    def __init__(self, paths: RunPaths, catalog: Catalog) -> None:
        self.paths = paths
        self.catalog = catalog
        unlisted = set(pt_files(paths.run_dir))
        if unlisted:
            unlisted.difference_update(file for (file,) in catalog.rows(["file"]))
        self._others = [
            fields
            for file in sorted(unlisted, reverse=True)
            if (fields := _name_fields(paths.run_dir, file)) is not None
        ]

    def __len__(self) -> int:
        return len(self.catalog) + len(self._others)

    @property
    def fields(self) -> set[str]:
        return {*self.catalog.fields, *(name for fields in self._others for name in fields)}

    def rows(self, names: Sequence[str], places: Sequence[int] | None = None) -> Iterator[tuple[list[Any], int]]:
        """The values of these fields, and each capture's place, by which it is found again (None: all places).

        Those in the catalog have its row's id, the others count from -1 down.
        """
        made = {i: name for i, name in enumerate(names) if name in _PLACE_FIELDS}
        asked = [*names, *(["file"] if made else []), ROW_ID]
        for chunk in [None] if places is None else _chunks([place for place in places if place >= 0]):
            for values in self.catalog.rows(asked, chunk):
                row_id = values.pop()
                yield self._place(values, made), row_id
        for place in range(-1, -1 - len(self._others), -1) if places is None else (p for p in places if p < 0):
            yield self._place([self._others[place].get(name) for name in asked[:-1]], made), place

    def describe(self, place: int) -> dict[str, Any]:
        """Everything known of a capture, as JSON."""
        own: dict[str, Any]
        if place >= 0:
            record = self.catalog.record(place)
            sections = {"metadata": record.metadata, "tensor_info": record.tensor_info}
            if record.is_statistics:
                sections["errors"] = record.errors
            own = {"file": record.file, "bytes": record.bytes, "xxh3_128": record.xxh3_128}
        else:
            fields = self._others[place]
            named = {_short(name): value for name, value in fields.items() if name.startswith("metadata.")}
            sections = {"metadata": named, "tensor_info": {}}
            own = {"file": fields["file"], "bytes": fields["bytes"], "xxh3_128": None}
        run_dir = self.paths.run_dir
        path = None if own["file"] is None else str(run_dir / own["file"])
        return {"run": run_dir.name, "path": path, **own, **sections}

    def _place(self, values: list[Any], made: dict[int, str]) -> list[Any]:
        file = values.pop() if made else None
        for i, name in made.items():
            path = None if file is None else str(self.paths.run_dir / str(file))
            values[i] = self.paths.run_dir.name if name == "run" else path
        return values


def _chunks(places: Sequence[int]) -> list[Sequence[int]]:
    return [places[start : start + _CHUNK_ROWS] for start in range(0, len(places), _CHUNK_ROWS)]


def _name_fields(run_dir: Path, file: str) -> dict[str, Any] | None:
    """What a file's name says of it, and its size; None if it is no capture's name, or gone."""
    name = parse_name(file)
    if name is None:
        return None
    try:
        num_bytes = (run_dir / file).stat().st_size
    except OSError:
        return None
    _, tensor_name, gemm = name.split_tensor()
    fields = {"file": file, "bytes": num_bytes, "timestamp": name.timestamp, "counter": name.counter, "gemm": gemm}
    fields |= {f"metadata.{field}": getattr(name, field) for field in _NAME_FIELDS}
    return fields | {"metadata.tensor_name": tensor_name}


def _short(name: str) -> str:
    for section in _SECTIONS:
        name = name.removeprefix(section)
    return name
