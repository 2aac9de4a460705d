"""What can be known to fail before a process is started."""

import os
from collections.abc import Sequence
from pathlib import Path

from qcollect.errors import OutputError, PreflightError, RecipeError
from qcollect.host.facts import DiskSpace
from qcollect.launch.claim import check_free
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.recipe.conflicts import find_quant_conflicts
from qcollect.recipe.records import Recipe

# plan, manifests, logs and progress of a run
STATE_FILES_PER_RANK = 4
STATE_FILES = 12


def check_types(recipe: Recipe, quant_types: Sequence[str]) -> None:
    """Nothing, if the recipe's quant settings exist for every type.

    Raises:
        RecipeError: one does not (a scale rule for hifp8, ...).
    """
    settings = {key: getattr(recipe.quant, key) for key in ("scale_rule", "rounding", "block_size")}
    for quant_type in quant_types:
        for _, sentence in find_quant_conflicts(quant_type, settings, recipe.quant.overrides):
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


def check_output(run_dir: Path, *, overwrite: bool, now: float) -> None:
    """Nothing, if a run can probably begin in ``run_dir``: said before the model is looked at. The claim decides.

    Args:
        run_dir: absolute.
        overwrite: whether a run that has ended may be replaced.
        now: unix seconds.

    Raises:
        OutputError: it holds a run, a folder on the way to it is none, or it cannot be written to.
    """
    try:
        existing = next(p for p in (run_dir, *run_dir.parents) if os.path.lexists(p))
        if not existing.is_dir():
            raise OutputError(f"{run_dir} cannot be made: {existing} is not a folder; choose another folder with --out")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(f"{existing} cannot be written to; choose another folder with --out")
        os.lstat(run_dir)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{run_dir} cannot be used: {error.strerror}; choose another folder with --out") from error
    check_free(RunPaths(run_dir), overwrite, now)


def check_space(plans: Sequence[Plan], space: DiskSpace) -> None:
    """Nothing, if the plans' files fit.

    Raises:
        OutputError: they need more bytes or inodes than are free; both numbers are named.
    """
    num_bytes = sum(plan.schedule.num_bytes() for plan in plans)
    num_files = sum(plan.schedule.target + STATE_FILES + STATE_FILES_PER_RANK * plan.world_size for plan in plans)
    where = plans[0].run_dir.parent if plans else None
    if num_bytes > space.free_bytes:
        raise OutputError(
            f"{where}: the captures need about {num_bytes:,} bytes and {space.free_bytes:,} are free; "
            "lower --target, or choose another --out"
        )
    if space.free_inodes is not None and num_files > space.free_inodes:
        raise OutputError(
            f"{where}: the run makes {num_files:,} files and {space.free_inodes:,} inodes are free; "
            "lower --target, or choose another --out"
        )
