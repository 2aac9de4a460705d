"""A file whose tensor is in another file of its folder, and the way there.

    storage    {form: "reference", file, dtype, shape, xxh3_128}

stands in place of what ``compact`` makes of a tensor. ``file`` is the name of a file beside it, never a path, and
``xxh3_128`` the hash of what that stores (``hash_payload``). A reference leads to a file that stores something
itself, never to another reference. Its ``tensor_info`` and ``metadata`` are its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from qcollect.errors import CaptureError
from qcollect.store.compact import Entries, buffer_of, bytes_of

FORM = "reference"
SECTIONS = ("tensor_info", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The file beside it that a tensor is in, and the hash (hex) of what that file stores."""

    file: str
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a file stores beside ``tensor_info`` and ``metadata``: the bytes of its tensors, and a hash (hex) of all."""

    num_bytes: int
    xxh3_128: str


def hash_payload(content: Mapping[str, Any]) -> Payload:
    """The payload of a file, or of what is to become one.

    Two have one hash if they hold the same tensors, bit for bit, of the same dtypes and shapes under the same names,
    and the same plain values beside them. The order of names makes no difference.

    Raises:
        CaptureError: it holds something else; the message is without its path.
    """
    tensors: list[torch.Tensor] = []
    num_bytes = 0
    try:
        outline = _outline({name: value for name, value in content.items() if name not in SECTIONS}, tensors)
        hashed = xxhash.xxh3_128(json.dumps(outline).encode())
        for tensor in tensors:
            data = bytes_of(tensor)
            if data.numel():
                hashed.update(buffer_of(data))
            num_bytes += data.numel()
    except (TypeError, ValueError, RuntimeError) as error:  # too deep is a RuntimeError
        raise CaptureError(f"holds what captures do not hold: {type(error).__name__}: {error}") from error
    return Payload(num_bytes=num_bytes, xxh3_128=hashed.hexdigest())


def reference_entries(file: str, entries: Mapping[str, Any], payload: Payload) -> Entries:
    """What a file holds in place of ``entries``, which ``file`` beside it stores."""
    tensor = entries.get("tensor")
    stored = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)} if tensor is not None else entries["storage"]
    described = {name: stored[name] for name in ("dtype", "shape")}
    return {"storage": {"form": FORM, "file": file, **described, "xxh3_128": payload.xxh3_128}}


def find_reference(content: Any) -> Reference | None:
    """What a file's content refers to; None where it is no reference.

    Raises:
        CaptureError: it says that it is one, and does not name a file beside it; the message is without its path.
    """
    storage = content.get("storage") if isinstance(content, dict) else None
    if not isinstance(storage, dict) or storage.get("form") != FORM or "tensor" in content:
        return None
    file, digest = storage.get("file"), storage.get("xxh3_128")
    if not isinstance(file, str) or not isinstance(digest, str):
        raise CaptureError("is a reference that names no file, or no hash")
    if not is_beside(file):
        raise CaptureError(f"refers to {file!r}, which is no file of its own folder, and is not followed there")
    return Reference(file=file, xxh3_128=digest)


def is_beside(file: str) -> bool:
    """Whether ``file`` is the plain name of a file, and so of one in the same folder."""
    return file not in ("", ".", "..") and Path(file).name == file and "/" not in file and "\0" not in file


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value with its tensors described; these in the order they stand in it."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[name, _outline(value[name], tensors)] for name in sorted(value)]}
    if isinstance(value, list | tuple):
        return {"list": [_outline(item, tensors) for item in value]}
    return value
