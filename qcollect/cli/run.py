"""``qcollect run`` and ``qcollect sweep``."""

import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from qcollect.cli.console import err, fail, note, print_json, warn
from qcollect.cli.dry_run import print_plans
from qcollect.errors import UsageError

DEFAULT_RECIPE = "llama32_1b_wikipedia"
DEFAULT_OUT = "enhanced_tensor_logs"

Recipe = Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="A bundled recipe's name, or a YAML file.")]
Target = Annotated[int | None, typer.Option("--target", metavar="N", help="Captures, summed over ranks; exact.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="One folder per quant type is made in it.")]
Nproc = Annotated[int | None, typer.Option("--nproc", metavar="N", help="Processes; default: one a visible device.")]
GpuIds = Annotated[str | None, typer.Option("--gpu-ids", metavar="0,2", help="Devices, as nvidia-smi names them.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field; may be given several times."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there (only its own files).")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print command, environment, schedule and sizes; start nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def run(
    context: typer.Context,
    quant: Annotated[str | None, typer.Argument(metavar="TYPE", help="Quant type; see 'qcollect formats'.")] = None,
    quant_option: Annotated[str | None, typer.Option("--quant", metavar="TYPE", help="The same.")] = None,
    recipe: Recipe = DEFAULT_RECIPE,
    target: Target = None,
    out: Out = DEFAULT_OUT,
    nproc: Nproc = None,
    gpu_ids: GpuIds = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Capture one quant type: train the recipe under torchrun until the target is on disk.

    Arguments after -- go to the training script untouched.

    Example: qcollect run mxfp8 --recipe tiny --nproc 2 --target 50
    """
    if quant is not None and quant_option is not None and quant != quant_option:
        raise UsageError(
            f"two quant types were given, {quant!r} and --quant {quant_option!r}; run takes one, sweep several"
        )
    overrides = _overrides(settings, target, nproc, gpu_ids)
    chosen = quant or quant_option
    plans = _plans(recipe, overrides, [chosen] if chosen else None, out, context.obj)
    if dry_run:
        print_plans(plans, as_json=json)
        return
    _check_space(plans)
    from qcollect.launch.supervisor import execute

    plan = plans[0]
    for warning in plan.warnings:
        warn(warning)
    with _display() as display:
        outcome = execute(plan, overwrite=overwrite, on_tick=display.on_tick)
    _show_outcome(plan, outcome)
    if json:
        print_json({"run_dir": str(plan.run_dir), **outcome.to_dict(), "status": _snapshot(plan)})
    elif outcome.exit_code == 0:
        typer.echo(str(plan.run_dir))
    raise typer.Exit(int(outcome.exit_code))


def sweep(
    context: typer.Context,
    all_types: Annotated[bool, typer.Option("--all", help="The recipe's quant types.")] = False,
    quant: Annotated[list[str] | None, typer.Option("--quant", metavar="TYPE", help="One of several.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Put bf16 first.")] = False,
    recipe: Recipe = DEFAULT_RECIPE,
    target: Target = None,
    out: Out = DEFAULT_OUT,
    nproc: Nproc = None,
    gpu_ids: GpuIds = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Capture several quant types one after the other: same weights, data, seeds and schedule.

    A second call skips what is complete and redoes what is not. Arguments after -- go to the training script.

    Example: qcollect sweep --all --baseline --recipe tiny
    """
    from qcollect.recipe.load import load_recipe
    from qcollect.sweep import BASELINE, Member, decide, run_sweep

    if all_types == bool(quant):
        raise UsageError("give --all (the recipe's quant types) or --quant TYPE, once or several times")
    overrides = _overrides(settings, target, nproc, gpu_ids)
    types = list(quant or load_recipe(recipe, overrides).quant.types)
    types = list(dict.fromkeys([BASELINE, *types] if baseline else types))
    plans = _plans(recipe, overrides, types, out, context.obj)
    if dry_run:
        print_plans(plans, as_json=json)
        return
    members = [decide(plan, overwrite=overwrite) for plan in plans]
    _check_space([member.plan for member in members if member.action != "skip"])
    for warning in dict.fromkeys(w for plan in plans for w in plan.warnings):
        warn(warning)

    def on_start(member: Member) -> None:
        if member.action != "skip":
            note(f"{member.plan.quant_type}: {member.action} into {member.plan.run_dir}")

    with _display() as display:
        result = run_sweep(
            members, on_start=on_start, on_tick=display.on_tick, on_end=lambda m, o: _show_outcome(m.plan, o)
        )
    if json:
        print_json(
            {
                "exit_code": int(result.exit_code),
                "runs": [
                    {
                        "quant_type": m.plan.quant_type,
                        "run_dir": str(m.plan.run_dir),
                        "action": str(m.action),
                        **o.to_dict(),
                    }
                    for m, o in result.outcomes
                ],
            }
        )
    else:
        for member, outcome in result.outcomes:
            if outcome.exit_code == 0:
                typer.echo(str(member.plan.run_dir))
    raise typer.Exit(int(result.exit_code))


def _overrides(settings: Sequence[str] | None, target: int | None, nproc: int | None, gpu_ids: str | None) -> list[Any]:
    from qcollect.recipe.overrides import Override

    flags = (
        ("capture.target", target, "--target"),
        ("launch.nproc", nproc, "--nproc"),
        ("launch.gpu_ids", gpu_ids, "--gpu-ids"),
    )
    given = [Override(key=key, value=value, origin=flag) for key, value, flag in flags if value is not None]
    return [*(settings or []), *given]


def _plans(
    recipe_name: str, overrides: Sequence[Any], types: Sequence[str] | None, out: str, script_args: Sequence[str]
) -> list[Any]:
    """One plan a type; everything that can be refused is refused here."""
    from qcollect.formats.catalog import get_quant_type
    from qcollect.host.facts import num_cores
    from qcollect.launch.inspect import inspect_recipe
    from qcollect.launch.preflight import check_types
    from qcollect.plan.build import build_plan
    from qcollect.recipe.load import load_recipe

    for name in types or ():
        get_quant_type(name)
    recipe = load_recipe(recipe_name, overrides)
    types = list(types or [recipe.quant.type])
    check_types(recipe, types)
    inspection = inspect_recipe(recipe)
    return [
        build_plan(
            recipe,
            quant_type,
            inspection,
            out_dir=Path(out).absolute(),
            script_args=script_args,
            python=sys.executable,
            num_cores=num_cores(),
            run_id=uuid.uuid4().hex[:12],
            run_token=uuid.uuid4().hex,
        )
        for quant_type in types
    ]


def _check_space(plans: Sequence[Any]) -> None:
    from qcollect.host.facts import disk_space
    from qcollect.launch.preflight import check_space

    if plans:
        check_space(plans, disk_space(plans[0].run_dir))


def _display() -> Any:
    from qcollect.cli.live import RunDisplay

    return RunDisplay(err)


def _snapshot(plan: Any) -> dict[str, Any]:
    import time

    from qcollect.monitor.snapshot import read_snapshot
    from qcollect.paths import RunPaths

    return read_snapshot(RunPaths(plan.run_dir), time.time()).to_dict()


def _show_outcome(plan: Any, outcome: Any) -> None:
    from qcollect.monitor.render import printable

    if outcome.exit_code == 0:
        note(f"{plan.quant_type}: {outcome.reason}")
        return
    fail(f"{plan.quant_type}: {printable(outcome.reason)}", outcome.exit_code)
    for line in outcome.log_tail:
        note(f"  | {printable(line)}")
