"""What can be known to fail before a process is started."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from qcollect.errors import OutputError, PreflightError, RecipeError, ScheduleError
from qcollect.host.facts import DiskSpace, disk_space, probe_folder
from qcollect.host.machine import MachineFacts
from qcollect.launch.checks import check_memory, check_shared_memory
from qcollect.launch.claim import ClaimMode, check_free
from qcollect.paths import RunPaths
from qcollect.plan.finding import Finding, Level, texts
from qcollect.plan.inspection import Inspection
from qcollect.plan.record import Plan
from qcollect.recipe.conflicts import find_quant_conflicts
from qcollect.recipe.records import Recipe
from qcollect.recipe.selectors import expand_indices

# beside the captures, counted on runs: of a rank log, manifest, progress and how it left, torchrun's folder, and
# what it writes under a temporary name; of the run folders, plan, state and logs
STATE_FILES_PER_RANK = 7
STATE_FILES = 18
# what file managers, rsync and some file systems take without trouble in one folder
MANY_FILES = 10_000
BY_ITERATION = "by_iteration"


def check_types(recipe: Recipe, quant_types: Sequence[str]) -> None:
    """Nothing, if the recipe's quant settings exist for every type.

    Raises:
        RecipeError: one does not (a scale rule for hifp8, ...).
    """
    settings = {key: getattr(recipe.quant, key) for key in ("scale_rule", "rounding", "block_size")}
    for quant_type in quant_types:
        for _, sentence in find_quant_conflicts(quant_type, settings, recipe.quant.overrides, recipe.quant.find_type):
            raise RecipeError(f"recipe {recipe.name} with quant type {quant_type}: {sentence}")


def check_script(recipe: Recipe) -> None:
    """Nothing, if the training script is a file.

    Raises:
        PreflightError: it is not.
    """
    script = Path(recipe.script)
    if not script.is_file():
        problem = "is a folder" if script.is_dir() else "does not exist"
        raise PreflightError(
            f"script {script} {problem}; name the training script in the recipe or with --set script=FILE "
            "(relative to the current directory)"
        )


def check_output(run_dir: Path, *, mode: ClaimMode, now: float) -> None:
    """Nothing, if a run can probably begin in ``run_dir``: said before the model is looked at. The claim decides.

    Raises:
        OutputError: as ``find_output`` says.
    """
    refuse([find_output(run_dir, mode=mode, now=now)], OutputError)


def find_output(run_dir: Path, *, mode: ClaimMode, now: float) -> Finding:
    """Whether a run can begin in ``run_dir``: nothing is in the way, and a file can be made, renamed and removed there.

    The file is made in the first folder on the way that is there, and is gone again.

    Args:
        run_dir: absolute.
        mode: what becomes of a run that is there and has ended.
        now: unix seconds.
    """
    elsewhere = "choose another folder with --out"
    try:
        existing = next(p for p in (run_dir, *run_dir.parents) if os.path.lexists(p))
        if not existing.is_dir():
            return Finding.problem("output", f"{run_dir} cannot be made: {existing} is not a folder", elsewhere)
        with suppress(FileNotFoundError):  # a name that is too long is told here
            os.lstat(run_dir)
        check_free(RunPaths(run_dir), mode, now)
        probe = probe_folder(existing)
    except OutputError as error:
        return Finding.of_error("output", error)
    except OSError as error:
        return Finding.problem("output", f"{run_dir} cannot be used: {error.strerror}", elsewhere)
    if probe.problem is not None:
        space = disk_space(existing)
        inodes = "" if space.free_inodes is None else f" and {space.free_inodes:,} inodes"
        free = f"{space.free_bytes:,} bytes{inodes} free"
        return Finding.problem("output", f"{existing} {probe.problem} ({free})", elsewhere)
    if not probe.can_link:
        return Finding.warning(
            "output",
            f"{existing} is on a file system without hard links",
            "captures are renamed there instead, which does not tell two writers of a folder apart: start one only",
        )
    return Finding.ok("output", f"{run_dir} can be written to")


def check_limits(plan: Plan) -> None:
    """Nothing, if ``launch.max_bytes`` leaves room for an iteration and ``launch.show_ranks`` names ranks there are.

    Raises:
        ScheduleError: nothing could be captured.
        SelectionError: a rank that is not there.
    """
    spec = plan.recipe.launch
    if spec.show_ranks is not None:
        expand_indices(spec.show_ranks, plan.world_size, key="launch.show_ranks")
    first = plan.schedule.first_iteration
    num_bytes = plan.schedule.num_bytes(first)
    which, more = f"iteration {first}", "capture.iterations=spread:K"
    if plan.recipe.capture.trigger is not None:
        which, more = "the first iteration", "capture.trigger.iterations=K"
    if spec.max_bytes is not None and num_bytes > spec.max_bytes:
        raise ScheduleError(
            f"launch.max_bytes is {spec.max_bytes:,}, and the captures of {which} alone are about "
            f"{num_bytes:,} bytes; raise it, lower --target, or spread the captures with --set {more}"
        )


def check_space(plans: Sequence[Plan], space: DiskSpace) -> None:
    """Nothing, if the plans' files fit.

    Raises:
        OutputError: as ``find_space`` says.
    """
    refuse([find_space(plans, space)] if plans else [], OutputError)


def find_space(plans: Sequence[Plan], space: DiskSpace) -> Finding:
    """Whether the files of the plans fit, in bytes and in inodes; both numbers are named."""
    num_bytes = sum(plan.schedule.num_bytes() for plan in plans)
    num_files = sum(count_files(plan) for plan in plans)
    where, less = plans[0].run_dir.parent, "lower --target, or choose another --out"
    if num_bytes > space.free_bytes:
        return Finding.problem(
            "space",
            f"{where}: the captures need about {num_bytes:,} bytes and {space.free_bytes:,} are free",
            less,
        )
    if space.free_inodes is not None and num_files > space.free_inodes:
        return Finding.problem(
            "space", f"{where}: the run makes {num_files:,} files and {space.free_inodes:,} inodes are free", less
        )
    inodes = "" if space.free_inodes is None else f" and {space.free_inodes:,} inodes"
    return Finding.ok(
        "space",
        f"{where}: about {num_bytes:,} bytes in {num_files:,} files are needed, {space.free_bytes:,} bytes{inodes} "
        "are free",
    )


def count_files(plan: Plan) -> int:
    """The inodes a run takes: captures, what stands beside them, and folders."""
    iterations = {cut.iteration for cuts in plan.schedule.cuts for cut in cuts}
    folders = len(iterations) if plan.recipe.capture.layout == BY_ITERATION else 0
    return plan.schedule.num_files + folders + STATE_FILES + STATE_FILES_PER_RANK * plan.world_size


def find_layout(plan: Plan) -> list[Finding]:
    """A folder of more files than tools like to list."""
    if plan.recipe.capture.layout == BY_ITERATION or plan.schedule.num_files <= MANY_FILES:
        return []
    return [
        Finding.warning(
            "layout",
            f"{plan.run_dir} gets {plan.schedule.num_files:,} files, all in one folder",
            "a folder for each iteration is easier on file systems and tools: --set capture.layout=by_iteration",
        )
    ]


def find_end_of_data(plan: Plan, num_samples: int | None) -> list[Finding]:
    """Whether captures would see samples a second time: at their end the data begin anew, in another order."""
    train = plan.recipe.train
    if plan.recipe.capture.trigger is not None:  # nobody knows which samples they will be
        return []
    num_iterations = 1 + max((cut.iteration for cuts in plan.schedule.cuts for cut in cuts), default=0)
    each = train.micro_batches * train.micro_batch_size * plan.world_size
    if num_samples is None or num_iterations * each <= num_samples:
        return []
    return [
        Finding.warning(
            "data",
            f"up to its last capture the run takes {num_iterations * each:,} samples ({num_iterations} iterations of "
            f"{each}), and the data hold {num_samples:,}: then they are seen again, in another order",
            "take more data, a shorter data.sequence_length, or earlier capture.iterations",
        )
    ]


def check_plan(
    plan: Plan, inspection: Inspection, facts: MachineFacts, space: DiskSpace, *, others: Sequence[Plan] = ()
) -> list[Finding]:
    """What a planned run needs of this machine.

    Args:
        plan: the run.
        inspection: of its recipe.
        facts: of this machine.
        space: where the run's folder is, or will be.
        others: runs that follow it into the same folder; their files must fit beside its own.
    """
    return [
        *check_shared_memory(facts, plan.device, plan.world_size),
        *check_memory(facts, plan.recipe, inspection, plan.device, plan.world_size),
        find_space([plan, *others], space),
        *find_layout(plan),
        *find_end_of_data(plan, inspection.num_samples),
    ]


def refuse(findings: Iterable[Finding], kind: type[PreflightError] = PreflightError) -> None:
    """Nothing, if none of the findings is a problem.

    Raises:
        PreflightError: of this ``kind``; a line each problem.
    """
    problems = texts(findings, Level.PROBLEM)
    if problems:
        raise kind("\n".join(problems))
