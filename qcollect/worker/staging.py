"""Captured values, fixed the moment they are seen and brought to the host without holding the training thread.

On a CUDA device a value is copied on the stream that made it, so that nothing done to it afterwards reaches the copy;
its statistics are computed from the copy on the same stream. Copies lie side by side in a buffer on the device. Once it
is full, or nothing more is to come, they are sent: another stream brings them to page-locked memory, all in one piece
(``Parcel``). A buffer is filled again when it has arrived, for which the device waits, not the host. On the CPU there
is one copy, and whoever writes it computes the statistics.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qcollect.store.summary import FIELDS, summarize
from qcollect.store.summary_cuda import Room, can_copy, max_shares, pending_summaries
from qcollect.store.summary_cuda import summarize as summarize_flat
from qcollect.worker.arena import HostArena, Piece, Slot, page_rounded
from qcollect.worker.content import Content
from qcollect.worker.saver import Observation, Source, plain_value
from qcollect.worker.shipment import Arrival, Number, Shipment, Tokens

BUFFER_BYTES = 128 << 20  # of a device's memory: enough for few sends, and soon there
MAX_BUFFERS = 4
_MAX_VALUES = 512  # of a buffer
_FACTS_BYTES = 4 << 20  # of numbers and summaries that wait
_ALIGNMENT = 64
_PREPARED_SHAPE = (128, 256)  # enough for several of a kernel's programs
_FROM_DEVICE = ("scale", "amax", "num_saturated")  # of what is said of a consumer
_SUMMARY_WIDTH = len(FIELDS) + len(FIELDS) % 2  # kernels want starts at multiples of 16 bytes


@dataclass(slots=True, eq=False)
class Parcel:
    """Host memory of what travels together, and how many need it still."""

    slots: list[tuple[HostArena, Slot]] = field(default_factory=list)
    num_users: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Staged:
    """A value in host memory, or on its way there; shared by all captures that saw it.

    Args:
        lane: from its device; None: it was here.
        piece: where it is, once it is sent.
        summary: where its summary is; None: nobody computed it.
    """

    value_id: int
    parcel: Parcel
    num_bytes: int
    lane: "_Lane | None" = None
    piece: Piece | None = None
    summary: Piece | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """A capture that is to be shipped as soon as its value is on its way.

    Args:
        scales: of the blocks of a quantized copy and their micro exponents, from a device.
        tokens: of the micro-batch, from a device.
        facts: numbers of the metadata that come from a device.
        parcels: what its shipment is in; to be released once it is written.
    """

    ticket: int
    staged: Staged
    source: Source
    seen: Observation
    counter: int | None
    now: datetime
    scales: tuple[Staged, ...] | None = None
    tokens: Staged | None = None
    facts: tuple[Number, ...] = ()
    parcels: list[Parcel] = field(default_factory=list)

    @property
    def is_placed(self) -> bool:
        """Whether all that comes as values has its place in host memory."""
        values = (self.staged, self.tokens, *(self.scales or ()))
        return all(staged is None or staged.piece is not None for staged in values)

    def ship(self, arrival: Arrival | None = None, numbers: Mapping[torch.dtype, Piece] | None = None) -> Shipment:
        """What writers are told."""
        staged, scales, tokens = self.staged, self.scales, self.tokens
        assert staged.piece is not None
        # in the order of the fields
        return Shipment(
            self.ticket,
            arrival,
            staged.value_id,
            staged.piece,
            staged.summary,
            numbers or {},
            self.facts,
            None if scales is None else tuple(s.piece for s in scales if s.piece is not None),
            None if tokens is None or tokens.piece is None else Tokens(tokens.value_id, tokens.piece),
            self.source,
            self.seen,
            self.counter,
            self.now,
        )


Ship = Callable[[list[Shipment]], None]


class Stager:
    """Brings captured values to an arena and ships them. One thread at a time.

    Args:
        arena: for values. Where it is not shared with another process, those on a device are copied at once.
        ship: gets captures whose values are on their way.
        wait: returns when something was released (``release``); False: nothing that is shipped is still to be.
        buffer_bytes, max_buffers: of the memory that is taken on each device; values that are larger than a buffer have
            one more, as large as the largest, which the device waits for, too.
    """

    def __init__(
        self,
        arena: HostArena,
        *,
        ship: Ship,
        wait: Callable[[], bool],
        buffer_bytes: int = BUFFER_BYTES,
        max_buffers: int = MAX_BUFFERS,
    ) -> None:
        self.arena = arena
        self.num_shared = 0
        self._ship, self._wait = ship, wait
        self._sizes = min(buffer_bytes, arena.num_bytes // 2), max_buffers
        self._seen: dict[int, tuple[Content, Staged]] = {}  # by address
        self._tokens: tuple[Tensor, Staged] | None = None
        self._lanes: dict[torch.device, _Lane] = {}
        self._facts: HostArena | None = None
        self._value_ids = count()

    @property
    def waited_s(self) -> float:
        """How long it has waited for memory."""
        return self.arena.waited_s + (0.0 if self._facts is None else self._facts.waited_s)

    def prepare(self, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        """Bring a few values the way of those to come: what the first would wait for is compiled, and there, then."""
        zeros = [torch.zeros(_PREPARED_SHAPE, dtype=dtype, device=device) for dtype in dtypes]
        # as activations lie, and as an attention kernel's
        values = [value for zero in zeros for value in (zero, zero.clone().t()) if self.travels(value)]
        for value in values:
            _release(self.stage(value).parcel)
        if values:
            self.forget()
            torch.cuda.synchronize(device)

    def travels(self, value: Tensor) -> bool:
        """Whether a value comes here without anybody waiting for its device."""
        return value.device.type == "cuda" and self.arena.is_shared

    def stage(self, tensor: Tensor) -> Staged:
        """The value of ``tensor`` now, for one capture.

        The same memory, unchanged since it was staged for another capture, is not copied again.
        """
        value = plain_value(tensor)
        known = self._find(value)
        if known is not None:
            self.num_shared += 1
            known.parcel.num_users += 1
            return known
        staged = self._lane(value.device).copy(value) if self.travels(value) else self._copy_now(value)
        staged.parcel.num_users += 1
        self._remember(value, staged)
        return staged

    def submit(self, order: Order, tokens: Tensor | None = None) -> None:
        """Ship it when its value, and what else its metadata need from the device, is on its way.

        Args:
            tokens: see ``CaptureEngine.submit``.
        """
        order.parcels.append(order.staged.parcel)
        lane, scales = order.staged.lane, order.seen.block_scales
        if tokens is not None:
            order.tokens = self._stage_tokens(tokens)
            order.parcels.append(order.tokens.parcel)
            lane = lane or order.tokens.lane
        if lane is None:
            self._ship([order.ship()])
            return
        if scales is not None:
            order.scales = tuple(self.stage(codes) for codes in (scales.scales, *scales.micro))
            order.parcels += [staged.parcel for staged in order.scales]
            order.seen = order.seen._replace(block_scales=None)
        lane.submit(order)

    def release(self, order: Order) -> None:
        """It is written: what nobody needs any more gives its memory back."""
        for parcel in order.parcels:
            _release(parcel)

    def forget(self) -> None:
        """Values staged before are sent, and not shared with captures to come."""
        for lane in self._lanes.values():
            lane.flush()
        self._forget_seen()

    def close(self) -> None:
        """Give all memory back; nothing may be on its way."""
        self._lanes.clear()
        for arena in (self.arena, self._facts):
            if arena is not None:
                arena.close()

    def _stage_tokens(self, tokens: Tensor) -> Staged:
        """``stage`` for what comes with all captures of a micro-batch, and is the same tensor each time."""
        if self._tokens is None or self._tokens[0] is not tokens:
            staged = self.stage(tokens)
            self._forget_tokens()
            self._tokens = tokens, staged
        known = self._tokens[1]
        known.parcel.num_users += 1
        return known

    def _forget_tokens(self) -> None:
        known, self._tokens = self._tokens, None
        if known is not None:
            _release(known[1].parcel)

    def _forget_seen(self) -> None:
        self._forget_tokens()
        seen, self._seen = self._seen, {}
        for *_, staged in seen.values():
            _release(staged.parcel)

    def _find(self, value: Tensor) -> Staged | None:
        found = self._seen.get(value.data_ptr())
        if found is None:
            return None
        content, staged = found
        if content.is_of(value):
            return staged
        del self._seen[value.data_ptr()]  # changed, or the memory is another's by now
        _release(staged.parcel)
        return None

    def _remember(self, value: Tensor, staged: Staged) -> None:
        content = Content.of(value)
        if content is not None:
            staged.parcel.num_users += 1  # this memory of it
            self._seen[value.data_ptr()] = content, staged

    def _allocate(self, parcel: Parcel, num_bytes: int, before_waiting: Callable[[], None] = lambda: None) -> Slot:
        slot = self.arena.try_allocate(num_bytes)
        if slot is None:
            before_waiting()
            self.forget()  # what waits here, for others to share it or to be shipped, would never be given back
            slot = self.arena.allocate(num_bytes, self._wait)
        parcel.slots.append((self.arena, slot))
        return slot

    def _copy_now(self, value: Tensor) -> Staged:
        num_bytes, parcel = value.numel() * value.element_size(), Parcel()
        slot = self._allocate(parcel, num_bytes)
        self.arena.tensor(slot, value.shape, value.dtype).copy_(value)
        piece = self.arena.piece(slot, value.shape, value.dtype)
        return Staged(value_id=next(self._value_ids), parcel=parcel, num_bytes=num_bytes, piece=piece)

    def _lane(self, device: torch.device) -> "_Lane":
        if device not in self._lanes:
            if self._facts is None:
                self._facts = HostArena(_FACTS_BYTES, pin=self.arena.is_pinned, is_shared=True)
            self._lanes[device] = _Lane(
                device, self.arena, self._facts, self._allocate, self._ship, self._wait, self._value_ids, *self._sizes
            )
        return self._lanes[device]


class _Buffer:
    """Device memory of a parcel: its values, and the summaries of them."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.memory = torch.empty(_aligned(num_bytes), dtype=torch.uint8, device=device)
        self.num_bytes = self.memory.numel()
        self.rows = torch.empty((_MAX_VALUES, _SUMMARY_WIDTH), dtype=torch.float64, device=device)
        self.summaries = [row[: len(FIELDS)] for row in self.rows.unbind()]
        self.pending = pending_summaries(device, max_shares(self.num_bytes, _MAX_VALUES))
        self.arrived: torch.cuda.Event | None = None


