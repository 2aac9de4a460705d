"""``qcollect doctor``."""

import time
from typing import Annotated, Any

import typer
from rich.text import Text

from qcollect.cli.console import make_table, note, out, print_json
from qcollect.cli.planning import load, resolve_out
from qcollect.cli.run import DEFAULT_OUT, DEFAULT_RECIPE, GpuIds, Nproc, Out, Settings, Target

Recipe = Annotated[str, typer.Option("--recipe", metavar="NAME|FILE", help="A bundled recipe's name, or a YAML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    recipe: Recipe = DEFAULT_RECIPE,
    target: Target = None,
    out: Out = DEFAULT_OUT,
    nproc: Nproc = None,
    gpu_ids: GpuIds = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Check everything a run needs: machine, versions, model, data, devices, memory, disk. Starts nothing.

    A problem forbids the run (exit code 3), a warning does not; each says what to do.

    Example: qcollect doctor --recipe tiny --nproc 2
    """
    from qcollect.host.machine import read_machine
    from qcollect.launch.doctor import examine
    from qcollect.launch.inspect import look_at

    loaded = load(recipe, settings, target, nproc, gpu_ids, [])
    note(f"{loaded.name}: checking the model, the data and the devices")
    result = examine(loaded, out_dir=resolve_out(out), now=time.time(), facts=read_machine(), look_at=look_at)
    if json:
        print_json(result.to_dict())
    else:
        _print_findings(result)
    raise typer.Exit(int(result.exit_code))


def _print_findings(result: Any) -> None:
    for line in plain_lines(result) if not out.is_terminal else ():
        typer.echo(line)
    if out.is_terminal:
        _print_table(result)


def plain_lines(result: Any) -> list[str]:
    """A line a finding, and what it comes to."""
    from qcollect.monitor.render import printable

    width = max(len(finding.check) for finding in result.findings)
    lines = [f"{f.level:<8} {f.check:<{width}}  {printable(f.text)}" for f in result.findings]
    return [*lines, summarize(result)]


def _print_table(result: Any) -> None:
    from qcollect.monitor.render import printable

    table = make_table("", "", "")
    table.show_header = False
    for finding in result.findings:
        said = Text(printable(finding.message), overflow="fold")
        if finding.advice:
            said.append(f"\n{printable(finding.advice)}", style="italic")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check.replace("_", " "), said)
    out.print(table)
    out.print(Text(summarize(result)))


def summarize(result: Any) -> str:
    """The last line: whether a run would start."""
    from qcollect.plan.finding import Level

    num_problems, num_warnings = result.count(Level.PROBLEM), result.count(Level.WARNING)
    warned = f", {_count(num_warnings, 'warning')}" if num_warnings else ""
    if not num_problems:
        return f"{result.recipe}: nothing forbids a run{warned}"
    missed = f"; not checked because of that: {', '.join(result.not_checked)}" if result.not_checked else ""
    return f"{result.recipe}: {_count(num_problems, 'problem')}{warned}, a run would be refused{missed}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
