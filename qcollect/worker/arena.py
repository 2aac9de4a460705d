"""Host memory that captured values wait in until they are written: allocated once, bounded, used again.

With a CUDA device the memory is page-locked, so that copies arrive at the full rate of the bus and nobody waits for
them; where that is refused it stays pageable, with a warning.
"""

import mmap
import threading
import time
import warnings
from dataclasses import dataclass

import torch

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of the arena; without an offset memory of its own, for what is larger than the arena."""

    offset: int | None
    num_bytes: int


class HostArena:
    """``num_bytes`` of memory, given out in pieces; who asks for more than is free waits.

    Args:
        num_bytes: of the whole.
        pin: page-lock it, for copies from a CUDA device.
    """

    def __init__(self, num_bytes: int, *, pin: bool = False) -> None:
        self.num_bytes = max(page_rounded(num_bytes), _PAGE_BYTES)
        self.waited_s = 0.0
        self._memory = mmap.mmap(-1, self.num_bytes)
        self._free = [(0, self.num_bytes)]  # by offset
        self._num_oversized = 0
        self._changed = threading.Condition()
        self.is_pinned = pin and _page_lock(self._memory, self.num_bytes)

    def allocate(self, num_bytes: int) -> Slot:
        """A piece of so many bytes, once it is free; what does not fit at all gets memory of its own, one at a time."""
        size = page_rounded(num_bytes)
        with self._changed:
            slot = self._take(size, num_bytes)
            if slot is None:
                started = time.monotonic()
                while slot is None:
                    self._changed.wait()
                    slot = self._take(size, num_bytes)
                self.waited_s += time.monotonic() - started
            return slot

    def try_allocate(self, num_bytes: int) -> Slot | None:
        """``allocate``, if nobody has to wait for it."""
        with self._changed:
            return self._take(page_rounded(num_bytes), num_bytes)

    def tensor(self, slot: Slot, shape: torch.Size, dtype: torch.dtype, *, start: int = 0) -> torch.Tensor:
        """A dense tensor in the piece, from byte ``start`` on, whose storage is exactly its elements."""
        if slot.offset is None or shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=slot.offset + start)
        return flat.view(shape)

    def release(self, slot: Slot) -> None:
        """Give a piece back; no tensor in it may be read afterwards."""
        with self._changed:
            if slot.offset is None:
                self._num_oversized -= 1
            else:
                self._merge(slot.offset, page_rounded(slot.num_bytes))
            self._changed.notify_all()

    def close(self) -> None:
        """Unlock the memory; it goes when the last tensor in it has gone."""
        if self.is_pinned:
            self.is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(_address(self._memory))  # type: ignore[no-untyped-call]

    def _take(self, size: int, num_bytes: int) -> Slot | None:
        if size > self.num_bytes:
            if self._num_oversized:
                return None
            self._num_oversized += 1
            return Slot(None, num_bytes)
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i : i + 1] = [(offset + size, free - size)] if free > size else []
                return Slot(offset, num_bytes)
        return None

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
