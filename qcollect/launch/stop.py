"""Asking runs to end, from another terminal."""

import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcollect.errors import OutputError
from qcollect.host.processes import find_run, kill_all, process_is
from qcollect.monitor.run_record import RunRecord, read_run_record
from qcollect.monitor.snapshot import summarize_directory
from qcollect.paths import RunPaths
from qcollect.plan.stop import request_stop

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What became of one run: asked to end, or left as it was."""

    run_dir: Path
    was_asked: bool
    num_killed: int
    message: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"run_dir": str(self.run_dir)}


def stop_runs(directory: Path, *, now: float, wait: bool) -> list[Stopped]:
    """Ask every active run in ``directory`` (itself, or its direct children) to end; kill what lost ones left.

    Only the stop file is written; a process is signalled if it carries the token of a run of this host whose
    launcher is gone. ``wait`` goes for the runs of this host.

    Raises:
        OutputError: no run there, or a stop file cannot be written.
    """
    stopped = [_stop(RunPaths(run.run_dir)) for run in summarize_directory(directory, now)]
    while wait and any(_is_running_here(RunPaths(s.run_dir)) for s in stopped if s.was_asked):
        time.sleep(_POLL_S)
    return stopped


def _stop(paths: RunPaths) -> Stopped:
    record = read_run_record(paths)
    if record is None:
        return _left(paths, f"{paths.run_path} is missing or damaged; nothing was done")
    if not record.state.is_active:
        return _left(paths, f"has ended already ({record.state}); nothing was done")
    if record.host != socket.gethostname():
        return _ask(paths, f"is a run of {record.host or 'an unknown host'}; asked to end through {paths.stop_path}")
    if not process_is(record.launcher):
        return _clean(paths, record)
    return _ask(paths, "asked to end after the iteration it is in")


def _clean(paths: RunPaths, record: RunRecord) -> Stopped:
    num_killed = kill_all(lambda: find_run(record.run_token)) if record.run_token else 0
    what = f"ended {num_killed} process(es) it had left" if num_killed else "it has left no process"
    return Stopped(
        run_dir=paths.run_dir, was_asked=False, num_killed=num_killed, message=f"its launcher is gone; {what}"
    )


def _ask(paths: RunPaths, message: str) -> Stopped:
    try:
        request_stop(paths)
    except OSError as error:
        raise OutputError(f"{paths.stop_path} cannot be written: {error.strerror}; is it your run?") from error
    return Stopped(run_dir=paths.run_dir, was_asked=True, num_killed=0, message=message)


def _left(paths: RunPaths, message: str) -> Stopped:
    return Stopped(run_dir=paths.run_dir, was_asked=False, num_killed=0, message=message)


def _is_running_here(paths: RunPaths) -> bool:
    record = read_run_record(paths)
    is_active = record is not None and record.state.is_active and record.host == socket.gethostname()
    return is_active and record is not None and process_is(record.launcher)
