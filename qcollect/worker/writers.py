"""A pool of threads that write captures while training goes on."""

import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")

# How long a thread in Python may go on while another waits: five milliseconds otherwise, which the training thread
# would wait whenever it has let go of the interpreter for a moment, as most of torch's calls do.
_SWITCH_S = 0.0002

_pools: "weakref.WeakSet[WriterPool[object]]" = weakref.WeakSet()


class WriterPool(Generic[Job]):
    """``num_threads`` threads that call ``work`` on jobs, in the order they came.

    Threads do not survive a fork: in a child (a data loader's process) the pool takes no jobs.

    Args:
        work: may raise; the first error is kept for ``check``.
        prepare: called once in every thread.
    """

    def __init__(
        self, num_threads: int, work: Callable[[Job], None], *, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.error: BaseException | None = None
        self.is_child = False
        self._work = work
        self._prepare = prepare
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._num_open = 0
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"qcollect-writer-{i}", daemon=True) for i in range(num_threads)
        ]
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))
        for thread in self._threads:
            thread.start()
        _pools.add(self)  # type: ignore[arg-type]

    def submit(self, job: Job) -> None:
        with self._changed:
            self._num_open += 1
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until every job is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)

    def close(self) -> None:
        """Drain, and end the threads."""
        self.drain()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        if threads:
            sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            # jobs are taken all the same: who waits for them must not wait for ever
            self.error = self.error or error
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._work(job)
            except BaseException as error:
                self.error = self.error or error
            del job
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()


def _leave_children_alone() -> None:
    for pool in _pools:
        pool.is_child = True
        pool._threads, pool._num_open = [], 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_children_alone)
