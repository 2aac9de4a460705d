"""An index over a run's manifests, so that a hundred thousand captures are listed by any field at once.

The manifests are the truth. ``index.sqlite`` beside them holds, for each, how many of its bytes were read
and their xxh3-128, and a column for every field. Opening the catalog hashes each manifest again: lines
that came since are added, and a manifest that shrank, was replaced or is another one in what was read is
read anew. A published index is never written to: it is loaded into memory, brought up to date there and
replaced by one rename, so several processes may do that at once, and where nothing can be written the
copy in memory serves. The file ends with the xxh3-128 of what is before it; one that does not, or that
is nobody's of ours, is made anew.

Fields are called as a user finds them: ``file``, ``bytes``, ``xxh3_128``; from the name ``timestamp``,
``counter``; ``gemm`` of a quantized copy; ``metadata.NAME``, ``tensor_info.NAME`` and ``errors.TYPE.NAME``.
"""

import json
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from qcollect.paths import RunPaths, temporary_path
from qcollect.store.manifest import ManifestRecord, list_manifests
from qcollect.vocab import CaptureKey

__all__ = ["ROW_ID", "Catalog", "DamagedLine", "record_fields"]

# where a row is in this catalog, for ``record``; no field's name
ROW_ID = "#"

_APPLICATION_ID = 0x71636F6C  # "qcol"
_SCHEMA = 1
_DIGEST_BYTES = 16
_CHUNK_BYTES = 1 << 22
_BATCH_LINES = 2000
# what all forms of a capture's name begin with
_NAME_HEAD = re.compile(r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d{4,})_")
# SQLite allows 2000; fields beyond go into one column together
_MAX_COLUMNS = 1000
_TABLES = """
CREATE TABLE manifests (name TEXT PRIMARY KEY, num_bytes INTEGER, digest TEXT, num_lines INTEGER);
CREATE TABLE fields (name, position INTEGER);
CREATE TABLE captures (manifest TEXT, line INTEGER, rest BLOB);
CREATE TABLE damaged (manifest TEXT, line INTEGER, problem TEXT);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedLine:
    """A whole line of a manifest that is no capture's."""

    path: Path
    number: int
    problem: str


class Catalog:
    """The captures of one run, from its manifests; a context manager.

    Opening it brings it up to date with the whole lines the manifests have at that moment; ``was_stale`` says
    whether the file was not.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._db, self.was_stale = _open(paths)
        if self.was_stale:
            _publish(paths.index_path, self._db)
        self._positions = _read_positions(self._db)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT count(*) FROM captures").fetchone()
        return int(count)

    @property
    def fields(self) -> list[str]:
        """Every field some capture has, by name."""
        return sorted(self._positions)

    @property
    def damaged(self) -> list[DamagedLine]:
        lines = self._db.execute("SELECT manifest, line, problem FROM damaged ORDER BY manifest, line")
        return [
            DamagedLine(path=self.paths.manifest_dir / name, number=number, problem=problem)
            for name, number, problem in lines
        ]

    def rows(self, names: Sequence[str], row_ids: Sequence[int] | None = None) -> Iterator[list[Any]]:
        """The values of these fields, by rank and then as the captures were saved; None where one has not the field.

        Args:
            names: fields, or ``ROW_ID``.
            row_ids: only these captures, some thousands at most; None: all.
        """
        decoded = _Decoded()
        condition = "" if row_ids is None else f"rowid IN ({', '.join('?' * len(row_ids))})"
        with_rest = any(self._positions.get(name, 0) is None for name in names)
        for *cells, rest in self._select(names, condition, *(row_ids or ()), with_rest=with_rest):
            values = [decoded[cell] if type(cell) is bytes else cell for cell in cells]
            if rest is not None:
                others = decoded[rest]
                values = [others.get(name, value) for name, value in zip(names, values, strict=True)]
            yield values

    def records(self) -> Iterator[ManifestRecord]:
        """What the manifests say, by rank and then as the captures were saved."""
        yield from self._records()

    def find(self, file: str) -> ManifestRecord | None:
        """What the manifests say of a file, named relative to the run folder; the first line of several."""
        if "file" not in self._positions:
            return None
        return next(self._records(f"f{self._positions['file']} = ?", _encode(file)), None)

    def record(self, row_id: int) -> ManifestRecord:
        """What the manifests say of the capture whose ``ROW_ID`` this is."""
        return next(self._records("rowid = ?", row_id))

    def _records(self, condition: str = "", *values: Any) -> Iterator[ManifestRecord]:
        names = [name for name, position in self._positions.items() if position is not None]
        decoded = _Decoded()
        for *cells, rest in self._select(names, condition, *values, with_rest=len(names) < len(self._positions)):
            present = ((name, cell) for name, cell in zip(names, cells, strict=True) if cell is not None)
            fields = {name: decoded[cell] if type(cell) is bytes else cell for name, cell in present}
            yield _record(fields if rest is None else fields | decoded[rest])

    def _select(self, names: Sequence[str], condition: str, *values: Any, with_rest: bool) -> Iterator[tuple[Any, ...]]:
        """The cells of these fields, and last of all (None: not asked for) that of the fields without a column."""
        if not self._positions:
            return iter(())
        chosen = ", ".join([*(self._column(name) or "NULL" for name in names), "rest" if with_rest else "NULL"])
        where = f"WHERE {condition}" if condition else ""
        return self._db.execute(f"SELECT {chosen} FROM captures {where} ORDER BY manifest, line", values)

    def _column(self, name: str) -> str | None:
        if name == ROW_ID:
            return "rowid"
        position = self._positions.get(name)
        return None if position is None else f"f{position}"


def record_fields(record: ManifestRecord) -> dict[str, Any]:
    """A capture's fields by the names they have here."""
    fields: dict[str, Any] = {"file": record.file, "bytes": record.bytes, "xxh3_128": record.xxh3_128}
    match = None if record.file is None else _NAME_HEAD.match(record.file.rpartition("/")[2])
    if match is not None:
        fields |= {"timestamp": match["timestamp"], "counter": int(match["counter"])}
    with suppress(KeyError, TypeError, ValueError, IndexError):
        gemm = CaptureKey.from_metadata(record.metadata).gemm
        fields |= {} if gemm is None else {"gemm": str(gemm)}
    fields |= {f"metadata.{key}": value for key, value in record.metadata.items()}
    fields |= {f"tensor_info.{key}": value for key, value in record.tensor_info.items()}
    for quant_type, errors in record.errors.items():
        fields |= {f"errors.{quant_type}.{key}": value for key, value in errors.items()}
    return fields


