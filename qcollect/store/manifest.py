"""What a run has captured: one line a capture, one file a rank, written after the capture itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.files import append_line, read_lines

__all__ = ["ManifestRecord", "append_line", "list_manifests", "read_manifest", "read_manifests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRecord:
    """One capture: its file relative to the run folder, size and hash as written, all it says of itself."""

    file: str
    bytes: int
    xxh3_128: str
    metadata: dict[str, Any]
    tensor_info: dict[str, Any]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            file=str(fields["file"]),
            bytes=int(fields["bytes"]),
            xxh3_128=str(fields["xxh3_128"]),
            metadata=dict(fields["metadata"]),
            tensor_info=dict(fields["tensor_info"]),
        )


def read_manifest(path: Path) -> list[ManifestRecord]:
    """The captures of one manifest file, in the order they were taken.

    A last line without its newline is what a killed writer left, and is dropped. No file: no captures.

    Raises:
        CaptureError: another line cannot be read; the message has its number.
    """
    return [_parse(line, path, number) for number, line in enumerate(read_lines(path), 1)]


def list_manifests(paths: RunPaths) -> list[Path]:
    """The manifest files of a run, by rank."""
    return sorted(paths.manifest_dir.glob("rank*.jsonl"))


def read_manifests(paths: RunPaths) -> list[ManifestRecord]:
    """The captures of all ranks, rank by rank.

    Raises:
        CaptureError: as ``read_manifest``.
    """
    return [record for path in list_manifests(paths) for record in read_manifest(path)]


def _parse(line: bytes, path: Path, number: int) -> ManifestRecord:
    try:
        return ManifestRecord.from_dict(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(
            f"{path}:{number}: no manifest line ({type(error).__name__}: {error}); "
            "every line but the last must be whole; mend it or remove it"
        ) from error
