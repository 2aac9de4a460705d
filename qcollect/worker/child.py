"""A process of its own that works for this one: it reads messages from its input, and answers in lines.

Threads take turns with training for the interpreter, most of whose time on a GPU's host goes into Python; a process
does not. It ignores signals to the group, ends when it is told to and has done everything, and at once with the process
that it works for if that is gone, as a thread of that one would. It has no CUDA context, and takes some three seconds
to start.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import torch

import qcollect
from qcollect.errors import CaptureError

_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031  # Linux, fcntl.F_SETPIPE_SZ
_READ_BYTES = 1 << 16
_WATCH_S = 0.25

Tell = Callable[[bytes], None]


class Worker(Protocol):
    """What a child does."""

    def work(self, message: Any) -> None:
        """Take a message; it may be done later."""

    def close(self) -> None:
        """Do all that is left."""


class Child:
    """The process, as the one that it works for sees it. One thread at a time.

    Args:
        module: a program that calls ``serve``.
        settings: what that gets first.
    """

    def __init__(self, module: str, settings: Any) -> None:
        source = str(Path(qcollect.__file__).resolve().parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
            "CUDA_VISIBLE_DEVICES": "",  # it computes on no device
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        for pipe in (self._input, self._output):
            _enlarge(pipe.fileno())
        os.set_blocking(self.fileno(), False)
        self._rest = b""
        self.send((os.getpid(), settings))

    def fileno(self) -> int:
        """Of its answers, to wait for."""
        return self._output.fileno()

    def send(self, message: Any) -> None:
        """A message to it; waits while it has too many.

        Raises:
            CaptureError: it is not there any more.
        """
        try:
            pickle.dump(message, self._input, pickle.HIGHEST_PROTOCOL)
            self._input.flush()
        except OSError as error:
            raise self._is_gone() from error

    def answers(self) -> list[bytes]:
        """Lines that have come since the last call.

        Raises:
            CaptureError: it is not there any more.
        """
        try:
            data = os.read(self.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise self._is_gone()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def end(self) -> None:
        """Tell it that nothing more comes."""
        with suppress(CaptureError):  # it is gone
            self.send(None)  # a child that was forked from this process keeps the input open
        with suppress(OSError):
            self._input.close()

    def wait(self) -> list[bytes]:
        """Its last answers, once it has done everything and ended."""
        os.set_blocking(self.fileno(), True)
        data = self._rest
        while more := os.read(self.fileno(), _READ_BYTES):
            data += more
        self.process.wait()
        self._output.close()
        return data.split(b"\n")[:-1]

    def _is_gone(self) -> CaptureError:
        return CaptureError(
            f"the process that writes captures (pid {self.process.pid}) has ended by itself, with exit status "
            f"{self.process.wait()}; what it had not written is lost"
        )


def wait_for_any(children: Sequence[Child]) -> None:
    """Returns when one of them has answered, or has ended."""
    connection.wait(children)  # type: ignore[arg-type]  # whatever has a fileno; select takes none above 1023


def serve(make: Callable[[Any, Tell], Worker]) -> None:
    """Be a child: work until nothing more comes.

    Args:
        make: the worker, from the settings and what sends an answer, a line; any thread may.
    """
    # what ends the one it works for ends it, too, and not before everything is done
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    source = sys.stdin.buffer
    owner, settings = pickle.load(source)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    lock = threading.Lock()

    def tell(line: bytes) -> None:
        with lock:
            os.write(output, line + b"\n")

    worker = make(settings, tell)
    with suppress(EOFError):  # it was closed without a word
        while (message := pickle.load(source)) is not None:
            worker.work(message)
    worker.close()


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_WATCH_S)
    os._exit(1)


def _enlarge(pipe: int) -> None:
    """Who writes to a pipe that is full waits."""
    try:
        import fcntl

        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):  # not Linux, or more than this user may have
        pass
