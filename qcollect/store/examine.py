"""What a run folder holds, each file read once: the lines of its manifests, its captures, what was left over.

Nothing is judged or changed here (``verify`` does both). A file's bytes are hashed as they are read; then
torch opens the same file by mapping it, which reads the archive's directory and the metadata, not the
tensor again.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.files import read_tail
from qcollect.store.folder import final_name, is_inside, parse_name, pt_files, temporaries
from qcollect.store.manifest import ManifestRecord, list_manifests
from qcollect.vocab import CaptureKey, CaptureName

_CHUNK_BYTES = 1 << 20
_MAX_THREADS = 4
_ZIP_MAGIC = b"PK"

OnProgress = Callable[[int, int, int], None]  # files done, files in all, bytes read


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A whole line of a manifest, and the capture it lists; ``problem`` where it lists none."""

    manifest: Path
    number: int
    raw: bytes
    record: ManifestRecord | None = None
    problem: str | None = None

    @property
    def place(self) -> Path:
        """``rank00000.jsonl:12``, with the folder."""
        return self.manifest.with_name(f"{self.manifest.name}:{self.number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """A file under a capture's name, or that a manifest lists.

    Attributes:
        file: relative to the run folder, as manifests name it.
        num_bytes: its size.
        key: its identity, from its metadata; None where an older file's metadata are too few.
        rank: whose manifest lists it.
        is_torn: it holds no capture.
        problem: why it is torn, cannot be read, or is not the file that was written; None: all is well.
        line: what its manifest line must be, where it has none or another.
        misnamed: the fields of its name that disagree with the metadata.
        refers_to: the file that its tensor is in, where it is another.
        payload: the hash of what that file must store; None: that is not looked at.
        is_dangling: that file is gone or does not store it.
    """

    file: str
    num_bytes: int
    key: CaptureKey | None = None
    rank: int | None = None
    is_torn: bool = False
    is_unreadable: bool = False
    problem: str | None = None
    line: bytes | None = None
    misnamed: tuple[str, ...] = ()
    refers_to: str | None = None
    payload: str | None = None
    is_dangling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Everything in a run folder that a manifest lists or could list.

    ``tails`` are manifests whose last line was not ended; ``num_strangers`` counts the ``.pt`` files that
    have no capture's name and no line.
    """

    paths: RunPaths
    manifests: tuple[Path, ...]
    lines: tuple[Line, ...]
    tails: tuple[Path, ...]
    files: dict[str, FileReport]
    temporaries: tuple[Path, ...]
    num_strangers: int

    @property
    def num_bytes(self) -> int:
        return sum(report.num_bytes for report in self.files.values())


def examine_run(paths: RunPaths, on_progress: OnProgress | None = None) -> RunFiles:
    """All of a run folder, every file read."""
    manifests = tuple(list_manifests(paths))
    lines = tuple(line for path in manifests for line in read_manifest_lines(path))
    listed = listed_records(lines)
    found = sorted(pt_files(paths.run_dir))
    ours = [file for file in found if file in listed or parse_name(file) is not None]
    reports = _examine_files(paths.run_dir, [(file, listed.get(file)) for file in ours], on_progress)
    reports = _examine_references(paths.run_dir, reports)
    return RunFiles(
        paths=paths,
        manifests=manifests,
        lines=lines,
        tails=find_tails(manifests),
        files={report.file: report for report in reports},
        temporaries=tuple(temporaries(paths.run_dir)),
        num_strangers=len(found) - len(ours),
    )


def glance_at_rank(paths: RunPaths, rank: int) -> RunFiles:
    """One rank's part of a run folder. Files its manifest lists are not read: that they have their size is enough,
    and that the files are there that they refer to.
    """
    manifest = paths.manifest_path(rank)
    lines = tuple(read_manifest_lines(manifest))
    listed = listed_records(lines)
    found = sorted(pt_files(paths.run_dir))
    unlisted = [file for file in found if file not in listed and _rank_of(parse_name(file)) == rank]
    glances = [_glance(paths.run_dir, file, listed[file], rank) for file in found if file in listed]
    examined = _examine_files(paths.run_dir, [(file, None) for file in unlisted], None)
    own = [*glances, *(report for report in examined if report.rank in (rank, None))]
    return RunFiles(
        paths=paths,
        manifests=(manifest,),
        lines=lines,
        tails=find_tails([manifest]),
        files={report.file: report for report in _examine_references(paths.run_dir, own)},
        temporaries=tuple(p for p in temporaries(paths.run_dir) if _rank_of(final_name(p.name)) == rank),
        num_strangers=0,
    )


# ---------------------------------------------------------------------------------------------
# Manifests
# ---------------------------------------------------------------------------------------------


def read_manifest_lines(path: Path) -> list[Line]:
    """The whole lines of a manifest, those that list nothing included; none if there is no such file."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [_parse(path, number, raw) for number, raw in enumerate(content.split(b"\n")[:-1], 1)]


def _parse(path: Path, number: int, raw: bytes) -> Line:
    try:
        record = ManifestRecord.from_dict(json.loads(raw))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Line(manifest=path, number=number, raw=raw, problem=f"{type(error).__name__}: {error}")
    problem = None
    if record.file is None:
        problem = None if record.key is not None else "names neither a file nor a capture"
    elif not is_inside(record.file):
        problem = f"names {record.file!r}, which is no place for a capture of this run"
    return Line(manifest=path, number=number, raw=raw, record=None if problem else record, problem=problem)


def find_tails(manifests: Iterable[Path]) -> tuple[Path, ...]:
    """The manifests that do not end with a newline: what follows the last one is no line."""
    return tuple(path for path in manifests if read_tail(path, 1) not in (b"", b"\n"))


def listed_records(lines: Iterable[Line]) -> dict[str, ManifestRecord]:
    """By file, what the first line that lists it says."""
    listed: dict[str, ManifestRecord] = {}
    for line in lines:
        if line.record is not None and line.record.file is not None:
            listed.setdefault(line.record.file, line.record)
    return listed


def statistics_records(lines: Iterable[Line]) -> dict[CaptureKey, Line]:
    """By identity, the first line of each capture that is statistics alone."""
    found: dict[CaptureKey, Line] = {}
    for line in lines:
        if line.record is not None and line.record.is_statistics and (key := line.record.key) is not None:
            found.setdefault(key, line)
    return found


def manifest_rank(path: Path) -> int | None:
    """Whose manifest it is, by its name."""
    digits = path.stem.removeprefix("rank")
    return int(digits) if digits.isdecimal() else None


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def _examine_files(
    run_dir: Path, files: Collection[tuple[str, ManifestRecord | None]], on_progress: OnProgress | None
) -> list[FileReport]:
    reports: list[FileReport] = []
    num_bytes = 0
    # reading and hashing run side by side; what Python does with a file is done by one at a time anyway
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for report in pool.map(lambda item: examine_file(run_dir, *item), files):
            reports.append(report)
            num_bytes += report.num_bytes
            if on_progress is not None:
                on_progress(len(reports), len(files), num_bytes)
    return reports


def examine_file(run_dir: Path, file: str, record: ManifestRecord | None) -> FileReport:
    """One file, read whole, beside what its manifest line says (None: it has no line)."""
    from qcollect.store.capture import plain
    from qcollect.store.reference import find_reference

    path = run_dir / file
    try:
        num_bytes, digest, is_zip = hash_file(path)
    except OSError as error:
        return FileReport(
            file=file, num_bytes=0, is_unreadable=True, problem=f"cannot be read: {error.strerror or error}"
        )
    try:
        content = load_whole(path, num_bytes, is_zip)
    except CaptureError as error:
        return FileReport(file=file, num_bytes=num_bytes, is_torn=True, problem=str(error))
    metadata, tensor_info = plain(content["metadata"]), plain(content["tensor_info"])
    key = key_of(metadata)
    reference = find_reference(content)
    written = ManifestRecord(file=file, bytes=num_bytes, xxh3_128=digest, metadata=metadata, tensor_info=tensor_info)
    name = parse_name(file)
    return FileReport(
        file=file,
        num_bytes=num_bytes,
        key=key,
        rank=None if key is None else key.rank,
        problem=None if record is None else _difference(record, num_bytes, digest),
        line=None if record == written else encode_line(written),
        misnamed=() if name is None else _misnamed(name, metadata),
        refers_to=None if reference is None else _beside(file, reference.file),
        payload=None if reference is None else reference.xxh3_128,
    )


def hash_file(path: Path) -> tuple[int, str, bool]:
    """A file's size, the xxh3-128 of its bytes (hex), and whether it begins like a zip archive."""
    hashed, buffer = xxhash.xxh3_128(), bytearray(_CHUNK_BYTES)
    view, num_bytes, is_zip = memoryview(buffer), 0, False
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            is_zip = is_zip or (num_bytes == 0 and buffer.startswith(_ZIP_MAGIC))
            hashed.update(view[:count])
            num_bytes += count
    return num_bytes, hashed.hexdigest(), is_zip


def load_whole(path: Path, num_bytes: int, is_zip: bool) -> dict[str, Any]:
    """What a file holds, older ones included, and references as such; a zip archive is mapped, not read.

    Raises:
        CaptureError: it is torn or no capture; the message is the reason, on one line and without the path.
    """
    from qcollect.store.capture import load_any_capture

    if num_bytes == 0:
        raise CaptureError("is empty")
    try:
        return load_any_capture(path, mmap=is_zip, follow=False)
    except CaptureError as error:
        # torch goes on for lines about checkpoints and where they come from
        reason = str(error).removeprefix(f"{path}: ").removeprefix("cannot be loaded: ").strip()
        reason = reason or type(error.__cause__).__name__
        raise CaptureError(reason.splitlines()[0].split(". ")[0]) from error


def encode_line(record: ManifestRecord) -> bytes:
    """A manifest line without its newline, as the writer of captures writes it."""
    fields = {
        "file": record.file,
        "bytes": record.bytes,
        "xxh3_128": record.xxh3_128,
        "metadata": record.metadata,
        "tensor_info": record.tensor_info,
    }
    return json.dumps(fields, allow_nan=False).encode("ascii")


def key_of(metadata: dict[str, Any]) -> CaptureKey | None:
    """A capture's identity; None where the metadata, an older file's, do not hold it."""
    try:
        return CaptureKey.from_metadata(metadata)
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _glance(run_dir: Path, file: str, record: ManifestRecord, rank: int) -> FileReport:
    try:
        num_bytes = (run_dir / file).stat().st_size
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        return FileReport(file=file, num_bytes=0, rank=rank, is_unreadable=True, problem=problem)
    target = record.metadata.get("stored_in")
    return FileReport(
        file=file,
        num_bytes=num_bytes,
        key=key_of(record.metadata),
        rank=rank,
        problem=_difference(record, num_bytes, record.xxh3_128),
        refers_to=_beside(file, target) if isinstance(target, str) else None,
    )


# ---------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------


def _beside(file: str, name: str) -> str:
    """The file of this name in the folder of another, both relative to the run folder."""
    return "".join(file.rpartition("/")[:2]) + name.rpartition("/")[2]


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError):  # or no name that a file could have
        return False
    return True


