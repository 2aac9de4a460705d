"""Random fractions on the CPU by a compiled function, ``random_compiled.c``, many times as fast as by torch."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from qcollect.formats.c_function import CFunction
from qcollect.formats.random import random_fractions

_FUNCTION = CFunction(
    Path(__file__).with_suffix(".c"),
    "qcollect_fill_fractions",
    (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p),
    wishes=("-fopenmp",),
)
_ELEMENTS_OF_A_THREAD = 1 << 14  # or more: to start one takes time, too


def prepare() -> tuple[bool, str]:
    """Whether the function is there now, and if not why; without it, or before this was called, torch does it."""
    return _FUNCTION.prepare()


def fill_fractions(out: Tensor, seed: int, first: int) -> Tensor:
    """``random_fractions`` of as many places as ``out`` has elements, from ``first`` on, written to it.

    Args:
        out: float32, contiguous, on the CPU; returned.
    """
    if _FUNCTION.call is None:
        return out.view(-1).copy_(random_fractions(seed, out.numel(), first=first)).view(out.shape)
    num_threads = min(torch.get_num_threads(), max(out.numel() // _ELEMENTS_OF_A_THREAD, 1))
    _FUNCTION.call(seed, first, out.numel(), num_threads, out.data_ptr())
    return out
