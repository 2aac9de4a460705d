"""Captured values, fixed the moment they are seen and brought to the host without holding the training thread.

On a CUDA device a value is copied on the stream that made it, so that nothing done to it afterwards reaches the copy;
its statistics are computed from the copy on the same stream. Copies lie side by side in a buffer on the device. Once it
is full, or nothing more is to come, they are sent: another stream brings them to page-locked memory, all in one piece
(``Parcel``). A buffer is filled again when it has arrived, for which the device waits, not the host. On the CPU there
is one copy, and whoever writes it computes the statistics.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qcollect.store.compact import bytes_of
from qcollect.store.summary import FIELDS, summarize
from qcollect.worker.arena import HostArena, Slot, page_rounded
from qcollect.worker.saver import plain_value

BUFFER_BYTES = 64 << 20  # of a device's memory: large enough for full speed, small enough to be there soon
MAX_BUFFERS = 8
_MAX_VALUES = 512  # of a buffer
_ALIGNMENT = 64
_SUMMARY_WIDTH = len(FIELDS) + len(FIELDS) % 2  # kernels want starts at multiples of 16 bytes


class Numbers:
    """0-dim tensors on a device, brought to the host together, read after ``wait``."""

    def __init__(self) -> None:
        self._tensors: dict[torch.dtype, list[Tensor]] = {}
        self._values: dict[int, Any] = {}  # by the identity of its tensor
        self._coming: list[tuple[list[Tensor], Tensor]] = []
        self._arrived: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    def add(self, tensor: Tensor) -> None:
        self._tensors.setdefault(tensor.dtype, []).append(tensor)

    def send(self, *, pin: bool) -> None:
        """Copy them on the current stream, which has waited for what computes them."""
        for tensors in self._tensors.values():
            values = torch.stack(tensors)
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=pin)
            self._coming.append((tensors, host.copy_(values, non_blocking=True)))
        self._arrived = _record(torch.cuda.current_stream())

    def wait(self) -> None:
        """Until they are on the host."""
        if self._arrived is None:
            return
        self._arrived.synchronize()
        with self._lock:
            for tensors, host in self._coming:
                self._values.update(zip(map(id, tensors), host.tolist(), strict=True))
            self._coming.clear()

    def in_(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """``facts`` with the value of each tensor that was added; all else as it is."""
        return {name: self._values.get(id(fact), fact) for name, fact in facts.items()}


@dataclass(slots=True, eq=False)
class Parcel:
    """Host memory of values that travel together, and how many need it still."""

    slot: Slot | None = None
    arrived: torch.cuda.Event | None = None
    summaries: Tensor | None = None  # of values from a device
    num_users: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Staged:
    """A value in host memory, or on its way there; shared by all captures that saw it.

    Args:
        place: which of its parcel's values it is.
        lane: from its device; None: it was here.
        tensor: dense, of the value's shape and dtype, its storage its own, to be read after ``wait``; None: not sent
            yet.
    """

    parcel: Parcel
    num_bytes: int
    place: int = 0
    lane: "_Lane | None" = None
    tensor: Tensor | None = None
    _summary: list[float] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> Tensor:
        """The value, once it is in host memory."""
        assert self.tensor is not None
        if self.parcel.arrived is not None:
            self.parcel.arrived.synchronize()
        return self.tensor

    def summary(self) -> list[float]:
        """The numbers of ``store.summary``; after ``wait``. Computed once, by whoever comes first."""
        with self._lock:
            if self._summary is None:
                assert self.tensor is not None
                summaries = self.parcel.summaries
                found = summarize(self.tensor) if summaries is None else summaries[self.place, : len(FIELDS)]
                self._summary = found.tolist()
            return self._summary


Job = Callable[["Numbers | None"], None]
_Identity = tuple[Any, ...]


class Stager:
    """Stages values into an arena. One thread at a time stages, any may release.

    Args:
        buffer_bytes, max_buffers: of the memory that is taken on each device; a value that is larger than a buffer has
            one of its own, and the next such value waits for it.
    """

    def __init__(self, arena: HostArena, *, buffer_bytes: int = BUFFER_BYTES, max_buffers: int = MAX_BUFFERS) -> None:
        self.arena = arena
        self.num_shared = 0
        self._sizes = min(buffer_bytes, arena.num_bytes // 2), max_buffers
        self._seen: dict[_Identity, tuple[StorageWeakRef, Staged]] = {}
        self._lanes: dict[torch.device, _Lane] = {}
        self._lock = threading.Lock()

    def stage(self, tensor: Tensor) -> Staged:
        """The value of ``tensor`` now, for one capture; ``release`` it once it is written.

        The same memory, unchanged since it was staged for another capture, is not copied again.
        """
        value = plain_value(tensor)
        identity = _identity(value)
        known = self._find(identity)
        if known is not None:
            self.num_shared += 1
            return known
        staged = self._lane(value.device).copy(value) if value.device.type == "cuda" else self._copy_now(value)
        with self._lock:
            staged.parcel.num_users += 1 if identity is None else 2  # this memory of it is one
        if identity is not None:
            storage = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[identity] = (storage, staged)
        return staged

    def when_sent(self, staged: Staged, facts: Iterable[Any], job: Job) -> None:
        """Call ``job`` once the value is on its way, and with it the 0-dim tensors among ``facts`` on its device.

        ``job`` gets the numbers that these belong to; None: there are none.
        """
        if staged.lane is None:
            job(None)
        else:
            staged.lane.when_sent(staged, facts, job)

    def release(self, staged: Staged) -> None:
        """One user less; the last one gives the memory back."""
        parcel = staged.parcel
        with self._lock:
            parcel.num_users -= 1
            is_last = parcel.num_users == 0
        if is_last and parcel.slot is not None:
            self.arena.release(parcel.slot)

    def forget(self) -> None:
        """Values staged before are sent, and not shared with captures to come."""
        for lane in self._lanes.values():
            lane.flush()
        self._forget_seen()

    def _forget_seen(self) -> None:
        seen, self._seen = self._seen, {}
        for _, staged in seen.values():
            self.release(staged)

    def _find(self, identity: _Identity | None) -> Staged | None:
        if identity is None or identity not in self._seen:
            return None
        storage, staged = self._seen[identity]
        if storage.expired():  # type: ignore[no-untyped-call]  # the memory is another's by now
            del self._seen[identity]
            self.release(staged)
            return None
        with self._lock:
            staged.parcel.num_users += 1
        return staged

    def _allocate(self, num_bytes: int) -> Slot:
        slot = self.arena.try_allocate(num_bytes)
        if slot is None:
            self._forget_seen()  # what waits here for others to share it would never be written
            slot = self.arena.allocate(num_bytes)
        return slot

    def _copy_now(self, value: Tensor) -> Staged:
        num_bytes = value.numel() * value.element_size()
        slot = self._allocate(num_bytes)
        host = self.arena.tensor(slot, value.shape, value.dtype)
        host.copy_(value)
        return Staged(parcel=Parcel(slot=slot), num_bytes=num_bytes, tensor=host)

    def _lane(self, device: torch.device) -> "_Lane":
        if device not in self._lanes:
            self._lanes[device] = _Lane(device, self.arena, self._allocate, *self._sizes)
        return self._lanes[device]


class _Buffer:
    """Device memory of a parcel: its values, and the summaries of them."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.summaries = torch.empty((_MAX_VALUES, _SUMMARY_WIDTH), dtype=torch.float64, device=device)
        self.arrived: torch.cuda.Event | None = None


