"""A file of a model or data set looked at from its first bytes: whether it is the real one, and whole.

A safetensors file is 8 bytes (little endian) with the length of a JSON header, the header, the data:

    {"NAME": {"dtype": "BF16", "shape": [2048, 2048], "data_offsets": [0, 8388608]}, ..., "__metadata__": {...}}

Offsets count from the end of the header, and the tensors follow each other without gaps up to the file's end.
A Git LFS pointer is a text of three lines that stands in a clone for a file that was not downloaded.

**Source:** huggingface/safetensors README, "Format"; git-lfs/git-lfs docs/spec.md, "The Pointer".
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from qcollect.plan.finding import Finding

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
AGAIN = "download it again"
_POINTER_HEAD = b"version https://git-lfs.github.com/spec/"
# longer than any header: safetensors itself refuses more
_MAX_HEADER_BYTES = 100_000_000


def find_pointer(check: str, path: Path) -> Finding | None:
    """The problem of a file that is a Git LFS pointer; None for any other, and for none."""
    try:
        with path.open("rb") as stream:
            head = stream.read(1024)
    except OSError:
        return None
    if not head.startswith(_POINTER_HEAD):
        return None
    size = re.search(rb"^size (\d+)\s*$", head, re.MULTILINE)
    named = f"its size is {int(size[1]):,} bytes, " if size else ""
    return Finding.problem(
        check,
        f"{path}: Git LFS pointer, real file not downloaded ({named}{path.stat().st_size:,} are here)",
        f"run 'git lfs pull' in {path.parent}, or download the file itself",
    )


def unreadable(check: str, path: Path, error: OSError) -> Finding:
    reason = error.strerror or str(error)
    return Finding.problem(check, f"{path}: cannot be read: {reason}", "make it readable for the user who starts runs")


def read_object(check: str, path: Path) -> dict[str, Any] | Finding:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        return unreadable(check, path, error)
    except ValueError as error:
        return Finding.problem(check, f"{path}: is no JSON: {error}", AGAIN)
    if not isinstance(content, dict):
        return Finding.problem(check, f"{path}: holds a JSON {type(content).__name__}, no object", AGAIN)
    return content


def read_header(check: str, file: Path) -> dict[str, tuple[int, ...]] | Finding:
    """The shapes of a safetensors file's tensors by name, or what is wrong with it; its data are not read."""
    pointer = find_pointer(check, file)
    if pointer is not None:
        return pointer
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if num_bytes < 8 or length > _MAX_HEADER_BYTES:
                return Finding.problem(check, f"{file}: is no safetensors file ({num_bytes:,} bytes)", AGAIN)
            if length > num_bytes - 8:
                return _cut_short(check, file, num_bytes, f"at least {8 + length:,}")
            header = json.loads(stream.read(length))
    except OSError as error:
        return unreadable(check, file, error)
    except ValueError as error:
        return Finding.problem(check, f"{file}: its header is no JSON: {error}", AGAIN)
    return _check_header(check, file, header, num_bytes, 8 + length)


def _check_header(
    check: str, file: Path, header: Any, num_bytes: int, data_start: int
) -> dict[str, tuple[int, ...]] | Finding:
    entries = {k: v for k, v in header.items() if k != "__metadata__"} if isinstance(header, dict) else {}
    if not entries:
        return Finding.problem(check, f"{file}: its header names no tensors", AGAIN)
    spans = []
    for name, entry in entries.items():
        problem = _find_entry_problem(entry)
        if problem is not None:
            return Finding.problem(check, f"{file}: tensor {name} {problem}", AGAIN)
        spans.append((*entry["data_offsets"], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            return Finding.problem(check, f"{file}: tensor {name} begins at byte {start:,}, not {end:,}", AGAIN)
        end = stop
    if num_bytes != data_start + end:
        return _cut_short(check, file, num_bytes, f"{data_start + end:,}", is_longer=num_bytes > data_start + end)
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def _find_entry_problem(entry: Any) -> str | None:
    """What is wrong with one tensor's entry, as the end of a sentence that begins with its name."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "has no proper shape and data_offsets in the header"
    if dtype not in DTYPE_BITS:
        return f"is of dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}"
    needed, held = prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if needed != 8 * held:
        return f"is {dtype} {list(shape)}, which is {needed // 8:,} bytes, and its data_offsets span {held:,}"
    return None


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _cut_short(check: str, file: Path, num_bytes: int, wanted: str, *, is_longer: bool = False) -> Finding:
    what = "is longer than its header says" if is_longer else "is cut short"
    return Finding.problem(check, f"{file}: {what}, {num_bytes:,} of {wanted} bytes", AGAIN)
