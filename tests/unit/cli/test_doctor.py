import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from qcollect.cli import doctor as command
from qcollect.cli.doctor import plain_lines, summarize
from qcollect.launch.doctor import Examination
from qcollect.plan.finding import Finding

FINE = Examination(recipe="tiny", findings=(Finding.ok("python", "3.12.1"), Finding.ok("host_name", "node7 resolves")))
BAD = Examination(
    recipe="mine",
    findings=(
        Finding.ok("python", "3.12.1"),
        Finding.warning("open_files", "few", "raise it"),
        Finding.problem("checkpoint", "/m[red]\x1b[2J/x: gone\nreally", "get it"),
    ),
    not_checked=("memory", "space"),
)


def test_a_finding_is_a_line_whatever_is_in_it():
    assert plain_lines(FINE) == [
        "ok       python     3.12.1",
        "ok       host_name  node7 resolves",
        "tiny: nothing forbids a run",
    ]
    assert plain_lines(BAD)[2] == r"problem  checkpoint  /m[red]\x1b[2J/x: gone really; get it"


def test_the_last_line_says_whether_a_run_would_start():
    assert summarize(BAD) == (
        "mine: 1 problem, 1 warning, a run would be refused; not checked because of that: memory, space"
    )
    warned = Examination(recipe="mine", findings=BAD.findings[:2])
    assert summarize(warned) == "mine: nothing forbids a run, 1 warning"


@pytest.fixture
def screen(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None, legacy_windows=False)
    monkeypatch.setattr(command, "out", console)
    return console.file


def test_on_a_terminal_what_to_do_stands_below_what_is_wrong(screen):
    command._print_findings(BAD)
    assert [line.rstrip() for line in screen.getvalue().splitlines()[:5]] == [
        "ok       python      3.12.1",
        "warning  open files  few",
        "                     raise it",
        r"problem  checkpoint  /m[red]\x1b[2J/x: gone really",
        "                     get it",
    ]


@pytest.fixture
def run(monkeypatch):
    """``qcollect doctor ARGS`` with this result; its exit code, stdout and stderr, and what was examined."""
    asked = {}

    def examine(recipe, **given):
        asked.update(given, recipe=recipe)
        return asked["result"]

    monkeypatch.setattr("qcollect.launch.doctor.examine", examine)
    app = typer.Typer()
    app.command()(command.doctor)

    def invoke(result, *args):
        asked["result"] = result
        return CliRunner().invoke(app, args), asked

    return invoke


def test_the_exit_code_says_whether_a_run_is_forbidden(run):
    assert run(FINE, "--recipe", "tiny")[0].exit_code == 0
    assert run(BAD, "--recipe", "tiny")[0].exit_code == 3


def test_flags_and_settings_reach_the_recipe(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("--nproc", "3", "--gpu-ids", "0,2", "--target", "7", "--out", "there", "--set", "capture.layers=0")
    _, asked = run(FINE, "--recipe", "tiny", *flags)
    recipe = asked["recipe"]
    assert (recipe.launch.nproc, recipe.launch.gpu_ids, recipe.capture.target) == (3, ("0", "2"), 7)
    assert (recipe.capture.layers, asked["out_dir"]) == ((0,), tmp_path / "there")


def test_without_a_recipe_the_default_one_is_examined(run):
    _, asked = run(FINE)
    assert asked["recipe"].name == "llama32_1b_wikipedia"


def test_json_alone_stands_on_stdout(run):
    result, _ = run(BAD, "--recipe", "tiny", "--json")
    assert json.loads(result.stdout) == BAD.to_dict()
    assert result.stderr == "tiny: checking the model, the data and the devices\n"