def _record(fields: dict[str, Any]) -> ManifestRecord:
    def section(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}

    return ManifestRecord(
        file=fields["file"],
        bytes=fields["bytes"],
        xxh3_128=fields["xxh3_128"],
        metadata=section("metadata."),
        tensor_info=section("tensor_info."),
        errors=_nested(section("errors.")),
    )


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """``{"mxfp8.mse": 1.0}`` as ``{"mxfp8": {"mse": 1.0}}``."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        quant_type, _, key = name.partition(".")
        found.setdefault(quant_type, {})[key] = value
    return found


# ---------------------------------------------------------------------------------------------
# The index file
# ---------------------------------------------------------------------------------------------


def _open(paths: RunPaths) -> tuple[sqlite3.Connection, bool]:
    """The index in memory, up to date, and whether it differs from the file."""
    loaded = _load(paths.index_path)
    if loaded is not None:
        try:
            return loaded, _update(loaded, paths)
        except (sqlite3.Error, ValueError, TypeError):  # larger than such a copy may get, or not what it says
            loaded.close()
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_SCHEMA}; {_TABLES}")
    _update(db, paths)
    return db, paths.state_dir.is_dir()


def _load(path: Path) -> sqlite3.Connection | None:
    """A copy of the index in memory; None if there is none, or none that is whole and ours."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    image, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(image) == 0 or xxhash.xxh3_128_digest(image) != digest:
        return None
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.deserialize(image)
        ((application_id,),) = db.execute("PRAGMA application_id")
        ((schema,),) = db.execute("PRAGMA user_version")
        if (application_id, schema) == (_APPLICATION_ID, _SCHEMA):
            return db
    except (sqlite3.Error, OverflowError):
        pass
    db.close()
    return None


