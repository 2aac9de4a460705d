"""Starting Triton's kernels: what a launch needs is found once, and kept.

Triton works out at every launch which compiled kernel its arguments belong to, which takes longer than a small launch
itself. It is imported when a kernel is first started. Nothing here waits for the device.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Launch:
    """A kernel with those of its arguments that follow from the shape and dtype of tensors and from what is wanted.

    Args:
        module, name: where the kernel is, and its own name.
        numbers: its last arguments; constants among them.
        num_programs: how many start, unless a call says.
        fuses: whether a compiler may join a multiplication and an addition, which rounds once instead of twice.
        kept: what the keys by which others find this name by identity, kept alive.
    """

    module: str
    name: str
    numbers: tuple[object, ...]
    num_warps: int
    num_programs: int = 1
    max_registers: int | None = None
    fuses: bool = False
    kept: tuple[object, ...] = ()
    # by the device's index, and which of the tensors start at a multiple of 16 bytes, unless all do
    _compiled: dict[Any, tuple[Any, ...]] = field(default_factory=dict, init=False, repr=False)

    def start(
        self, tensors: Sequence[Tensor], numbers: tuple[int, ...] = (), *, num_programs: int | None = None
    ) -> None:
        """Starts it on the device of the first tensor.

        Args:
            tensors: the first arguments; all there.
            numbers: the next ones. They may differ from call to call, but Triton must compile the same for all
                (``do_not_specialize``, and none passes 2^31 that did not before).
        """
        index = tensors[0].device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.start(tensors, numbers, num_programs=num_programs)
        addresses, any_bits = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            any_bits |= address
        key = index if any_bits % 16 == 0 else (index, *(address % 16 == 0 for address in addresses))
        num_programs = self.num_programs if num_programs is None else num_programs
        if not self._start(key, index, addresses, numbers, num_programs):
            self._compile(key, tensors, numbers, num_programs)
        return None

    def start_known(
        self, index: int | None, addresses: Sequence[int], numbers: tuple[int, ...], num_programs: int | None = None
    ) -> bool:
        """``start`` by the addresses of the tensors, on the device of this index; whether it was compiled for such."""
        any_bits = 0
        for address in addresses:
            any_bits |= address
        if any_bits % 16 or (index is not None and index != torch.cuda.current_device()):
            return False
        return self._start(
            index, index, addresses, numbers, self.num_programs if num_programs is None else num_programs
        )

    def _start(
        self, key: object, index: int | None, addresses: Sequence[int], numbers: tuple[int, ...], num_programs: int
    ) -> bool:
        compiled = self._compiled.get(key)
        if compiled is None:
            return False
        run, function, metadata, stream_of = compiled
        stream = stream_of(index)
        run(num_programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *self.numbers)
        return True

    def _compile(self, key: object, tensors: Sequence[Tensor], numbers: tuple[int, ...], num_programs: int) -> None:
        """Starts it for the first time with tensors that lie so."""
        kernel = getattr(importlib.import_module(self.module), self.name)[(num_programs,)]
        options = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        found = kernel(
            *tensors, *numbers, *self.numbers, num_warps=self.num_warps, enable_fp_fusion=self.fuses, **options
        )
        if found is not None and tensors[0].device.type != "cpu":  # the interpreter compiles nothing
            from triton.runtime import driver

            self._compiled[key] = (found.run, found.function, found.packed_metadata, driver.active.get_current_stream)


def stream_key(device: torch.device) -> tuple[int | None, int] | None:
    """The current stream, for what is kept for its kernels; None while a graph is captured, which may run beside it."""
    if device.type != "cuda":
        return device.index, 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return device.index, torch._C._cuda_getCurrentRawStream(device.index)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether kernels can run there: on a CPU only in Triton's interpreter, chosen before the process started."""
    if device.type == "cuda":
        return has_triton()
    # Triton's own switch; asking Triton would import it
    return device.type == "cpu" and has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
