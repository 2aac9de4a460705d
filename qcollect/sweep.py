"""One recipe under several quant types, one run after the other; a second call does what is left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qcollect.errors import ExitCode, OutputError, QcollectError
from qcollect.launch.outcome import Outcome
from qcollect.launch.supervisor import execute
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.monitor.snapshot import RunSnapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.store.files import count_lines, read_json
from qcollect.store.manifest import list_manifests

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
        OutputError: the folder holds a complete run of another recipe, and ``overwrite`` is not set.
    """
    paths = RunPaths(plan.run_dir)
    record = read_run_record(paths)
    if record is None:
        return Member(plan=plan, action=Action.RUN)
    if overwrite:
        return Member(plan=plan, action=Action.REDO)
    captured = sum(count_lines(path) for path in list_manifests(paths))
    if record.state != RunState.COMPLETED or captured != record.target:
        return Member(plan=plan, action=Action.REDO)
    difference = _first_difference(read_json(paths.plan_path) or {}, plan.to_dict())
    if difference is not None:
        raise OutputError(
            f"{plan.run_dir} holds a complete run whose {difference} differs from this sweep's; choose another --out, "
            "or replace it with --overwrite"
        )
    return Member(plan=plan, action=Action.SKIP)


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
    """The dotted name of a field of the recipe, or of the plan, in which two plans would capture differently."""
    for key in ("world_size", "target", "script_args"):
        if stored.get(key) != planned[key]:
            return key
    for section, fields in planned["recipe"].items():
        before = stored.get("recipe", {}).get(section)
        if section in _IRRELEVANT or before == fields:
            continue
        if not isinstance(fields, dict) or not isinstance(before, dict):
            return f"recipe.{section}"
        name = next((n for n in fields if before.get(n) != fields[n] and (section, n) != ("quant", "types")), None)
        if name is not None:
            return f"{section}.{name}"
    return None
