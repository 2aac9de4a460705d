"""``qcollect formats`` and ``qcollect env``."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from qcollect.cli.console import fits, make_table, out, print_json, print_table

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE", help="YAML files of formats of your own; default: the catalog."),
]


def formats(files: Files = None, json: Json = False) -> None:
    """Print the number formats: bits, block, scale, range, special values, source.

    With files, the formats they define; every fault of theirs is named with its line.

    Example: qcollect formats my_fp6.yaml
    """
    from qcollect.formats.catalog import QUANT_TYPES
    from qcollect.formats.custom import load_quant_type
    from qcollect.formats.table import HEADERS, describe, rows

    quant_types = [load_quant_type(file) for file in files] if files else list(QUANT_TYPES.values())
    if json:
        print_json([describe(quant_type) for quant_type in quant_types])
        return
    cells = rows(quant_types)
    # the source is the last and by far the longest: below, a line each
    columns = range(len(HEADERS) - 1)
    table = _format_table(HEADERS, cells, columns)
    if fits(table):
        print_table(table)
    else:
        print_table(_format_table(HEADERS, cells, columns[:6]))
        typer.echo()
        print_table(_format_table(HEADERS, cells, [0, *columns[6:]]))
    typer.echo("\nsources:")
    for row in cells:
        typer.echo(f"  {row[0]}: {row[-1]}")


def _format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> Table:
    """The columns that are named; on a terminal, where they must fit, with a word of the header a line."""
    names = [headers[i] for i in columns]
    table = make_table(*(name.replace(" ", "\n").replace("/", "/\n") for name in names) if out.is_terminal else names)
    for row in rows:
        table.add_row(*(Text(row[i]) for i in columns))
    return table


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
            typer.echo(f"{key}:" if value else f"{key}: none")
            for name, item in value.items():
                typer.echo(f"  {name}: {'not installed' if item is None else item}")
        elif isinstance(value, list):
            typer.echo(f"{key}: {', '.join(map(str, value)) or 'none'}")
        else:
            typer.echo(f"{key}: {value}")
