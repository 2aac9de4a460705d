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
UNCHANGED_INTERVAL_S = 30.0


class Display:
    """Shows the newest of a stream of states, while it lasts."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._last: tuple[str, object] = ("", None)
        self._last_at = float("-inf")

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

    def show(self, line: str, rendered: RenderableType | None = None, *, key: object = None) -> None:
        """The newest state: ``rendered`` (or ``line``) on a terminal; elsewhere ``line``, if it is new.

        Args:
            key: what makes a line worth printing; None: the line. A new key is printed once 2 s have passed
                since the last line, another line under the same key (a rate, a loss) after 30 s.
        """
        if self._live is not None:
            self._live.update(Text(line) if rendered is None else rendered, refresh=True)
            return
        new = (line, line if key is None else key)
        interval_s = PLAIN_INTERVAL_S if new[1] != self._last[1] else UNCHANGED_INTERVAL_S
        if new[0] != self._last[0] and self._clock() - self._last_at >= interval_s:
            self._last, self._last_at = new, self._clock()
            self._console.print(Text(line))

    def print_line(self, line: str) -> None:
        """A line that stays, above what is redrawn."""
        (self._console if self._live is None else self._live.console).print(Text(line))


class PrepareDisplay(Display):
    """The progress of ``data prepare``."""

    def update(self, progress: PrepareProgress) -> None:
        self.show(
            f"{progress.source.name}: {progress.done_frac:.0%}, {progress.num_documents:,} documents, "
            f"{progress.num_tokens:,} tokens"
        )
