"""Own a run folder: of many starters exactly one does, and nothing of anybody else's is lost.

The state folder is the claim. It is prepared whole under a temporary name, with ``run.json`` saying
whose it is, and published by one rename: a rename never replaces a folder that holds something, so
the first wins and no claim exists that does not name its owner. A lock on the run folder makes
starters on one machine take turns, so that the others can name the winner; where a file system has
no locks the rename alone decides.

To overwrite, the old state folder is first renamed away (``displaced``): from then on the old run
does not exist, its manifests still name its files, and whoever owns the folder next removes them,
also after a crash in between.
"""

import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from qcollect.errors import CaptureError, OutputError
from qcollect.host.processes import find_run, identify, kill_all, process_is
from qcollect.monitor.run_record import RunRecord, RunState, read_run_record
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import DISPLACED_PREFIX, STATE_DIR_NAME, TEMPORARY_SUFFIX, RunPaths, temporary_path
from qcollect.plan.difference import describe_difference, first_difference
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Schedule
from qcollect.store.files import locked_folder, read_json, write_json_atomic
from qcollect.store.folder import capture_dirs, is_inside, pt_files, temporaries
from qcollect.store.manifest import read_manifest

# A run recorded on another host whose files have not changed for this long is taken for dead.
_SILENT_AFTER_S = 600.0


