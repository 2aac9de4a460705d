"""A reader that has seen enough and closes the pipe: no traceback, nothing on stderr."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qcollect.paths
from qcollect.monitor.run_record import RunRecord, RunState
from qcollect.paths import RunPaths
from qcollect.store.files import write_json_atomic

pytestmark = pytest.mark.integration
REPOSITORY = Path(qcollect.paths.__file__).parents[1]
# killed by SIGPIPE, an error of Python's, or done before it was noticed
ENDINGS = (0, 1, 141)


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory):
    """A folder whose status is longer than a pipe holds."""
    out = tmp_path_factory.mktemp("many")
    for number in range(700):
        paths = RunPaths(out / f"{number:03d}-{'x' * 200}")
        paths.state_dir.mkdir(parents=True)
        record = RunRecord(
            run_id=f"run-{number}",
            run_token="",
            quant_type="mxfp8",
            state=RunState.COMPLETED,
            host="here",
            target=1,
            world_size=0,
            recipe_name="fake",
            launcher=None,
        )
        write_json_atomic(paths.run_path, record.to_dict())
    return out


def first_line(*arguments, unbuffered):
    """(the first line of a command's output, its exit code, its stderr) with a reader that then closes the pipe."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | ({"PYTHONUNBUFFERED": "1"} if unbuffered else {})
    command = [sys.executable, "-m", "qcollect", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        line = b""
        while not line.endswith(b"\n") and (piece := process.stdout.read(1)):
            line += piece
        process.stdout.close()
        return line.decode(), process.wait(60), process.stderr.read().decode()


@pytest.mark.parametrize("unbuffered", [True, False], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["lines", "json"])
def test_status_of_many_runs_into_a_reader_that_closes_early(many_runs, options, unbuffered):
    """Textualize/rich issue 3400; Backblaze/B2_Command_Line_Tool issue 1071."""
    line, exit_code, errors = first_line("status", str(many_runs), *options, unbuffered=unbuffered)
    assert line.startswith("[" if options else "mxfp8")
    assert (exit_code in ENDINGS, errors) == (True, "")


@pytest.mark.parametrize("unbuffered", [True, False], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize(
    "arguments", [("recipes", "ls", "--json"), ("formats",), ("--help",)], ids=lambda arguments: arguments[0]
)
def test_short_output_into_a_reader_that_closes_early(arguments, unbuffered):
    line, exit_code, errors = first_line(*arguments, unbuffered=unbuffered)
    assert line != ""
    assert (exit_code in ENDINGS, errors) == (True, "")


def test_output_into_a_pipe_nobody_reads(many_runs):
    """The reader has ended before the first byte comes."""
    for arguments in (("status", str(many_runs)), ("recipes", "ls", "--json"), ("formats", "--json")):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "qcollect", *arguments]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=writing, stderr=subprocess.PIPE, text=True
        )
        os.close(writing)
        assert (done.returncode in ENDINGS, done.stderr) == (True, ""), arguments
