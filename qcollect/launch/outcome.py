"""How a run ended, judged from what it left: pure, so that every ending can be tested without a process."""

import signal
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from qcollect.errors import ExitCode
from qcollect.monitor.failures import Failure
from qcollect.monitor.run_record import RunState


class StopCause(StrEnum):
    """Who asked a run to end before its target."""

    REQUEST = "request"
    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    SIGHUP = "SIGHUP"


_STOPS: dict[StopCause, tuple[RunState, ExitCode, str]] = {
    StopCause.REQUEST: (RunState.STOPPED, ExitCode.STOPPED, "stopped on request"),
    StopCause.SIGINT: (RunState.INTERRUPTED, ExitCode.INTERRUPTED, "interrupted (SIGINT)"),
    StopCause.SIGTERM: (RunState.INTERRUPTED, ExitCode.TERMINATED, "interrupted (SIGTERM)"),
    StopCause.SIGHUP: (RunState.INTERRUPTED, ExitCode.TERMINATED, "interrupted (SIGHUP)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop that was asked for. ``forced_by`` says why workers were not left to end by themselves, None: they were.

    ``escalated_at`` is when the first of them was signalled (unix seconds); what fails later only follows.
    """

    cause: StopCause
    forced_by: str | None = None
    escalated_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. ``reason`` is a complete message; ``log_tail`` ends the log of the rank to blame."""

    state: RunState
    exit_code: ExitCode
    reason: str
    failures: tuple[Failure, ...] = ()
    log_tail: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": str(self.state),
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "failures": [failure.to_dict() for failure in self.failures],
            "log_tail": list(self.log_tail),
        }


def judge(
    *,
    captured: int,
    target: int,
    agent_exit_code: int | None,
    stop: Stop | None,
    failures: tuple[Failure, ...],
    agent_log_path: Path,
    now: float,
) -> Outcome:
    """The outcome of a run whose processes are gone.

    Args:
        captured: manifest lines of all ranks.
        target: how many there were to be.
        agent_exit_code: of torchrun, negative for a signal; None if it was never started.
        stop: the stop asked for, None: none.
        failures: the first cause first.
        agent_log_path: where torchrun's own output is.
        now: unix seconds.
    """
    so_far = f"{captured} of {target} captures"
    if agent_exit_code == 0 and captured == target:
        return Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason=f"all {target} captures were taken")
    if stop is not None:
        failures = tuple(f for f in failures if stop.escalated_at is None or f.time_s < stop.escalated_at)
    if agent_exit_code != 0 and stop is None and not failures:
        failures = (Failure(rank=None, time_s=now, exit_code=agent_exit_code, log_path=agent_log_path),)
    if failures and (agent_exit_code != 0 or stop is None):
        return _failed(f"{failures[0].describe()}; its log: {failures[0].log_path}", failures)
    if stop is not None:
        state, exit_code, text = _STOPS[stop.cause]
        force = f", by force: {stop.forced_by}" if stop.forced_by else ""
        return Outcome(state=state, exit_code=exit_code, reason=f"{text} with {so_far}{force}")
    return _failed(f"the run ended with {so_far}; the workers' logs: {agent_log_path.parent}", failures)


def _failed(reason: str, failures: tuple[Failure, ...]) -> Outcome:
    return Outcome(state=RunState.FAILED, exit_code=ExitCode.WORKER, reason=reason, failures=failures)


def cause_of(signum: signal.Signals) -> StopCause:
    return StopCause(signum.name)
