"""The two kinds of JSON file a run writes while others read it: whole documents and lines.

A document is replaced by one rename, so a reader sees the old or the new one. A line is appended
by one write and counts once its newline is there, so what a killed writer left behind is no line.
"""

import errno
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from qcollect.paths import temporary_path

_CHUNK_BYTES = 1 << 20
_MAX_PARTS = 1024  # that a system writes at once, as a rule
_counted: dict[Path, tuple[int, int, int]] = {}  # inode, bytes and lines of large files
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # the one of POSIX, the other of Windows


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None if there is no such file or it holds no whole JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json_atomic(path: Path, record: dict[str, Any]) -> None:
    """Replace ``path`` by ``record``, by a temporary file beside it and one rename.

    Raises:
        ValueError: a number is NaN or Inf.
        OSError: it cannot be written; ``path`` is as it was and no temporary file stays.
    """
    temporary = temporary_path(path, uuid.uuid4().hex[:12])
    try:
        temporary.write_bytes(encode_line(record))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_in_place(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` over an existing ``path``: for a full disk, where a second file has no room.

    Not atomic; a reader may see neither the old nor the new record for an instant.
    """
    with path.open("r+b") as file:
        file.write(encode_line(record))
        file.truncate()


def rename_new(source: Path, target: Path) -> None:
    """Rename that fails where ``target`` exists, which ``os.rename`` does not on POSIX.

    Raises:
        FileExistsError: ``target`` exists; ``source`` stays.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: check, then rename
        if target.exists():
            raise FileExistsError(target) from None
        source.rename(target)
    else:
        source.unlink()


def write_parts(path: Path, parts: Sequence[Any], *, durable: bool = False) -> None:
    """A new file that holds one piece of memory after the other.

    Args:
        durable: its content is on the disk itself when this returns.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: it cannot be written; what there is of it stays.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    try:
        rest = [memoryview(part).cast("B") for part in parts]
        while rest:
            num_bytes = os.writev(file, rest[:_MAX_PARTS]) if hasattr(os, "writev") else os.write(file, rest[0])
            while rest and num_bytes >= len(rest[0]):
                num_bytes -= len(rest.pop(0))
            if num_bytes:
                rest[0] = rest[0][num_bytes:]
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk itself when this returns; nothing where folders cannot be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Take turns with others who lock the folder; False where there are no such locks.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


class LineFile:
    """A file of JSON lines that stays open between them. A file has one writer at a time.

    Args:
        durable: a line is on the disk itself when ``append`` returns.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self.durable = durable
        self._file: int | None = None
        self._inode = 0

    def append(self, record: dict[str, Any]) -> None:
        """Append ``record`` as one line. A torn tail that another writer left is dropped first.

        Raises:
            ValueError: a number is NaN or Inf.
            OSError: no space, or the file or its folder is gone; no part of the line stays.
        """
        self.append_encoded(encode_line(record))

    def append_encoded(self, line: bytes) -> None:
        """``append`` for lines that are put together already, each with its newline."""
        if self._file is None:
            self._open()
        elif self.path.stat().st_ino != self._inode:  # nobody would find what is written to a file that is gone
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        assert self._file is not None
        written = 0
        try:
            # once, unless the disk ran full inside the line: the rest raises, or fits by now
            while written < len(line):
                written += os.write(self._file, line[written:])
            if self.durable:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _FLAGS, 0o666)
        try:
            _drop_torn_tail(file)
            self._inode = os.fstat(file).st_ino
        except BaseException:
            os.close(file)
            raise
        self._file = file


def append_line(path: Path, record: dict[str, Any]) -> None:
    """``LineFile.append`` of a single line."""
    with LineFile(path) as file:
        file.append(record)


def read_lines(path: Path) -> list[bytes]:
    """The whole lines of a file, without their newlines; none if there is no such file."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return content.split(b"\n")[:-1]


def count_lines(path: Path) -> int:
    """How many whole lines a file has, without parsing them; 0 if there is no such file.

    Of a large file that only grows, what this process has counted before is not read again.
    """
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            inode, num_read, count = _counted.get(path, (None, 0, 0))
            if inode != status.st_ino or num_read > status.st_size:
                num_read, count = 0, 0
            file.seek(num_read)
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                num_read += len(chunk)
                count += chunk.count(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if num_read > _CHUNK_BYTES:
        _counted[path] = (status.st_ino, num_read, count)
    return count


def read_tail(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a file, from the start of a line where it is cut; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            tail = file.read(num_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    first_line_end = tail.find(b"\n")
    return tail if start == 0 or first_line_end < 0 else tail[first_line_end + 1 :]


def encode_line(record: dict[str, Any]) -> bytes:
    """One line of JSON, with its newline; raises ValueError where a number is NaN or Inf."""
    # ASCII: names may hold bytes that are no UTF-8 (lone surrogates), and U+2028 must not look like a line end
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _drop_torn_tail(file: int) -> None:
    """Cut what follows the last newline."""
    end = os.fstat(file).st_size
    if end == 0 or _read_at(file, 1, end - 1) == b"\n":
        return
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        newline = _read_at(file, end - start, start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    os.ftruncate(file, end)


def _read_at(file: int, num_bytes: int, offset: int) -> bytes:
    os.lseek(file, offset, os.SEEK_SET)  # appending does not mind
    return os.read(file, num_bytes)
