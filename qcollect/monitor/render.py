"""Snapshots -> what a terminal shows, or one plain line a run for logs and pipes. Pure.

Text that comes from files (names, paths, errors, log lines) is shown as it is: never as markup, and
never as control codes for the terminal.
"""

import unicodedata
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qcollect.monitor.run_record import RunState
from qcollect.monitor.snapshot import STALE_AFTER_S, RankSnapshot, RunSnapshot

_STATE_STYLES = {
    RunState.STARTING: "cyan",
    RunState.RUNNING: "cyan",
    RunState.STOPPING: "yellow",
    RunState.COMPLETED: "green",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "bold red",
    RunState.STALLED: "bold red",
    RunState.INTERRUPTED: "yellow",
    RunState.LOST: "bold red",
    RunState.UNKNOWN: "magenta",
}
# with these a row of ordinary numbers fits into 80 columns
_BAR_CELLS = 8
_PADDING = (0, 1, 0, 0)
_NONE = "-"


def printable(text: str) -> str:
    """``text`` on one line: line ends and tabs become spaces, other control characters their escapes."""
    return "".join(" " if c in "\n\r\t" else c if _is_printable(c) else ascii(c)[1:-1] for c in text)


def render_table(snapshots: Sequence[RunSnapshot]) -> Table:
    """One row a run; of a running one the phase is shown as its state."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=_PADDING)
    table.add_column("quant", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name in ("captured", "rate", "ETA", "size", "iter", "loss", "ranks", "exit"):
        table.add_column(name, no_wrap=True, justify="left" if name == "captured" else "right")
    for run in snapshots:
        table.add_row(
            Text(printable(run.quant_type), style="bold"),
            _state(run),
            Text.assemble((_bar(run), "green"), f" {run.captured}/{run.target}"),
            *(Text(cell) for cell in (_rate(run), format_duration(run.eta_s), format_bytes(run.bytes))),
            *(Text(cell) for cell in (_optional(run.iteration), format_number(run.loss))),
            Text(_ranks(run), style="" if run.num_ranks_ok == len(run.ranks) else "red"),
            Text(_optional(run.exit_code)),
        )
    return table


def render_run(run: RunSnapshot) -> RenderableType:
    """One run with a row for each rank, what went wrong, and where its files are."""
    title = f"{printable(run.quant_type)} · {printable(run.recipe_name)} · {printable(run.run_id)}"
    where = Text(printable(str(run.run_dir)), style="dim", overflow="fold")
    rows: list[RenderableType] = [Text(title, style="bold", overflow="fold"), where, Text()]
    rows += [render_table([run]), Text(), _rank_table(run)]
    trigger = [] if run.trigger is None else [Text(printable(str(run.trigger)), overflow="fold")]
    notes = [*trigger, *_failure_notes(run), *(Text(f"warning: {printable(w)}", style="yellow") for w in run.warnings)]
    notes += [Text(printable(n), style="dim") for n in run.notes]
    return Group(*rows, *([Text(), *notes] if notes else []))


def render_status(snapshots: Sequence[RunSnapshot]) -> RenderableType:
    """The dashboard: a single run in full, several as a table with what went wrong below it."""
    if len(snapshots) == 1:
        return render_run(snapshots[0])
    notes = [
        Text.assemble((printable(r.quant_type), "bold"), ": ", note) for r in snapshots for note in _failure_notes(r)
    ]
    return Group(render_table(snapshots), *([Text(), *notes] if notes else []))


def plain_line(run: RunSnapshot) -> str:
    """A run on one line, without colour and as wide as it needs; the reason last."""
    parts = [
        printable(run.quant_type),
        run.state_text if run.phase == run.state else f"{run.state_text} ({run.phase})",
        f"{run.captured}/{run.target}",
        _rate(run),
        f"eta {format_duration(run.eta_s)}",
        format_bytes(run.bytes),
        f"iteration {_optional(run.iteration)}",
        f"loss {format_number(run.loss)}",
        f"ranks {_ranks(run)}",
        f"exit {_optional(run.exit_code)}",
    ]
    if run.trigger is not None and not run.reason:
        parts.append(str(run.trigger))
    line = "  ".join(printable(part) for part in parts)
    return f"{line}  {printable(run.reason)}" if run.reason else line


# ---------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------


def _rank_table(run: RunSnapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=_PADDING)
    for name in ("rank", "pid", "state", "device", "iter", "captured", "size", "loss", "seen"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("state", "device") else "right")
    for rank in run.ranks:
        share = "?" if rank.share is None else str(rank.share)
        table.add_row(
            str(rank.rank),
            _optional(rank.pid),
            Text(printable(rank.state), style=_rank_style(rank)),
            Text(printable(rank.device or _NONE)),
            _optional(rank.iteration),
            f"{rank.captured}/{share}",
            _NONE if rank.bytes is None else format_bytes(rank.bytes),
            format_number(rank.loss),
            Text(_age(rank), style=_age_style(run, rank)),
        )
    return table


def _failure_notes(run: RunSnapshot) -> Iterable[Text]:
    """What failed first, and its log; without a failure the reason of a run that is not completed."""
    if run.failures and run.state in (RunState.FAILED, RunState.LOST):
        first = run.failures[0]
        yield Text(printable(first.describe()), style="bold red", overflow="fold")
        yield Text(f"log: {printable(str(first.log_path))}", overflow="fold")
        if len(run.failures) > 1:
            others = ", ".join(printable(f.describe()) for f in run.failures[1:4])
            yield Text(f"then {others}{', ...' if len(run.failures) > 4 else ''}", style="dim", overflow="fold")
    elif run.reason and run.state != RunState.COMPLETED:
        yield Text(printable(run.reason), style="yellow", overflow="fold")


def _state(run: RunSnapshot) -> Text:
    text = run.phase if run.state == RunState.RUNNING else run.state_text
    return Text(printable(text), style=_STATE_STYLES[run.state])


def _bar(run: RunSnapshot) -> str:
    """A bar that is full only when the target is reached."""
    filled = min(_BAR_CELLS, run.captured * _BAR_CELLS // run.target) if run.target else 0
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _rank_style(rank: RankSnapshot) -> str:
    return "red" if not rank.is_ok else "green" if rank.state == "done" else "cyan"


def _age(rank: RankSnapshot) -> str:
    return _NONE if rank.age_s is None else f"{format_duration(rank.age_s)} ago"


def _age_style(run: RunSnapshot, rank: RankSnapshot) -> str:
    return "yellow" if run.state.is_active and (rank.age_s or 0.0) > STALE_AFTER_S else ""


def _ranks(run: RunSnapshot) -> str:
    return f"{run.num_ranks_ok}/{len(run.ranks)}"


def _rate(run: RunSnapshot) -> str:
    return _NONE if run.files_per_s is None else f"{run.files_per_s:.1f}/s"


def _optional(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _is_printable(character: str) -> bool:
    # Cc: C0 and C1 controls; Cf: among them the ones that reverse the line; Cs: bytes that are no UTF-8
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def format_number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """``4s``, ``2m05s``, ``1h02m``, ``3d04h``; ``-`` for None."""
    if seconds is None:
        return _NONE
    total = round(seconds)
    for unit, name, below, below_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= unit:
            return f"{total // unit}{name}{total % unit // below:02d}{below_name}"
    return f"{total}s"


def format_bytes(count: float) -> str:
    """``12 B``, ``3.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
