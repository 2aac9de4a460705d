"""A worker process: its own log from the first byte, the training script inside, errors on file.

python -m qcollect.worker ARGS               under torchrun, QCOLLECT_PLAN names the plan
python -m qcollect.worker --inspect IN OUT   recipe JSON in, inspection JSON out
python -m qcollect.worker --devices          devices as JSON on stdout
"""

import atexit
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from qcollect.errors import ExitCode
from qcollect.host.processes import PARENT_VARIABLE, die_with_parent
from qcollect.paths import RunPaths

PLAN_VARIABLE = "QCOLLECT_PLAN"


def main(arguments: Sequence[str]) -> int:
    # a worker has a session of its own and would outlive the agent, an inspection a launcher that is interrupted
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(signal.SIGKILL, int(parent) if parent else None)
    if len(arguments) == 3 and arguments[0] == "--inspect" and PLAN_VARIABLE not in os.environ:
        return _inspect(Path(arguments[1]), Path(arguments[2]))
    if list(arguments) == ["--devices"] and PLAN_VARIABLE not in os.environ:
        return _print_devices()
    return _work(list(arguments))


def _inspect(recipe_path: Path, out_path: Path) -> int:
    from qcollect.recipe.records import recipe_from_dict
    from qcollect.store.files import write_json_atomic
    from qcollect.worker.inspection import inspect_recipe

    recipe = recipe_from_dict(json.loads(recipe_path.read_text(encoding="utf-8")))
    write_json_atomic(out_path, inspect_recipe(recipe).to_dict())
    return ExitCode.OK


def _print_devices() -> int:
    from qcollect.worker.inspection import describe_devices

    device, names = describe_devices()
    print(json.dumps({"device": device, "devices": names}))  # noqa: T201
    return ExitCode.OK


def _work(script_args: list[str]) -> NoReturn:
    plan_path = Path(os.environ[PLAN_VARIABLE])
    paths = RunPaths(plan_path.parent.parent)
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    _redirect_output(paths.log_path(rank))
    faulthandler.enable()
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, all_threads=True)
    try:
        _run_script(plan_path, script_args)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _fail(paths, rank, local_rank, stop)
    except BaseException as error:
        _fail(paths, rank, local_rank, error)
    _finish()


def _run_script(plan_path: Path, script_args: list[str]) -> None:
    from qcollect.worker import auto

    script = json.loads(plan_path.read_text(encoding="utf-8"))["recipe"]["script"]
    sys.argv = [script, *script_args]
    sys.path.insert(0, str(Path(script).parent))
    auto.enable(exit_at_target=True)  # for a script without ``collect``
    runpy.run_path(script, run_name="__main__")


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _finish() -> NoReturn:
    """End with 0: threads are waited for and exit handlers run, as when an interpreter ends.

    Its own tear-down after that is left out: with torch and transformers loaded it takes 1.4 s (measured).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # executors first, then what is no daemon
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ExitCode.OK)


def _fail(paths: RunPaths, rank: int, local_rank: int, error: BaseException) -> NoReturn:
    from qcollect.worker.progress import write_error

    traceback.print_exception(error)
    with suppress(OSError):  # a full disk is what it may be about
        write_error(paths, rank, local_rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # no clean-up: destroying a process group whose peers wait in a collective can hang for ever
    os._exit(ExitCode.INTERNAL)
