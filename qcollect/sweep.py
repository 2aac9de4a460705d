"""One recipe under several quant types, one run after the other; a second call does what is left.

What a member has is told by its manifests: all captures there, and it is skipped; some, and it is
resumed, if it is the same run in every field that counts.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qcollect.errors import ExitCode, QcollectError
from qcollect.host.capture_signal import CaptureSignal
from qcollect.launch.claim import ClaimMode, check_same_run, is_complete
from qcollect.launch.outcome import Outcome
from qcollect.launch.supervisor import Watcher, execute, takes_signal
from qcollect.monitor.run_record import RunState
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.store.files import read_json

BASELINE = "bf16"


class Action(StrEnum):
    RUN = "run"
    SKIP = "skip"
    RESUME = "resume"
    REDO = "redo"


_MODES = {Action.RUN: ClaimMode.NEW, Action.RESUME: ClaimMode.RESUME, Action.REDO: ClaimMode.OVERWRITE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run of the sweep and what is to be done about it."""

    plan: Plan
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """How each member ended; the exit code of the whole."""

    outcomes: tuple[tuple[Member, Outcome], ...]
    exit_code: ExitCode


def decide(plan: Plan, *, overwrite: bool) -> Member:
    """What to do about one member: run it, skip it because it is complete, resume it, or redo it.

    Raises:
        OutputError: the folder holds a run that is not this one (complete or not: its files are not to be
            lost), and ``overwrite`` is not set.
    """
    paths = RunPaths(plan.run_dir)
    if not os.path.lexists(paths.state_dir):
        return Member(plan=plan, action=Action.RUN)
    if overwrite:
        return Member(plan=plan, action=Action.REDO)
    stored = read_json(paths.plan_path)
    check_same_run(paths.run_dir, stored, plan)
    return Member(plan=plan, action=Action.SKIP if is_complete(paths, plan.schedule) else Action.RESUME)


def run_sweep(
    members: Sequence[Member],
    *,
    on_start: Callable[[Member], None],
    watcher: Watcher,
    on_end: Callable[[Member, Outcome], None],
) -> SweepResult:
    """Execute the members in order. A failed one does not end the sweep; a signal does.

    Args:
        members: as ``decide`` gives them.
        on_start, on_end: called around every member, skipped ones included.
        watcher: as in ``execute``.
    """
    outcomes: list[tuple[Member, Outcome]] = []
    # a signal that asks for captures must not end the sweep between two members
    with CaptureSignal(enabled=any(takes_signal(member.plan) for member in members)):
        for member in members:
            on_start(member)
            outcome = _execute_member(member, watcher)
            outcomes.append((member, outcome))
            on_end(member, outcome)
            if outcome.sweep_ends_with is not None:
                return SweepResult(outcomes=tuple(outcomes), exit_code=outcome.sweep_ends_with)
    failed = any(outcome.exit_code != ExitCode.OK for _, outcome in outcomes)
    return SweepResult(outcomes=tuple(outcomes), exit_code=ExitCode.SWEEP_PARTLY_FAILED if failed else ExitCode.OK)


def _execute_member(member: Member, watcher: Watcher) -> Outcome:
    if member.action == Action.SKIP:
        reason = f"complete already: {member.plan.schedule.target} captures"
        return Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason=reason)
    try:
        return execute(member.plan, mode=_MODES[member.action], watcher=watcher)
    except QcollectError as error:  # the folder is held by a run that is alive: the others can still be done
        return Outcome(state=RunState.FAILED, exit_code=ExitCode(error.exit_code), reason=str(error))
