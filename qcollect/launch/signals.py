"""Signals that end a run, noted instead of obeyed while a run is supervised."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from qcollect.errors import QcollectError

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP inside the block, in the order they came; the old handlers come back after it.

    A SIGHUP that was ignored before (``nohup``, a detached run) stays ignored.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for signum in _STOPPING:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            self._before[signum] = _set_handler(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            # None: a handler that was not installed from Python cannot be put back
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def count(self, signum: signal.Signals) -> int:
        return self.received.count(signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))


def _set_handler(signum: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Any:
    try:
        return signal.signal(signum, handler)
    except ValueError as error:
        raise QcollectError("a run can be executed from a program's main thread only, where signals arrive") from error
