"""The ``qcollect`` command. Heavy imports are inside the commands; torch is never imported here."""

import io
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from qcollect._version import __version__
from qcollect.cli import captures, data, doctor, info, recipes, run, status, stop
from qcollect.cli.console import fail
from qcollect.errors import ExitCode, QcollectError

app = typer.Typer(
    name="qcollect",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    help=(
        "Capture the tensors of LLM training under emulated number formats, forward and backward.\n\n"
        "Start with: qcollect run mxfp8 --recipe tiny"
    ),
)
# commands whose arguments after -- belong to the training script
PASSES_ARGUMENTS = ("run", "sweep")


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("sweep")(run.sweep)
app.command("status")(status.status)
app.command("stop")(stop.stop)
app.command("doctor")(doctor.doctor)
app.command("ls")(captures.ls)
app.command("show")(captures.show)
app.command("verify")(captures.verify)
app.command("formats")(info.formats)
app.command("env")(info.env)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the exit codes of ``errors.ExitCode``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    script_args: list[str] = []
    _prepare_process()
    if given and given[0] in PASSES_ARGUMENTS and "--" in given:
        cut = given.index("--")
        given, script_args = given[:cut], given[cut + 1 :]
    try:
        app(args=given, obj=tuple(script_args), prog_name="qcollect")
    except QcollectError as error:
        sys.exit(fail(str(error), error.exit_code).exit_code)


def _prepare_process() -> None:
    """A name that stdout's encoding does not have is escaped; SIGTERM and SIGHUP end like an exception."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for name in ("SIGTERM", "SIGHUP"):
        signum = getattr(signal, name, None)  # elsewhere there is no SIGHUP; under nohup it is ignored, and stays so
        if signum is not None and signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    # what is being waited for, an inspection for example, is ended and its folder removed on the way out
    sys.exit(ExitCode.TERMINATED)
