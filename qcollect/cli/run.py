"""``qcollect run`` and ``qcollect sweep``."""

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from qcollect.cli.console import err, fail, note, print_json, warn
from qcollect.cli.dry_run import print_plans
from qcollect.errors import OutputError, UsageError

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
    chosen = quant if quant is not None else quant_option
    loaded = _load(recipe, settings, target, nproc, gpu_ids, [] if chosen is None else [chosen])
    plans = _plans(loaded, [loaded.quant.type], out, context.obj, overwrite=overwrite, dry_run=dry_run)
    _check_space(plans, dry_run=dry_run)
    if dry_run:
        print_plans(plans, as_json=json)
        return
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
    from qcollect.sweep import BASELINE, Action, Member, decide, run_sweep

    if all_types == bool(quant):
        raise UsageError("give --all (the recipe's quant types) or --quant TYPE, once or several times")
    loaded = _load(recipe, settings, target, nproc, gpu_ids, quant or [])
    types = list(dict.fromkeys([*([BASELINE] if baseline else []), *(quant or loaded.quant.types)]))
    # a run that has ended is skipped or redone: whatever it is, it may be there
    plans = _plans(loaded, types, out, context.obj, overwrite=True, dry_run=dry_run)
    if dry_run:
        _check_space(plans, dry_run=True)
        print_plans(plans, as_json=json)
        return
    members = [decide(plan, overwrite=overwrite) for plan in plans]
    _check_space([member.plan for member in members if member.action != Action.SKIP], dry_run=False)
    for warning in dict.fromkeys(w for plan in plans for w in plan.warnings):
        warn(warning)

    def on_start(member: Member) -> None:
        if member.action != Action.SKIP:
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


def _load(
    recipe: str,
    settings: Sequence[str] | None,
    target: int | None,
    nproc: int | None,
    gpu_ids: str | None,
    types: Sequence[str],
) -> Any:
    """The recipe with the settings and flags in it; the first of ``types``, if there is one, as its quant type."""
    from qcollect.formats.catalog import get_quant_type
    from qcollect.recipe.load import load_recipe
    from qcollect.recipe.overrides import Override

    for name in types:
        get_quant_type(name)
    flags = (
        ("quant.type", next(iter(types), None), "the quant type"),
        ("capture.target", target, "--target"),
        ("launch.nproc", nproc, "--nproc"),
        ("launch.gpu_ids", gpu_ids, "--gpu-ids"),
    )
    given = [Override(key=key, value=value, origin=flag) for key, value, flag in flags if value is not None]
    return load_recipe(recipe, [*(settings or []), *given])


def _plans(
    recipe: Any, types: Sequence[str], out: str, script_args: Sequence[str], *, overwrite: bool, dry_run: bool
) -> list[Any]:
    """One plan a type; everything that can be refused is refused here, what needs no look at the model first."""
    from qcollect.host.facts import loopback_interface, num_cores
    from qcollect.launch.inspect import inspect_recipe
    from qcollect.launch.preflight import check_output, check_script, check_types
    from qcollect.plan.build import build_plan

    check_types(recipe, types)
    check_script(recipe)
    out_dir = _out_dir(out)
    for quant_type in types:
        with _refusing(dry_run=dry_run):
            check_output(out_dir / quant_type, overwrite=overwrite, now=time.time())
    note(f"{recipe.name}: checking the model, the data and the devices")
    inspection = inspect_recipe(recipe)
    return [
        build_plan(
            recipe,
            quant_type,
            inspection,
            out_dir=out_dir,
            script_args=script_args,
            python=sys.executable,
            num_cores=num_cores(),
            loopback=loopback_interface(),
            run_id=uuid.uuid4().hex[:12],
            run_token=uuid.uuid4().hex,
        )
        for quant_type in types
    ]


def _out_dir(out: str) -> Path:
    if not out or out.split("/")[0] == "~":
        raise UsageError(
            "--out is empty; give a folder" if not out else f"--out is {out!r}: '~' is not expanded here; write it out"
        )
    return Path(out).absolute()


@contextmanager
def _refusing(*, dry_run: bool) -> Iterator[None]:
    """What forbids a run is only told by a dry run."""
    try:
        yield
    except OutputError as error:
        if not dry_run:
            raise
        warn(f"as it is, the run would be refused: {error}")


def _check_space(plans: Sequence[Any], *, dry_run: bool) -> None:
    from qcollect.host.facts import disk_space
    from qcollect.launch.preflight import check_space

    if plans:
        with _refusing(dry_run=dry_run):
            check_space(plans, disk_space(plans[0].run_dir))


def _display() -> Any:
    from qcollect.cli.live import RunDisplay

    return RunDisplay(err)


def _snapshot(plan: Any) -> dict[str, Any]:
    from qcollect.monitor.snapshot import read_snapshot
    from qcollect.paths import RunPaths

    return read_snapshot(RunPaths(plan.run_dir), time.time()).to_dict()


def _show_outcome(plan: Any, outcome: Any) -> None:
    from qcollect.monitor.render import printable
    from qcollect.monitor.run_record import RunState

    text = f"{plan.quant_type}: {printable(outcome.reason)}"
    if outcome.state in (RunState.INTERRUPTED, RunState.STOPPED):
        note(f"{text}; they are in {plan.run_dir}")
    elif outcome.exit_code == 0:
        note(text)
    else:
        fail(text, outcome.exit_code)
        for line in outcome.log_tail:
            note(f"  | {line}")
