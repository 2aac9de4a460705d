"""Captured values, fixed the moment they are seen and brought to the host without holding the training thread.

On a CUDA device a value is cloned on the stream that made it, so that nothing done to it afterwards reaches the clone;
its statistics are computed from the clone on the same stream; another stream copies both to page-locked memory. On the
CPU there is one copy, and whoever writes it computes the statistics.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from qcollect.store.summary import FIELDS, summarize
from qcollect.worker.arena import HostArena, Slot, page_rounded
from qcollect.worker.saver import plain_value

DEVICE_BYTES = 2 << 30  # of clones that are on their way
_SUMMARY_BYTES = 8 * len(FIELDS)
_ALIGNMENT = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Staged:
    """A value in host memory, or on its way there; shared by all captures that saw it.

    Args:
        tensor: dense, of the value's shape and dtype; its storage is its own. To be read after ``wait``.
    """

    tensor: torch.Tensor
    slot: Slot
    _arrived: torch.cuda.Event | None = None
    _clone: tuple[torch.Tensor, torch.Tensor] | None = None
    _summary: torch.Tensor | None = None
    _numbers: list[float] | None = None
    _num_users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def wait(self) -> None:
        """Until the value is in host memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._clone = None

    def summary(self) -> list[float]:
        """The numbers of ``store.summary``; after ``wait``. Computed once, by whoever comes first."""
        with self._lock:
            if self._numbers is None:
                found = summarize(self.tensor) if self._summary is None else self._summary
                self._numbers = found.tolist()
            return self._numbers


_Identity = tuple[Any, ...]


class Stager:
    """Stages values into an arena. One thread stages, any may release."""

    def __init__(self, arena: HostArena, *, device_bytes: int = DEVICE_BYTES) -> None:
        self.arena = arena
        self.device_bytes = device_bytes
        self.num_shared = 0
        self._seen: dict[_Identity, tuple[StorageWeakRef, Staged]] = {}
        self._under_way: deque[Staged] = deque()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def stage(self, tensor: torch.Tensor) -> Staged:
        """The value of ``tensor`` now, for one capture; ``release`` it once it is written.

        The same memory, unchanged since it was staged for another capture, is not copied again.
        """
        value = plain_value(tensor)
        identity = identity_of(value)
        known = self._find(identity)
        if known is not None:
            self.num_shared += 1
            return known
        slot = self._allocate(value.numel() * value.element_size())
        staged = self._copy(value, slot) if value.device.type == "cuda" else self._copy_now(value, slot)
        staged._num_users = 1
        if identity is not None:
            staged._num_users += 1  # this memory of it
            storage = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[identity] = (storage, staged)
        return staged

    def release(self, staged: Staged) -> None:
        """One user less; the last one gives the memory back."""
        with self._lock:
            staged._num_users -= 1
            is_last = staged._num_users == 0
        if is_last:
            self.arena.release(staged.slot)

    def forget(self) -> None:
        """Values staged before are not shared with captures to come."""
        seen, self._seen = self._seen, {}
        for _, staged in seen.values():
            self.release(staged)
        while self._under_way and self._under_way[0]._clone is None:
            self._under_way.popleft()

    def _find(self, identity: _Identity | None) -> Staged | None:
        if identity is None or identity not in self._seen:
            return None
        storage, staged = self._seen[identity]
        if storage.expired():  # type: ignore[no-untyped-call]  # the memory is another's by now
            del self._seen[identity]
            self.release(staged)
            return None
        with self._lock:
            staged._num_users += 1
        return staged

    def _allocate(self, num_bytes: int) -> Slot:
        size = _aligned(num_bytes) + _SUMMARY_BYTES
        slot = self.arena.try_allocate(size)
        if slot is None:
            self.forget()  # what waits here for others to share it would never be written
            slot = self.arena.allocate(size)
        return slot

    def _copy_now(self, value: torch.Tensor, slot: Slot) -> Staged:
        host = self.arena.tensor(slot, value.shape, value.dtype)
        host.copy_(value)
        return Staged(tensor=host, slot=slot)

    def _copy(self, value: torch.Tensor, slot: Slot) -> Staged:
        num_bytes = value.numel() * value.element_size()
        self._make_room(num_bytes)
        with torch.cuda.device(value.device):
            clone = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
            summary = summarize(clone)
            produced, arrived = (torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
            produced.record()
            stream = self._stream(value.device)
            stream.wait_event(produced)
            host = self.arena.tensor(slot, value.shape, value.dtype)
            host_summary = self.arena.tensor(slot, summary.shape, summary.dtype, start=_aligned(num_bytes))
            with torch.cuda.stream(stream):
                host.copy_(clone, non_blocking=True)
                host_summary.copy_(summary, non_blocking=True)
            arrived.record(stream)
        # held until the copy has arrived: the other stream reads them
        staged = Staged(tensor=host, slot=slot, _arrived=arrived, _clone=(clone, summary), _summary=host_summary)
        self._under_way.append(staged)
        return staged

    def _make_room(self, num_bytes: int) -> None:
        """Wait for the oldest copies while there are too many clones on the device."""
        while self._under_way and (
            self._under_way[0]._clone is None
            or num_bytes + sum(s.num_bytes for s in self._under_way if s._clone is not None) > self.device_bytes
        ):
            self._under_way.popleft().wait()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        index = device.index or 0
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[index]


def held_bytes(num_bytes: int) -> int:
    """What a value of so many bytes takes of an arena."""
    return page_rounded(_aligned(num_bytes) + _SUMMARY_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def identity_of(value: torch.Tensor) -> _Identity | None:
    """What tells that two tensors are the same memory with the same content; None where nothing tells."""
    if value.is_inference() or value.numel() == 0:
        return None
    return (
        value.untyped_storage()._cdata,
        value.storage_offset(),
        value.shape,
        value.stride(),
        value.dtype,
        value._version,
    )
