"""Makes a run folder agree with itself again after a kill, a full disk or a hand that moved files.

The files are the truth: whole ones are listed, lines without a file are dropped, what is torn or is not the
file that was written goes to ``.qcollect/torn`` under a name that is free there. Nothing else is deleted but
temporary captures, which nobody can finish, and a manifest that loses a whole line is kept beside the torn
files too. References to a file that is gone, or goes, go with it: captures without a tensor, which a resumed
run takes again. A manifest is rewritten only if something is wrong with it, then in the order of the counters,
so that the same files always give the same manifest and a second repair finds nothing to do.
"""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qcollect.paths import RunPaths, temporary_path
from qcollect.store.catalog import Catalog
from qcollect.store.examine import (
    FileReport,
    Line,
    RunFiles,
    find_tails,
    glance_at_rank,
    listed_records,
    manifest_rank,
    read_manifest_lines,
    statistics_records,
)
from qcollect.store.files import rename_new
from qcollect.store.folder import parse_name
from qcollect.store.manifest import list_manifests
from qcollect.vocab import CaptureKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing a repair did: to which file, what and why."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line a manifest is to have."""

    file: str | None  # None: statistics alone, in the order they stand in
    raw: bytes

    @property
    def order(self) -> tuple[float, str]:
        if self.file is None:
            return (float("inf"), "")
        name = parse_name(self.file)
        return (float("inf") if name is None else name.counter, self.file)


def repair_run(found: RunFiles) -> list[Action]:
    """Repair a run folder as it was examined; nobody may be writing to it.

    Raises:
        OSError: the folder cannot be written; what was done until then stands.
    """
    actions = [*_remove_temporaries(found), *_set_aside_files(found)]
    wanted = _wanted_lines(found)
    paths = {*found.manifests, *(found.paths.manifest_path(rank) for rank in wanted if rank is not None)}
    for path in sorted(paths):
        actions += _repair_manifest(found, path, wanted.get(manifest_rank(path), []))
    return actions + _repair_index(found.paths, is_changed=bool(actions))


def repair_rank(paths: RunPaths, rank: int) -> list[Action]:
    """Repair one rank's part of a run folder, for that rank before it goes on writing; others may be doing the same.

    Files the manifest lists are not read; one whose size is another one is taken for torn. The whole files of
    this rank that are not listed are read and listed.

    Raises:
        OSError: the folder cannot be written.
    """
    found = glance_at_rank(paths, rank)
    manifest = paths.manifest_path(rank)
    actions = [*_remove_temporaries(found), *_set_aside_files(found)]
    return actions + _repair_manifest(found, manifest, _wanted_lines(found).get(rank, []))


def after_repair(found: RunFiles) -> RunFiles:
    """What ``examine_run`` would find after ``repair_run``, without reading the captures again."""
    manifests = tuple(list_manifests(found.paths))
    lines = tuple(line for path in manifests for line in read_manifest_lines(path))
    listed, moved = listed_records(lines), files_to_set_aside(found)
    return replace(
        found,
        manifests=manifests,
        lines=lines,
        tails=find_tails(manifests),
        files={
            file: replace(report, line=None) if file in listed else report
            for file, report in found.files.items()
            if file not in moved
        },
        temporaries=(),
    )


def find_repeats(found: RunFiles) -> dict[str, str]:
    """Files that hold the same capture as another, with that one: the first that is listed, or the first by name."""
    position = {file: i for i, file in enumerate(listed_records(found.lines))}
    first_of: dict[CaptureKey, str] = {}
    repeats: dict[str, str] = {}
    for file in sorted(found.files, key=lambda file: (position.get(file, len(position)), file)):
        report = found.files[file]
        if report.key is None or report.problem is not None:
            continue
        first = first_of.setdefault(report.key, file)
        if first != file:
            repeats[file] = first
    return repeats


def files_to_set_aside(found: RunFiles) -> dict[str, str]:
    """The files a repair takes out of the run, and why."""
    reasons = {
        file: _why_not_kept(report)
        for file, report in found.files.items()
        if report.problem is not None and not report.is_unreadable
    }
    reasons |= {file: f"it holds the same capture as {first}" for file, first in find_repeats(found).items()}
    # what refers to a file that goes would have no tensor any longer
    orphans = {
        file: f"it refers to {report.refers_to}, which is moved away"
        for file, report in found.files.items()
        if report.refers_to in reasons and file not in reasons and not report.is_unreadable
    }
    return reasons | orphans


def _why_not_kept(report: FileReport) -> str:
    if report.is_dangling:
        return f"it {report.problem}"
    return "it is torn" if report.is_torn else "it is not the file that was written"


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def _remove_temporaries(found: RunFiles) -> Iterator[Action]:
    for path in found.temporaries:
        with suppress(FileNotFoundError):
            path.unlink()
            yield Action(path=path, what="removed: a capture whose writer ended before it was whole")


