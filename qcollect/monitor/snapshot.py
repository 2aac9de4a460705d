"""A run as its files show it now: what is captured, how fast, which ranks are well.

Everything is read from the run folder and the process table; the clock is passed in. What is
captured comes from the manifests; the ``.pt`` files in the folder are counted as a cross-check and
give sizes and times. Logs are never parsed.
"""

import json
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcollect.errors import OutputError
from qcollect.host.processes import ProcessId, parse_process, process_is
from qcollect.monitor.failures import Failure, read_failures
from qcollect.monitor.run_record import RunRecord, RunState, read_run_record
from qcollect.paths import RunPaths, find_runs
from qcollect.plan.trigger import TriggerEvent, read_event
from qcollect.store.files import count_lines, read_json, read_tail
from qcollect.store.folder import capture_dirs
from qcollect.store.manifest import list_manifests

# A heartbeat older than this is pointed out.
STALE_AFTER_S = 30.0
MIN_WAIT_S = 1.0  # of training for writers, to be worth a word
# a rank's last word; its process may be gone then
ENDED = ("done", "left", "failed")
_METRICS_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank: its own report (``progress``), its manifest, and whether its process lives.

    ``state`` is the worker's word (loading, training, draining, done, left, failed), ``waiting`` before its
    first report, ``gone`` when its process ended without one, ``ended`` when torchrun ended it because
    another rank failed. ``num_micro_batches`` counts those begun in the iteration; ``age_s`` is the age of the
    report; ``trigger`` what it waits for, and what came nearest to it. ``num_deduped`` captures refer to other files,
    which took ``deduped_bytes`` less.
    """

    rank: int
    state: str
    captured: int
    share: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    iteration: int | None = None
    num_micro_batches: int | None = None
    bytes: int | None = None
    device: str | None = None
    loss: float | None = None
    age_s: float | None = None
    waited_s: float | None = None
    trigger: dict[str, Any] | None = None
    num_deduped: int | None = None
    deduped_bytes: int | None = None
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None and self.state not in ("failed", "gone")

    @property
    def waiting_for(self) -> tuple[str, ...]:
        names = (self.trigger or {}).get("waiting_for")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    def to_dict(self) -> dict[str, Any]:
        failure = None if self.failure is None else self.failure.to_dict()
        return asdict(self) | {"failure": failure, "is_ok": self.is_ok}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """One run. ``state`` is what is recorded, or ``lost`` (its launcher is gone), or ``unknown`` (another
    host's, or captures that no launcher of ours made).

    ``captured`` counts manifest lines, ``num_files`` the ``.pt`` files and ``bytes`` their sizes; where there are lines
    only (statistics), those of the manifests.
    ``phase`` says more of an active run: starting, loading, waiting for a trigger, capturing, training, draining,
    stopping. ``trigger`` is what began its captures, if it waited.
    ``failures`` has the first cause first; ``warnings`` are findings, ``notes`` what else is worth knowing, each a
    complete sentence.
    """

    run_dir: Path
    run_id: str
    quant_type: str
    recipe_name: str
    state: RunState
    phase: str
    host: str
    target: int
    captured: int
    num_files: int
    bytes: int
    world_size: int
    ranks: tuple[RankSnapshot, ...]
    launcher_pid: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    elapsed_s: float | None = None
    files_per_s: float | None = None
    eta_s: float | None = None
    last_file_age_s: float | None = None
    iteration: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    trigger: TriggerEvent | None = None
    failures: tuple[Failure, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def state_text(self) -> str:
        """The state as it is shown: ``unknown (recorded on HOST)`` for a run of another host."""
        if self.state != RunState.UNKNOWN:
            return str(self.state)
        return f"unknown (recorded on {self.host})" if self.host else "unknown (no run.json)"

    @property
    def num_ranks_ok(self) -> int:
        return sum(rank.is_ok for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "run_dir": str(self.run_dir),
            "state": str(self.state),
            "state_text": self.state_text,
            "num_ranks_ok": self.num_ranks_ok,
            "trigger": None if self.trigger is None else self.trigger.to_dict(),
            "ranks": [rank.to_dict() for rank in self.ranks],
            "failures": [failure.to_dict() for failure in self.failures],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def read_snapshot(
    paths: RunPaths,
    now: float,
    *,
    hostname: str | None = None,
    is_process: Callable[[ProcessId | None], bool] = process_is,
) -> RunSnapshot:
    """The run in ``paths`` at ``now``.

    Args:
        paths: a run folder; with a damaged ``run.json`` the run is lost, without one unknown.
        now: unix seconds.
        hostname: this machine's name; None asks it.
        is_process: whether this process runs here.
    """
    record = read_run_record(paths) or _record_without_file(paths)
    is_here = record.host == (socket.gethostname() if hostname is None else hostname)
    state = _current_state(record, is_here, is_process)
    failures = read_failures(paths)
    ranks = _read_ranks(paths, record, now, failures, is_process if is_here and record.state.is_active else None)
    files = _scan_files(paths.run_dir)
    captured = sum(rank.captured for rank in ranks)
    metrics = _last_metrics(paths)
    event = read_event(paths)
    rate = _files_per_s(files, record, state, captured, now)
    num_missing = max(0, record.target - captured)
    ended_at = now if state.is_active else record.ended_at
    return RunSnapshot(
        run_dir=paths.run_dir,
        run_id=record.run_id,
        quant_type=record.quant_type,
        recipe_name=record.recipe_name,
        state=state,
        phase=_phase(state, ranks, record.target, captured, waits=event is None),
        host=record.host,
        target=record.target,
        captured=captured,
        num_files=files.count,
        bytes=files.num_bytes if files.count else _manifest_bytes(paths),
        world_size=record.world_size,
        ranks=ranks,
        launcher_pid=None if record.launcher is None else record.launcher.pid,
        started_at=record.started_at,
        ended_at=record.ended_at,
        elapsed_s=None if record.started_at is None or ended_at is None else max(0.0, ended_at - record.started_at),
        files_per_s=rate,
        eta_s=num_missing / rate if rate and state.is_active else None,
        last_file_age_s=None if files.last_s is None else max(0.0, now - files.last_s),
        iteration=_latest_iteration(ranks, metrics),
        loss=_number(metrics.get("loss")),
        tokens_per_s=_number(metrics.get("tokens_per_s")),
        exit_code=record.exit_code,
        reason=record.reason,
        trigger=event,
        failures=failures,
        warnings=tuple(_warnings(state, ranks, captured, files.count)),
        notes=tuple(_notes(ranks, captured)),
    )


def summarize_directory(directory: Path, now: float) -> list[RunSnapshot]:
    """All runs in ``directory`` (itself, or its direct children), by name.

    Raises:
        OutputError: there is no such folder, or no run in it.
    """
    runs = find_runs(directory)
    if runs:
        return [read_snapshot(paths, now) for paths in runs]
    problem = "holds no run" if directory.is_dir() else "is not a folder" if directory.exists() else "does not exist"
    raise OutputError(
        f"{directory} {problem} (looked for .qcollect in it and in the folders it holds); "
        "name the folder given to --out, or start a run: qcollect run mxfp8"
    )


# ---------------------------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------------------------


def _record_without_file(paths: RunPaths) -> RunRecord:
    is_damaged = paths.run_path.exists()
    return RunRecord(
        run_id="?",
        run_token="",
        quant_type=paths.run_dir.name,
        state=RunState.LOST if is_damaged else RunState.UNKNOWN,
        host="",
        target=0,
        world_size=0,
        recipe_name="?",
        launcher=None,
        reason=f"{paths.run_path} is {'damaged' if is_damaged else 'missing'}",
    )


def _current_state(record: RunRecord, is_here: bool, is_process: Callable[[ProcessId | None], bool]) -> RunState:
    if not record.state.is_active:
        return record.state
    if record.launcher is not None and not is_here:
        return RunState.UNKNOWN
    return record.state if is_process(record.launcher) else RunState.LOST


def _phase(state: RunState, ranks: tuple[RankSnapshot, ...], target: int, captured: int, *, waits: bool) -> str:
    if state != RunState.RUNNING:
        return str(state)
    states = {rank.state for rank in ranks}
    if states <= {"waiting", "gone"}:
        return "starting"
    if "training" not in states:
        return "loading" if states & {"loading", "waiting"} else "draining"
    waiting_for = next((rank.waiting_for for rank in ranks if rank.waiting_for), ())
    if waiting_for and waits:
        return f"waiting for {', '.join(waiting_for)}"
    return "capturing" if captured < target else "training"


# ---------------------------------------------------------------------------------------------
# Ranks
# ---------------------------------------------------------------------------------------------


def _read_ranks(
    paths: RunPaths,
    record: RunRecord,
    now: float,
    failures: tuple[Failure, ...],
    is_process: Callable[[ProcessId | None], bool] | None,
) -> tuple[RankSnapshot, ...]:
    failure_of = {failure.rank: failure for failure in failures}
    progress = {rank: read_json(paths.progress_path(rank)) for rank in _known_ranks(paths, record)}
    shares = _planned_shares(paths) if None in progress.values() else []
    ranks = []
    for rank, fields in progress.items():
        planned = shares[rank] if rank < len(shares) else None
        captured = count_lines(paths.manifest_path(rank))
        ranks.append(_read_rank(rank, fields or {}, captured, planned, now, failure_of.get(rank), is_process))
    return tuple(ranks)


def _known_ranks(paths: RunPaths, record: RunRecord) -> list[int]:
    listed = (path.stem.removeprefix("rank") for path in list_manifests(paths))
    return sorted({*range(record.world_size), *(int(rank) for rank in listed if rank.isdecimal())})


def _read_rank(
    rank: int,
    fields: dict[str, Any],
    captured: int,
    planned_share: int | None,
    now: float,
    failure: Failure | None,
    is_process: Callable[[ProcessId | None], bool] | None,
) -> RankSnapshot:
    state = str(fields.get("state") or "waiting")
    if failure is not None:
        state = "ended" if failure.was_ended else "failed"
    elif fields and state not in ENDED and is_process is not None:
        state = state if is_process(parse_process(fields)) else "gone"
    updated_at = _number(fields.get("updated_at"))
    return RankSnapshot(
        rank=rank,
        state=state,
        captured=captured,
        share=_integer(fields.get("share")) if fields else planned_share,
        local_rank=_integer(fields.get("local_rank")),
        pid=_integer(fields.get("pid")),
        iteration=_integer(fields.get("iteration")),
        num_micro_batches=_integer(fields.get("num_micro_batches")),
        bytes=_integer(fields.get("bytes")),
        device=None if fields.get("device") is None else str(fields["device"]),
        loss=_number(fields.get("loss")),
        age_s=None if updated_at is None else max(0.0, now - updated_at),
        waited_s=_number(fields.get("waited_s")),
        trigger=trigger if isinstance(trigger := fields.get("trigger"), dict) else None,
        num_deduped=_integer(fields.get("num_deduped")),
        deduped_bytes=_integer(fields.get("deduped_bytes")),
        failure=failure,
    )


def _planned_shares(paths: RunPaths) -> list[int | None]:
    shares = (read_json(paths.plan_path) or {}).get("shares")
    return [_integer(share) for share in shares] if isinstance(shares, list) else []


# ---------------------------------------------------------------------------------------------
# Files, metrics, warnings
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    count: int
    num_bytes: int
    first_s: float | None
    last_s: float | None


def _scan_files(run_dir: Path) -> _Files:
    """The ``.pt`` files of the run folder and its ``iter*`` folders."""
    stats = []
    for folder in capture_dirs(run_dir):
        try:
            with os.scandir(folder) as entries:
                stats += [e.stat(follow_symlinks=False) for e in entries if _is_capture(e.name)]
        except FileNotFoundError:  # removed meanwhile
            continue
    times = [s.st_mtime for s in stats]
    return _Files(
        count=len(stats),
        num_bytes=sum(s.st_size for s in stats),
        first_s=min(times, default=None),
        last_s=max(times, default=None),
    )


def _manifest_bytes(paths: RunPaths) -> int:
    num_bytes = 0
    for path in list_manifests(paths):
        with suppress(FileNotFoundError):  # removed meanwhile
            num_bytes += path.stat().st_size
    return num_bytes


def _is_capture(name: str) -> bool:
    return name.endswith(".pt") and not name.startswith(".")


def _files_per_s(files: _Files, record: RunRecord, state: RunState, captured: int, now: float) -> float | None:
    """Files a second since the first one; falls while a running run writes none.

    Captures without files (statistics only) count from the start of the run.
    """
    start, count = (files.first_s, files.count) if files.count else (record.started_at, captured)
    end = now if state.is_active else (files.last_s if files.count else record.ended_at)
    if start is None or end is None or count < 2 or end - start < 0.05:
        return None
    return count / (end - start)


def _last_metrics(paths: RunPaths) -> dict[str, Any]:
    lines = read_tail(paths.metrics_path, _METRICS_TAIL_BYTES).split(b"\n")[:-1]
    try:
        metrics = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return metrics if isinstance(metrics, dict) else {}


def _latest_iteration(ranks: tuple[RankSnapshot, ...], metrics: dict[str, Any]) -> int | None:
    known = [rank.iteration for rank in ranks if rank.iteration is not None]
    last = _integer(metrics.get("iteration"))
    return max([*known, *([] if last is None else [last])], default=None)


def _warnings(state: RunState, ranks: tuple[RankSnapshot, ...], captured: int, num_files: int) -> list[str]:
    warnings = []
    if not state.is_active and num_files > captured:
        warnings.append(f"{num_files - captured} .pt file(s) have no manifest line")
    if not state.is_active and 0 < num_files < captured:
        warnings.append(f"{captured - num_files} manifest line(s) have no .pt file")
    stale = [r for r in ranks if state.is_active and r.age_s is not None and r.age_s > STALE_AFTER_S]
    for rank in (r for r in stale if r.state not in (*ENDED, "gone")):
        warnings.append(f"rank {rank.rank} has not reported for {rank.age_s:.0f} s")
    slowest = max(ranks, key=lambda rank: rank.waited_s or 0.0, default=None)
    if slowest is not None and (slowest.waited_s or 0.0) >= MIN_WAIT_S:
        warnings.append(
            f"training waited {slowest.waited_s:.0f} s for captures to be written (rank {slowest.rank}); "
            "a larger capture.host_memory_gb holds more of them"
        )
    return warnings


def _notes(ranks: tuple[RankSnapshot, ...], captured: int) -> list[str]:
    num_deduped = sum(rank.num_deduped or 0 for rank in ranks)
    if not num_deduped:
        return []
    num_bytes = sum(rank.deduped_bytes or 0 for rank in ranks)
    return [
        f"{num_deduped:,} of {captured:,} captures refer to another that is the same, which saved {num_bytes:,} bytes"
    ]


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)
