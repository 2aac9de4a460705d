"""Sources -> tokens -> Megatron's indexed dataset: what ``qcollect data prepare`` does.

Leaves ``{out}.bin``, ``{out}.idx`` and ``{out}.json``, which says what they were made from. The same sources,
tokenizer and settings make the same bytes.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcollect.data.pairs import bin_path, idx_path
from qcollect.data.sources import Source, SourceReader, find_sources
from qcollect.data.tokenizer import Tokenizer, encode_document, load_tokenizer, require_eos
from qcollect.data.writer import IndexedDatasetWriter, output_errors, refuse_existing
from qcollect.errors import DatasetError, OutputError
from qcollect.paths import temporary_path

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareProgress:
    """Where a preparation is; ``done_frac`` counts bytes of the sources on disk."""

    source: Path
    num_documents: int
    num_tokens: int
    done_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What was written. ``num_skipped`` documents held no text; ``num_bytes`` is the size of the .bin."""

    num_documents: int
    num_skipped: int
    num_tokens: int
    dtype: str
    num_bytes: int
    duration_s: float
    paths: tuple[Path, ...]


def prepare(
    sources: Sequence[str | Path],
    tokenizer_spec: str | Path,
    out_prefix: str | Path,
    *,
    append_eos: bool = True,
    text_field: str = "text",
    overwrite: bool = False,
    progress: Callable[[PrepareProgress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> PrepareReport:
    """Tokenize every document of ``sources``, in order, into one dataset; whole or not at all.

    Sources, tokenizer and output are checked before anything is written.

    Args:
        sources: files; see ``sources`` for what is read.
        tokenizer_spec: "bytes" or a tokenizer's folder.
        out_prefix: of the files to write; ``.bin`` or ``.idx`` at its end is taken off. Its folder is made.
        append_eos: end each document with the tokenizer's end token.
        text_field: of JSON lines, the field that holds the text.
        overwrite: replace existing files.
        progress: called after every document.
        clock: seconds, for ``duration_s``.

    Raises:
        DatasetError: a source or the tokenizer cannot be read, or no document holds text.
        OutputError: files exist, or the folder cannot be written.
        MissingExtraError: an optional dependency is missing.
    """
    start_s = clock()
    found = find_sources(sources)
    tokenizer = load_tokenizer(tokenizer_spec)
    if append_eos:
        require_eos(tokenizer)
    prefix = _output_prefix(Path(out_prefix), found, overwrite=overwrite)

    with output_errors(prefix.parent):
        prefix.parent.mkdir(parents=True, exist_ok=True)
    num_skipped = 0
    num_bytes_done, num_bytes_all = 0, max(1, sum(source.num_bytes for source in found))
    with IndexedDatasetWriter(prefix, tokenizer.vocab_size, overwrite=overwrite) as writer:
        for source in found:
            reader = SourceReader(source, text_field=text_field)
            for text in reader:
                if text:
                    writer.add_document(encode_document(tokenizer, text, append_eos=append_eos))
                else:
                    num_skipped += 1
                if progress is not None:
                    done = num_bytes_done + reader.read_frac * source.num_bytes
                    progress(_progress(writer, source, done / num_bytes_all))
            num_bytes_done += source.num_bytes
        if writer.num_documents == 0:
            raise DatasetError(f"{', '.join(str(s.path) for s in found)}: no document holds text")

    description = _describe(found, tokenizer, writer, num_skipped, append_eos=append_eos)
    _write_json(_json_path(prefix), description)
    return PrepareReport(
        num_documents=writer.num_documents,
        num_skipped=num_skipped,
        num_tokens=writer.num_tokens,
        dtype=writer.dtype.name,
        num_bytes=writer.num_tokens * writer.dtype.itemsize,
        duration_s=clock() - start_s,
        paths=_output_paths(prefix),
    )


def _json_path(prefix: Path) -> Path:
    return Path(f"{prefix}.json")


def _output_paths(prefix: Path) -> tuple[Path, ...]:
    return bin_path(prefix), idx_path(prefix), _json_path(prefix)


def _output_prefix(path: Path, sources: Sequence[Source], *, overwrite: bool) -> Path:
    """The prefix to write, once its names are free (or may be replaced) and its folder takes files."""
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name a prefix in it, such as {path / 'wikipedia'}")
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    outputs = _output_paths(prefix)
    if not overwrite:
        refuse_existing(*outputs)
    for source in sources:
        if any(output.exists() and output.samefile(source.path) for output in outputs):
            raise OutputError(f"{source.path}: is a source and would be overwritten; choose another prefix")
    folder = prefix.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{folder}: no files can be written there, so not {outputs[0]} either")
    return prefix


def _progress(writer: IndexedDatasetWriter, source: Source, done_frac: float) -> PrepareProgress:
    return PrepareProgress(
        source=source.path, num_documents=writer.num_documents, num_tokens=writer.num_tokens, done_frac=done_frac
    )


def _describe(
    sources: Sequence[Source], tokenizer: Tokenizer, writer: IndexedDatasetWriter, num_skipped: int, *, append_eos: bool
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "sources": [{"path": str(s.path), "kind": str(s.kind), "bytes": s.num_bytes} for s in sources],
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "append_eos": append_eos,
        "dtype": writer.dtype.name,
        "documents": writer.num_documents,
        "skipped": num_skipped,
        "tokens": writer.num_tokens,
    }


def _write_json(path: Path, record: dict[str, Any]) -> None:
    temporary = temporary_path(path, secrets.token_hex(4))
    with output_errors(path):
        try:
            temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
