"""A training script, run as its own program and ended without taking it apart.

What a script leaves behind is not freed: a model in ``DistributedDataParallel`` that is freed joins gloo's threads
while it holds the interpreter's lock, which one of them may be waiting for, to free what the last collective
remembered of Python; with torch 2.13 that hangs, or aborts while the interpreter ends (pytorch issues 56297 and
190489).
"""

import atexit
import gc
import io
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from qcollect.errors import ExitCode

_OPENED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # what ``open`` gives for writing

_left_behind: list[object] = []


def never_free(thing: object) -> None:
    """Keep something for as long as the process lives."""
    _left_behind.append(thing)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path arguments`` does.

    Raises:
        SystemExit: as the script does, unless it is to end with 0.
        BaseException: what the script raises.
    """
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        never_free(runpy.run_path(path, run_name="__main__"))
    except SystemExit as stop:
        never_free(stop)  # with the frames that it came through
        if stop.code not in (None, 0):
            raise


def finish() -> NoReturn:
    """End with 0: threads are waited for, exit handlers run and files written out, as when an interpreter ends.

    Its own tear-down after that is left out: with torch and transformers loaded it takes 1.4 s (measured).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # executors first, then what is no daemon
    atexit._run_exitfuncs()
    if _left_behind:  # there was a script: to look for its files takes 85 ms
        _flush_files()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ExitCode.OK)


def _flush_files() -> None:
    """Write out what the script has left open."""
    for found in gc.get_objects():
        if issubclass(type(found), _OPENED):
            with suppress(Exception):  # closed, or its disk is full
                found.flush()
