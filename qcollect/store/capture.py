"""One capture <-> one ``.pt`` file that says by itself what it holds.

A file is ``torch.save`` of ``{"tensor", "tensor_info", "metadata"}`` with nothing but tensors and
plain Python values inside, so ``torch.load(path, weights_only=True)`` reads it in any process.
It appears under its final name whole or not at all.
"""

import math
import os
import pickle
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from qcollect.errors import CaptureError
from qcollect.paths import temporary_path
from qcollect.store.files import rename_new, sync_folder
from qcollect.store.summary import describe, summarize

METADATA_SCHEMA = 1
_ALIGNMENT = 64  # torch's own: bytes between starts of tensors in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A written file: where, how many bytes, and the xxh3-128 of those bytes (hex)."""

    path: Path
    num_bytes: int
    xxh3_128: str


class _HashingFile:
    """A binary file that hashes what passes through it and keeps the error that stopped it.

    torch's own error after a failed write speaks of positions in its archive, not of the disk.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.num_bytes += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_capture(
    path: Path, tensor: torch.Tensor, tensor_info: dict[str, Any], metadata: dict[str, Any], *, durable: bool = False
) -> StoredFile:
    """Write one capture; never replaces an existing file.

    Args:
        path: the final name; its folder exists.
        tensor: dense CPU tensor that owns its storage.
        tensor_info: as ``describe_tensor`` gives it.
        metadata: plain values (``plain``).
        durable: the file and its name are on the disk itself when this returns.

    Raises:
        FileExistsError: the name is taken.
        CaptureError: the disk is full or the folder is gone. In no case is anything left behind.
    """
    temporary = temporary_path(path, uuid.uuid4().hex[:12])
    hashing: _HashingFile | None = None
    try:
        with temporary.open("xb") as file:
            hashing = _HashingFile(file)
            _write_archive({"tensor": tensor, "tensor_info": tensor_info, "metadata": metadata}, hashing)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        rename_new(temporary, path)
        if durable:
            sync_folder(path.parent)
    except FileExistsError:
        temporary.unlink(missing_ok=True)
        raise
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(path, (hashing and hashing.error) or error) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return StoredFile(path=path, num_bytes=hashing.num_bytes, xxh3_128=hashing.hash.hexdigest())


def _write_archive(content: dict[str, Any], file: _HashingFile) -> None:
    """``torch.save`` without its CRC, which the hash of the file makes superfluous, and costs as much as the writing.

    The switch that torch has for it is the whole process's, and users' own checkpoints keep theirs: hence its
    writer, and the function behind ``torch.save``, by themselves.
    """
    try:
        writer = torch._C.PyTorchFileWriter(file, False, _ALIGNMENT)  # type: ignore[call-overload]
        write: Any = torch.serialization._save
    except (AttributeError, TypeError):  # another torch
        torch.save(content, file)  # type: ignore[arg-type]
        return
    write(content, writer, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    writer.write_end_of_file()
    file.flush()


def write_failure(path: Path, cause: Exception) -> CaptureError:
    """The error for a file or folder that could not be written: why, and the bytes and inodes that are free there."""
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return CaptureError(f"{path}: cannot be written: {reason}{_space_left(path.parent)}")


def _space_left(folder: Path) -> str:
    try:
        if not hasattr(os, "statvfs"):  # Windows has no inodes
            return f" ({shutil.disk_usage(folder).free:,} bytes free in {folder})"
        free = os.statvfs(folder)
    except OSError:
        return f" (the folder {folder} is gone)"
    return f" ({free.f_bavail * free.f_frsize:,} bytes and {free.f_favail:,} inodes free in {folder})"


def load_capture(path: Path | str, *, mmap: bool = False) -> dict[str, Any]:
    """``{"tensor", "tensor_info", "metadata"}`` of a file, without unpickling code.

    Raises:
        CaptureError: the file is missing, torn, or not a capture.
    """
    content = _load(path, mmap)
    if not isinstance(content, dict) or "tensor" not in content or "metadata" not in content:
        raise _no_capture(path)
    return content


def load_any_capture(path: Path | str, *, mmap: bool = False) -> dict[str, Any]:
    """As ``load_capture``, also of older files: ``tensor_info`` and ``metadata`` are empty where a file has none.

    Raises:
        CaptureError: the file is missing, torn, or holds no tensor under ``tensor``.
    """
    content = _load(path, mmap)
    if not isinstance(content, dict) or not isinstance(content.get("tensor"), torch.Tensor):
        raise _no_capture(path)
    sections = {name: content.get(name) for name in ("tensor_info", "metadata")}
    return {**content, **{name: value if isinstance(value, dict) else {} for name, value in sections.items()}}


def _load(path: Path | str, mmap: bool) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        raise CaptureError(f"{path}: cannot be loaded: {error}") from error


def _no_capture(path: Path | str) -> CaptureError:
    return CaptureError(f"{path}: holds no capture (a dict with 'tensor', 'tensor_info' and 'metadata')")


def describe_tensor(tensor: torch.Tensor, source: torch.Tensor | None = None) -> dict[str, Any]:
    """``tensor_info``: shape, dtype, device and statistics of a tensor. Their rules are those of ``summary.describe``.

    Args:
        tensor: any shape, dtype and device; values are read here.
        source: the tensor as the network holds it, whose device, ``requires_grad`` and ``is_leaf`` are recorded.
    """
    source = tensor if source is None else source
    return describe(
        summarize(tensor).cpu(),
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=source.device,
        requires_grad=source.requires_grad,
        is_leaf=source.is_leaf,
    )


_CONVERSIONS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((bool, str, type(None)), lambda v: v),
    (int, int),
    (float, lambda v: float(v) if math.isfinite(v) else str(float(v))),
    (dict, lambda v: {str(k): plain(item) for k, item in v.items()}),
    ((list, tuple, set, frozenset, torch.Size), lambda v: [plain(item) for item in v]),
    (torch.Tensor, lambda v: plain(v.tolist())),
)


def plain(value: Any) -> Any:
    """``value`` with only str, int, float, bool, None, list and dict inside.

    Tuples, sets and shapes become lists, tensors and arrays nested lists, dtypes, devices, paths and other
    objects their ``str``; NaN and Inf become the strings ``nan``, ``inf``, ``-inf``. Subclasses of
    str and int (enums) become plain ones.
    """
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            converted = convert(value)
            return str.__str__(converted) if isinstance(converted, str) else converted
    if hasattr(value, "tolist"):  # numpy's arrays and scalars, without needing numpy
        return plain(value.tolist())
    return str(value)
