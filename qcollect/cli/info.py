"""``qcollect formats`` and ``qcollect env``."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from qcollect.cli.console import out, print_json

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def formats(json: Json = False) -> None:
    """Print the number formats: bits, block, scale, range, special values, source.

    Example: qcollect formats
    """
    from qcollect.formats.catalog import HEADERS, QUANT_TYPES, describe, rows

    if json:
        print_json([describe(name) for name in QUANT_TYPES])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in HEADERS:
        table.add_column(column, overflow="fold")
    for row in rows():
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def env(json: Json = False) -> None:
    """Print versions, devices and the rank that would be detected, for a bug report.

    Example: qcollect env > report.txt
    """
    from qcollect.host.facts import environment_report
    from qcollect.launch.inspect import describe_devices

    report = {**environment_report(), **describe_devices()}
    if json:
        print_json(report)
        return
    for key, value in report.items():
        if isinstance(value, dict):
            typer.echo(f"{key}:")
            for name, item in value.items():
                typer.echo(f"  {name}: {'not installed' if item is None else item}")
        elif isinstance(value, list):
            typer.echo(f"{key}: {', '.join(map(str, value)) or 'none'}")
        else:
            typer.echo(f"{key}: {value}")