def _examine_references(run_dir: Path, reports: Collection[FileReport]) -> list[FileReport]:
    """The reports, in each that refers to another file whether that is there and stores what it must."""
    report_of = {report.file: report for report in reports}
    sound = [report for report in reports if report.refers_to is not None and report.problem is None]
    # each is read once, however many refer to it
    targets = sorted({report.refers_to for report in sound if report.refers_to and report.payload is not None})
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        payloads = dict(zip(targets, pool.map(lambda file: _payload_of(run_dir / file), targets), strict=True))
    judged = {r.file: _judge_reference(run_dir, r, report_of, payloads) for r in sound}
    return [judged.get(report.file, report) for report in reports]


def _judge_reference(
    run_dir: Path, report: FileReport, report_of: dict[str, FileReport], payloads: dict[str, str | CaptureError]
) -> FileReport:
    assert report.refers_to is not None
    target = report_of.get(report.refers_to)
    if target is None and not _exists(run_dir / report.refers_to):
        return _dangling(report, "is gone")
    if target is not None and target.is_unreadable:
        problem = f"refers to {report.refers_to}, which {target.problem}"
        return replace(report, is_unreadable=True, problem=problem)
    if target is not None and target.problem is not None:
        return _dangling(report, "is torn" if target.is_torn else "is not the file that was written")
    if target is not None and target.refers_to is not None:
        return _dangling(report, "is a reference itself")
    stored = payloads.get(report.refers_to)
    if isinstance(stored, CaptureError):
        return _dangling(report, f"cannot be loaded: {stored}")
    if stored is not None and stored != report.payload:
        return _dangling(report, f"stores something else (xxh3-128 {stored}, and {report.payload} is meant)")
    return report


