"""SIGUSR1, by which somebody outside asks for captures."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from qcollect.errors import UsageError


class CaptureSignal:
    """SIGUSR1 inside the block is noted instead of obeyed; the handler of before comes back after it.

    Not ``enabled``, nothing is done and nothing comes.

    Raises:
        UsageError: on entering, where the system has no such signal, or outside a program's main thread.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.was_received = False
        self._is_enabled = enabled
        self._before: Any = None

    def __enter__(self) -> Self:
        if not self._is_enabled:
            return self
        if not hasattr(signal, "SIGUSR1"):
            raise UsageError("trigger 'signal' waits for SIGUSR1, which this system does not have; wait for another")
        try:
            self._before = signal.signal(signal.SIGUSR1, self._note)
        except ValueError:
            raise UsageError(
                "trigger 'signal' waits for SIGUSR1, which arrives in a program's main thread only; enter the context "
                "there, or wait for another"
            ) from None
        signal.siginterrupt(signal.SIGUSR1, False)  # what a library waits for in C goes on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_enabled:
            # None: a handler that was not installed from Python cannot be put back
            signal.signal(signal.SIGUSR1, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.was_received = True
