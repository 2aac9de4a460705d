"""What ``torch.save`` writes, put together in memory around the tensors' own bytes.

A file of torch's is a zip archive of stored entries: ``data.pkl``, whose tensors name entries ``data/0``, ``data/1``,
..., and a few small ones. ``torch.save`` computes a CRC of everything, which costs as much as the writing and which the
hash of a whole file makes superfluous, and asks every object of the pickle for a name of its own, a hundred calls in
Python a capture, while other threads wait for the interpreter. Here the bytes are the same but for that: no CRC, as
torch itself writes when told not to compute one (for a whole process, which users' own checkpoints share).

**Source:** torch, "Serialization semantics" (the layout of its archives); PKWARE APPNOTE 6.3.10, 4.3 (the records of a
zip archive).
"""

import ctypes
import io
import pickle
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import xxhash

Part = bytes | ctypes.Array[ctypes.c_char]

_FOLDER = "archive/"  # every entry's; torch takes the name from a file's where it is given a path
_ALIGNMENT = 64  # torch's own: of the starts of entries
_FORMAT_VERSION, _VERSION = b"1", b"3\n"
_PROTOCOL = 2
_LOCAL, _LOCAL_MAGIC = struct.Struct("<4s5H3I2H"), b"PK\x03\x04"
_DESCRIPTOR, _DESCRIPTOR_MAGIC = struct.Struct("<4s3I"), b"PK\x07\x08"
_LISTED, _LISTED_MAGIC = struct.Struct("<4s6H3I5HI"), b"PK\x01\x02"  # a directory's record, but for start and path
_END_64, _END_64_MAGIC = struct.Struct("<4sQ2H2I4Q"), b"PK\x06\x06"
_LOCATOR, _LOCATOR_MAGIC = struct.Struct("<4sIQI"), b"PK\x06\x07"
_END, _END_MAGIC = struct.Struct("<4s4H2IH"), b"PK\x05\x06"
_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008  # flags: of names, and that sizes stand behind the data
_MADE_BY = 0x031E
_MAX_BYTES = (1 << 32) - (1 << 20)  # beyond it sizes and offsets need the fields of zip64


