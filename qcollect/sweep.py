"""One recipe under several quant types, one run after the other; a second call does what is left."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qcollect.errors import ExitCode, OutputError, QcollectError
from qcollect.launch.outcome import Outcome
from qcollect.launch.supervisor import execute
from qcollect.monitor.run_record import RunState
from qcollect.monitor.snapshot import RunSnapshot, read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.store.files import read_json

BASELINE = "bf16"
# what may differ between a run and its repetition without changing a captured value
_IRRELEVANT = ("launch", "name", "path")


class Action(StrEnum):
    RUN = "run"
    SKIP = "skip"
    REDO = "redo"


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
    """What to do about one member: run it, skip it because it is complete, or redo it.

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
    difference = None if stored is None else _first_difference(stored, plan.to_dict())
    if stored is None or difference is not None:
        what = "without a readable plan.json" if stored is None else f"whose {difference} differs from this sweep's"
        raise OutputError(f"{plan.run_dir} holds a run {what}; choose another --out, or replace it with --overwrite")
    return Member(plan=plan, action=Action.SKIP if _is_complete(paths) else Action.REDO)


def _is_complete(paths: RunPaths) -> bool:
    """Whether the run says so, and its files are all there."""
    run = read_snapshot(paths, time.time())
    return run.state == RunState.COMPLETED and run.captured == run.target <= run.num_files


def run_sweep(
    members: Sequence[Member],
    *,
    on_start: Callable[[Member], None],
    on_tick: Callable[[RunSnapshot], None],
    on_end: Callable[[Member, Outcome], None],
) -> SweepResult:
    """Execute the members in order. A failed one does not end the sweep; a signal does.

    Args:
        members: as ``decide`` gives them.
        on_start, on_end: called around every member, skipped ones included.
        on_tick: as in ``execute``.
    """
    outcomes: list[tuple[Member, Outcome]] = []
    for member in members:
        on_start(member)
        outcome = _execute_member(member, on_tick)
        outcomes.append((member, outcome))
        on_end(member, outcome)
        if outcome.state in (RunState.INTERRUPTED, RunState.STOPPED):
            return SweepResult(outcomes=tuple(outcomes), exit_code=outcome.exit_code)
    failed = any(outcome.exit_code != ExitCode.OK for _, outcome in outcomes)
    return SweepResult(outcomes=tuple(outcomes), exit_code=ExitCode.SWEEP_PARTLY_FAILED if failed else ExitCode.OK)


def _execute_member(member: Member, on_tick: Callable[[RunSnapshot], None]) -> Outcome:
    if member.action == Action.SKIP:
        reason = f"complete already: {member.plan.schedule.target} captures"
        return Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason=reason)
    try:
        return execute(member.plan, overwrite=member.action == Action.REDO, on_tick=on_tick)
    except QcollectError as error:  # the folder is held by a run that is alive: the others can still be done
        return Outcome(state=RunState.FAILED, exit_code=ExitCode(error.exit_code), reason=str(error))


def _first_difference(stored: dict[str, Any], planned: dict[str, Any]) -> str | None:
    """The name of a field of the plan, or of its recipe (dotted), in which two plans would capture differently."""
    for key in ("world_size", "device", "target", "script_args"):
        if stored.get(key) != planned[key]:
            return key
    for section, fields in planned["recipe"].items():
        before = stored.get("recipe", {}).get(section)
        if section in _IRRELEVANT or before == fields:
            continue
        if not isinstance(fields, dict) or not isinstance(before, dict):
            return str(section)
        name = next((n for n in fields if before.get(n) != fields[n] and (section, n) != ("quant", "types")), None)
        if name is not None:
            return f"{section}.{name}"
    return None
