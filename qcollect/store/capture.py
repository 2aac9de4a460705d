"""One capture <-> one ``.pt`` file that says by itself what it holds.

A file is ``torch.save`` of ``{"tensor", "tensor_info", "metadata"}`` with nothing but tensors and
plain Python values inside, so ``torch.load(path, weights_only=True)`` reads it in any process.
It appears under its final name whole or not at all. Instead of ``tensor`` it may hold what takes fewer
bytes (``compact``), or the name of another file that holds the same (``reference``); ``load`` gives the tensor
in any case.
"""

import io
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from qcollect.errors import CaptureError
from qcollect.paths import temporary_path
from qcollect.store.archive import Part, archive_parts
from qcollect.store.compact import holds_tensor, restore, value_entries
from qcollect.store.files import rename_new, sync_folder, write_parts
from qcollect.store.reference import SECTIONS, find_reference, hash_payload
from qcollect.store.summary import describe, summarize

METADATA_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A written file: where, how many bytes, and the xxh3-128 of those bytes (hex).

    ``deduped_bytes``: how many it is smaller than the file it refers to; None: it refers to none.
    """

    path: Path
    num_bytes: int
    xxh3_128: str
    deduped_bytes: int | None = None


def save_capture(
    path: Path,
    stored: torch.Tensor | Mapping[str, Any],
    tensor_info: dict[str, Any],
    metadata: dict[str, Any],
    *,
    durable: bool = False,
) -> StoredFile:
    """Write one capture; never replaces an existing file.

    Args:
        path: the final name; its folder exists.
        stored: dense CPU tensor that owns its storage, or what ``compact`` made of it.
        tensor_info: as ``describe_tensor`` gives it.
        metadata: plain values (``plain``).
        durable: the file and its name are on the disk itself when this returns.

    Raises:
        FileExistsError: the name is taken.
        CaptureError: the disk is full or the folder is gone. In no case is anything left behind.
    """
    entries = value_entries(stored) if isinstance(stored, torch.Tensor) else stored
    plain_sections = {"tensor_info": tensor_info, "metadata": metadata}
    temporary = temporary_path(path, uuid.uuid4().hex[:12])
    try:
        parts = archive_parts(entries, plain_sections) or _torch_archive({**entries, **plain_sections})
        digest, num_bytes = xxhash.xxh3_128(), 0
        for part in parts:
            digest.update(part)
            num_bytes += len(part)
        write_parts(temporary, parts, durable=durable)
        rename_new(temporary, path)
        if durable:
            sync_folder(path.parent)
    except FileExistsError:
        temporary.unlink(missing_ok=True)
        raise
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise write_failure(path, error) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return StoredFile(path=path, num_bytes=num_bytes, xxh3_128=digest.hexdigest())


def _torch_archive(content: dict[str, Any]) -> list[Part]:
    """For 4 GiB and more, which the archives made here do not reach."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return [buffer.getvalue()]


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


def load(path: os.PathLike[str] | str) -> torch.Tensor:
    """The tensor of a capture's file, whatever it is stored as: the same values, dtype and shape, bit for bit.

    Of a capture with ``capture.tokens`` the rows that are stored. A reference is followed to the file beside it.

    Raises:
        CaptureError: the file is missing, torn, or no capture; or the file it refers to is, or is another one by now.
        MissingExtraError: it is compressed, and zstandard is not installed.
    """
    return _restore(path, load_any_capture(path))


def load_capture(path: os.PathLike[str] | str, *, mmap: bool = False) -> dict[str, Any]:
    """``{"tensor", "tensor_info", "metadata"}`` of a file and what else it holds, without unpickling code.

    ``tensor`` is there whatever the file stores; of a reference all else, too, that the other file stores.

    Raises:
        CaptureError: as ``load``.
        MissingExtraError: as ``load``.
    """
    content = _load(path, mmap)
    if not _is_capture(path, content) or "metadata" not in content:
        raise _no_capture(path)
    content = resolve(path, content, mmap=mmap)
    return {**content, "tensor": _restore(path, content)}


