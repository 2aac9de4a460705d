"""Files -> documents (text), one at a time; no file is read into memory as a whole.

Read, each also compressed by bzip2 or gzip, always as UTF-8 whatever the locale:

    Wikipedia XML dump   known by its content (``<mediawiki``), whatever its name: dumps come split as
                         ``enwiki-...xml-p10p30302.bz2``. One document an article; see ``wikipedia``.
    .jsonl .ndjson .json one JSON object a line, its text under ``text`` or another field. Lines end at ``\\n``
                         alone: U+2028, U+2029 and U+0085 are text. Blank lines are passed over.
    .txt                 one document an article where lines such as ``= Title =`` begin articles (the heading
                         stays, text ahead of the first is a document of its own), else the whole file.
                         A document of more than 16 Mi characters ends at the next blank line.

A document that ends up empty is given as "", for the caller to count.
"""

import bz2
import gzip
import json
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, cast

from qcollect.data.wikipedia import plain_text, read_articles, require_parser
from qcollect.errors import DatasetError

READ = "Wikipedia XML dumps, .jsonl/.ndjson/.json (one object a line) and .txt, each also as .bz2 or .gz"
MAX_TEXT_DOCUMENT_CHARS = 1 << 24


class SourceKind(StrEnum):
    WIKIPEDIA = "wikipedia"
    JSONL = "jsonl"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that can be read, and as what. ``num_bytes`` is its size on disk."""

    path: Path
    kind: SourceKind
    compression: str | None
    num_bytes: int


def find_source(path: str | Path) -> Source:
    """What ``path`` is read as, from its first bytes and its name; nothing else is read.

    Raises:
        DatasetError: missing, a folder, empty, or nothing that is read here.
        MissingExtraError: a dump, and its parser is not installed.
    """
    path = Path(path)
    if path.is_dir():
        raise DatasetError(f"{path}: is a folder; name files. Read are {READ}.")
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as raw:
            compression = _compression(raw.read(3))
            raw.seek(0)
            head = _decompress(raw, compression).read(4096)
    except _READ_ERRORS as error:
        raise DatasetError(f"{path}: cannot be read: {_reason(error)}. Read are {READ}.") from error
    kind = _kind(path, head)
    if kind is SourceKind.WIKIPEDIA:
        require_parser()
    return Source(path=path, kind=kind, compression=compression, num_bytes=num_bytes)


def find_sources(paths: Sequence[str | Path]) -> list[Source]:
    """``find_source`` of each.

    Raises:
        DatasetError: no paths, or one that cannot be read.
    """
    if not paths:
        raise DatasetError(f"no source files named. Read are {READ}.")
    return [find_source(path) for path in paths]


class SourceReader:
    """Iterates over the documents of one source; ``read_frac`` says how far it is, by bytes on disk.

    Raises (while iterating):
        DatasetError: damaged, not UTF-8, or a line that holds no such record; names file and line.
    """

    def __init__(self, source: Source, *, text_field: str = "text") -> None:
        self.source = source
        self.text_field = text_field
        self._num_bytes_read = 0

    @property
    def read_frac(self) -> float:
        return min(1.0, self._num_bytes_read / max(1, self.source.num_bytes))

    def __iter__(self) -> Iterator[str]:
        try:
            with self.source.path.open("rb") as raw:
                for text in self._documents(_decompress(raw, self.source.compression)):
                    self._num_bytes_read = raw.tell()
                    yield text
        except _READ_ERRORS as error:
            raise DatasetError(f"{self.source.path}: cannot be read: {_reason(error)}") from error

    def _documents(self, stream: IO[bytes]) -> Iterator[str]:
        if self.source.kind is SourceKind.WIKIPEDIA:
            return (plain_text(a.wikitext, a.hidden_namespaces) for a in read_articles(stream))
        lines = _lines(self.source.path, stream)
        if self.source.kind is SourceKind.JSONL:
            return _json_documents(self.source.path, lines, self.text_field)
        return _text_documents(line for _, line in lines)


def read_documents(source: Source, *, text_field: str = "text") -> Iterator[str]:
    """The documents of ``source``; "" for one that ends up empty."""
    return iter(SourceReader(source, text_field=text_field))


# ---------------------------------------------------------------------------------------------
# Detection
# ---------------------------------------------------------------------------------------------

_READ_ERRORS = (OSError, EOFError, zlib.error, ET.ParseError)
_SUFFIXES = {
    ".jsonl": SourceKind.JSONL,
    ".ndjson": SourceKind.JSONL,
    ".json": SourceKind.JSONL,
    ".txt": SourceKind.TEXT,
}


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _compression(magic: bytes) -> str | None:
    if magic == b"BZh":
        return "bz2"
    return "gzip" if magic[:2] == b"\x1f\x8b" else None


def _decompress(raw: IO[bytes], compression: str | None) -> IO[bytes]:
    if compression == "bz2":
        return bz2.BZ2File(raw)
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if compression == "gzip" else raw


def _kind(path: Path, head: bytes) -> SourceKind:
    is_utf16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    start = head.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace").lstrip()
    if "<mediawiki" in start and start.startswith(("<mediawiki", "<?xml", "<!--")):
        return SourceKind.WIKIPEDIA
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".bz2", ".gz")]
    kind = _SUFFIXES.get(suffixes[-1]) if suffixes else None
    if kind is None:
        raise DatasetError(f"{path}: not a file that is read here. Read are {READ}.")
    if not start:
        raise DatasetError(f"{path}: holds no text")
    if kind is SourceKind.JSONL and start.startswith("["):
        raise DatasetError(f"{path}: is one JSON array; one object a line is read: jq -c '.[]' makes that of it")
    return kind


# ---------------------------------------------------------------------------------------------
# Lines
# ---------------------------------------------------------------------------------------------

_ARTICLE_HEADING = re.compile(r"\s*=\s+[^=\s](?:.*[^=\s])?\s+=\s*")


def _lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end) of a UTF-8 file; ends are ``\\n`` and ``\\r\\n`` alone."""
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line)"
            ) from error
        yield number, text.removesuffix("\n").removesuffix("\r")


def _json_documents(path: Path, lines: Iterator[tuple[int, str]], text_field: str) -> Iterator[str]:
    for number, line in lines:
        if line.strip():
            text = _json_text(f"{path}:{number}", line, text_field)
            yield text if text.strip() else ""


def _json_text(where: str, line: str, text_field: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where}: not a JSON object on one line: {error}") from error
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: a JSON {type(record).__name__}; one object a line is read")
    if text_field not in record:
        raise DatasetError(f"{where}: no field {text_field!r}; it has: {', '.join(map(repr, record))}")
    text = record[text_field]
    if not isinstance(text, str):
        raise DatasetError(f"{where}: field {text_field!r} is {type(text).__name__}, not text")
    return text.encode("utf-8", errors="replace").decode() if _has_surrogate(text) else text


def _has_surrogate(text: str) -> bool:
    r"""Half a UTF-16 pair, which JSON can spell (``"\ud800"``) and no encoding can hold."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _text_documents(lines: Iterator[str]) -> Iterator[str]:
    parts: list[str] = []
    num_chars = 0
    for line in lines:
        is_long = num_chars > MAX_TEXT_DOCUMENT_CHARS and not line.strip()
        if parts and (is_long or _ARTICLE_HEADING.fullmatch(line)):
            text = "\n".join(parts)
            if text.strip():
                yield text.strip("\n")
            parts, num_chars = [], 0
        parts.append(line)
        num_chars += len(line) + 1
    text = "\n".join(parts)
    yield text.strip("\n") if text.strip() else ""
