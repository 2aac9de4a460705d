"""The summary of a tensor on the CPU by a compiled function: one pass over memory, without the interpreter's lock.

The function is ``summary_compiled.c``. The system's C compiler makes a library of it the first time that a summary is
asked for, which takes less than a second, and later processes load that from the user's cache folder. Where there is no
compiler, ``summary_cpu`` does the same by torch, several times more slowly, with other last digits of sums.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from qcollect.formats.c_function import CFunction

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Numbers = ctypes.c_double * 9

_FUNCTION = CFunction(
    Path(__file__).with_suffix(".c"),
    "qcollect_summarize",
    (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, _Numbers),
)


def prepare() -> tuple[bool, str]:
    """Whether the function is there now, and if not why; the first summary asks the same."""
    return _FUNCTION.prepare()


def summarize(flat: Tensor) -> tuple[float, ...] | None:
    """What ``summary.FIELDS`` names; None where ``summary_cpu`` is to do it.

    Args:
        flat: one dimension, on the CPU, elements side by side, any dtype.
    """
    kind = _KINDS.get(flat.dtype)
    # a subclass may have no memory of its own
    if kind is None or type(flat) is not Tensor or flat.data_ptr() % flat.element_size() or not prepare()[0]:
        return None
    assert _FUNCTION.call is not None
    numbers = _Numbers()
    _FUNCTION.call(flat.data_ptr(), flat.numel(), kind, numbers)
    return tuple(numbers)
