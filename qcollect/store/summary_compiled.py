"""The summary of a tensor on the CPU by a compiled function: one pass over memory, without the interpreter's lock.

The function is ``summary_compiled.c``. The system's C compiler makes a library of it the first time that a summary is
asked for, which takes less than a second, and later processes load that from the user's cache folder. Where there is no
compiler, ``summary_cpu`` does the same by torch, several times more slowly, with other last digits of sums.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qcollect.formats.compiled import processor
from qcollect.paths import cache_dir

_SOURCE_PATH = Path(__file__).with_suffix(".c")
_COMPILERS = ("cc", "gcc", "clang")
# Instructions of this processor, every operation rounded by itself, and no look at floating-point exceptions
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared")
_TIMEOUT_S = 120
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Numbers = ctypes.c_double * 9

Function = Callable[[int, int, int, "ctypes.Array[ctypes.c_double]"], None]


class _Loaded:
    """The function of this process, once it has been asked for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_known = False
        self.function: Function | None = None
        self.reason = ""  # why there is none


_loaded = _Loaded()


def prepare() -> tuple[bool, str]:
    """Whether the function is there now, and if not why; compiles it if no cache holds it.

    The first summary does the same. Asked once, the answer is that of the whole process. Threads wait for the first.
    """
    if not _loaded.is_known:
        with _loaded.lock:
            if not _loaded.is_known:
                try:
                    _loaded.function = load_or_compile(cache_dir("compiled"))
                except Exception as error:  # a compiler, a folder, the loader: torch does without
                    _loaded.reason = _describe(error)
                _loaded.is_known = True
    return _loaded.function is not None, _loaded.reason


def summarize(flat: Tensor) -> tuple[float, ...] | None:
    """What ``summary.FIELDS`` names; None where ``summary_cpu`` is to do it.

    Args:
        flat: one dimension, on the CPU, elements side by side, any dtype.
    """
    kind = _KINDS.get(flat.dtype)
    # a subclass may have no memory of its own
    if kind is None or type(flat) is not Tensor or flat.data_ptr() % flat.element_size() or not prepare()[0]:
        return None
    assert _loaded.function is not None
    numbers = _Numbers()
    _loaded.function(flat.data_ptr(), flat.numel(), kind, numbers)
    return tuple(numbers)


def load_or_compile(folder: Path) -> Function:
    """The function from a library in a folder, which is made if it is not there.

    Raises:
        OSError: the folder or the library in it cannot be used, or there is no compiler.
        subprocess.SubprocessError: the compiler failed.
    """
    path = folder / f"summary-{_digest()}.so"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(path)
    function = ctypes.CDLL(str(path)).qcollect_summarize
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, _Numbers)
    function.restype = None
    return function


def _compile(path: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*_compiler(), *_FLAGS, "-o", name, str(_SOURCE_PATH)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
        Path(name).replace(path)  # another process sees all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)


def _compiler() -> list[str]:
    """The command of the user's (CC) or the system's C compiler."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise FileNotFoundError(f"no C compiler: none of {', '.join(_COMPILERS)} is on the PATH, and CC is not set")


def _describe(error: Exception) -> str:
    """One line; of a compiler that failed, the last that it said."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (said or str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def _digest() -> str:
    """Names all that the library follows from: the source, how it is compiled, the system and the processor."""
    parts = (_SOURCE_PATH.read_text(encoding="utf-8"), *_FLAGS, platform.system(), platform.machine(), processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