def _restore(path: os.PathLike[str] | str, content: Mapping[str, Any]) -> torch.Tensor:
    try:
        return restore(content)
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from error


def load_any_capture(path: os.PathLike[str] | str, *, mmap: bool = False, follow: bool = True) -> dict[str, Any]:
    """What a file holds as it stands there (``compact.restore`` makes it a tensor), older files included.

    ``tensor_info`` and ``metadata`` are empty where a file has none.

    Args:
        follow: of a reference, what the file stores that it refers to (``resolve``); else the reference.

    Raises:
        CaptureError: the file is missing, torn, or holds no tensor; with ``follow``, or the one it refers to is.
    """
    content = _load(path, mmap)
    if not _is_capture(path, content):
        raise _no_capture(path)
    sections = {name: content.get(name) for name in SECTIONS}
    content = {**content, **{name: value if isinstance(value, dict) else {} for name, value in sections.items()}}
    return resolve(path, content, mmap=mmap) if follow else content


def resolve(path: os.PathLike[str] | str, content: dict[str, Any], *, mmap: bool = False) -> dict[str, Any]:
    """``content`` with what the file stores that it refers to, all of which is hashed; as it is, if it is no reference.

    Args:
        path: of the file with this content: the other one is looked for beside it.

    Raises:
        CaptureError: the other file is missing, torn, a reference itself, or does not store what it did. The message
            names both.
    """
    reference = find_reference(content)
    if reference is None:
        return content
    target = Path(path).with_name(reference.file)
    where = f"{path}: its tensor is in {target}"
    try:
        stored = load_any_capture(target, mmap=mmap, follow=False)
        if find_reference(stored) is not None:
            raise CaptureError("it is a reference itself")
        digest = hash_payload(stored).xxh3_128
    except CaptureError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise CaptureError(f"{where}, which is gone; the two belong into one folder") from error
        raise CaptureError(f"{where}, which cannot be used: {str(error).removeprefix(f'{target}: ')}") from error
    if digest != reference.xxh3_128:
        raise CaptureError(
            f"{where}, which holds another one by now (the xxh3-128 of what it stores is {digest}, and was "
            f"{reference.xxh3_128})"
        )
    own = {name: value for name, value in content.items() if name in SECTIONS}
    return {**{name: value for name, value in stored.items() if name not in SECTIONS}, **own}


def _is_capture(path: os.PathLike[str] | str, content: Any) -> bool:
    try:
        return holds_tensor(content) or find_reference(content) is not None
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from error


def _load(path: os.PathLike[str] | str, mmap: bool) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        raise CaptureError(f"{path}: cannot be loaded: {error}") from error


def _no_capture(path: os.PathLike[str] | str) -> CaptureError:
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


_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def _plain_dict(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(k): item if type(item) in _AS_THEY_ARE else plain(item) for k, item in value.items()}


def _plain_list(value: Iterable[Any]) -> list[Any]:
    return [item if type(item) in _AS_THEY_ARE else plain(item) for item in value]


# most of what metadata are made of
_MOST: dict[type, Callable[[Any], Any]] = {dict: _plain_dict, list: _plain_list}
_CONVERSIONS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((bool, str, type(None)), lambda v: v),
    (int, int),
    (float, lambda v: float(v) if math.isfinite(v) else str(float(v))),
    (dict, _plain_dict),
    ((list, tuple, set, frozenset, torch.Size), _plain_list),
    (torch.Tensor, lambda v: plain(v.tolist())),
)


def plain(value: Any) -> Any:
    """``value`` with only str, int, float, bool, None, list and dict inside.

    Tuples, sets and shapes become lists, tensors and arrays nested lists, dtypes, devices, paths and other
    objects their ``str``; NaN and Inf become the strings ``nan``, ``inf``, ``-inf``. Subclasses of
    str and int (enums) become plain ones.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind in _MOST:
        return _MOST[kind](value)
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            converted = convert(value)
            return str.__str__(converted) if isinstance(converted, str) else converted
    if hasattr(value, "tolist"):  # numpy's arrays and scalars, without needing numpy
        return plain(value.tolist())
    return str(value)
