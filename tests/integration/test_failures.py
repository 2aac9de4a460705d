"""What a user sees when a rank fails: the rank, the error in its own words, its log; not torchrun's summary."""

import json
import time

import pytest

from qcollect.paths import RunPaths

pytestmark = pytest.mark.integration

SCRIPT = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to fail")
    raise RuntimeError("[/bold] [1, 2]")
time.sleep(60)
"""
ERROR = "rank 1 failed: RuntimeError: [/bold] [1, 2]"


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("failing") / "a [/x/y] b"


@pytest.fixture(scope="module")
def result(qcollect_here, small_recipe, out_dir, tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "failing.py"
    script.write_text(SCRIPT)
    settings = ("--set", f"script={script}", "--set", "launch.grace_s=1")
    return qcollect_here("run", "mxfp8", "--recipe", str(small_recipe), "--out", str(out_dir), *settings)


@pytest.fixture(scope="module")
def log_path(out_dir):
    return RunPaths(out_dir / "mxfp8").log_path(1)


def test_the_headline_names_rank_error_and_log(result, log_path):
    assert (result.exit_code, result.out) == (4, "")
    headline = next(line for line in result.err.splitlines() if line.startswith("error: "))
    assert headline == f"error: mxfp8: {ERROR}; its log: {log_path}"


def test_the_end_of_the_failing_ranks_log_follows_the_headline(result):
    lines = result.err.splitlines()
    tail = lines[lines.index(next(line for line in lines if line.startswith("error: "))) + 1 :]
    assert all(line.startswith("  | ") for line in tail)
    assert '  |     raise RuntimeError("[/bold] [1, 2]")' in tail
    assert tail[-1] == "  | RuntimeError: [/bold] [1, 2]"
    assert "ChildFailedError" not in result.err


def test_the_log_of_the_failing_rank_holds_all_it_printed(result, log_path):
    first, *_, last = log_path.read_text().splitlines()
    assert (first, last) == ("about to fail", "RuntimeError: [/bold] [1, 2]")


def test_run_json_and_status_hold_the_same_reason(result, qcollect_here, out_dir, log_path):
    run = json.loads(RunPaths(out_dir / "mxfp8").run_path.read_text())
    assert (run["state"], run["exit_code"], run["reason"]) == ("failed", 4, f"{ERROR}; its log: {log_path}")
    (shown,) = qcollect_here("status", str(out_dir), "--json").json
    assert shown["failures"][0]["description"] == ERROR
    (line,) = qcollect_here("status", str(out_dir)).out.splitlines()
    assert line.endswith(f"{ERROR}; its log: {log_path}")


def test_the_dashboard_shows_error_and_log_as_they_are(result, out_dir, log_path):
    from rich.console import Console

    from qcollect.monitor.render import render_status
    from qcollect.monitor.snapshot import summarize_directory

    console = Console(force_terminal=True, width=400, color_system=None)
    with console.capture() as capture:
        console.print(render_status(summarize_directory(out_dir, time.time())))
    assert ERROR in capture.get() and str(log_path) in capture.get()


def test_a_failed_run_is_not_replaced_without_being_asked(result, qcollect_here, small_recipe, out_dir, nothing_starts):
    refused = qcollect_here("run", "mxfp8", "--recipe", str(small_recipe), "--out", str(out_dir))
    assert refused.exit_code == 3
    assert f"{out_dir / 'mxfp8'} already holds run " in refused.err and "(failed, " in refused.err
