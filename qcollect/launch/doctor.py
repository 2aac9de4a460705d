"""Everything a run of a recipe needs, looked at in the order a run would come upon it. Starts no run, leaves no file.

``run`` and ``sweep`` are refused by the same functions; here all of them speak, whatever the others say.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qcollect.errors import DeviceError, ExitCode, QcollectError, UsageError
from qcollect.host.devices import device_order, visible_devices
from qcollect.host.facts import disk_space, loopback_interface, num_cores
from qcollect.host.machine import MachineFacts
from qcollect.launch.checks import MIN_VERSIONS, check_devices, check_machine
from qcollect.plan.finding import Finding, Level
from qcollect.plan.inspection import Inspection
from qcollect.plan.record import Plan
from qcollect.recipe.records import Recipe

# what cannot be told once something before it is amiss
_OF_MODEL = ("checkpoint", "data", "tokenizer")
_OF_PLAN = ("capture", "memory", "space")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, in order; ``not_checked`` names what a problem stands before."""

    recipe: str
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.PREFLIGHT if self.count(Level.PROBLEM) else ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "exit_code": int(self.exit_code),
            "num_problems": self.count(Level.PROBLEM),
            "num_warnings": self.count(Level.WARNING),
            "not_checked": list(self.not_checked),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def examine(
    recipe: Recipe, *, out_dir: Path, now: float, facts: MachineFacts, look_at: Callable[[Recipe], Inspection]
) -> Examination:
    """Look at everything a run of ``recipe`` into ``out_dir`` needs.

    Args:
        recipe: with flags and settings in it.
        out_dir: absolute; the run's folder is in it.
        now: unix seconds.
        facts: of this machine.
        look_at: asks a worker process about the recipe, as ``inspect.look_at`` does.
    """
    findings = check_machine(facts, recipe)
    if any(f.check == "system" and f.level == Level.PROBLEM for f in findings):
        return _ended(recipe, findings, ("output", *_OF_MODEL, "devices", *_OF_PLAN))
    findings += _check_request(recipe, out_dir, now)
    if any(f.check in MIN_VERSIONS and f.level == Level.PROBLEM for f in findings):
        return _ended(recipe, findings, (*_OF_MODEL, "devices", *_OF_PLAN))
    try:
        inspection = look_at(recipe)
    except QcollectError as error:
        is_about_devices = isinstance(error, DeviceError | UsageError)
        findings.append(Finding.of_error("devices" if is_about_devices else "inspection", error))
        return _ended(recipe, findings, (*_OF_MODEL, "devices", *_OF_PLAN))
    findings += [*inspection.findings, *check_devices(facts, inspection)]
    if not inspection.modules:
        return _ended(recipe, findings, _OF_PLAN)
    planned = _check_plans(recipe, inspection, facts, out_dir)
    return _ended(recipe, [*findings, *planned], () if _is_planned(planned) else ("memory", "space"))


def _ended(recipe: Recipe, findings: Sequence[Finding], not_checked: tuple[str, ...]) -> Examination:
    return Examination(recipe=recipe.name, findings=tuple(findings), not_checked=not_checked)


def _is_planned(findings: Sequence[Finding]) -> bool:
    return any(finding.check == "space" for finding in findings)


def _attempt(check: str, said: str, function: Callable[[], object]) -> Finding:
    """What ``function`` refuses, as a finding; ``said`` if it does not."""
    try:
        function()
    except QcollectError as error:
        return Finding.of_error(check, error)
    return Finding.ok(check, said)


# ---------------------------------------------------------------------------------------------
# Before the model is looked at
# ---------------------------------------------------------------------------------------------


def _check_request(recipe: Recipe, out_dir: Path, now: float) -> list[Finding]:
    from qcollect.launch.claim import ClaimMode
    from qcollect.launch.preflight import check_script, check_types, find_output

    types = recipe.quant.types
    swept = _attempt("quant", f"{recipe.quant.type}; swept: {', '.join(types)}", lambda: check_types(recipe, types))
    if swept.level == Level.PROBLEM:  # of a sweep; a run has its own type, and it was checked when it was read
        swept = replace(swept, level=Level.WARNING, message=f"'sweep --all' would be refused: {swept.message}")
    return [
        _attempt("script", recipe.script, lambda: check_script(recipe)),
        swept,
        find_output(out_dir / recipe.quant.type, mode=ClaimMode.NEW, now=now),
    ]


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


def _check_plans(recipe: Recipe, inspection: Inspection, facts: MachineFacts, out_dir: Path) -> list[Finding]:
    from qcollect.launch.preflight import check_limits, check_plan, find_space

    try:
        plan = _plan(recipe, recipe.quant.type, inspection, out_dir)
        check_limits(plan)
    except QcollectError as error:
        return [Finding.of_error("capture", error)]
    space = disk_space(plan.run_dir)
    own = [w for w in plan.warnings if w not in inspection.warnings]
    findings = [
        Finding.ok("capture", _describe(plan)),
        *(replace(Finding.of_error("capture", warning), level=Level.WARNING) for warning in own),
        *check_plan(plan, inspection, facts, space),
    ]
    try:
        sweep = [_plan(recipe, name, inspection, out_dir) for name in recipe.quant.types]
    except QcollectError:  # told by the check of the types
        return findings
    swept = find_space(sweep, space)
    if swept.level == Level.PROBLEM and not any(f.check == "space" and f.level == Level.PROBLEM for f in findings):
        findings.append(replace(swept, level=Level.WARNING, message=f"'sweep --all' would be refused: {swept.message}"))
    return findings


def _plan(recipe: Recipe, quant_type: str, inspection: Inspection, out_dir: Path) -> Plan:
    from qcollect.plan.build import build_plan

    return build_plan(
        recipe,
        quant_type,
        inspection,
        out_dir=out_dir,
        script_args=(),
        python=sys.executable,
        num_cores=num_cores(),
        loopback=loopback_interface(),
        run_id="doctor",
        run_token="doctor",
        user_visible_devices=visible_devices(),
        user_device_order=device_order(),
    )


def _describe(plan: Plan) -> str:
    iterations = len({cut.iteration for cuts in plan.schedule.cuts for cut in cuts})
    return (
        f"{plan.schedule.target:,} captures of {plan.quant_type} in {iterations} iteration(s) by {plan.world_size} "
        f"process(es) on {plan.device}"
    )