class ClaimMode(Enum):
    """What may be in the folder: nothing, a run to be replaced, or one to be gone on with."""

    NEW = "new"
    OVERWRITE = "overwrite"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A run folder that is ours, and what ``run.json`` says of the run."""

    paths: RunPaths
    record: RunRecord


def claim(plan: Plan, *, mode: ClaimMode, now: float) -> Claim:
    """Make ``plan.run_dir`` ours, with its state folder, ``plan.json`` and ``run.json`` (starting) in it.

    Args:
        plan: the launch.
        mode: ``OVERWRITE`` replaces the run that is there: its captures, as its manifests name them, and its
            state. ``RESUME`` goes on with it, under its run_id.
        now: unix seconds, the start of the run.

    Raises:
        OutputError: the folder holds a run that is alive, or any run with ``NEW``, or none or another one
            with ``RESUME``; holds captures that no manifest of ours names; or cannot be written. Nothing
            is changed then.
    """
    paths = RunPaths(plan.run_dir)
    with _explaining(plan.run_dir):
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with locked_folder(plan.run_dir) as is_alone:
            check_free(paths, mode, now)
            if mode == ClaimMode.RESUME:
                return _resume(plan, paths, now, is_alone=is_alone)
            _check_strangers(paths)
            record = _new_record(plan, now)
            with _withdrawing(temporary_path(paths.state_dir, plan.run_token)) as prepared:
                _prepare(prepared, paths, plan, record)
                if mode == ClaimMode.OVERWRITE:
                    _end_remains(read_run_record(paths))
                    _displace(paths, plan.run_token)
                _publish(prepared, paths)
            with _withdrawing(paths.state_dir):
                _finish_displaced(paths)
            if is_alone:
                _remove_abandoned(paths)
    return Claim(paths=paths, record=record)


def is_alive(record: RunRecord | None, paths: RunPaths, now: float) -> bool:
    """Whether the recorded run goes on: its launcher lives, or, on another host, its files still change."""
    if record is None or record.launcher is None or not record.state.is_active:
        return False
    if record.host == socket.gethostname():
        return process_is(record.launcher)
    return now - _last_change(paths) < _SILENT_AFTER_S


# ---------------------------------------------------------------------------------------------
# What forbids a claim
# ---------------------------------------------------------------------------------------------


def check_free(paths: RunPaths, mode: ClaimMode, now: float) -> None:
    """Nothing, if ``claim`` would not be refused for the run that is there, or is not.

    Raises:
        OutputError: it is alive, or there and neither to be overwritten nor resumed, or to be resumed and not there.
    """
    if not os.path.lexists(paths.state_dir):
        if mode == ClaimMode.RESUME:
            raise OutputError(f"{paths.run_dir} holds no run to resume; leave --resume out to begin one")
        return
    if not paths.state_dir.is_dir():
        raise OutputError(f"{paths.state_dir} is not a folder; move it away, or choose another folder with --out")
    record = read_run_record(paths)
    if is_alive(record, paths, now):
        stop = f"qcollect stop {shlex.quote(str(paths.run_dir))}"
        raise OutputError(
            f"{paths.run_dir} is in use by {_describe(record)}; end it with '{stop}', "
            "or choose another folder with --out"
        )
    if mode == ClaimMode.NEW:
        raise OutputError(
            f"{paths.run_dir} already holds {_describe(record)}; "
            "go on with it with --resume, replace it with --overwrite, or choose another folder with --out"
        )


def check_same_run(run_dir: Path, stored: dict[str, Any] | None, plan: Plan) -> None:
    """Nothing, if the stored plan would capture the very same values as the new one.

    Raises:
        OutputError: it would not; the field is named.
    """
    planned = plan.to_dict()
    name = None if stored is None else first_difference(stored, planned)
    if stored is not None and name is None:
        return
    what = (
        "without a readable plan.json"
        if stored is None or name is None
        else f"of other settings: {describe_difference(name, stored, planned)}"
    )
    raise OutputError(f"{run_dir} holds a run {what}; choose another --out, or replace it with --overwrite")


def is_complete(paths: RunPaths, schedule: Schedule) -> bool:
    """Whether the manifests list all captures of the schedule and the files are there."""
    run = read_snapshot(paths, time.time())
    return not run.state.is_active and run.captured == schedule.target and run.num_files >= schedule.num_files


def _describe(record: RunRecord | None) -> str:
    """``run ID (running, pid 12 on HOST, started TIME)``"""
    if record is None:
        return "a run without a readable run.json"
    pid = "no pid" if record.launcher is None else f"pid {record.launcher.pid}"
    started = (
        "?" if record.started_at is None else datetime.fromtimestamp(record.started_at, UTC).isoformat(" ", "seconds")
    )
    return f"run {record.run_id} ({record.state}, {pid} on {record.host or '?'}, started {started})"


def _last_change(paths: RunPaths) -> float:
    files = [paths.run_path, paths.metrics_path, *paths.progress_dir.glob("*.json"), *paths.manifest_dir.glob("*")]
    times = [0.0]
    for path in files:
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def _check_strangers(paths: RunPaths) -> None:
    named = {name for state_dir in (paths.state_dir, *_displaced_dirs(paths)) for name in _named_files(state_dir)}
    strangers = [path for path in (paths.run_dir / file for file in pt_files(paths.run_dir)) if path not in named]
    if strangers:
        raise OutputError(
            f"{paths.run_dir} holds {len(strangers)} .pt file(s) that no manifest names, such as "
            f"{strangers[0].relative_to(paths.run_dir)}; nothing was changed. Choose another folder with --out, "
            "or move them away"
        )


# ---------------------------------------------------------------------------------------------
# Making it ours
# ---------------------------------------------------------------------------------------------


def _new_record(plan: Plan, now: float) -> RunRecord:
    return RunRecord(
        run_id=plan.run_id,
        run_token=plan.run_token,
        quant_type=plan.quant_type,
        state=RunState.STARTING,
        host=socket.gethostname(),
        target=plan.schedule.target,
        world_size=plan.world_size,
        recipe_name=plan.recipe.name,
        launcher=identify(os.getpid()),
        started_at=now,
    )


def _prepare(prepared: Path, paths: RunPaths, plan: Plan, record: RunRecord) -> None:
    """Make a complete state folder under a temporary name."""
    prepared.mkdir()
    for folder in paths.state_dirs():
        (prepared / folder.relative_to(paths.state_dir)).mkdir()
    write_json_atomic(prepared / paths.plan_path.name, plan.to_dict())
    write_json_atomic(prepared / paths.run_path.name, record.to_dict())


def _resume(plan: Plan, paths: RunPaths, now: float, *, is_alone: bool) -> Claim:
    """Take over a run that has ended: its captures and manifests stay, what it said of itself is begun anew."""
    stored = read_json(paths.plan_path)
    check_same_run(paths.run_dir, stored, plan)
    before = read_run_record(paths)
    _end_remains(before)
    if not is_alone:
        _take_over(paths, "" if before is None else before.run_token)
    plan = replace(plan, run_id=str((stored or {}).get("run_id") or plan.run_id))
    record = _new_record(plan, now)
    write_json_atomic(paths.run_path, record.to_dict())
    # what the captures began with stays: they go on from there
    stale = (paths.stop_path, paths.signal_path, paths.metrics_path)
    for path in (*stale, *paths.progress_dir.glob("*.json"), *paths.errors_dir.glob("*")):
        path.unlink(missing_ok=True)
    for path in temporaries(paths.run_dir):
        path.unlink(missing_ok=True)
    write_json_atomic(paths.plan_path, plan.to_dict())
    return Claim(paths=paths, record=record)


def _end_remains(record: RunRecord | None) -> None:
    """End what a run of this machine whose launcher was killed has left and would still write."""
    if record is not None and record.state.is_active and record.host == socket.gethostname() and record.run_token:
        kill_all(lambda: find_run(record.run_token))


def _take_over(paths: RunPaths, token: str) -> None:
    """Where there are no locks: of several that resume the run with this token, one makes this file."""
    try:
        (paths.control_dir / f"taken-{token}").touch(exist_ok=False)
    except FileExistsError as error:
        raise OutputError(f"{paths.run_dir} has just been taken by another --resume") from error


def _displace(paths: RunPaths, token: str) -> None:
    with suppress(FileNotFoundError):  # another starter has displaced it; who publishes first wins
        paths.state_dir.rename(paths.displaced_dir(token))


def _publish(prepared: Path, paths: RunPaths) -> None:
    try:
        prepared.rename(paths.state_dir)
    except OSError as error:
        if not os.path.lexists(paths.state_dir):
            raise
        holder = _describe(read_run_record(paths))
        raise OutputError(
            f"{paths.run_dir} has just been taken by {holder}; choose another folder with --out"
        ) from error


def _displaced_dirs(paths: RunPaths) -> list[Path]:
    return sorted(paths.run_dir.glob(f"{DISPLACED_PREFIX}*"))


def _finish_displaced(paths: RunPaths) -> None:
    """Remove the captures of runs that were renamed away, then what is left of their state."""
    displaced = _displaced_dirs(paths)
    if not displaced:
        return
    for path in (*(p for d in displaced for p in _named_files(d)), *temporaries(paths.run_dir)):
        path.unlink(missing_ok=True)
    for folder in capture_dirs(paths.run_dir)[1:]:
        with suppress(OSError):  # not empty: not only ours
            folder.rmdir()
    for state_dir in displaced:
        shutil.rmtree(state_dir)


def _named_files(state_dir: Path) -> Iterator[Path]:
    """The files the manifests in ``state_dir`` name, those inside the run folder's capture folders only."""
    names = RunPaths(state_dir.parent)
    for manifest in sorted((state_dir / names.manifest_dir.name).glob("*.jsonl")):
        for record in read_manifest(manifest):
            if record.file is not None and is_inside(record.file):
                yield names.run_dir / record.file


def _remove_abandoned(paths: RunPaths) -> None:
    """State folders that starters, killed at that moment, prepared and did not publish."""
    for prepared in paths.run_dir.glob(f".{STATE_DIR_NAME}.*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(prepared, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Around a claim
# ---------------------------------------------------------------------------------------------


@contextmanager
def _withdrawing(state_dir: Path) -> Iterator[Path]:
    """Remove a state folder of ours if the claim fails while it stands."""
    try:
        yield state_dir
    except BaseException:
        shutil.rmtree(state_dir, ignore_errors=True)
        raise


@contextmanager
def _explaining(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except CaptureError as error:
        raise OutputError(str(error)) from error
    except OSError as error:
        raise OutputError(
            f"{run_dir} cannot be used: {error.strerror or error} ({error.filename}); choose another folder with --out"
        ) from error
