"""Processes of a launch beside the workers: the agent, started ahead of time, and the guard."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from qcollect.host.processes import PARENT_VARIABLE, RUN_TOKEN_VARIABLE, launch_environment
from qcollect.launch.agent import WAIT, Orders
from qcollect.launch.guard import ALL_IS_WELL

AGENT_COMMAND = (sys.executable, "-m", "qcollect.launch.agent")
_GUARD_EXIT_S = 5.0


class PreparedAgent:
    """An agent that imports torch while the launcher still looks at the model, then waits for its orders.

    Leaving the context without having given any ends it. Not ``enabled``, there is none.
    """

    def __init__(self, run_token: str, *, enabled: bool = True) -> None:
        self.run_token = run_token
        self._is_enabled = enabled
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not self._is_enabled:
            return self
        with suppress(OSError):  # then the run starts one the ordinary way, and says why it cannot
            self._process = subprocess.Popen(
                [*AGENT_COMMAND, WAIT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=launch_environment(
                    unset=(), env={RUN_TOKEN_VARIABLE: self.run_token, PARENT_VARIABLE: str(os.getpid())}
                ),
                start_new_session=True,
            )
        return self

    def give(self, command: Sequence[str], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes] | None:
        """Have it run ``command`` (one that starts as ``AGENT_COMMAND`` does); None if it cannot, or is gone."""
        process, self._process = self._process, None
        if process is None or tuple(command[: len(AGENT_COMMAND)]) != AGENT_COMMAND:
            self._end(process)
            return None
        arguments = list(command[len(AGENT_COMMAND) :])
        assert process.stdin is not None
        try:
            process.stdin.write(Orders(arguments=arguments, env=env, log_path=str(log_path)).to_line())
            process.stdin.close()
        except OSError:
            self._end(process)
            return None
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._process)
        self._process = None

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.kill()  # it has done nothing and has no children
            process.wait()
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]


class Guard:
    """The process that ends a run if this one is killed; it ends with the context."""

    def __init__(self, run_token: str, grace_s: float) -> None:
        self._arguments = (run_token, str(grace_s))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # no process to be had: the run itself will say so
            self._process = subprocess.Popen(
                [sys.executable, "-m", "qcollect.launch.guard", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=launch_environment(unset=(RUN_TOKEN_VARIABLE,), env={}),
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(ALL_IS_WELL)
            self._process.stdin.close()
        try:
            self._process.wait(_GUARD_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
