"""From flags to plans: what ``run`` and ``sweep`` do before anything starts, in the order of what it costs."""

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from qcollect.cli.console import note, warn
from qcollect.errors import PreflightError, UsageError


def load(
    recipe: str,
    settings: Sequence[str] | None,
    target: int | None,
    nproc: int | None,
    gpu_ids: str | None,
    types: Sequence[str],
) -> Any:
    """The recipe with the settings and flags in it, ``types`` (names, or files of one's own) among them.

    The first of them, if there is one, is the recipe's quant type, and all are its types for a sweep.
    """
    from qcollect.formats.catalog import get_quant_type
    from qcollect.recipe.load import load_recipe
    from qcollect.recipe.overrides import Override

    for name in types:
        get_quant_type(name)
    flags = (
        ("quant.type", next(iter(types), None), "the quant type"),
        ("quant.types", list(dict.fromkeys(types)) or None, "the quant types"),
        ("capture.target", target, "--target"),
        ("launch.nproc", nproc, "--nproc"),
        ("launch.gpu_ids", gpu_ids, "--gpu-ids"),
    )
    given = [Override(key=key, value=value, origin=flag) for key, value, flag in flags if value is not None]
    return load_recipe(recipe, [*(settings or []), *given])


def resolve_out(out: str) -> Path:
    """The folder ``--out`` names, absolute."""
    if not out or out.split("/")[0] == "~":
        raise UsageError(
            "--out is empty; give a folder" if not out else f"--out is {out!r}: '~' is not expanded here; write it out"
        )
    return Path(out).absolute()


def check_request(recipe: Any, types: Sequence[str], out_dir: Path, *, mode: Any, dry_run: bool) -> None:
    """Refuse what can be refused without a look at the model; no process is started for it."""
    from qcollect.launch.preflight import check_output, check_script, check_types

    check_types(recipe, types)
    check_script(recipe)
    for quant_type in types:
        with _refusing(dry_run=dry_run):
            check_output(out_dir / quant_type, mode=mode, now=time.time())


def make_plans(
    recipe: Any, types: Sequence[str], out_dir: Path, script_args: Sequence[str], *, run_token: str | None = None
) -> tuple[list[Any], Any]:
    """One plan a type, and the inspection they rest on.

    Args:
        recipe, types, out_dir: as they were checked.
        script_args: for the training script.
        run_token: of the first run; None: a new one.
    """
    from qcollect.host.devices import device_order, visible_devices
    from qcollect.host.facts import loopback_interface, num_cores
    from qcollect.launch.inspect import inspect_recipe
    from qcollect.launch.preflight import check_limits
    from qcollect.plan.build import build_plan

    note(f"{recipe.name}: checking the model, the data and the devices")
    inspection = inspect_recipe(recipe)
    tokens = [run_token or uuid.uuid4().hex, *(uuid.uuid4().hex for _ in types[1:])]
    plans = [
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
            run_token=token,
            user_visible_devices=visible_devices(),
            user_device_order=device_order(),
        )
        for quant_type, token in zip(types, tokens, strict=True)
    ]
    for plan in plans:
        check_limits(plan)
    return plans, inspection


def check_plans(plans: Sequence[Any], inspection: Any, *, dry_run: bool) -> None:
    """Refuse plans this machine cannot serve, warn of what is most likely not meant; nothing for no plan."""
    from qcollect.host.machine import read_machine
    from qcollect.launch.checks import check_devices, check_machine
    from qcollect.launch.preflight import check_plan, refuse
    from qcollect.plan.finding import Level, texts

    if not plans:
        return
    first, *others = plans
    facts = read_machine()
    findings = [
        *check_machine(facts, first.recipe),
        *check_devices(facts, inspection),
        *check_plan(first, inspection, facts, _space(plans), others=others),
    ]
    with _refusing(dry_run=dry_run):
        refuse(findings)
    warnings = [*(w for plan in plans for w in plan.warnings), *texts(findings, Level.WARNING)]
    for warning in dict.fromkeys(warnings):
        warn(warning)


def _space(plans: Sequence[Any]) -> Any:
    """What is free where the plans' folders are, and what runs that will be resumed have there already."""
    from qcollect.host.facts import disk_space
    from qcollect.monitor.snapshot import read_snapshot
    from qcollect.paths import RunPaths

    space = disk_space(plans[0].run_dir)
    runs = [read_snapshot(RunPaths(plan.run_dir), time.time()) for plan in plans if plan.run_dir.is_dir()]
    return replace(
        space,
        free_bytes=space.free_bytes + sum(run.bytes for run in runs),
        free_inodes=None if space.free_inodes is None else space.free_inodes + sum(run.num_files for run in runs),
    )


@contextmanager
def _refusing(*, dry_run: bool) -> Iterator[None]:
    """What forbids a run is only told by a dry run."""
    try:
        yield
    except PreflightError as error:
        if not dry_run:
            raise
        warn(f"as it is, the run would be refused: {error}")
