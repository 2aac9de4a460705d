"""Asking a worker process what only it can know: the model's sites, this machine's devices."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qcollect.errors import PreflightError
from qcollect.host.devices import visible_devices
from qcollect.host.processes import PARENT_VARIABLE, RUN_TOKEN_VARIABLE, launch_environment
from qcollect.plan.build import RANK_VARIABLES
from qcollect.plan.devices import device_environment
from qcollect.plan.inspection import Inspection
from qcollect.recipe.records import Recipe

TIMEOUT_S = 600
# of a run around this one: with a plan in its environment the worker would begin to work
_RUN_VARIABLES = ("QCOLLECT_PLAN", RUN_TOKEN_VARIABLE)


def inspect_recipe(recipe: Recipe) -> Inspection:
    """The recipe's sites and this machine's devices, from a process of its own.

    Raises:
        PreflightError: something the recipe needs is missing or damaged (every finding is listed), or the
            inspection itself failed.
    """
    inspection = look_at(recipe)
    if inspection.problems:
        raise PreflightError("\n".join(inspection.problems))
    return inspection


def look_at(recipe: Recipe) -> Inspection:
    """As ``inspect_recipe``, with what is missing or damaged among the findings.

    Raises:
        PreflightError: the inspection itself failed.
    """
    devices = device_environment(recipe.launch.gpu_ids, visible_devices(), recipe.launch.device)
    env = {"OMP_NUM_THREADS": "1", **devices}
    with tempfile.TemporaryDirectory(prefix="qcollect-") as folder:
        recipe_path, out_path = Path(folder, "recipe.json"), Path(folder, "inspection.json")
        recipe_path.write_text(json.dumps(recipe.to_dict()), encoding="utf-8")
        result = _ask(["--inspect", str(recipe_path), str(out_path)], env)
        if result.returncode or not out_path.is_file():
            last = "\n".join(result.stderr.strip().splitlines()[-12:])
            raise PreflightError(f"recipe {recipe.name}: the model cannot be inspected:\n{last}")
        return Inspection.from_dict(json.loads(out_path.read_text(encoding="utf-8")))


def describe_devices() -> dict[str, Any]:
    """``{"device": type, "devices": names}`` as torch sees them; in words, if torch fails."""
    result = _ask(["--devices"], {})
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return {"device": f"unknown: torch failed: {last}", "devices": []}
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def _ask(arguments: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qcollect.worker", *arguments]
    try:
        return subprocess.run(
            command,
            env=launch_environment(
                unset=(*RANK_VARIABLES, *_RUN_VARIABLES), env={**env, PARENT_VARIABLE: str(os.getpid())}
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreflightError(
            f"no answer from '{shlex.join(command[:3])}' within {TIMEOUT_S} s; "
            "a file system or a device that hangs is the usual cause"
        ) from error
