"""``qcollect stop``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from qcollect.cli.console import note, print_json
from qcollect.cli.run import DEFAULT_OUT


def stop(
    directory: Annotated[
        str, typer.Argument(metavar="[DIR]", help="A run's folder, or one that holds runs.")
    ] = DEFAULT_OUT,
    wait: Annotated[bool, typer.Option("--wait", help="Return once they have ended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Ask the runs of a folder to end cleanly after the iteration they are in.

    A sweep ends with the run that is stopped. What a killed launcher left behind is ended.

    Example: qcollect stop enhanced_tensor_logs
    """
    from qcollect.launch.stop import stop_runs

    stopped = stop_runs(Path(directory).absolute(), now=time.time(), wait=wait)
    if json:
        print_json([run.to_dict() for run in stopped])
    for run in stopped:
        note(f"{run.run_dir}: {run.message}")
