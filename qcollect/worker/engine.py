"""From the training thread to the disk: values are staged, threads write them, errors come back to training."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import psutil
import torch

from qcollect.errors import CaptureError
from qcollect.plan.schedule import FILE_OVERHEAD_BYTES
from qcollect.recipe.records import CaptureSpec
from qcollect.worker.arena import HostArena, can_share
from qcollect.worker.counts import Counts
from qcollect.worker.saver import Observation, Saver, Source
from qcollect.worker.shipment import Shipment
from qcollect.worker.staging import Order, Stager
from qcollect.worker.writers import WriterProcesses, Writers, WriterThreads

_MAX_WRITERS = 8  # more are no faster into the page cache
_FREE_FRACTION = 0.25  # of the host's free memory, for all ranks of a host
_UNPLANNED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How captures get to the disk.

    Args:
        host_memory_bytes: for values that wait, of all ranks of this host; None: what an iteration's captures need,
            at most a quarter of what is free.
        durability: what is on the disk itself, whatever happens to the machine: ``none``, every ``file``, or ``all``
            (the manifests, too).
        on_error: whether a capture that cannot be written ends the training.
    """

    host_memory_bytes: int | None = None
    durability: str = "none"
    on_error: str = "stop"

    @classmethod
    def of(cls, spec: CaptureSpec) -> Self:
        """What a recipe's ``capture`` section asks for."""
        return cls(
            host_memory_bytes=None if spec.host_memory_gb is None else int(spec.host_memory_gb * 1e9),
            durability=spec.durability,
            on_error=spec.on_error,
        )


class CaptureEngine:
    """Takes captures on the training thread and has them written by others.

    All of it is the training thread's: what writers have done it learns when it asks.

    Args:
        needed_bytes: what the captures of an iteration come to; 0: not known.
        num_local_ranks: processes of this host that share its memory and cores.
        on_shipped: called when captures went to the writers, and it is known what became of others.
        in_process: whether threads of this process write; None: unless training is on a CUDA device.
    """

    def __init__(
        self,
        saver: Saver,
        settings: EngineSettings,
        *,
        device: torch.device,
        needed_bytes: int = 0,
        num_local_ranks: int = 1,
        on_shipped: Callable[[], None] = lambda: None,
        in_process: bool | None = None,
    ) -> None:
        self.saver = saver
        self.settings = settings
        self.on_shipped = on_shipped
        self.counts = Counts()
        self._error: Exception | None = None
        self._orders: dict[int, Order] = {}  # that nobody has told the end of
        self._num_shipped = 0  # whose outcome is not known
        self._is_closed = False
        self._pid = os.getpid()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = max(min(_MAX_WRITERS, cores // num_local_ranks), 1)
        is_cuda = device.type == "cuda"
        if in_process is None:
            in_process = not (is_cuda and can_share())
        make_writers = WriterThreads if in_process else WriterProcesses
        # before the memory, which takes a while too
        self._writers: Writers = make_writers(saver, num_threads, goes_on=settings.on_error == "continue")
        num_bytes = _arena_bytes(settings.host_memory_bytes, needed_bytes, num_local_ranks)
        # what is asked for by number is taken now; of what is not known to be needed, pages come as they are written to
        num_touched = needed_bytes or settings.host_memory_bytes or 0
        arena = HostArena(num_bytes, pin=is_cuda, is_shared=not in_process, num_touched=num_touched)
        self.stager = Stager(arena, ship=self._ship, wait=lambda: self._settle(wait=True))

    @property
    def waited_s(self) -> float:
        """How long the training thread has waited for writers."""
        return self.stager.waited_s

    def submit(
        self,
        tensor: torch.Tensor,
        seen: Observation,
        counter: int | None = None,
        *,
        source: Source | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Take one capture: its value is that of now, whatever is done to the tensor afterwards.

        Waits only while the host memory is full of values that are not written yet. In a process that was forked from
        the one that made the engine (a data loader's) nothing is taken.

        Args:
            source: of the tensor that ``tensor`` is a copy of; None: it is none.
            tokens: whose hash is ``seen.token_hash``, on the device of ``tensor`` unless that is the CPU; they may not
                change afterwards. None: it is known.

        Raises:
            CaptureError: an earlier capture could not be written.
        """
        if os.getpid() != self._pid:
            return
        if self._error is not None:
            raise self._error
        staged, counts = self.stager.stage(tensor), self.counts
        counts.num_taken += 1
        counts.num_bytes_taken += staged.num_bytes + FILE_OVERHEAD_BYTES
        order = self._orders[counts.num_taken] = Order(
            ticket=counts.num_taken,
            staged=staged,
            source=source or Source.of(tensor),
            seen=seen,
            counter=counter,
            now=self.saver.clock(),
        )
        self.stager.submit(order, tokens)

    def forget(self) -> None:
        """What is taken so far goes to the writers, and is not the value of a tensor that is seen from now on."""
        self.stager.forget()

    def check(self) -> None:
        """Raise what a writer could not do.

        Raises:
            CaptureError: with the path, why, and what is free there.
        """
        if self._orders:
            self._settle(wait=False)
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait until everything taken is on disk.

        Raises:
            CaptureError: a capture could not be written.
        """
        if os.getpid() != self._pid:
            return
        self.stager.forget()
        while self._orders and self._settle(wait=True):
            pass
        self.check()

    def close(self) -> None:
        """Write what is taken, end the writers and give the memory back; never raises what they could not do."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.drain()
        except Exception as error:  # of a writer, or of the device: what that had is lost
            self._error = self._error or error
        self._writers.close()
        self.stager.close()

    def _ship(self, shipments: list[Shipment]) -> None:
        self._writers.send(shipments)
        self._num_shipped += len(shipments)
        self._settle(wait=False)
        self.on_shipped()

    def _settle(self, *, wait: bool) -> bool:
        """Note what has become of captures; with ``wait`` of one at least. False: writers have none."""
        if wait and not self._num_shipped:
            return False
        try:
            outcomes = self._writers.outcomes(wait=wait)
        except CaptureError as error:
            self._error = error
            self._orders.clear()  # nobody will tell
            raise
        self._num_shipped -= len(outcomes)
        counts = self.counts
        for outcome in outcomes:
            self.stager.release(self._orders.pop(outcome.ticket))
            if outcome.num_bytes:
                counts.num_written += 1
                counts.num_bytes += outcome.num_bytes
                counts.num_deduped += outcome.deduped_bytes is not None
                counts.deduped_bytes += outcome.deduped_bytes or 0
            elif isinstance(outcome.error, CaptureError) and self.settings.on_error == "continue":
                counts.num_missing += 1
                counts.first_missing = counts.first_missing or str(outcome.error)
            else:
                self._error = self._error or outcome.error
        return True


def _arena_bytes(limit: int | None, needed: int, num_local_ranks: int) -> int:
    if limit is not None:
        return limit // num_local_ranks
    free = int(psutil.virtual_memory().available * _FREE_FRACTION) // num_local_ranks
    return min(needed or _UNPLANNED_BYTES, free)
