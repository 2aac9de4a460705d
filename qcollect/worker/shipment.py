"""A capture in memory, as the training thread tells writers of it, and what they do with it.

Writers are threads, or threads of another process that shares the memory: hence nothing but plain records here, and
pieces of memory by the keys they have.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from qcollect.errors import CaptureError
from qcollect.formats.quantized import ScaleCodes
from qcollect.store.summary import summarize
from qcollect.worker.arena import Maps, Piece
from qcollect.worker.saver import Observation, Saver, Source
from qcollect.worker.tokens import hash_tokens

T = TypeVar("T")
_POLL_S = 0.0003


class Arrival(NamedTuple):
    """Something that has arrived once a number in shared memory, which the device counts up, is ``number``."""

    counter: Piece
    number: int


class Number(NamedTuple):
    """A 0-dim tensor that comes with a shipment: element ``place`` of the numbers of a dtype.

    Args:
        consumer, name: the entry of ``Observation.consumers`` and the field of it that it is.
    """

    consumer: int
    name: str
    dtype: torch.dtype
    place: int


class Tokens(NamedTuple):
    """The first input of a micro-batch, which is still to be hashed; ``value_id`` as that of a ``Shipment``."""

    value_id: int
    value: Piece


class Shipment(NamedTuple):
    """One capture: where its parts lie, when they are there, and what is known of it.

    Args:
        ticket: what its sender knows it by.
        value_id: the same for captures that share a value.
        summary: as ``store.summary`` gives it; None: to be computed from the value.
        numbers: by dtype those that stand in ``facts``.
        facts: of the consumers of ``seen``, those that come as numbers.
        block_scales: those of ``seen`` and their micro exponents.
        tokens: whose hash ``seen`` has not; None: it has.
    """

    ticket: int
    arrival: Arrival | None
    value_id: int
    value: Piece
    summary: Piece | None
    numbers: Mapping[torch.dtype, Piece]
    facts: tuple[Number, ...]
    block_scales: tuple[Piece, ...] | None
    tokens: Tokens | None
    source: Source
    seen: Observation
    counter: int | None
    now: datetime

    def open(
        self, maps: Maps, summaries: "OfValues[list[float]]", hashes: "OfValues[str]"
    ) -> tuple[torch.Tensor, list[float], Observation]:
        """The value, its summary, and what is known of it, once all is there."""
        if self.arrival is not None:
            arrived = self.arrival.counter.open(maps)
            while int(arrived) < self.arrival.number:
                time.sleep(_POLL_S)
        value = self.value.open(maps)
        if self.summary is None:
            summary = summaries.of(self.value_id, value)
        else:
            summary = self.summary.open(maps).tolist()
        seen = self.seen
        if self.facts:
            numbers = {dtype: piece.open(maps).tolist() for dtype, piece in self.numbers.items()}
            consumers = [dict(consumer) for consumer in seen.consumers]
            for fact in self.facts:
                consumers[fact.consumer][fact.name] = numbers[fact.dtype][fact.place]
            seen = seen._replace(consumers=consumers)
        if self.block_scales is not None:
            scales, *micro = (piece.open(maps) for piece in self.block_scales)
            seen = seen._replace(block_scales=ScaleCodes(scales=scales, micro=tuple(micro)))
        if self.tokens is not None:
            token_hash = hashes.of(self.tokens.value_id, self.tokens.value.open(maps))
            seen = seen._replace(token_hash=token_hash)
        return value, summary, seen

    def encode(self) -> tuple[Any, ...]:
        """As plain tuples: pickle takes a tenth of the time for them."""
        return (
            self.ticket,
            self.arrival,
            self.value_id,
            tuple(self.value),
            None if self.summary is None else tuple(self.summary),
            self.numbers,
            tuple(map(tuple, self.facts)),
            self.block_scales,
            None if self.tokens is None else (self.tokens.value_id, tuple(self.tokens.value)),
            tuple(self.source),
            tuple(self.seen),
            self.counter,
            self.now,
        )

    @classmethod
    def decode(cls, fields: tuple[Any, ...]) -> Self:
        """What ``encode`` made."""
        found = cls(*fields)
        return found._replace(
            value=Piece(*found.value),
            summary=None if found.summary is None else Piece(*found.summary),
            facts=tuple(Number(*fact) for fact in found.facts),
            tokens=None if found.tokens is None else Tokens(found.tokens[0], Piece(*found.tokens[1])),
            source=Source(*found.source),
            seen=Observation(*found.seen),
        )


class Memories:
    """The shared memory of another process, mapped when it is first asked for; the last few mappings are kept."""

    _MAX_KEPT = 4

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._maps: dict[int, tuple[int, mmap.mmap]] = {}

    def __call__(self, key: int, num_bytes: int) -> mmap.mmap:
        path = Path(f"/proc/{self._owner}/fd/{key}")
        inode = path.stat().st_ino  # the number may be another file's by now
        found = self._maps.get(key)
        if found is None or found[0] != inode:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = inode, mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            while len(self._maps) >= self._MAX_KEPT:
                self._maps.pop(next(iter(self._maps)))
            self._maps[key] = found
        return found[1]


class OfValues(Generic[T]):
    """What follows from values and does not come with them, computed once, by whichever thread comes first."""

    _MAX_KEPT = 256

    def __init__(self, compute: Callable[[torch.Tensor], T]) -> None:
        self._compute = compute
        self._found: dict[int, tuple[threading.Lock, list[T]]] = {}
        self._lock = threading.Lock()

    def of(self, value_id: int, value: torch.Tensor) -> T:
        with self._lock:
            if value_id not in self._found and len(self._found) >= self._MAX_KEPT:
                self._found.pop(next(iter(self._found)))
            lock, found = self._found.setdefault(value_id, (threading.Lock(), []))
        with lock:
            if not found:
                found.append(self._compute(value))
            return found[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a capture: the bytes of its file, or why there is none. Neither: an earlier one failed.

    ``deduped_bytes``: as ``StoredFile`` has them.
    """

    ticket: int
    num_bytes: int = 0
    deduped_bytes: int | None = None
    error: Exception | None = None


class Scribe:
    """Has shipments written by a saver; several threads may at once.

    Args:
        maps: gives the memory that shipments lie in.
        goes_on: after a capture could not be written, others are.
        tell: gets the outcome of every shipment.
    """

    def __init__(self, saver: Saver, maps: Maps, *, goes_on: bool, tell: Callable[[Outcome], None]) -> None:
        self._saver, self._maps, self._goes_on, self._tell = saver, maps, goes_on, tell
        self._summaries = OfValues(_summary)
        self._hashes = OfValues(hash_tokens)
        self._has_failed = False

    def write(self, shipment: Shipment) -> None:
        """Write one capture and tell what became of it."""
        if self._has_failed:
            self._tell(Outcome(shipment.ticket))
            return
        try:
            value, summary, seen = shipment.open(self._maps, self._summaries, self._hashes)
            stored = self._saver.write(value, summary, shipment.source, seen, shipment.counter, shipment.now)
        except Exception as error:
            self._has_failed = not (self._goes_on and isinstance(error, CaptureError))
            self._tell(Outcome(shipment.ticket, error=error))
        else:
            self._tell(Outcome(shipment.ticket, stored.num_bytes, stored.deduped_bytes))


def _summary(value: torch.Tensor) -> list[float]:
    numbers: list[float] = summarize(value).tolist()
    return numbers
