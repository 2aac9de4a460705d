"""The consoles: results on stdout, progress and messages on stderr; and how an error is shown."""

import json
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, emoji=False)
out = Console(highlight=False, markup=False, soft_wrap=True, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout, never with NaN."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def note(text: str) -> None:
    """A message on stderr, as it stands."""
    err.print(Text(text))


def warn(text: str) -> None:
    err.print(Text.assemble(("warning: ", "yellow"), text))


def fail(text: str, exit_code: int) -> typer.Exit:
    """Show an error; raise what this returns."""
    err.print(Text.assemble(("error: ", "bold red"), text))
    return typer.Exit(int(exit_code))
