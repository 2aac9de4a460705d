"""Captures that wait for a trigger, from the command line to the files: torchrun and two gloo ranks."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

import qcollect
from qcollect.paths import RunPaths
from qcollect.store.files import read_json
from qcollect.store.manifest import read_manifests

pytestmark = pytest.mark.integration
# target 8 over two ranks and two iterations: two captures each
SPIKE = "capture.trigger={on: [loss_spike, nan], iterations: 2, warmup: 1, loss_factor: 1.2}"


def settings(*values):
    return [part for value in values for part in ("--set", value)]


def captured_iterations(paths):
    return sorted({(record.metadata["rank"], record.metadata["iteration"]) for record in read_manifests(paths)})


def both_ranks(*iterations):
    return [(rank, iteration) for rank in range(2) for iteration in iterations]


def run_record(paths):
    return json.loads(paths.run_path.read_text())


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "mxfp8")


@pytest.fixture
def run(qcollect_here, small_recipe, tmp_path):
    def run(*arguments):
        return qcollect_here("run", "mxfp8", "--recipe", str(small_recipe), "--out", str(tmp_path), *arguments)

    return run


def test_a_loss_spike_begins_captures(run, qcollect_here, paths, tmp_path):
    result = run(*settings(SPIKE, "train.learning_rate=3"))
    assert result.exit_code == 0, result.err
    event = run_record(paths)["trigger"]
    assert (event["on"], event["metric"]) == ("loss_spike", "loss")
    assert event["value"] > 1.2 * event["reference"] > 0
    assert event == json.loads(paths.trigger_path.read_text())
    assert captured_iterations(paths) == both_ranks(event["iteration"] + 1, event["iteration"] + 2)
    assert all(c.metadata["trigger"] == event for c in qcollect.open_run(paths.run_dir))
    told = f"triggered by loss_spike at iteration {event['iteration']} (rank 0: loss "
    assert told in run_record(paths)["reason"]
    assert told in result.err
    assert "running (waiting for loss_spike, nan)  0/8" in result.err
    assert told in qcollect_here("status", str(tmp_path)).out
    assert qcollect_here("verify", str(tmp_path)).exit_code == 0


def test_a_training_of_nan_goes_on_to_the_end_of_its_captures(run, paths):
    result = run(*settings("capture.trigger={on: nan, iterations: 3}", "train.learning_rate=1e30"))
    assert result.exit_code == 0, result.err
    event = run_record(paths)["trigger"]
    assert event["on"] == "nan" and not math.isfinite(float(event["value"]))
    assert {iteration for _, iteration in captured_iterations(paths)} == {event["iteration"] + i for i in (1, 2, 3)}
    assert len(list(paths.run_dir.glob("*.pt"))) == 8


def test_training_that_ends_before_is_a_stop_that_says_what_was_seen(run, paths):
    result = run(*settings("capture.trigger={on: [loss_spike, nan, signal], warmup: 2}", "train.iterations=6"))
    assert result.exit_code == 7
    record = run_record(paths)
    assert (record["state"], record["exit_code"], record["trigger"]) == ("stopped", 7, None)
    before, _, after = record["reason"].partition(": the largest loss was ")
    assert before == (
        "the training came to its end (data or iterations) with 0 of 8 captures; capture.trigger waited for "
        "loss_spike, nan, signal, and none came"
    )
    assert after.endswith("(2 are needed); no loss or grad_norm was NaN or infinite; no signal came")
    assert list(paths.run_dir.glob("*.pt")) == []


def test_dry_run_says_that_the_schedule_begins_at_the_trigger(run):
    result = run("--dry-run", *settings(SPIKE))
    assert result.exit_code == 0
    lines = [line.strip() for line in result.out.splitlines()]
    assert "begins at the trigger: T is the first iteration in which a rank sees loss_spike, nan" in lines
    assert [line for line in lines if line.startswith("iteration")] == [
        "iteration T+1, micro-batch 0: 2 captures",
        "iteration T+2, micro-batch 0: 2 captures",
    ]


# ---- a signal ----------------------------------------------------------------------------------


def wait_until(condition, process, limit_s=90):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def iteration_of(paths):
    return min((read_json(paths.progress_path(rank)) or {}).get("iteration", 0) for rank in range(2))


@pytest.fixture
def start(small_recipe, tmp_path):
    """Starts ``qcollect run`` as a process of its own that waits for a signal."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "qcollect", "run", "mxfp8", "--recipe", str(small_recipe), "--out"]
        process = subprocess.Popen(
            [*command, str(tmp_path), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def test_a_signal_to_the_launcher_begins_captures_and_they_are_resumed(start, run, paths, qcollect_here, tmp_path):
    waiting = settings("capture.trigger={on: signal, iterations: 20}", "train.iterations=5000")
    process = start("--target", "80", *waiting)
    wait_until(lambda: iteration_of(paths) >= 3, process)
    shown = qcollect_here("status", str(tmp_path), "--json").json
    assert "waiting for signal" in json.dumps(shown)
    assert list(paths.run_dir.glob("*.pt")) == []

    os.kill(run_record(paths)["launcher"]["pid"], signal.SIGUSR1)
    wait_until(lambda: len(read_manifests(paths)) >= 8, process)
    os.kill(read_json(paths.progress_path(1))["pid"], signal.SIGKILL)
    process.wait(60)
    event = json.loads(paths.trigger_path.read_text())
    assert (event["on"], event["value"]) == ("signal", None)
    assert run_record(paths)["trigger"] == event
    num_before = len(read_manifests(paths))
    assert (process.returncode, num_before < 80) == (4, True)

    resumed = run("--target", "80", "--resume", *waiting)  # nobody signals again
    assert resumed.exit_code == 0, resumed.err
    assert captured_iterations(paths) == both_ranks(*range(event["iteration"] + 1, event["iteration"] + 21))
    assert len(list(paths.run_dir.glob("*.pt"))) == 80
    assert json.loads(paths.trigger_path.read_text()) == event == run_record(paths)["trigger"]
    assert not paths.signal_path.exists()


def test_a_request_of_a_run_that_ended_is_not_that_of_the_next(start, run, paths):
    waiting = settings("capture.trigger=signal", "train.iterations=5000")
    process = start(*waiting)
    wait_until(lambda: iteration_of(paths) >= 1, process)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert process.returncode == 143
    assert "waited for signal, and none came: no signal came" in run_record(paths)["reason"]
    paths.signal_path.touch()

    process = start("--resume", *waiting)
    wait_until(lambda: not paths.signal_path.exists(), process)
    wait_until(lambda: iteration_of(paths) >= 2, process)
    assert not paths.trigger_path.exists()
    process.send_signal(signal.SIGUSR1)
    process.wait(60)
    assert process.returncode == 0
