"""``run.json``: what the launcher says of its run, and who the launcher is."""

import errno
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from qcollect.host.processes import ProcessId, parse_process
from qcollect.paths import RunPaths
from qcollect.plan.trigger import TriggerEvent, parse_event
from qcollect.store.files import read_json, write_json_atomic, write_json_in_place

RUN_SCHEMA = 1

# On a full disk a record fits over the older one only inside the disk block that one has.
_MAX_REASON_CHARS_IN_PLACE = 400


class RunState(StrEnum):
    """``LOST`` and ``UNKNOWN`` are never recorded: they are what a reader finds."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    UNKNOWN = "unknown"

    @property
    def is_active(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One execution. Times are unix seconds; ISO in UTC in the file.

    Read from a damaged file, what is missing or of a wrong type is None, and such a launcher is
    not running.
    """

    run_id: str
    run_token: str
    quant_type: str
    state: RunState
    host: str
    target: int
    world_size: int
    recipe_name: str
    launcher: ProcessId | None
    agent: ProcessId | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    trigger: TriggerEvent | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": RUN_SCHEMA,
            "run_id": self.run_id,
            "run_token": self.run_token,
            "quant_type": self.quant_type,
            "state": str(self.state),
            "reason": self.reason,
            "exit_code": self.exit_code,
            "host": self.host,
            "launcher": None if self.launcher is None else self.launcher.to_dict(),
            "agent": None if self.agent is None else self.agent.to_dict(),
            "target": self.target,
            "world_size": self.world_size,
            "started_at": _to_iso(self.started_at),
            "ended_at": _to_iso(self.ended_at),
            "recipe_name": self.recipe_name,
            "trigger": None if self.trigger is None else self.trigger.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            run_id=str(fields.get("run_id") or "?"),
            run_token=str(fields.get("run_token") or ""),
            quant_type=str(fields.get("quant_type") or "?"),
            state=_state(fields.get("state")),
            host=str(fields.get("host") or ""),
            target=_count(fields.get("target")),
            world_size=_count(fields.get("world_size")),
            recipe_name=str(fields.get("recipe_name") or "?"),
            launcher=parse_process(fields.get("launcher")),
            agent=parse_process(fields.get("agent")),
            started_at=_from_iso(fields.get("started_at")),
            ended_at=_from_iso(fields.get("ended_at")),
            exit_code=fields["exit_code"] if isinstance(fields.get("exit_code"), int) else None,
            reason=None if fields.get("reason") is None else str(fields["reason"]),
            trigger=parse_event(fields.get("trigger")),
        )


def read_run_record(paths: RunPaths) -> RunRecord | None:
    """The record of a run; None if there is none that can be read."""
    fields = read_json(paths.run_path)
    return None if fields is None else RunRecord.from_dict(fields)


def write_run_record(paths: RunPaths, record: RunRecord) -> None:
    """Replace the record; on a full disk by writing over the old one, since the end must be told.

    Raises:
        OSError: it cannot be written at all.
    """
    try:
        write_json_atomic(paths.run_path, record.to_dict())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shortened = replace(record, reason=record.reason and record.reason[:_MAX_REASON_CHARS_IN_PLACE])
        write_json_in_place(paths.run_path, shortened.to_dict())


def _state(value: object) -> RunState:
    try:
        return RunState(str(value))
    except ValueError:
        return RunState.LOST


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _to_iso(time_s: float | None) -> str | None:
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")


def _from_iso(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
