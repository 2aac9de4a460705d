"""A worker process: its own log from the first byte, the training script inside, errors on file.

python -m qcollect.worker ARGS               under torchrun, QCOLLECT_PLAN names the plan
python -m qcollect.worker --inspect IN OUT   recipe JSON in, inspection JSON out
python -m qcollect.worker --devices          devices as JSON on stdout
"""

import errno
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from qcollect.errors import ExitCode
from qcollect.host.processes import PARENT_VARIABLE, die_with_parent
from qcollect.paths import RunPaths
from qcollect.worker.script import finish, run_script

PLAN_VARIABLE = "QCOLLECT_PLAN"
_stacks_file: IO[bytes] | None = None


def main(arguments: Sequence[str]) -> NoReturn:
    # a worker has a session of its own and would outlive the agent, an inspection a launcher that is interrupted
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(signal.SIGKILL, int(parent) if parent else None)
    if PLAN_VARIABLE not in os.environ and answer(arguments):
        finish()
    _work(list(arguments))


def answer(arguments: Sequence[str]) -> bool:
    """Answer what the launcher asks of a worker before there is a plan; False if it asks nothing."""
    if len(arguments) == 3 and arguments[0] == "--inspect":
        _inspect(Path(arguments[1]), Path(arguments[2]))
    elif list(arguments) == ["--devices"]:
        _print_devices()
    else:
        return False
    return True


def _inspect(recipe_path: Path, out_path: Path) -> None:
    from qcollect.recipe.records import recipe_from_dict
    from qcollect.store.files import write_json_atomic
    from qcollect.worker.inspection import inspect_recipe

    recipe = recipe_from_dict(json.loads(recipe_path.read_text(encoding="utf-8")))
    write_json_atomic(out_path, inspect_recipe(recipe).to_dict())


def _print_devices() -> None:
    from qcollect.worker.inspection import describe_devices

    device, names = describe_devices()
    print(json.dumps({"device": device, "devices": names}))  # noqa: T201


def _work(script_args: list[str]) -> NoReturn:
    plan_path = Path(os.environ[PLAN_VARIABLE])
    paths = RunPaths(plan_path.parent.parent)
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    _redirect_output(paths.log_path(rank))
    faulthandler.enable()
    _dump_stacks_when_asked(paths, rank)
    try:
        _reserve_error(paths, rank)
        _run_script(plan_path, script_args)
    except BaseException as error:
        _fail(paths, rank, local_rank, error)
    _leave(paths, rank)
    finish()


def _reserve_error(paths: RunPaths, rank: int) -> None:
    from qcollect.worker.error_report import reserve_error

    reserve_error(paths, rank)


def _run_script(plan_path: Path, script_args: list[str]) -> None:
    from qcollect.worker import auto

    script = json.loads(plan_path.read_text(encoding="utf-8"))["recipe"]["script"]
    auto.enable(exit_at_target=True)  # for a script without ``collect``
    run_script(script, script_args)


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _dump_stacks_when_asked(paths: RunPaths, rank: int) -> None:
    """On SIGUSR2 all threads' stacks are written; the launcher asks when nothing moves any more."""
    if not hasattr(signal, "SIGUSR2"):
        return
    global _stacks_file  # faulthandler keeps the descriptor, not the file
    with suppress(OSError):  # a full disk: a run without this is better than none
        _stacks_file = paths.stacks_path(rank).open("ab", buffering=0)
        faulthandler.register(signal.SIGUSR2, file=_stacks_file, all_threads=True)
        # said last: from now on the signal does not end this process
        _stacks_file.write(f"rank {rank}, pid {os.getpid()}\n".encode())


def _leave(paths: RunPaths, rank: int) -> None:
    """When this rank left, for the launcher: if others fail later, it may have left them alone."""
    from qcollect.store.files import write_json_atomic
    from qcollect.worker.error_report import release_error

    release_error(paths, rank)
    with suppress(OSError):
        write_json_atomic(paths.leave_path(rank), {"rank": rank, "time": time.time()})
    with suppress(OSError):  # nobody will ask any more
        paths.stacks_path(rank).unlink()


def _explain(paths: RunPaths, rank: int, error: BaseException) -> BaseException:
    """The error; one that says only that a disk is full, with the path and what is free there."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    from qcollect.store.capture import write_failure

    path = Path(error.filename) if isinstance(error.filename, str) else paths.log_path(rank)
    explained = write_failure(path, error)
    explained.__cause__ = error
    return explained


def _fail(paths: RunPaths, rank: int, local_rank: int, error: BaseException) -> NoReturn:
    from qcollect.worker.error_report import write_error

    error = _explain(paths, rank, error)
    # a full disk is what it may be about: then neither the log nor a new file has room
    with suppress(OSError):
        traceback.print_exception(error)
    with suppress(OSError):
        write_error(paths, rank, local_rank, error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # no clean-up: destroying a process group whose peers wait in a collective can hang for ever
    os._exit(ExitCode.INTERNAL)