def _publish(path: Path, db: sqlite3.Connection) -> None:
    """Put the index in its place; where that cannot be, the next reader makes it again."""
    temporary = temporary_path(path, uuid.uuid4().hex[:12])
    try:
        image = db.serialize()
        with temporary.open("xb") as file:
            file.write(image)
            file.write(xxhash.xxh3_128_digest(image))
        temporary.replace(path)
    except (OSError, sqlite3.Error, MemoryError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Bringing it up to date
# ---------------------------------------------------------------------------------------------


def _update(db: sqlite3.Connection, paths: RunPaths) -> bool:
    """Read what the manifests have beyond the index; whether that was anything."""
    manifests = {path.name: path for path in list_manifests(paths)}
    known = [name for (name,) in db.execute("SELECT name FROM manifests")]
    is_changed = False
    db.execute("BEGIN")
    for name in known:
        if name not in manifests:
            _forget(db, name)
            is_changed = True
    for path in manifests.values():
        is_changed |= _update_manifest(db, path)
    db.execute("COMMIT")
    return is_changed


def _update_manifest(db: sqlite3.Connection, path: Path) -> bool:
    row = db.execute("SELECT num_bytes, digest, num_lines FROM manifests WHERE name = ?", (path.name,)).fetchone()
    num_read, digest, num_lines = row or (0, "", 0)
    try:
        file = path.open("rb")
    except FileNotFoundError:  # replaced or removed meanwhile
        return False
    with closing(file):
        hashed = xxhash.xxh3_128()
        is_prefix = _hash_prefix(file, num_read, hashed) and (row is None or hashed.hexdigest() == digest)
        if not is_prefix:
            _forget(db, path.name)
            num_lines, num_read = 0, 0
            hashed.reset()
            file.seek(0)
        num_new = 0
        new_lines = _whole_lines(file)
        while lines := list(islice(new_lines, _BATCH_LINES)):
            for line in lines:
                hashed.update(line)
                num_new += len(line)
            _insert(db, path.name, num_lines, lines)
            num_lines += len(lines)
    if is_prefix and not num_new and row is not None:
        return False
    state = (path.name, num_read + num_new, hashed.hexdigest(), num_lines)
    db.execute("INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?)", state)
    return True


def _hash_prefix(file: Any, num_bytes: int, hashed: Any) -> bool:
    """Hash the first bytes of a file; False where it has fewer."""
    while num_bytes > 0:
        chunk = file.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            return False
        hashed.update(chunk)
        num_bytes -= len(chunk)
    return True


def _whole_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """The next lines with their newlines, up to one that its writer has not ended yet."""
    return takewhile(lambda line: line.endswith(b"\n"), file)


def _forget(db: sqlite3.Connection, name: str) -> None:
    for table in ("captures", "damaged"):
        db.execute(f"DELETE FROM {table} WHERE manifest = ?", (name,))
    db.execute("DELETE FROM manifests WHERE name = ?", (name,))
    # a field that no capture has any more is no field
    for field, position in _read_positions(db).items():
        column = "rest" if position is None else f"f{position}"
        if db.execute(f"SELECT 1 FROM captures WHERE {column} IS NOT NULL LIMIT 1").fetchone() is None:
            db.execute("DELETE FROM fields WHERE name = ?", (_encode(field),))


def _insert(db: sqlite3.Connection, manifest: str, num_before: int, lines: Iterable[bytes]) -> None:
    rows = []
    for number, line in enumerate(lines, num_before + 1):
        try:
            rows.append((number, record_fields(ManifestRecord.from_dict(json.loads(line, parse_constant=str)))))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = ascii(f"{type(error).__name__}: {error}")[1:-1]
            db.execute("INSERT INTO damaged VALUES (?, ?, ?)", (manifest, number, problem))
    positions = _positions(db, dict.fromkeys(name for _, fields in rows for name in fields))
    columns = {name: position for name, position in positions.items() if position is not None}
    others = [name for name, position in positions.items() if position is None]
    names = ", ".join(["manifest", "line", "rest", *(f"f{position}" for position in columns.values())])
    places = ", ".join("?" * (3 + len(columns)))
    db.executemany(
        f"INSERT INTO captures ({names}) VALUES ({places})",
        (
            (manifest, number, _rest(fields, others), *(_encode(fields.get(name, _MISSING)) for name in columns))
            for number, fields in rows
        ),
    )


def _read_positions(db: sqlite3.Connection) -> dict[str, int | None]:
    rows = db.execute("SELECT name, position FROM fields ORDER BY rowid")
    return {json.loads(name) if isinstance(name, bytes) else name: position for name, position in rows}


def _positions(db: sqlite3.Connection, names: Iterable[str]) -> dict[str, int | None]:
    """The column of each field; new fields get one while there are any."""
    known = _read_positions(db)
    num_columns = len(db.execute("PRAGMA table_info(captures)").fetchall()) - 3
    free = [p for p in range(num_columns) if p not in known.values()]
    found: dict[str, int | None] = {}
    for name in names:
        if name not in known:
            if not free and num_columns < _MAX_COLUMNS:
                db.execute(f"ALTER TABLE captures ADD COLUMN f{num_columns}")
                free.append(num_columns)
                num_columns += 1
            known[name] = free.pop() if free else None
            db.execute("INSERT INTO fields VALUES (?, ?)", (_encode(name), known[name]))
        found[name] = known[name]
    return found


# ---------------------------------------------------------------------------------------------
# Values: JSON's types in SQLite's. What SQLite has not (true, null, lists, ...) is JSON text as a blob.
# ---------------------------------------------------------------------------------------------

_MISSING: Any = object()
_INT64 = 1 << 63


def _rest(fields: dict[str, Any], names: Sequence[str]) -> bytes | None:
    chosen = {name: fields[name] for name in names if name in fields}
    return json.dumps(chosen).encode() if chosen else None


def _encode(value: Any) -> str | int | float | bytes | None:
    kind = type(value)
    if kind is float:
        return float(value)
    if kind is str and "\0" not in value and (value.isascii() or _is_utf8(value)):
        return str(value)
    if kind is int and -_INT64 <= value < _INT64:
        return int(value)
    if value is _MISSING:
        return None
    return json.dumps(value).encode()


class _Decoded(dict[bytes, Any]):
    """JSON texts by what they say; there are few different ones, shapes mostly."""

    def __missing__(self, text: bytes) -> Any:
        value = self[text] = json.loads(text)
        return value


def _is_utf8(text: str) -> bool:
    """Whether it has no lone surrogates, which names of bytes that are no UTF-8 hold."""
    return not any("\ud800" <= c <= "\udfff" for c in text)
