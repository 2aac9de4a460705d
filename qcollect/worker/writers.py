"""Who writes captures while training goes on: threads of this process, or of others that share its memory (``child``).

Both take shipments and give outcomes, in any order, to the one thread that asks.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from qcollect.errors import CaptureError
from qcollect.worker.arena import Memory
from qcollect.worker.child import Child, wait_for_any
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
_MAX_PROCESSES, _THREADS_OF_ONE = 2, 4


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


class WriterProcesses:
    """``Writers`` in processes of their own (``write_shipments``): two for many threads."""

    def __init__(self, saver: Saver, num_threads: int, *, goes_on: bool) -> None:
        # identical payloads are known to the process that has written the first
        num = 1 if saver.packing.dedupe else min(max(num_threads // _THREADS_OF_ONE, 1), _MAX_PROCESSES)
        settings = {"saver": saver.settings, "num_threads": -(-num_threads // num), "goes_on": goes_on}
        self.children = [Child("qcollect.worker.write_shipments", settings) for _ in range(num)]
        self._num_sent = 0

    def send(self, shipments: Sequence[Shipment]) -> None:
        messages: list[list[tuple[Any, ...]]] = [[] for _ in self.children]
        for shipment in shipments:
            messages[self._num_sent % len(messages)].append(shipment.encode())
            self._num_sent += 1
        for child, message in zip(self.children, messages, strict=True):
            if message:
                child.send(message)

    def outcomes(self, *, wait: bool) -> list[Outcome]:
        while True:
            found = [decode_outcome(line) for child in self.children for line in child.answers()]
            if found or not wait:
                return found
            wait_for_any(self.children)

    def close(self) -> None:
        for child in self.children:
            child.end()
        for child in self.children:
            child.wait()


def encode_outcome(outcome: Outcome) -> bytes:
    """As a line."""
    error = outcome.error
    told = None if error is None else [isinstance(error, CaptureError), type(error).__name__, str(error)]
    return json.dumps([outcome.ticket, outcome.num_bytes, outcome.deduped_bytes, told]).encode()


def decode_outcome(line: bytes) -> Outcome:
    """What ``encode_outcome`` made; an error that is none of ours becomes a RuntimeError that says which it was."""
    ticket, num_bytes, deduped_bytes, told = json.loads(line)
    if told is None:
        return Outcome(ticket, num_bytes, deduped_bytes)
    is_ours, kind, text = told
    return Outcome(ticket, error=CaptureError(text) if is_ours else RuntimeError(f"{kind}: {text}"))
