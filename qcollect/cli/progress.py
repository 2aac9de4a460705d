"""Progress on stderr: redrawn on a terminal, plain lines at a bounded rate elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from qcollect.data.prepare import PrepareProgress

PLAIN_INTERVAL_S = 2.0


class Display:
    """Shows the newest of a stream of states; the last one stays."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._last_line, self._last_at = "", float("-inf")

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, line: str, rendered: RenderableType | None = None) -> None:
        """``rendered`` (or ``line``) on a terminal; elsewhere ``line``, if it is new and 2 s have passed."""
        if self._live is not None:
            self._live.update(Text(line) if rendered is None else rendered, refresh=True)
        elif line != self._last_line and self._clock() - self._last_at >= PLAIN_INTERVAL_S:
            self._last_line, self._last_at = line, self._clock()
            self._console.print(Text(line))


class PrepareDisplay(Display):
    """The progress of ``data prepare``."""

    def update(self, progress: PrepareProgress) -> None:
        self.show(
            f"{progress.source.name}: {progress.done_frac:.0%}, {progress.num_documents:,} documents, "
            f"{progress.num_tokens:,} tokens"
        )