def _set_aside_files(found: RunFiles) -> Iterator[Action]:
    for file, reason in sorted(files_to_set_aside(found).items()):
        path = found.paths.run_dir / file
        target = _set_aside(path, found.paths.torn_dir)
        yield Action(path=path, what=f"moved to {target}: {reason}")


def _set_aside(path: Path, folder: Path, *, keep: bool = False) -> Path:
    """Give a file a name in ``folder`` that nothing has; ``keep``: its old name too. Returns the new name."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        target = folder / (path.name if number == 0 else f"{path.name}.{number}")
        try:
            _copy_new(path, target) if keep else rename_new(path, target)
        except FileExistsError:
            number += 1
        else:
            return target


def _copy_new(source: Path, target: Path) -> None:
    content = source.read_bytes()
    with target.open("xb") as file:
        file.write(content)


# ---------------------------------------------------------------------------------------------
# Manifests
# ---------------------------------------------------------------------------------------------


def _wanted_lines(found: RunFiles) -> dict[int | None, list[_Entry]]:
    """By rank, the lines its manifest is to have, in order."""
    wanted: dict[int | None, list[_Entry]] = {}
    aside = files_to_set_aside(found)
    seen: set[str] = set()
    for key, line in statistics_records(found.lines).items():
        wanted.setdefault(key.rank, []).append(_Entry(file=None, raw=line.raw))
    for line in found.lines:
        file = None if line.record is None else line.record.file
        report = None if file is None else found.files.get(file)
        if report is None or report.file in seen or report.file in aside:
            continue
        seen.add(report.file)
        rank = manifest_rank(line.manifest) if report.rank is None else report.rank
        wanted.setdefault(rank, []).append(_Entry(file=report.file, raw=report.line or line.raw))
    for report in found.files.values():
        if report.file not in seen and report.file not in aside and report.line is not None and report.rank is not None:
            wanted.setdefault(report.rank, []).append(_Entry(file=report.file, raw=report.line))
    return {rank: sorted(entries, key=lambda entry: entry.order) for rank, entries in wanted.items()}


def _repair_manifest(found: RunFiles, path: Path, wanted: list[_Entry]) -> list[Action]:
    lines = [line for line in found.lines if line.manifest == path]
    has_tail = path in found.tails
    if not has_tail and sorted(line.raw for line in lines) == sorted(entry.raw for entry in wanted):
        return []
    actions = [*_changes(found, lines, wanted, path)]
    kept = {entry.raw for entry in wanted}
    if any(line.raw not in kept for line in lines):
        copy = _set_aside(path, found.paths.torn_dir, keep=True)
        actions.append(Action(path=path, what=f"kept as it was in {copy}"))
    if has_tail:
        actions.append(Action(path=path, what="dropped the last line, which its writer did not end"))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomic(path, (entry.raw for entry in wanted))
    return actions


def _changes(found: RunFiles, lines: list[Line], wanted: list[_Entry], manifest: Path) -> Iterator[Action]:
    """What makes a manifest's lines into those it is to have."""
    raw_of = {entry.file: entry.raw for entry in wanted if entry.file is not None}
    first_of = statistics_records(lines)
    aside = files_to_set_aside(found)
    seen: set[str] = set()
    for line in lines:
        file = None if line.record is None else line.record.file
        if line.record is None:
            yield Action(path=line.place, what=f"dropped: {line.problem}")
        elif file is None:
            key = line.record.key
            if key is not None and first_of[key] is not line:
                yield Action(path=line.place, what="dropped: its statistics are listed before")
            elif key is not None and key.rank != manifest_rank(manifest):
                yield Action(path=line.place, what=f"dropped: it is rank {key.rank}'s")
        elif file in seen:
            yield Action(path=line.place, what=f"dropped: {file} is listed before")
        elif file not in raw_of:
            reason = "was moved away" if file in aside else "is another rank's" if file in found.files else "is gone"
            yield Action(path=line.place, what=f"dropped: {file} {reason}")
        elif raw_of[file] != line.raw:
            yield Action(path=line.place, what=f"written anew as {file} says")
        seen |= set() if file is None else {file}
    for entry in wanted:
        if entry.file is not None and entry.file not in seen:
            yield Action(path=found.paths.run_dir / entry.file, what=f"listed in {manifest.name}: it is whole")


def _repair_index(paths: RunPaths, *, is_changed: bool) -> list[Action]:
    if is_changed:
        paths.index_path.unlink(missing_ok=True)
    with Catalog(paths) as catalog:
        return [Action(path=paths.index_path, what="made anew from the manifests")] if catalog.was_stale else []


def _write_atomic(path: Path, lines: Iterable[bytes]) -> None:
    temporary = temporary_path(path, uuid.uuid4().hex[:12])
    try:
        with temporary.open("xb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
