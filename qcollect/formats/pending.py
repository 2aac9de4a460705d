"""What kernels have counted of many tensors, put together later by one launch: on a host that is busy each costs."""

from collections.abc import Callable

import torch
from torch import Tensor

Finish = Callable[[Tensor, Tensor], None]

_NUM_VIEWS = 4096


class PendingShares:
    """Memory of a device in which programs of kernels leave their shares of what is counted until ``finish``.

    All on one stream, on which it is finished, too.

    Args:
        finish: launches the kernel that puts them together, with the memory and a row of facts for each tensor.
        num_numbers: of the memory, in float64 numbers.
    """

    def __init__(self, finish: Finish, device: torch.device, num_numbers: int) -> None:
        self._finish = finish
        self._rows: list[tuple[int, ...]] = []
        self._end = 0
        self._set_memory(torch.empty(num_numbers, dtype=torch.float64, device=device))

    def _set_memory(self, memory: Tensor) -> None:
        self._memory, self._size, self._address = memory, memory.numel(), memory.data_ptr()
        self._views: dict[tuple[int, int], Tensor] = {}  # the same ones in every iteration

    def take(self, num_numbers: int, out: Tensor, *facts: int) -> Tensor:
        """Memory for a tensor's shares; what waits is finished first, if there is no more room.

        An even number is taken, since kernels want starts at multiples of 16 bytes.

        Args:
            out: float64, contiguous, at a multiple of 16 bytes, where the result is to be; on the memory's device, and
                kept until then.
            facts: what the row says, after where shares and result are.
        """
        return self.view(self.take_address(num_numbers, out, *facts), num_numbers)

    def take_address(self, num_numbers: int, out: Tensor, *facts: int) -> int:
        """``take`` without making a tensor: where its memory is."""
        size = num_numbers + num_numbers % 2
        if self._end + size > self._size:
            self.make_room(size)
        start, address = self._end, self._address
        self._end = start + size
        self._rows.append((start, (out.data_ptr() - address) // 8, *facts))
        return address + 8 * start

    def view(self, address: int, num_numbers: int) -> Tensor:
        """What ``take_address`` gave last or before, as a tensor; nothing was finished since."""
        start = (address - self._address) // 8
        view = self._views.get((start, num_numbers))
        if view is None:
            if len(self._views) >= _NUM_VIEWS:
                self._views.clear()
            view = self._views[start, num_numbers] = self._memory[start : start + num_numbers]
        return view

    def make_room(self, num_numbers: int) -> None:
        """What waits is finished, unless there is room for so many more: for what one launch takes in several pieces.

        Args:
            num_numbers: of all pieces, each with its number rounded up to an even one.
        """
        if self._end + num_numbers <= self._size:
            return
        self.finish()
        if num_numbers > self._size:
            self._set_memory(self._memory.new_empty(num_numbers))

    def finish(self) -> None:
        """Have the results put where they are to be."""
        if not self._rows:
            return
        is_cuda = self._memory.device.type == "cuda"
        rows = torch.tensor(self._rows, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._rows.clear()
        self._end = 0
        self._finish(self._memory, rows.to(self._memory.device, non_blocking=True))
