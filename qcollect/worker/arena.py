"""Host memory that captured values wait in until they are written: allocated once, bounded, used again.

With a CUDA device the memory is page-locked, so that copies arrive at the full rate of the bus and nobody waits for
them; where that is refused it stays pageable, with a warning. It can be shared with another process.
"""

import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

_PAGE_BYTES = 4096


class Memory:
    """Zeroed memory; with ``is_shared`` another process of this user can map it.

    ``key`` is what others know it by: its open file in this process, below zero where it is not shared.
    """

    _local: ClassVar["weakref.WeakValueDictionary[int, Memory]"] = weakref.WeakValueDictionary()
    _keys: ClassVar["count[int]"] = count(1)

    def __init__(self, num_bytes: int, *, is_shared: bool = False) -> None:
        self.num_bytes = num_bytes
        self.key = os.memfd_create("qcollect") if is_shared else -next(self._keys)
        if is_shared:
            os.ftruncate(self.key, num_bytes)
            self.map = mmap.mmap(self.key, num_bytes)
        else:
            self.map = _map_alone(num_bytes)
        self._local[self.key] = self

    def __del__(self) -> None:
        if self.key >= 0:
            os.close(self.key)

    @classmethod
    def map_of(cls, key: int, num_bytes: int) -> mmap.mmap:
        """The memory of this process that has this key."""
        return cls._local[key].map


Maps = Callable[[int, int], mmap.mmap]  # memory by its key and size


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of the arena, or of memory of its own, for what is larger than the arena."""

    memory: Memory
    offset: int
    num_bytes: int


class Piece(NamedTuple):
    """A dense tensor in an arena, as a process tells another of it.

    Args:
        memory: the key and the size of the memory.
        offset: in it, in bytes.
    """

    memory: tuple[int, int]
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def open(self, maps: "Maps") -> torch.Tensor:
        """The tensor itself."""
        return _tensor(maps(*self.memory), self.shape, self.dtype, self.offset)


def _map_alone(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone: the system finds its pages sooner than those of memory that could be shared."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def can_share() -> bool:
    """Whether this system has memory that another process can map by its owner's file."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


class HostArena:
    """``num_bytes`` of memory, given out in pieces by one thread; who asks for more than is free waits.

    Args:
        num_bytes: of the whole.
        pin: page-lock it, for copies from a CUDA device.
        is_shared: so that another process can read what is in it.
        num_touched: bytes that are written to at once, so that nobody waits for the system to find them later.
    """

    def __init__(self, num_bytes: int, *, pin: bool = False, is_shared: bool = False, num_touched: int = 0) -> None:
        self.num_bytes = max(page_rounded(num_bytes), _PAGE_BYTES)
        self.waited_s = 0.0
        self.is_shared = is_shared
        self._memory = Memory(self.num_bytes, is_shared=is_shared)
        self._free = [(0, self.num_bytes)]  # by offset
        self._num_alone = 0
        self.is_pinned = pin and _page_lock(self._memory.map, self.num_bytes)
        if not self.is_pinned:
            _tensor(self._memory.map, (min(num_touched, self.num_bytes),), torch.uint8, 0).zero_()

    def allocate(self, num_bytes: int, wait: Callable[[], bool]) -> Slot:
        """A piece of so many bytes, once it is free; what does not fit at all gets memory of its own, one at a time.

        Args:
            wait: returns when something may have been released. False: nothing will be, since who asks has the rest;
                then this gets memory of its own, too.
        """
        slot = self.try_allocate(num_bytes)
        if slot is None:
            started = time.monotonic()
            while slot is None:
                slot = self.try_allocate(num_bytes) if wait() else self._allocate_alone(num_bytes)
            self.waited_s += time.monotonic() - started
        return slot

    def try_allocate(self, num_bytes: int) -> Slot | None:
        """``allocate``, if nobody has to wait for it."""
        size = page_rounded(num_bytes)
        if size > self.num_bytes:
            return None if self._num_alone else self._allocate_alone(num_bytes)
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i : i + 1] = [(offset + size, free - size)] if free > size else []
                return Slot(self._memory, offset, size)
        return None

    def _allocate_alone(self, num_bytes: int) -> Slot:
        self._num_alone += 1
        size = page_rounded(num_bytes)
        return Slot(Memory(size, is_shared=self.is_shared), 0, size)

    def tensor(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype, *, start: int = 0) -> torch.Tensor:
        """A dense tensor in the piece, from byte ``start`` on, whose storage is exactly its elements."""
        return _tensor(slot.memory.map, shape, dtype, slot.offset + start)

    def piece(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype, *, start: int = 0) -> Piece:
        """``tensor`` for others."""
        memory = slot.memory
        return Piece((memory.key, memory.num_bytes), slot.offset + start, tuple(shape), dtype)

    def release(self, slot: Slot) -> None:
        """Give a piece back; no tensor in it may be read afterwards."""
        if slot.memory is self._memory:
            self._merge(slot.offset, slot.num_bytes)
        else:
            self._num_alone -= 1

    def close(self) -> None:
        """Unlock the memory and let go of it: it goes when the last tensor in it has gone. Nothing may follow."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(self._memory.map))  # type: ignore[no-untyped-call]
        del self._memory  # whoever still knows the arena

    def _merge(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def page_rounded(num_bytes: int) -> int:
    """Up to whole pages."""
    return -(-max(num_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES


def _tensor(memory: mmap.mmap, shape: Sequence[int], dtype: torch.dtype, offset: int) -> torch.Tensor:
    num_elements = prod(shape)
    if num_elements == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=offset).view(tuple(shape))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _page_lock(memory: mmap.mmap, num_bytes: int) -> bool:
    result = torch.cuda.cudart().cudaHostRegister(_address(memory), num_bytes, 0)  # type: ignore[no-untyped-call]
    if int(result) == 0:
        return True
    warnings.warn(
        f"qcollect: {num_bytes:,} bytes of host memory cannot be page-locked (CUDA error {int(result)}); copies from "
        "the device will be several times slower. Set capture.host_memory_gb lower, or raise the limit (ulimit -l)",
        stacklevel=3,
    )
    return False
