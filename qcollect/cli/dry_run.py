"""``--dry-run``: what a launch would do, exactly, without doing it."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import typer

from qcollect.cli.console import print_json
from qcollect.monitor.render import format_bytes, printable
from qcollect.paths import RunPaths
from qcollect.plan.devices import RankDevice
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut, PlannedCapture


def print_plans(plans: Sequence[Plan], *, as_json: bool) -> None:
    if as_json:
        dicts = [plan.to_dict() | {"num_bytes": plan.schedule.num_bytes()} for plan in plans]
        print_json(dicts[0] if len(dicts) == 1 else dicts)
        return
    for plan in plans:
        for line in describe_plan(plan):
            typer.echo(line)
        typer.echo()
    total_files = sum(plan.schedule.num_files for plan in plans)
    total_lines = sum(plan.schedule.target for plan in plans) - total_files
    total_bytes = sum(plan.schedule.num_bytes() for plan in plans)
    lines = f"{_count(total_lines, 'line')} of statistics, " if total_lines else ""
    typer.echo(
        f"in total: {_count(len(plans), 'run')}, {_count(total_files, 'file')}, {lines}"
        f"about {format_bytes(total_bytes)}; nothing was started"
    )


def describe_plan(plan: Plan) -> Iterator[str]:
    """The plan as text; the command can be pasted into a shell."""
    yield f"{plan.quant_type} ({plan.recipe.name}, {plan.device}, {_count(plan.world_size, 'process', 'processes')})"
    yield "command:"
    unset = "".join(f" -u {name}" for name in plan.unset)
    env = "".join(f" {name}={shlex.quote(value)}" for name, value in plan.env.items())
    yield f"  env{unset}{env} {shlex.join(plan.torchrun_argv)}"
    yield "environment:"
    yield from (f"  {name}={value}" for name, value in plan.env.items())
    yield f"removed from the environment: {', '.join(plan.unset)}"
    paths = RunPaths(plan.run_dir)
    yield "directories:"
    yield f"  {plan.run_dir}  the captures"
    yield f"  {paths.state_dir}  {paths.plan_path.name}, written first, {paths.run_path.name}, manifests, logs"
    yield f"script: {shlex.join([plan.recipe.script, *plan.script_args])}"
    yield "devices:"
    yield from (f"  {describe_device(device)}" for device in plan.devices)
    yield "schedule:"
    yield from (f"  {line}" for line in _describe_schedule(plan))
    yield f"left in high precision: {', '.join(_summarize(plan.excluded))}"
    yield from _describe_size(plan)


def _describe_size(plan: Plan) -> Iterator[str]:
    num_bytes = format_bytes(plan.schedule.num_bytes())
    if plan.schedule.leaves_files:
        less = ", less what capture.dedupe saves" if plan.recipe.capture.dedupe else ""
        yield f"files: {plan.schedule.target:,}, about {num_bytes}{less}"
    else:
        yield f"files: 0; lines of statistics in the manifests: {plan.schedule.target:,}, about {num_bytes}"


def describe_device(device: RankDevice) -> str:
    """``rank 0, local rank 0: cuda:0 = CUDA_VISIBLE_DEVICES entry 2 = NVIDIA H100 (GPU-..., index 2)``."""
    parts = [device.device]
    if device.visible_device is not None:
        parts.append(f"CUDA_VISIBLE_DEVICES entry {printable(device.visible_device)}")
    if device.gpu_name is not None:
        index = None if device.gpu_index is None else f"index {device.gpu_index} of nvidia-smi"
        known = ", ".join(part for part in (device.gpu_uuid, index) if part is not None)
        parts.append(f"{printable(device.gpu_name)}{known and f' ({known})'}")
    return f"rank {device.rank}, local rank {device.local_rank}: {' = '.join(parts)}"


def _describe_schedule(plan: Plan) -> Iterator[str]:
    """Ranks with the same cuts together; of each cut the modules in order."""
    trigger = plan.recipe.capture.trigger
    if trigger is not None:
        yield f"begins at the trigger: T is the first iteration in which a rank sees {', '.join(trigger.on)}"
    ranks = range(plan.world_size)
    by_cuts = groupby(ranks, key=lambda rank: [(c.iteration, c.micro_batch, c.count) for c in plan.schedule.cuts[rank]])
    for _, group in by_cuts:
        members = list(group)
        name = f"rank {members[0]}" if len(members) == 1 else f"ranks {members[0]} to {members[-1]}"
        yield f"{name}: {_count(plan.schedule.share(members[0]), 'capture')}{' each' if len(members) > 1 else ''}"
        cuts = plan.schedule.cuts[members[0]]
        if cuts and not plan.schedule.leaves_files:
            yield from _describe_whole(plan, cuts)
            continue
        for cut in cuts:
            iteration = cut.iteration if trigger is None else f"T+{1 + cut.iteration}"
            yield f"  iteration {iteration}, micro-batch {cut.micro_batch}: {_count(cut.count, 'capture')}"
            yield from (f"    {line}" for line in _describe_cut(plan.schedule.captures, cut))


def _describe_whole(plan: Plan, cuts: Sequence[Cut]) -> Iterator[str]:
    """Of cuts that all take the whole list: how many there are, and the list once."""
    iterations = list(dict.fromkeys(cut.iteration for cut in cuts))
    span = f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else str(iterations[0])
    yield (
        f"  {_count(len(iterations), 'iteration')} ({span}), {_count(len(cuts), 'micro-batch', 'micro-batches')} "
        f"with {_count(cuts[0].count, 'line')} of statistics each"
    )
    yield from (f"    {line}" for line in _describe_cut(plan.schedule.captures, replace(cuts[0], start=0)))


def _describe_cut(captures: Sequence[PlannedCapture], cut: Cut) -> Iterator[str]:
    position = cut.start
    for module, group in groupby(captures[: cut.count], key=lambda capture: capture.module):
        members = list(group)
        names = [" ".join(part for part in (c.tensor_name, c.gemm) if part) for c in members]
        yield f"{position + 1:4d} to {position + len(members):4d}  {module}: {', '.join(names)}"
        position += len(members)


def _count(number: int, name: str, plural: str | None = None) -> str:
    return f"{number:,} {name if number == 1 else plural or f'{name}s'}"


def _summarize(names: Sequence[str]) -> list[str]:
    """Names with their layer index as ``*``, each once."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))