class _Lane:
    """From one device to the host: buffers that are filled, sent, and filled again.

    Args:
        values, facts: memory for values, and for all that is small.
        allocate: gives a piece of ``values``; before it waits, it calls what it is given.
    """

    def __init__(
        self,
        device: torch.device,
        values: HostArena,
        facts: HostArena,
        allocate: Callable[[Parcel, int, Callable[[], None]], Slot],
        ship: Ship,
        wait: Callable[[], bool],
        value_ids: "count[int]",
        buffer_bytes: int,
        max_buffers: int,
    ) -> None:
        self._device, self._values_arena, self._facts, self._value_ids = device, values, facts, value_ids
        self._allocate, self._ship, self._wait = allocate, ship, wait
        self._buffer_bytes, self._max_buffers = buffer_bytes, max_buffers
        self._stream, self._signals = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._sent: deque[_Buffer] = deque()  # in the order they were sent
        self._oversized: _Buffer | None = None
        self._num_arrivals = 0
        with torch.cuda.stream(self._signals):
            self._arrivals = torch.zeros((), dtype=torch.int64, device=device)
        counter = facts.allocate(_ALIGNMENT, wait)
        self._counter = facts.tensor(counter, (), torch.int64)
        self._counter_piece = facts.piece(counter, (), torch.int64)
        # what is being filled
        self._buffer: _Buffer | None = None
        self._parcel = Parcel()
        self._values: list[tuple[Staged, torch.Size, torch.dtype, int]] = []
        self._end = 0
        self._orders: list[Order] = []
        self._numbers: dict[torch.dtype, list[Tensor]] = {}
        self._sources: dict[int, torch.cuda.Stream] = {}  # streams that all this is made on
        self._writers: set[int] = set()  # those among them that wrote to the buffer
        self._under_way: deque[tuple[torch.cuda.Event, Any]] = deque()  # what the other stream reads until then

    def copy(self, value: Tensor) -> Staged:
        """A value in the buffer that is being filled."""
        num_bytes = value.numel() * value.element_size()
        buffer, start = self._buffer, self._end
        if buffer is not None and (start + num_bytes > buffer.num_bytes or len(self._values) == _MAX_VALUES):
            self.flush()
            buffer = None
        if buffer is None:
            self._buffer = buffer = self._next_buffer(num_bytes)
            self._end = start = 0
            self._writers.clear()
        raw = self._note_stream()
        if raw not in self._writers:
            self._writers.add(raw)
            if buffer.arrived is not None:  # what the buffer held before
                self._sources[raw].wait_event(buffer.arrived)
        summary, room = buffer.summaries[len(self._values)], Room(buffer.memory, start)
        if can_copy(value):
            summarize_flat(value, summary, pending=buffer.pending, room=room)
        else:
            flat = room.view(value.numel(), value.dtype)
            flat.view(value.shape).copy_(value)
            summarize(flat, summary, buffer.pending)
        staged = Staged(value_id=next(self._value_ids), parcel=self._parcel, num_bytes=num_bytes, lane=self)
        self._values.append((staged, value.shape, value.dtype, start))
        self._end = start + _aligned(num_bytes)
        return staged

    def submit(self, order: Order) -> None:
        """See ``Stager.submit``."""
        self._note_stream()
        if order.seen.consumers:
            order.facts = self._take_numbers(order.seen.consumers)
        self._orders.append(order)

    def flush(self) -> None:
        """Send what there is."""
        if self._buffer is None and not self._orders:
            return
        buffer, self._buffer = self._buffer, None
        parcel, self._parcel = self._parcel, Parcel()
        values, self._values = self._values, []
        orders, self._orders = self._orders, []
        sources, self._sources = self._sources, {}
        tensors, self._numbers = self._numbers, {}
        while self._under_way and _is_over(self._under_way[0][0]):
            self._under_way.popleft()
        for order in orders:
            order.parcels.append(parcel)
        parcel.num_users += len(orders)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for source in sources.values():
                self._stream.wait_stream(source)
            numbers = self._send_facts(parcel, tensors, buffer, [staged for staged, *_ in values])

            def ship_ready() -> None:
                """Those that need no more than the numbers: they may hold the memory that is waited for."""
                nonlocal orders
                ready = [order for order in orders if order.is_placed]
                orders = [order for order in orders if not order.is_placed]
                if ready:
                    arrival, _ = self._arrive()
                    self._ship([order.ship(arrival, numbers) for order in ready])

            if buffer is not None:
                self._send_values(self._allocate(parcel, self._end, ship_ready), buffer, values)
            arrival, event = self._arrive()
        self._under_way.append((event, tensors))
        if orders:
            self._ship([order.ship(arrival, numbers) for order in orders])
        if buffer is None:
            return
        buffer.arrived = event
        if buffer is not self._oversized:
            self._sent.append(buffer)

    def _take_numbers(self, consumers: Sequence[dict[str, Any]]) -> tuple[Number, ...]:
        """Have each 0-dim tensor among what is said of consumers sent."""
        found = []
        for place, consumer in enumerate(consumers):
            for name in _FROM_DEVICE:
                fact = consumer.get(name)
                if isinstance(fact, Tensor) and fact.device == self._device:
                    tensors = self._numbers.setdefault(fact.dtype, [])
                    found.append(Number(place, name, fact.dtype, len(tensors)))
                    tensors.append(fact)
                    consumer[name] = None
        return tuple(found)

    def _send_facts(
        self,
        parcel: Parcel,
        numbers: Mapping[torch.dtype, list[Tensor]],
        buffer: _Buffer | None,
        staged: list[Staged],
    ) -> dict[torch.dtype, Piece]:
        """Copy summaries and numbers to the host; where the numbers will be."""
        found = {dtype: torch.stack(tensors) for dtype, tensors in numbers.items()}
        summaries = None
        if buffer is not None:
            buffer.pending.finish()
            summaries = buffer.rows[: len(staged)]
        parts = [*found.values(), *([] if summaries is None else [summaries])]
        sizes = [_aligned(part.numel() * part.element_size()) for part in parts]
        slot = self._facts.allocate(sum(sizes), self._wait)
        parcel.slots.append((self._facts, slot))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        for part, start in zip(parts, starts, strict=True):
            self._facts.tensor(slot, part.shape, part.dtype, start=start).copy_(part, non_blocking=True)
        for row, one in enumerate(staged):
            start = starts[-1] + row * _SUMMARY_WIDTH * 8
            one.summary = self._facts.piece(slot, (len(FIELDS),), torch.float64, start=start)
        return {
            dtype: self._facts.piece(slot, part.shape, dtype, start=start)
            for (dtype, part), start in zip(found.items(), starts, strict=False)
        }

    def _send_values(
        self, slot: Slot, buffer: _Buffer, values: list[tuple[Staged, torch.Size, torch.dtype, int]]
    ) -> None:
        """Copy the values of a buffer to the host, all in one piece."""
        host = self._values_arena.tensor(slot, (self._end,), torch.uint8)
        host.copy_(buffer.memory[: self._end], non_blocking=True)
        for staged, shape, dtype, start in values:
            staged.piece = self._values_arena.piece(slot, shape, dtype, start=start)

    def _arrive(self) -> tuple[Arrival, torch.cuda.Event]:
        """When all that was sent so far will be there: on the device's counter, which others can read, and an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._num_arrivals += 1
        # by another stream: what is before an event can be seen by the host once that is over, and only then counts
        self._signals.wait_event(event)
        with torch.cuda.stream(self._signals):
            self._counter.copy_(self._arrivals.add_(1), non_blocking=True)
        return Arrival(self._counter_piece, self._num_arrivals), event

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        if num_bytes > self._buffer_bytes:
            last = self._oversized
            if last is not None and last.num_bytes >= num_bytes:
                return last
            if last is not None and last.arrived is not None:
                self._under_way.append((last.arrived, last))  # what is in it is still read
            self._oversized = _Buffer(self._device, num_bytes)
            return self._oversized
        if self._sent and (len(self._sent) == self._max_buffers or _is_over(self._sent[0].arrived)):
            return self._sent.popleft()
        return _Buffer(self._device, self._buffer_bytes)

    def _note_stream(self) -> int:
        """The current stream, which makes something that is to be sent."""
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # at a tenth of the time
        if raw not in self._sources:
            self._sources[raw] = torch.cuda.current_stream(self._device)
        return raw


def held_bytes(num_bytes: int) -> int:
    """What a value of so many bytes takes of an arena, at most."""
    return page_rounded(_aligned(num_bytes))


def _release(parcel: Parcel) -> None:
    parcel.num_users -= 1
    if parcel.num_users == 0:
        for arena, slot in parcel.slots:
            arena.release(slot)
        parcel.slots.clear()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _is_over(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]
