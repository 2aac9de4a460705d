"""How a run ended, judged from what it left: pure, so that every ending can be tested without a process."""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcollect.errors import ExitCode
from qcollect.monitor.failures import Failure
from qcollect.monitor.run_record import RunState
from qcollect.plan.stop import StopCause

_STOPS: dict[StopCause, tuple[RunState, ExitCode, str]] = {
    StopCause.REQUEST: (RunState.STOPPED, ExitCode.STOPPED, "stopped on request"),
    StopCause.SIGINT: (RunState.INTERRUPTED, ExitCode.INTERRUPTED, "interrupted (SIGINT)"),
    StopCause.SIGTERM: (RunState.INTERRUPTED, ExitCode.TERMINATED, "interrupted (SIGTERM)"),
    StopCause.SIGHUP: (RunState.INTERRUPTED, ExitCode.TERMINATED, "interrupted (SIGHUP)"),
    StopCause.MAX_TIME: (RunState.STOPPED, ExitCode.STOPPED, "launch.max_time is over: stopped"),
    StopCause.MAX_BYTES: (RunState.STOPPED, ExitCode.STOPPED, "launch.max_bytes is reached: stopped"),
    StopCause.DATA_END: (RunState.STOPPED, ExitCode.STOPPED, "the training came to its end (data or iterations)"),
    StopCause.STALL: (RunState.STALLED, ExitCode.STALLED, "stalled"),
}
_REQUESTS = (StopCause.REQUEST, StopCause.SIGINT, StopCause.SIGTERM, StopCause.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop that was asked for. ``forced_by`` says why workers were not left to end by themselves, None: they were.

    ``escalated_at`` is when the first of them was signalled (unix seconds); what fails later only follows.
    ``detail`` is a sentence more about the cause.
    """

    cause: StopCause
    detail: str | None = None
    forced_by: str | None = None
    escalated_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. ``reason`` is a complete message; ``log_tail`` ends the log of the rank to blame.

    ``cause`` is that of a stop before the target; ``signalled`` the first signal that came, also where the run
    ended by something else.
    """

    state: RunState
    exit_code: ExitCode
    reason: str
    failures: tuple[Failure, ...] = ()
    log_tail: tuple[str, ...] = field(default=())
    cause: StopCause | None = None
    signalled: StopCause | None = None

    @property
    def sweep_ends_with(self) -> ExitCode | None:
        """The exit code of a sweep of which this is the last run because somebody wanted an end; None: it goes on."""
        cause = self.signalled or self.cause
        return _STOPS[cause][1] if cause in _REQUESTS else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": str(self.state),
            "exit_code": int(self.exit_code),
            "reason": self.reason,
            "cause": self.cause,
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
    trigger: str | None = None,
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
        trigger: what the captures began with, or what was waited for, in a sentence; None: they did not wait.
    """
    so_far = f"{captured} of {target} captures"
    trigger = f"; {trigger}" if trigger else ""
    if agent_exit_code == 0 and captured == target:
        reason = f"all {target} captures were taken{trigger}"
        return Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason=reason)
    if stop is not None:
        failures = tuple(f for f in failures if stop.escalated_at is None or f.time_s < stop.escalated_at)
    if agent_exit_code != 0 and stop is None and not failures:
        failures = (Failure(rank=None, time_s=now, exit_code=agent_exit_code, log_path=agent_log_path),)
    if failures and (agent_exit_code != 0 or stop is None):
        return _failed(f"{failures[0].describe()}; its log: {failures[0].log_path}", failures)
    if stop is not None:
        state, exit_code, text = _STOPS[stop.cause]
        force = f", by force: {stop.forced_by}" if stop.forced_by else ""
        detail = f": {stop.detail}" if stop.detail else ""
        reason = f"{text} with {so_far}{force}{detail}{trigger}"
        return Outcome(state=state, exit_code=exit_code, reason=reason, cause=stop.cause)
    if captured > target:
        return _failed(f"the run ended with {so_far}; the workers' logs: {agent_log_path.parent}", failures)
    state, exit_code, text = _STOPS[StopCause.DATA_END]
    reason = f"{text} with {so_far}{trigger}; the workers' logs: {agent_log_path.parent}"
    return Outcome(state=state, exit_code=exit_code, reason=reason)


def _failed(reason: str, failures: tuple[Failure, ...]) -> Outcome:
    return Outcome(state=RunState.FAILED, exit_code=ExitCode.WORKER, reason=reason, failures=failures)


def cause_of(signum: signal.Signals) -> StopCause:
    return StopCause(signum.name)
