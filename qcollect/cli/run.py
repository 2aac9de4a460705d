"""``qcollect run`` and ``qcollect sweep``."""

import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from qcollect.cli.console import err, fail, note, print_json
from qcollect.cli.dry_run import print_plans
from qcollect.cli.planning import check_plans, check_request, load, make_plans, resolve_out
from qcollect.errors import UsageError
from qcollect.host.platform import require_linux

DEFAULT_RECIPE = "llama32_1b_wikipedia"
DEFAULT_OUT = "enhanced_tensor_logs"

Recipe = Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="A bundled recipe's name, or a YAML file.")]
Target = Annotated[int | None, typer.Option("--target", metavar="N", help="Captures, summed over ranks; exact.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="One folder per quant type is made in it.")]
Nproc = Annotated[int | None, typer.Option("--nproc", metavar="N", help="Processes; default: one a visible device.")]
GpuIds = Annotated[
    str | None,
    typer.Option(
        "--gpu-ids",
        metavar="0,2",
        help="Devices as nvidia-smi names them; with CUDA_VISIBLE_DEVICES set, positions in it.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field; may be given several times."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that has ended: save what is missing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there (only its own files).")]
Detach = Annotated[
    bool, typer.Option("--detach", help="Run on without this terminal; 'status' and 'stop' find it again.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print command, environment, schedule and sizes; start nothing.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def run(
    context: typer.Context,
    quant: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="Quant type (see 'qcollect formats'), or a YAML file of your own."),
    ] = None,
    quant_option: Annotated[str | None, typer.Option("--quant", metavar="TYPE", help="The same.")] = None,
    recipe: Recipe = DEFAULT_RECIPE,
    target: Target = None,
    out: Out = DEFAULT_OUT,
    nproc: Nproc = None,
    gpu_ids: GpuIds = None,
    settings: Settings = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    detach: Detach = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Capture one quant type: train the recipe under torchrun until the target is on disk.

    Arguments after -- go to the training script untouched.

    Example: qcollect run mxfp8 --recipe tiny --nproc 2 --target 50
    """
    require_linux("qcollect run")
    if quant is not None and quant_option is not None and quant != quant_option:
        raise UsageError(
            f"two quant types were given, {quant!r} and --quant {quant_option!r}; run takes one, sweep several"
        )
    chosen = quant if quant is not None else quant_option
    mode = _mode(resume=resume, overwrite=overwrite)
    loaded = load(recipe, settings, target, nproc, gpu_ids, [] if chosen is None else [chosen])
    types, out_dir = [loaded.quant.type], resolve_out(out)
    if detach and not dry_run:
        _detach(types, out_dir)
    check_request(loaded, types, out_dir, mode=mode, dry_run=dry_run)
    from qcollect.launch.prepared import PreparedAgent
    from qcollect.launch.supervisor import execute

    with PreparedAgent(uuid.uuid4().hex, enabled=not dry_run) as agent:
        plans, inspection = make_plans(loaded, types, out_dir, context.obj, run_token=agent.run_token)
        check_plans(plans, inspection, dry_run=dry_run)
        if dry_run:
            print_plans(plans, as_json=json)
            return
        plan = plans[0]
        outcome = _complete_already(plan) if resume else None
        if outcome is None:
            with _display() as display:
                outcome = execute(plan, mode=mode, watcher=_watcher(display), agent=agent)
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
    resume: Resume = False,
    overwrite: Overwrite = False,
    detach: Detach = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Capture several quant types one after the other: same weights, data, seeds and schedule.

    A second call skips what is complete and goes on with what is not (--resume says the same). Arguments after --
    go to the training script.

    Example: qcollect sweep --all --baseline --recipe tiny
    """
    require_linux("qcollect sweep")
    from qcollect.launch.claim import ClaimMode
    from qcollect.sweep import BASELINE, Action, Member, decide, run_sweep

    if all_types == bool(quant):
        raise UsageError("give --all (the recipe's quant types) or --quant TYPE, once or several times")
    loaded = load(recipe, settings, target, nproc, gpu_ids, quant or [])
    types = list(dict.fromkeys([*([BASELINE] if baseline else []), *loaded.quant.types]))
    _mode(resume=resume, overwrite=overwrite)
    out_dir = resolve_out(out)
    if detach and not dry_run:
        _detach(types, out_dir)
    # a run that has ended is skipped, resumed or redone: whatever it is, it may be there
    check_request(loaded, types, out_dir, mode=ClaimMode.OVERWRITE, dry_run=dry_run)
    plans, inspection = make_plans(loaded, types, out_dir, context.obj)
    if dry_run:
        check_plans(plans, inspection, dry_run=True)
        print_plans(plans, as_json=json)
        return
    members = [decide(plan, overwrite=overwrite) for plan in plans]
    check_plans([m.plan for m in members if m.action != Action.SKIP], inspection, dry_run=False)

    def on_start(member: Member) -> None:
        if member.action != Action.SKIP:
            note(f"{member.plan.quant_type}: {member.action} into {member.plan.run_dir}")

    with _display() as display:
        result = run_sweep(
            members, on_start=on_start, watcher=_watcher(display), on_end=lambda m, o: _show_outcome(m.plan, o)
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


def _mode(*, resume: bool, overwrite: bool) -> Any:
    from qcollect.launch.claim import ClaimMode

    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite replaces it; give one of them")
    return ClaimMode.RESUME if resume else ClaimMode.OVERWRITE if overwrite else ClaimMode.NEW


def _complete_already(plan: Any) -> Any:
    """The outcome of a run that needs no resuming; None if it does."""
    from qcollect.errors import ExitCode
    from qcollect.launch.claim import check_same_run, is_complete
    from qcollect.launch.outcome import Outcome
    from qcollect.monitor.run_record import RunState
    from qcollect.paths import RunPaths
    from qcollect.store.files import read_json

    paths, target = RunPaths(plan.run_dir), plan.schedule.target
    check_same_run(plan.run_dir, read_json(paths.plan_path), plan)
    if not is_complete(paths, plan.schedule):
        return None
    return Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason=f"complete already: {target} captures")


def _detach(types: Sequence[str], out_dir: Path) -> NoReturn:
    """Start this very command again without the terminal, and leave once it has begun or been refused."""
    from qcollect.launch.detach import start_detached

    started = start_detached([out_dir / quant_type for quant_type in types], sys.argv[1:])
    for line in started.messages:
        note(line)
    if started.exit_code == 0:
        typer.echo(str(started.run_dir))
    raise typer.Exit(started.exit_code)


def _watcher(display: Any) -> Any:
    from qcollect.host.processes import is_detached
    from qcollect.launch.detach import move_output
    from qcollect.launch.supervisor import Watcher

    if is_detached():
        return Watcher(on_tick=display.on_tick, on_line=display.on_line, on_claimed=move_output)
    return Watcher(on_tick=display.on_tick, on_line=display.on_line)


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
        snapshot = _snapshot(plan)
        for line in (*snapshot["warnings"], *snapshot["notes"]):
            note(f"{plan.quant_type}: {printable(line)}")
    else:
        fail(text, outcome.exit_code)
        for line in outcome.log_tail:
            note(f"  | {line}")
