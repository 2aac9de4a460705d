"""Writes Megatron's indexed dataset, whole or not at all. Imports no torch."""

import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from qcollect.data.pairs import HEADER, MAGIC, VERSION, bin_path, idx_path, token_dtype
from qcollect.errors import DatasetError, OutputError
from qcollect.paths import temporary_path


class IndexedDatasetWriter:
    """Documents in, one ``.bin``/``.idx`` pair out; each document is one sequence.

    Both files are written under temporary names in the same folder and renamed by ``close``, the index
    last. ``abort``, or an exception inside ``with``, leaves nothing behind and an older pair untouched.

    Args:
        prefix: of the pair; ``.bin`` and ``.idx`` are appended.
        vocab_size: number of token ids; decides the dtype (see ``token_dtype``) and is enforced.
        overwrite: replace an existing pair.

    Raises:
        OutputError: a file of that name exists, or the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, *, overwrite: bool = False) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self._overwrite = overwrite
        self._lengths = array("i")
        self._refuse_existing()
        token = secrets.token_hex(4)
        self._temporary_bin = temporary_path(bin_path(self.prefix), token)
        self._temporary_idx = temporary_path(idx_path(self.prefix), token)
        with output_errors(self._temporary_bin):
            self._stream = self._temporary_bin.open("xb", buffering=1 << 20)

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def add_document(self, ids: Iterable[int]) -> None:
        """Append one document.

        Raises:
            DatasetError: no ids, or one outside the vocabulary.
            OutputError: the file cannot be written.
        """
        tokens = array("q", ids)
        if not tokens:
            raise DatasetError(f"{self.prefix}: document {self.num_documents} has no tokens")
        for extreme in (min(tokens), max(tokens)):
            if not 0 <= extreme < self.vocab_size:
                raise DatasetError(
                    f"{self.prefix}: document {self.num_documents} has token id {extreme}, outside the vocabulary "
                    f"of {self.vocab_size}"
                )
        with output_errors(self._temporary_bin):
            array(self.dtype.typecode, tokens).tofile(self._stream)
        self._lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    def close(self) -> None:
        """Give both files their names. A dataset without a document is refused and leaves nothing.

        Raises:
            DatasetError: no document was added.
            OutputError: a file of that name appeared meanwhile, or the folder cannot be written.
        """
        try:
            if not self._lengths:
                raise DatasetError(f"{self.prefix}: no documents to write")
            with output_errors(self._temporary_bin):
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._stream.close()
            with output_errors(self._temporary_idx), self._temporary_idx.open("xb") as stream:
                self._write_index(stream.write)
                stream.flush()
                os.fsync(stream.fileno())
            self._refuse_existing()
            with output_errors(self.prefix):
                idx_path(self.prefix).unlink(missing_ok=True)  # never an old index beside new tokens
                self._temporary_bin.replace(bin_path(self.prefix))
                self._temporary_idx.replace(idx_path(self.prefix))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; nothing once ``close`` succeeded."""
        try:
            self._stream.close()
        except OSError:
            pass  # a full disk fails the flush as well; what counts is that the files go
        finally:
            self._temporary_bin.unlink(missing_ok=True)
            self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _write_index(self, write: Callable[[bytes], int]) -> None:
        itemsize = self.dtype.itemsize
        count = len(self._lengths)
        write(HEADER.pack(MAGIC, VERSION, self.dtype.code, count, count + 1))
        write(self._lengths.tobytes())
        write(array("q", (n * itemsize for n in accumulate(self._lengths[:-1], initial=0))).tobytes())
        write(array("q", range(count + 1)).tobytes())

    def _refuse_existing(self) -> None:
        if not self._overwrite:
            refuse_existing(bin_path(self.prefix), idx_path(self.prefix))


def refuse_existing(*paths: Path) -> None:
    """Nothing, if none of ``paths`` exists; else OutputError naming the first that does."""
    for path in paths:
        if os.path.lexists(path):
            raise OutputError(f"{path}: exists; choose another prefix, or overwrite it (--overwrite)")


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """OSError inside becomes OutputError with the path it is about."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
