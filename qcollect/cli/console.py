"""The consoles: results on stdout, progress and messages on stderr; and how an error is shown.

A text is shown as it is: no markup, no wrapping off a terminal, and control characters, which could
come from a file or an exception, as their escapes.
"""

import json
import sys
from contextlib import suppress
from typing import IO, Any, cast

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class _Stderr:
    """``sys.stderr`` of the moment; where nobody reads any more (a closed terminal or pipe) the work goes on."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    @property
    def rich_proxied_file(self) -> "_Stderr":
        """What Rich writes to while it has put a proxy in the place of ``sys.stderr``."""
        return self

    @property
    def _stream(self) -> IO[str]:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


err = Console(file=cast(IO[str], _Stderr()), highlight=False, markup=False, soft_wrap=True, emoji=False)
out = Console(highlight=False, markup=False, soft_wrap=True, emoji=False)

_UNBOUNDED = 1 << 16


def print_json(value: Any) -> None:
    """One JSON document on stdout, never with NaN."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_table(*headers: str) -> Table:
    """An empty table with a header for each column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header)
    return table


def fits(table: Table) -> bool:
    """Whether every row of the table fits on a line; always, off a terminal."""
    return not out.is_terminal or _natural_width(table) <= out.width


def print_table(table: Table) -> None:
    """A table on stdout; off a terminal as wide as it needs, a line a row."""
    if out.is_terminal:
        out.print(table)
        return
    for line in out.render_lines(table, out.options.update(width=_natural_width(table)), pad=False):
        typer.echo("".join(segment.text for segment in line).rstrip())


def _natural_width(table: Table) -> int:
    return Measurement.get(out, out.options.update(width=_UNBOUNDED), table).maximum


def note(text: str) -> None:
    """A message on stderr."""
    err.print(Text(_printable(text)))


def warn(text: str) -> None:
    err.print(Text.assemble(("warning: ", "yellow"), _printable(text)))


def fail(text: str, exit_code: int) -> typer.Exit:
    """Show an error; raise what this returns."""
    err.print(Text.assemble(("error: ", "bold red"), _printable(text)))
    return typer.Exit(int(exit_code))


def _printable(text: str) -> str:
    """``text`` with its line ends, without control characters."""
    from qcollect.monitor.render import printable

    return "\n".join(printable(line) for line in text.splitlines())
