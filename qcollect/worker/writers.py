"""Who writes captures while training goes on: threads of this process, or of another that shares its memory.

Threads take turns with training for the interpreter, most of whose time on a GPU's host goes into Python: there a
process of their own writes, which costs a second or two to start. Both take shipments and give outcomes, in any order,
to the one thread that asks.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import qcollect
from qcollect.errors import CaptureError
from qcollect.worker.arena import Memory
from qcollect.worker.saver import Saver
from qcollect.worker.shipment import Outcome, Scribe, Shipment

Job = TypeVar("Job")

# How long a thread in Python may go on while another waits: five milliseconds otherwise, which the training thread
# would wait whenever it has let go of the interpreter for a moment, as most of torch's calls do.
_SWITCH_S = 0.0002
# Of writers beside training on the same cores: its threads wait for the last of them at every step, so a writer that
# takes a core for a moment holds them all. Where all cores are busy writers get next to nothing, and all of them once
# training waits.
_NICENESS = 19
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031  # Linux, fcntl.F_SETPIPE_SZ
_READ_BYTES = 1 << 16


class Writers(Protocol):
    """Writes what is sent."""

    def send(self, shipments: Sequence[Shipment]) -> None:
        """Have them written; returns before they are.

        Raises:
            CaptureError: nobody is there to do it.
        """

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        """What has become of shipments since the last call; with ``wait`` of one at least.

        Raises:
            CaptureError: what is sent will not be written.
        """

    def close(self) -> None:
        """End them, once all is written; outcomes that nobody has asked for are lost."""


class WriterPool(Generic[Job]):
    """``num_threads`` threads that call ``work``, which may not raise, on jobs in the order they came.

    Args:
        niceness: how far behind other threads of the machine theirs stand, from 0 to 19 (on Linux).
    """

    def __init__(self, num_threads: int, work: Callable[[Job], None], *, niceness: int = 0) -> None:
        self._work, self._niceness = work, niceness
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"qcollect-writer-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads once every job is done."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere a thread has none of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (job := self._jobs.get()) is not None:
            self._work(job)
            del job


class WriterThreads:
    """``Writers`` in this process."""

    def __init__(self, saver: Saver, num_threads: int, *, goes_on: bool) -> None:
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        scribe = Scribe(saver, Memory.map_of, goes_on=goes_on, tell=self._outcomes.put)
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))
        self._pool: WriterPool[Shipment] = WriterPool(num_threads, scribe.write, niceness=_NICENESS)

    def send(self, shipments: Sequence[Shipment]) -> None:
        for shipment in shipments:
            self._pool.submit(shipment)

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        found = [self._outcomes.get()] if wait else []
        while True:
            try:
                found.append(self._outcomes.get_nowait())
            except Empty:
                return found

    def close(self) -> None:
        self._pool.close()
        sys.setswitchinterval(self._switch_s)


class WriterProcess:
    """``Writers`` in a process of their own; see ``write_shipments``.

    It reads shipments from its input and ends with it, or with this process. Its output is a line for every outcome.
    """

    def __init__(self, saver: Saver, num_threads: int, *, goes_on: bool) -> None:
        source = str(Path(qcollect.__file__).resolve().parents[1])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
            "CUDA_VISIBLE_DEVICES": "",  # it computes on no device
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qcollect.worker.write_shipments"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout.fileno()
        _enlarge(self._input.fileno())
        _enlarge(self._output)
        self._rest = b""
        self._is_blocking = True
        self._write({"saver": saver.settings, "owner": os.getpid(), "num_threads": num_threads, "goes_on": goes_on})

    def send(self, shipments: Sequence[Shipment]) -> None:
        self._write(list(shipments))

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        if wait != self._is_blocking:
            os.set_blocking(self._output, wait)
            self._is_blocking = wait
        found: list[Outcome] = []
        while True:
            try:
                data = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return found
            if not data:
                raise self._is_gone()
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += map(decode_outcome, lines)
            if found or not wait:
                return found

    def close(self) -> None:
        with suppress(CaptureError):  # it is gone
            self._write(None)  # a child that was forked from this process keeps the input open
        with suppress(OSError):
            self._input.close()
        os.set_blocking(self._output, True)
        while os.read(self._output, _READ_BYTES):
            pass
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _write(self, message: Any) -> None:
        try:
            pickle.dump(message, self._input, pickle.HIGHEST_PROTOCOL)
            self._input.flush()
        except OSError as error:
            raise self._is_gone() from error

    def _is_gone(self) -> CaptureError:
        return CaptureError(
            f"the process that writes captures (pid {self._process.pid}) has ended by itself, with exit status "
            f"{self._process.wait()}; what it had not written is lost"
        )


def encode_outcome(outcome: Outcome) -> bytes:
    """One line."""
    error = outcome.error
    told = None if error is None else [isinstance(error, CaptureError), type(error).__name__, str(error)]
    return json.dumps([outcome.ticket, outcome.num_bytes, outcome.deduped_bytes, told]).encode() + b"\n"


def decode_outcome(line: bytes) -> Outcome:
    """What ``encode_outcome`` made; an error that is none of ours becomes a RuntimeError that says which it was."""
    ticket, num_bytes, deduped_bytes, told = json.loads(line)
    if told is None:
        return Outcome(ticket, num_bytes, deduped_bytes)
    is_ours, kind, text = told
    return Outcome(ticket, error=CaptureError(text) if is_ours else RuntimeError(f"{kind}: {text}"))


def _enlarge(pipe: int) -> None:
    """Who writes to a pipe that is full waits."""
    try:
        import fcntl

        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, OSError):  # not Linux, or more than this user may have
        pass
