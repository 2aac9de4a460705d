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

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from qcollect.errors import CaptureError, OutputError
from qcollect.host.processes import identify, process_is
from qcollect.monitor.run_record import RunRecord, RunState, read_run_record
from qcollect.paths import DISPLACED_PREFIX, STATE_DIR_NAME, TEMPORARY_SUFFIX, RunPaths, temporary_path
from qcollect.plan.record import Plan
from qcollect.store.files import write_json_atomic
from qcollect.store.manifest import read_manifest
from qcollect.vocab import CaptureName

# A run recorded on another host whose files have not changed for this long is taken for dead.
_SILENT_AFTER_S = 600.0
_ITERATION_DIR = re.compile(r"iter\d+")
_TEMPORARY = re.compile(rf"\.(?P<name>.+\.pt)\.[^.]+{re.escape(TEMPORARY_SUFFIX)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A run folder that is ours, and what ``run.json`` says of the run."""

    paths: RunPaths
    record: RunRecord


def claim(plan: Plan, *, overwrite: bool, now: float) -> Claim:
    """Make ``plan.run_dir`` ours, with its state folder, ``plan.json`` and ``run.json`` (starting) in it.

    Args:
        plan: the launch.
        overwrite: replace the run that is there: its captures, as its manifests name them, and its state.
        now: unix seconds, the start of the run.

    Raises:
        OutputError: the folder holds a run (and ``overwrite`` is off or that run is alive), holds
            captures that no manifest of ours names, or cannot be written. Nothing is changed then.
    """
    paths = RunPaths(plan.run_dir)
    with _explaining(plan.run_dir):
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with _lock(plan.run_dir) as is_alone:
            check_free(paths, overwrite, now)
            _check_strangers(paths)
            record = _new_record(plan, now)
            with _withdrawing(temporary_path(paths.state_dir, plan.run_token)) as prepared:
                _prepare(prepared, paths, plan, record)
                if overwrite:
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
        return process_is(record.launcher.pid, record.launcher.create_time)
    return now - _last_change(paths) < _SILENT_AFTER_S


# ---------------------------------------------------------------------------------------------
# What forbids a claim
# ---------------------------------------------------------------------------------------------


def check_free(paths: RunPaths, overwrite: bool, now: float) -> None:
    """Nothing, if ``claim`` would not be refused for the run that is there.

    Raises:
        OutputError: it is alive, or there and not to be overwritten.
    """
    if not os.path.lexists(paths.state_dir):
        return
    if not paths.state_dir.is_dir():
        raise OutputError(f"{paths.state_dir} is not a folder; move it away, or choose another folder with --out")
    record = read_run_record(paths)
    if is_alive(record, paths, now):
        raise OutputError(
            f"{paths.run_dir} is in use by {_describe(record)}; let it end, or choose another folder with --out"
        )
    if not overwrite:
        raise OutputError(
            f"{paths.run_dir} already holds {_describe(record)}; "
            "replace it with --overwrite, or choose another folder with --out"
        )


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
    strangers = [path for path in _captures(paths.run_dir) if path not in named]
    if strangers:
        raise OutputError(
            f"{paths.run_dir} holds {len(strangers)} .pt file(s) that no manifest names, such as "
            f"{strangers[0].relative_to(paths.run_dir)}; nothing was changed. Choose another folder with --out, "
            "or move them away"
        )


def _captures(run_dir: Path) -> Iterator[Path]:
    """Every ``.pt`` file of a run folder: in it, and in its ``iter*`` folders."""
    for folder in _capture_dirs(run_dir):
        with os.scandir(folder) as entries:
            yield from (Path(e.path) for e in entries if e.name.endswith(".pt") and not e.name.startswith("."))


def _capture_dirs(run_dir: Path) -> list[Path]:
    with os.scandir(run_dir) as entries:
        iterations = [e for e in entries if _ITERATION_DIR.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return [run_dir, *(Path(e.path) for e in iterations)]


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
    for path in (*(p for d in displaced for p in _named_files(d)), *_unfinished_captures(paths.run_dir)):
        path.unlink(missing_ok=True)
    for folder in _capture_dirs(paths.run_dir)[1:]:
        with suppress(OSError):  # not empty: not only ours
            folder.rmdir()
    for state_dir in displaced:
        shutil.rmtree(state_dir)


def _named_files(state_dir: Path) -> Iterator[Path]:
    """The files the manifests in ``state_dir`` name, those inside the run folder's capture folders only."""
    names = RunPaths(state_dir.parent)
    for manifest in sorted((state_dir / names.manifest_dir.name).glob("*.jsonl")):
        for record in read_manifest(manifest):
            parts = PurePosixPath(record.file).parts
            is_flat = len(parts) == 1
            is_by_iteration = len(parts) == 2 and _ITERATION_DIR.fullmatch(parts[0]) is not None
            if parts[-1:] != ("..",) and (is_flat or is_by_iteration):
                yield names.run_dir.joinpath(*parts)


def _unfinished_captures(run_dir: Path) -> list[Path]:
    """Temporary files of captures that were being written when a run ended."""
    return [
        path
        for folder in _capture_dirs(run_dir)
        for path in folder.glob(f".*{TEMPORARY_SUFFIX}")
        if (match := _TEMPORARY.fullmatch(path.name)) is not None and _is_capture_name(match["name"])
    ]


def _is_capture_name(name: str) -> bool:
    try:
        return CaptureName.parse(name).rank is not None
    except ValueError:
        return False


def _remove_abandoned(paths: RunPaths) -> None:
    """State folders that starters, killed at that moment, prepared and did not publish."""
    for prepared in paths.run_dir.glob(f".{STATE_DIR_NAME}.*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(prepared, ignore_errors=True)


# ---------------------------------------------------------------------------------------------
# Around a claim
# ---------------------------------------------------------------------------------------------


@contextmanager
def _lock(run_dir: Path) -> Iterator[bool]:
    """Take turns with other starters; False where the file system has no such locks."""
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(folder)


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
