"""A launcher without a terminal: the same command once more, in a session of its own.

It goes through every check as always; what it says until it owns a folder is shown by the command
that started it, which then leaves. From then on it writes to ``logs/launcher.log`` of its run, of a
sweep to each run's own.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcollect.host.processes import DETACHED_VARIABLE, launch_environment
from qcollect.monitor.run_record import read_run_record
from qcollect.paths import RunPaths

DETACH_FLAG = "--detach"
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A detached launcher's first words: the folder it owns, and its exit code if it has ended already."""

    run_dir: Path | None
    exit_code: int
    messages: tuple[str, ...]


def start_detached(run_dirs: Sequence[Path], arguments: Sequence[str]) -> Started:
    """Start ``qcollect ARGUMENTS`` detached and wait until it owns one of ``run_dirs`` or has ended.

    Interrupted before that, it is ended.
    """
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own = [argument for argument in arguments[:cut] if argument != DETACH_FLAG]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "qcollect", *own, *arguments[cut:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=launch_environment(unset=(), env={DETACHED_VARIABLE: "1"}),
            start_new_session=True,
        )
        try:
            run_dir = _await_claim(process, run_dirs)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        output.seek(0)
        messages = output.read().decode("utf-8", errors="replace").splitlines()
    if run_dir is None:
        return Started(run_dir=None, exit_code=process.returncode, messages=tuple(messages))
    if process.returncode is not None:
        log = RunPaths(run_dir).launcher_log_path
        return Started(
            run_dir=run_dir, exit_code=process.returncode, messages=(*messages, f"has ended already, its log is {log}")
        )
    return Started(
        run_dir=run_dir,
        exit_code=0,
        messages=(
            *messages,
            f"goes on as process {process.pid}: 'qcollect status {run_dir.parent}' shows it, "
            f"'qcollect stop {run_dir.parent}' ends it, its log is {RunPaths(run_dir).launcher_log_path}",
        ),
    )


def _await_claim(process: "subprocess.Popen[bytes]", run_dirs: Sequence[Path]) -> Path | None:
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None  # it may have owned one since the last look
        for run_dir in run_dirs:
            record = read_run_record(RunPaths(run_dir))
            if record is not None and record.launcher is not None and record.launcher.pid == process.pid:
                return run_dir
        time.sleep(_POLL_S)
    return None


def move_output(paths: RunPaths) -> None:
    """From now on stdout and stderr go to this run's ``launcher.log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(paths.launcher_log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
