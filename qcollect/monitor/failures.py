"""Why a run failed: the rank that failed first, in one sentence, out of what all ranks left.

When one rank fails the others follow: torchrun ends them with SIGTERM, or their collective breaks
and they raise too. The first one is the cause. Two kinds of file tell: ``errors/rankNNNNN.json``,
by a worker that could still write (exact time, type, message), and ``errors/agent.json``, by the
agent (exit codes and signals of all, in the order seen, in whole seconds).

A rank may also have left with 0 before the others were done: then their collectives break, torchrun
names them, and the one that left is the cause (``progress/rankNNNNN.leave.json``).
"""

import json
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcollect.paths import RunPaths
from qcollect.store.files import read_json, read_tail

# A crash that is no answer to another rank's: these win a tie in time.
# numbers of Linux, which other systems need not have: their records are read there
_SIGKILL, _SIGTERM, _SIGABRT = 9, 15, 6
_CRASH_SIGNALS = frozenset({4, 7, 8, _SIGKILL, 11})  # ILL, BUS, FPE, KILL, SEGV
_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank that did not end well. ``type`` and ``message`` are those of its exception, if it told.

    ``exit_code`` is negative for a signal, as in ``subprocess``. ``rank`` is None for the agent.
    """

    rank: int | None
    time_s: float
    log_path: Path
    exit_code: int | None = None
    type: str | None = None
    message: str | None = None

    @property
    def signal_number(self) -> int | None:
        return -self.exit_code if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def was_ended(self) -> bool:
        """Whether it only followed the others: SIGTERM, and no exception of its own."""
        return self.type is None and self.exit_code in (-_SIGTERM, 128 + _SIGTERM)

    def describe(self) -> str:
        """One sentence without the log's path: ``rank 1 failed: ValueError: bad tokenizer path``."""
        who = "torchrun's agent" if self.rank is None else f"rank {self.rank}"
        if self.type is not None:
            return f"{who} failed: {self.type}: {self.message}" if self.message else f"{who} failed: {self.type}"
        if self.signal_number == _SIGKILL:
            return f"{who} was killed (signal 9), often out of memory"
        if self.signal_number is not None:
            return f"{who} was ended by signal {self.signal_number} ({_signal_name(self.signal_number)})"
        if self.exit_code is None:
            return f"{who} failed: {self.message or 'it did not say why'}"
        if self.exit_code == 0:
            return f"{who} left early (exit code 0) {self.message or ''}".rstrip()
        return f"{who} ended with exit code {self.exit_code}"

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"log_path": str(self.log_path)}
        return fields | {"signal": self.signal_number, "description": self.describe()}


def has_failures(paths: RunPaths) -> bool:
    """Whether a worker or the agent has left an error; cheap."""
    return any(True for _ in paths.errors_dir.glob("*.json"))


def read_failures(paths: RunPaths) -> tuple[Failure, ...]:
    """All ranks that failed, the first cause first, those torchrun ended last.

    If only the agent failed (a port, a rendezvous, its arguments), that one.
    """
    agent = read_json(paths.agent_error_path) or {}
    entries = [e for e in agent.get("failures") or [] if isinstance(e, dict) and isinstance(e.get("rank"), int)]
    told = dict(_told_by_ranks(paths))
    failures, latest_s = [], 0.0
    for entry in entries:
        failure = _merge(entry, told.pop(entry["rank"], None), paths, not_before_s=latest_s)
        latest_s = max(latest_s, failure.time_s)
        failures.append(failure)
    failures += [_merge({"rank": rank}, fields, paths) for rank, fields in sorted(told.items())]
    if agent and not failures:
        return (_agent_failure(agent, paths),)
    if failures:
        last_s = max(f.time_s for f in failures)
        leavers = [left for left in read_early_leavers(paths) if left.time_s <= last_s]
        # one that had left may still have been there when torchrun ended the others
        failures = leavers + [f for f in failures if f.rank not in {left.rank for left in leavers}]
    return tuple(sorted(failures, key=_order))


def read_early_leavers(paths: RunPaths) -> Iterable[Failure]:
    """The ranks that left with 0 while others went on: their training ended, not by a common decision."""
    for leave_path in sorted(paths.progress_dir.glob("rank*.leave.json")):
        leave = read_json(leave_path) or {}
        rank = leave.get("rank")
        progress = (read_json(paths.progress_path(rank)) if isinstance(rank, int) else None) or {}
        if isinstance(rank, int) and progress.get("state") != "done":
            yield Failure(
                rank=rank,
                time_s=_seconds(leave.get("time")),
                log_path=paths.log_path(rank),
                exit_code=0,
                message=f"after {progress.get('iteration', '?')} iteration(s); the others could not go on without it",
            )


def read_log_tail(path: Path, num_lines: int = 10) -> tuple[str, ...]:
    """The last lines of a log that are not blank; of a line that redraws itself (``\\r``), what it showed last."""
    text = read_tail(path, _LOG_TAIL_BYTES).decode("utf-8", errors="replace")
    shown = (line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
    return tuple([line for line in shown if line][-num_lines:])


def _told_by_ranks(paths: RunPaths) -> Iterable[tuple[int, dict[str, Any]]]:
    for path in sorted(paths.errors_dir.glob("rank*.json")):
        fields = read_json(path)
        if fields is not None and isinstance(fields.get("rank"), int):
            yield fields["rank"], fields


def _merge(
    entry: dict[str, Any], told: dict[str, Any] | None, paths: RunPaths, *, not_before_s: float = 0.0
) -> Failure:
    """One rank's failure from the agent's entry and from what the rank told itself, if it did.

    The agent lists ranks as it sees them end, so an entry without an exact time is not before those listed above it.
    """
    exit_code = entry.get("exitcode")
    if told is not None and "time" in told:
        time_s = _seconds(told["time"])
    else:
        # an abort mostly answers another rank's end (gloo, NCCL's watchdog): the end of its whole second
        seen_s = _seconds(entry.get("time")) + (0.999 if exit_code == -_SIGABRT else 0.0)
        time_s = max(seen_s, not_before_s)
    return Failure(
        rank=entry["rank"],
        time_s=time_s,
        log_path=paths.log_path(entry["rank"]),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        type=_text(told, "type"),
        message=_text(told, "message"),
    )


def _agent_failure(agent: dict[str, Any], paths: RunPaths) -> Failure:
    signum = agent.get("signal")
    return Failure(
        exit_code=-signum if isinstance(signum, int) else None,
        rank=None,
        time_s=_seconds(agent.get("time")),
        log_path=paths.agent_log_path,
        type=_text(agent, "type"),
        message=_text(agent, "message"),
    )


def _order(failure: Failure) -> tuple[bool, float, bool]:
    return failure.was_ended, failure.time_s, failure.signal_number not in _CRASH_SIGNALS


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _text(fields: dict[str, Any] | None, key: str) -> str | None:
    value = (fields or {}).get(key)
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else json.dumps(value)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