class _Lane:
    """From one device to the host: buffers that are filled, sent, and filled again.

    Args:
        allocate: gives a piece of the arena, and may wait.
    """

    def __init__(
        self,
        device: torch.device,
        arena: HostArena,
        allocate: Callable[[int], Slot],
        buffer_bytes: int,
        max_buffers: int,
    ) -> None:
        self._device, self._arena, self._allocate = device, arena, allocate
        self._buffer_bytes, self._max_buffers = buffer_bytes, max_buffers
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: deque[_Buffer] = deque()  # in the order they were sent
        self._oversized: _Buffer | None = None
        self._buffer: _Buffer | None = None  # that is being filled, with
        self._parcel = Parcel()
        self._values: list[tuple[Staged, torch.Size, torch.dtype, int]] = []
        self._end = 0
        self._numbers = Numbers()
        self._jobs: list[tuple[Staged, Job]] = []
        self._sources: dict[int, torch.cuda.Stream] = {}  # that all this is made on

    def copy(self, value: Tensor) -> Staged:
        """A value in the buffer that is being filled."""
        num_bytes = value.numel() * value.element_size()
        if self._buffer is not None and (
            self._end + num_bytes > self._buffer.memory.numel() or len(self._values) == _MAX_VALUES
        ):
            self.flush()
        with torch.cuda.device(self._device):
            if self._buffer is None:
                self._buffer, self._parcel, self._end = self._next_buffer(num_bytes), Parcel(), 0
            self._note_stream(self._buffer)
            start = self._end
            place = self._buffer.memory[start : start + num_bytes].view(value.dtype).view(value.shape)
            place.copy_(value)
            summarize(place, out=self._buffer.summaries[len(self._values), : len(FIELDS)])
        staged = Staged(parcel=self._parcel, num_bytes=num_bytes, place=len(self._values), lane=self)
        self._values.append((staged, value.shape, value.dtype, start))
        self._end += _aligned(num_bytes)
        return staged

    def when_sent(self, staged: Staged, facts: Iterable[Any], job: Job) -> None:
        """See ``Stager.when_sent``."""
        numbers = [f for f in facts if isinstance(f, Tensor) and f.dim() == 0 and f.device == self._device]
        if staged.tensor is not None and not numbers:
            job(None)
            return
        with torch.cuda.device(self._device):
            self._note_stream(self._buffer)
        for number in numbers:
            self._numbers.add(number)
        self._jobs.append((staged, job))

    def flush(self) -> None:
        """Send what there is."""
        if self._buffer is None and not self._jobs:
            return
        buffer, self._buffer = self._buffer, None
        numbers, self._numbers = self._numbers, Numbers()
        jobs, self._jobs = self._jobs, []
        sources, self._sources = self._sources, {}
        with torch.cuda.device(self._device):
            for source in sources.values():
                self._stream.wait_stream(source)
            with torch.cuda.stream(self._stream):
                numbers.send(pin=self._arena.is_pinned)
            # before waiting for memory, which those may hold that need no more than these numbers
            for staged, job in jobs:
                if staged.tensor is not None:
                    job(numbers)
            if buffer is not None:
                with torch.cuda.stream(self._stream):
                    waiting = [(staged, job) for staged, job in jobs if staged.tensor is None]
                    self._send(buffer)
                for _, job in waiting:
                    job(numbers)

    def _send(self, buffer: _Buffer) -> None:
        """Copy the values of a buffer to the host on the current stream, all in one piece."""
        parcel, values, self._values = self._parcel, self._values, []
        slot = parcel.slot = self._allocate(self._end)
        hosts = [self._arena.tensor(slot, shape, dtype, start=start) for _, shape, dtype, start in values]
        if slot.offset is None:  # larger than the arena
            for host, (_, _, _, start) in zip(hosts, values, strict=True):
                bytes_of(host).copy_(buffer.memory[start : start + host.numel() * host.element_size()])
        else:
            everything = self._arena.tensor(slot, torch.Size((self._end,)), torch.uint8)
            everything.copy_(buffer.memory[: self._end], non_blocking=True)
        summaries = torch.empty(
            (len(values), _SUMMARY_WIDTH), dtype=torch.float64, device="cpu", pin_memory=self._arena.is_pinned
        )
        parcel.summaries = summaries.copy_(buffer.summaries[: len(values)], non_blocking=True)
        parcel.arrived = buffer.arrived = _record(self._stream)
        for host, (staged, _, _, _) in zip(hosts, values, strict=True):
            staged.tensor = host
        if buffer.memory.numel() == self._buffer_bytes:
            self._sent.append(buffer)
        else:
            self._oversized = buffer

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        if num_bytes > self._buffer_bytes:
            if self._oversized is not None and self._oversized.arrived is not None:
                self._oversized.arrived.synchronize()
            self._oversized = None
            return _Buffer(self._device, num_bytes)
        if self._sent and (len(self._sent) == self._max_buffers or _has_arrived(self._sent[0])):
            return self._sent.popleft()
        return _Buffer(self._device, self._buffer_bytes)

    def _note_stream(self, buffer: _Buffer | None) -> None:
        """The current stream makes something that is to be sent."""
        stream = torch.cuda.current_stream()
        if stream.stream_id in self._sources:
            return
        self._sources[stream.stream_id] = stream
        if buffer is not None and buffer.arrived is not None:
            stream.wait_event(buffer.arrived)  # of what the buffer held before


def held_bytes(num_bytes: int) -> int:
    """What a value of so many bytes takes of an arena, at most."""
    return page_rounded(_aligned(num_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _has_arrived(buffer: _Buffer) -> bool:
    return buffer.arrived is None or bool(buffer.arrived.query())  # type: ignore[no-untyped-call]


def _identity(value: Tensor) -> _Identity | None:
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
