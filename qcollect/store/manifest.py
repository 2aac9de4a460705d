"""What a run has captured: one line a capture, one file a rank, written after the capture itself."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.files import append_line, read_lines
from qcollect.vocab import CaptureKey

__all__ = ["ManifestRecord", "append_line", "list_manifests", "read_manifest", "read_manifests"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRecord:
    """One capture: its file relative to the run folder, size and hash as written, all it says of itself.

    A capture of statistics alone has no file, and the three are None; ``errors`` holds, by quant type, what
    ``formats.error_stats.describe_totals`` gives.
    """

    file: str | None
    bytes: int | None
    xxh3_128: str | None
    metadata: dict[str, Any]
    tensor_info: dict[str, Any]
    errors: dict[str, Any] = field(default_factory=dict)

    @property
    def is_statistics(self) -> bool:
        """Whether there is no tensor behind it."""
        return self.file is None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        has_file = fields["file"] is not None
        return cls(
            file=str(fields["file"]) if has_file else None,
            bytes=int(fields["bytes"]) if has_file else None,
            xxh3_128=str(fields["xxh3_128"]) if has_file else None,
            metadata=dict(fields["metadata"]),
            tensor_info=dict(fields["tensor_info"]),
            errors=dict(fields.get("errors") or {}),
        )

    @property
    def key(self) -> CaptureKey | None:
        """The capture's identity; None where the metadata, an older file's, do not hold it."""
        try:
            return CaptureKey.from_metadata(self.metadata)
        except (KeyError, TypeError, ValueError, IndexError):
            return None


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
