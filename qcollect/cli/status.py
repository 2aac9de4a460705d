"""``qcollect status``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from qcollect.cli.console import out, print_json
from qcollect.cli.run import DEFAULT_OUT

REFRESH_S = 1.0


def status(
    directory: Annotated[
        str, typer.Argument(metavar="[DIR]", help="A run's folder, or one that holds runs.")
    ] = DEFAULT_OUT,
    once: Annotated[bool, typer.Option("--once", help="One snapshot, also on a terminal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One snapshot as JSON.")] = False,
) -> None:
    """Show runs: live on a terminal until none is active (Ctrl-C leaves it), one snapshot otherwise.

    Example: qcollect status enhanced_tensor_logs --once
    """
    from qcollect.monitor.render import plain_line, render_status
    from qcollect.monitor.snapshot import summarize_directory

    folder = Path(directory).absolute()
    snapshots = summarize_directory(folder, time.time())
    if json:
        print_json([snapshot.to_dict() for snapshot in snapshots])
        return
    if not out.is_terminal or out.is_dumb_terminal:
        for snapshot in snapshots:
            typer.echo(plain_line(snapshot))
        return
    if once:
        out.print(render_status(snapshots))
        return
    _watch(folder)


def _watch(folder: Path) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from qcollect.monitor.render import render_status
    from qcollect.monitor.snapshot import summarize_directory

    hint = Text("Ctrl-C leaves; the runs go on", style="dim")
    was_active = False
    with Live(console=out, auto_refresh=False) as live:
        while True:
            snapshots = summarize_directory(folder, time.time())
            is_active = any(snapshot.state.is_active for snapshot in snapshots)
            view = render_status(snapshots)
            live.update(Group(view, hint) if is_active else view, refresh=True)
            if not is_active and not was_active:
                return
            was_active = is_active  # of a sweep the next run begins at once
            time.sleep(REFRESH_S)