def archive_parts(entries: Mapping[str, Any], plain: Mapping[str, Any]) -> list[Part] | None:
    """A file of ``{**entries, **plain}`` as pieces to be written one after the other; None if it is 4 GiB or more.

    The pieces of tensors are their own memory: they may not change, nor go, before they are written.

    Args:
        entries: dense CPU tensors that own their storage, by name or in dicts and lists, and plain values.
        plain: plain values only.
    """
    storages: list[torch.UntypedStorage] = []
    items = [_pickled(name) + _pickled_tensors(value, storages) for name, value in entries.items()]
    items += [_pickled(name) + _pickled(value) for name, value in plain.items()]
    pickled = b"\x80\x02}(" + b"".join(items) + b"u."
    if sum(storage.nbytes() for storage in storages) + len(pickled) >= _MAX_BYTES:
        return None
    archive = _Archive()
    archive.add("data.pkl", pickled)
    archive.add(".format_version", _FORMAT_VERSION)
    archive.add(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    for number, storage in enumerate(storages):
        archive.add(f"data/{number}", _memory(storage))
    archive.add("version", _VERSION)
    archive.add(".data/serialization_id", f"{xxhash.xxh3_128_intdigest(pickled):040d}"[-40:].encode())
    return archive.finish()


class _Frame(NamedTuple):
    """What stands around an entry's data: before and behind them, and in the directory up to where the entry starts."""

    before: bytes
    after: bytes
    listed: bytes
    path: bytes


class _Archive:
    """A zip archive that grows at its end."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._small: list[bytes] = []  # the last part, not put together yet
        self._num_bytes = 0
        self._directory: list[bytes] = []

    def add(self, name: str, data: Part) -> None:
        """An entry, whose data start at a multiple of 64 bytes."""
        frame = _frame(name, len(data), self._num_bytes % _ALIGNMENT)
        self._directory.append(frame.listed + self._num_bytes.to_bytes(4, "little") + frame.path)
        if isinstance(data, bytes):
            self._append(frame.before + data + frame.after)
            return
        self._append(frame.before)
        if data:
            self._parts.append(b"".join(self._small))
            self._parts.append(data)
            self._small = []
            self._num_bytes += len(data)
        self._append(frame.after)

    def finish(self) -> list[Part]:
        start, num, directory = self._num_bytes, len(self._directory), b"".join(self._directory)
        size, end = len(directory), start + len(directory)
        self._append(directory)
        self._append(_END_64.pack(_END_64_MAGIC, _END_64.size - 12, _MADE_BY, 45, 0, 0, num, num, size, start))
        self._append(_LOCATOR.pack(_LOCATOR_MAGIC, 0, end, 1))
        self._append(_END.pack(_END_MAGIC, 0, 0, num, num, size, start, 0))
        self._parts.append(b"".join(self._small))
        return self._parts

    def _append(self, data: bytes) -> None:
        self._small.append(data)
        self._num_bytes += len(data)


@lru_cache(maxsize=4096)
def _frame(name: str, size: int, start: int) -> _Frame:
    """That of an entry; ``start`` is where it starts, modulo what starts of data are multiples of."""
    path = (_FOLDER + name).encode()
    flags = _UTF8 | (_SIZES_FOLLOW if size else 0)
    # the padding is an extra field: two letters, its length, and what torch fills it with
    padding = -(start + _LOCAL.size + len(path) + 4) % _ALIGNMENT
    extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return _Frame(
        before=_LOCAL.pack(_LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra,
        after=_DESCRIPTOR.pack(_DESCRIPTOR_MAGIC, 0, size, size) if size else b"",
        listed=_LISTED.pack(_LISTED_MAGIC, 0, 0, flags, 0, 0, 0, 0, size, size, len(path), 0, 0, 0, 0, 0),
        path=path,
    )


def _memory(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


# ---------------------------------------------------------------------------------------------
# Pickles, each without the opcodes at its ends: one after the other they are the items of a dict. A part that
# remembers objects remembers its own only.
# ---------------------------------------------------------------------------------------------


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, _PROTOCOL)[2:-1]


def _pickled_tensors(value: Any, storages: list[torch.UntypedStorage]) -> bytes:
    if isinstance(value, torch.Tensor) and _is_whole(value):
        storages.append(value.untyped_storage())
        return _pickled_tensor(value.dtype, value.shape, len(storages) - 1)
    buffer = io.BytesIO()
    _Pickler(buffer, storages).dump(value)
    return buffer.getvalue()[2:-1]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether nothing tells a tensor from others of its dtype and shape but its elements."""
    num_bytes = tensor.numel() * tensor.element_size()
    is_plain = type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.requires_grad
    return is_plain and tensor.untyped_storage().nbytes() == num_bytes


@lru_cache(maxsize=1024)
def _pickled_tensor(dtype: torch.dtype, shape: torch.Size, number: int) -> bytes:
    """A tensor whose storage is entry ``data/<number>``."""
    buffer = io.BytesIO()
    empty: list[Any] = [None] * number
    _Pickler(buffer, empty).dump(torch.empty(shape, dtype=dtype, device="cpu"))
    return buffer.getvalue()[2:-1]


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch does, their storages by number."""

    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file, _PROTOCOL)
        self._storages = storages
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """What torch's reader finds a storage by."""
        if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            return None
        untyped: Any = getattr(obj, "_untyped_storage", obj)
        if untyped._cdata not in self._numbers:
            self._numbers[untyped._cdata] = len(self._storages)
            self._storages.append(untyped)
        kind: Any = torch.UntypedStorage
        num_elements = untyped.nbytes()
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
            num_elements = obj._size()  # type: ignore[no-untyped-call]
        return "storage", kind, str(self._numbers[untyped._cdata]), "cpu", num_elements
