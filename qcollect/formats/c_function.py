"""A C function that the system's compiler makes for this processor, once; later processes load it from a cache folder.

Where there is no compiler, or the folder cannot be used, there is no function, and the reason: callers do without.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from qcollect.paths import cache_dir

_COMPILERS = ("cc", "gcc", "clang")
# Instructions of this processor, every operation rounded by itself, and no look at floating-point exceptions
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared")
_TIMEOUT_S = 120


class CFunction:
    """One function of a source file without a main program.

    Args:
        source: the file.
        name: of the function, which returns nothing.
        argument_types: of ``ctypes``.
        flags: of the compiler.
        wishes: more of them, left out where the compiler or this system cannot do it.
    """

    def __init__(
        self,
        source: Path,
        name: str,
        argument_types: tuple[Any, ...],
        *,
        flags: tuple[str, ...] = FLAGS,
        wishes: tuple[str, ...] = (),
    ) -> None:
        self.source, self.name, self.argument_types, self.flags = source, name, argument_types, flags
        self.wishes = wishes
        self._lock = threading.Lock()
        self._is_known = False
        self._reason = ""  # why there is none
        self.call: Callable[..., None] | None = None  # once it was prepared, if there is one

    def prepare(self) -> tuple[bool, str]:
        """Whether the function is there now, and if not why; compiles it if no cache holds it.

        Asked once, the answer is that of the whole process. Threads wait for the first.
        """
        if not self._is_known:
            with self._lock:
                if not self._is_known:
                    try:
                        self.call = self._find(cache_dir("compiled"))
                    except Exception as error:  # a compiler, a folder, the loader
                        self._reason = _describe(error)
                    self._is_known = True
        return self.call is not None, self._reason

    def _find(self, folder: Path) -> Callable[..., None]:
        if self.wishes:
            with suppress(OSError, subprocess.SubprocessError):
                return self._load_or_compile(folder, (*self.flags, *self.wishes))
        return self._load_or_compile(folder, self.flags)

    def _load_or_compile(self, folder: Path, flags: tuple[str, ...]) -> Callable[..., None]:
        path = folder / f"{self.source.stem}-{self._digest(flags)}.so"
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._compile(path, flags)
        function = ctypes.CDLL(str(path))[self.name]
        function.argtypes = self.argument_types
        function.restype = None
        return function

    def _compile(self, path: Path, flags: tuple[str, ...]) -> None:
        handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        try:
            subprocess.run(
                [*_compiler(), *flags, "-o", name, str(self.source)],
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

    def _digest(self, flags: tuple[str, ...]) -> str:
        """Names all that the library follows from: the source, how it is compiled, the system and the processor."""
        parts = (self.source.read_text(encoding="utf-8"), *flags)
        parts += (platform.system(), platform.machine(), processor())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def processor() -> str:
    """What code compiled for this processor may use: a home folder is often shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


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
