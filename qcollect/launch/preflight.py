"""What can be known to fail before a process is started."""

from collections.abc import Sequence

from qcollect.errors import OutputError, RecipeError
from qcollect.host.facts import DiskSpace
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
        for key, sentence in find_quant_conflicts(quant_type, settings, recipe.quant.overrides):
            raise RecipeError(f"{recipe.path}: quant.{key} with type {quant_type!r}: {sentence}")


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
