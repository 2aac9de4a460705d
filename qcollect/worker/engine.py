"""From the training thread to the disk: values are staged, threads write them, errors come back to training."""

import os
import threading
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

import psutil
import torch

from qcollect.errors import CaptureError
from qcollect.plan.schedule import FILE_OVERHEAD_BYTES
from qcollect.recipe.records import CaptureSpec
from qcollect.worker.arena import HostArena
from qcollect.worker.saver import Observation, Saver, Source
from qcollect.worker.staging import Numbers, Staged, Stager
from qcollect.worker.writers import WriterPool

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    staged: Staged
    numbers: Numbers | None  # what was counted on the device for the metadata
    scaled: torch.cuda.Event | None  # after which the scales of blocks are there
    source: Source
    seen: Observation
    counter: int | None
    now: datetime


class CaptureEngine:
    """Takes captures on the training thread and has them written by others.

    Args:
        needed_bytes: what the captures of an iteration come to; 0: not known.
        num_local_ranks: processes of this host that share its memory and cores.
    """

    def __init__(
        self,
        saver: Saver,
        settings: EngineSettings,
        *,
        device: torch.device,
        needed_bytes: int = 0,
        num_local_ranks: int = 1,
    ) -> None:
        self.saver = saver
        self.settings = settings
        self.num_taken = 0
        self.num_bytes_taken = 0
        self.num_missing = 0
        self.first_missing: str | None = None
        self._lock = threading.Lock()
        # a thread begins on device 0, wherever its maker was
        is_here = device.type == "cuda" and device.index is None
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_here else device
        num_bytes = _arena_bytes(settings.host_memory_bytes, needed_bytes, num_local_ranks)
        self.arena = HostArena(num_bytes, pin=device.type == "cuda")
        self.stager = Stager(self.arena)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.pool: WriterPool[_Job] = WriterPool(
            max(min(_MAX_WRITERS, cores // num_local_ranks), 1), self._write, prepare=self._use_own_stream
        )

    @property
    def waited_s(self) -> float:
        """How long the training thread has waited for writers."""
        return self.arena.waited_s

    def submit(
        self, tensor: torch.Tensor, seen: Observation, counter: int | None = None, *, source: Source | None = None
    ) -> None:
        """Take one capture: its value is that of now, whatever is done to the tensor afterwards.

        Waits only while the host memory is full of values that are not written yet.

        Args:
            source: of the tensor that ``tensor`` is a copy of; None: it is none.

        Raises:
            CaptureError: an earlier capture could not be written.
        """
        self.check()
        if self.pool.is_child:
            return
        staged = self.stager.stage(tensor)
        scaled = None
        if tensor.is_cuda and seen.block_scales is not None:
            scaled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            scaled.record()
        source, now = source or Source.of(tensor), self.saver.clock()

        def write(numbers: Numbers | None) -> None:
            self.pool.submit(
                _Job(
                    staged=staged,
                    numbers=numbers,
                    scaled=scaled,
                    source=source,
                    seen=seen,
                    counter=counter,
                    now=now,
                )
            )

        self.num_taken += 1
        self.num_bytes_taken += staged.num_bytes + FILE_OVERHEAD_BYTES
        self.stager.when_sent(staged, (fact for consumer in seen.consumers for fact in consumer.values()), write)

    def forget(self) -> None:
        """What is taken so far goes to the writers, and is not the value of a tensor that is seen from now on."""
        self.stager.forget()

    def check(self) -> None:
        """Raise what a writer could not do.

        Raises:
            CaptureError: with the path, why, and what is free there.
        """
        if self.pool.error is not None:
            raise self.pool.error

    def drain(self) -> None:
        """Wait until everything taken is on disk.

        Raises:
            CaptureError: a capture could not be written.
        """
        self.stager.forget()
        self.pool.drain()
        self.check()

    def close(self) -> None:
        """Write what is taken, end the threads and give the memory back; never raises what writers could not do."""
        try:
            self.stager.forget()
        except RuntimeError as error:  # the device's: what it had is lost
            self.pool.error = self.pool.error or error
        self.pool.close()
        self.arena.close()

    def _use_own_stream(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def _write(self, job: _Job) -> None:
        try:
            if self.pool.error is not None:
                return  # training ends: what follows the capture that failed is not written
            value = job.staged.wait()
            if job.scaled is not None:
                torch.cuda.current_stream().wait_event(job.scaled)
            seen = job.seen
            if job.numbers is not None:
                job.numbers.wait()
                seen = replace(seen, consumers=[job.numbers.in_(consumer) for consumer in seen.consumers])
            self.saver.write(value, job.staged.summary(), job.source, seen, job.counter, job.now)
        except CaptureError as error:
            if self.settings.on_error == "stop":
                raise
            with self._lock:
                self.num_missing += 1
                self.first_missing = self.first_missing or str(error)
        finally:
            self.stager.release(job.staged)


def _arena_bytes(limit: int | None, needed: int, num_local_ranks: int) -> int:
    if limit is not None:
        return limit // num_local_ranks
    free = int(psutil.virtual_memory().available * _FREE_FRACTION) // num_local_ranks
    return min(needed or _UNPLANNED_BYTES, free)