def _dangling(report: FileReport, why: str) -> FileReport:
    return replace(report, is_dangling=True, problem=f"refers to {report.refers_to}, which {why}")


def _payload_of(path: Path) -> str | CaptureError:
    """The hash of what a file stores; why it cannot be had."""
    from qcollect.store.reference import hash_payload

    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        return hash_payload(load_whole(path, path.stat().st_size, is_zip)).xxh3_128
    except (OSError, ValueError) as error:
        return CaptureError(str(error))
    except CaptureError as error:
        return error


def _difference(record: ManifestRecord, num_bytes: int, digest: str | None) -> str | None:
    if record.bytes != num_bytes:
        return f"has {num_bytes:,} bytes, and its manifest line says {record.bytes:,}"
    if record.xxh3_128 != digest:
        return f"has the xxh3-128 {digest}, and its manifest line says {record.xxh3_128}"
    return None


def _misnamed(name: CaptureName, metadata: dict[str, Any]) -> tuple[str, ...]:
    """The fields where a name and the metadata both say something, and not the same."""
    fields = ("iteration", "layer_type", "layer_idx", "operation", "phase", "component", "quant_type")
    disagreeing = []
    for field in (*fields, "rank", "sample_idx"):
        named, value = getattr(name, field), metadata.get(field, _ABSENT)
        if named is not None and value is not _ABSENT and named != ("unknown" if value is None else value):
            disagreeing.append(f"{field} {named!r} is {value!r} in the metadata")
    if "tensor_name" in metadata and not _is_tensor_of(name, metadata):
        disagreeing.append(f"tensor {name.tensor!r} is {metadata['tensor_name']!r} in the metadata")
    return tuple(disagreeing)


_ABSENT: Any = object()


def _is_tensor_of(name: CaptureName, metadata: dict[str, Any]) -> bool:
    key = key_of(metadata)
    tensor_name = str(metadata["tensor_name"])
    if (name.layer_type, name.operation, tensor_name, name.tensor) == ("linear", "backward", "input", "grad_output"):
        return True  # what older linears called the gradient of their output
    written = tensor_name if key is None or key.gemm is None else f"{tensor_name}_{key.gemm}"
    return name.tensor == written or name.tensor.endswith(f"_{written}")


def _rank_of(name: CaptureName | None) -> int | None:
    return None if name is None else name.rank
