"""Stops before the target: who asks, how workers are asked, and what becomes of those that do not listen."""

import json
import os
import signal
import time

import pytest
from fakes import (
    GRACE_S,
    WhenTraining,
    assert_nothing_left,
    both_train,
    interrupt_self,
    run,
    until,
    until_training,
    with_launch,
)

from qcollect.errors import ExitCode
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, read_stop, request_stop


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (StopCause.REQUEST, "stopped on request"),
        (StopCause.MAX_BYTES, "launch.max_bytes is reached: stopped"),
        (StopCause.DATA_END, "the training came to its end (data or iterations)"),
    ],
)
def test_stop_file_ends_the_run_after_the_iteration_for_the_reason_it_gives(make_plan, cause, text):
    plan = make_plan("endless")
    stop = WhenTraining(lambda snapshot: request_stop(RunPaths(plan.run_dir), cause))
    outcome = run(plan, stop)
    assert (outcome.state, outcome.exit_code, outcome.cause) == (RunState.STOPPED, ExitCode.STOPPED, cause)
    assert outcome.reason == f"{text} with 2 of 6 captures"
    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code, record.reason) == (RunState.STOPPED, 7, outcome.reason)
    assert [rank.state for rank in stop.snapshots[-1].ranks] == ["done", "done"]
    assert_nothing_left(plan)


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"cause": "nobody"}'])
def test_stop_file_without_a_cause_is_a_request(make_plan, content):
    plan = make_plan("endless")
    stop = WhenTraining(lambda snapshot: RunPaths(plan.run_dir).stop_path.write_bytes(content))
    outcome = run(plan, stop)
    assert (outcome.exit_code, outcome.reason) == (7, "stopped on request with 2 of 6 captures")


def test_of_two_who_ask_for_a_stop_the_first_gives_the_reason(make_plan):
    plan = make_plan("endless")
    paths = RunPaths(plan.run_dir)

    def ask_twice(snapshot):
        request_stop(paths, StopCause.MAX_BYTES)
        request_stop(paths, StopCause.REQUEST)

    outcome = run(plan, WhenTraining(ask_twice))
    assert outcome.reason == "launch.max_bytes is reached: stopped with 2 of 6 captures"
    assert list(paths.control_dir.iterdir()) == [paths.stop_path]  # no temporary file of the second


def test_signal_after_another_stop_is_what_the_run_is_said_to_have_ended_by(make_plan):
    plan = make_plan("endless")
    paths = RunPaths(plan.run_dir)

    def ask_then_interrupt(snapshot):
        request_stop(paths, StopCause.MAX_BYTES)
        interrupt_self()

    outcome = run(plan, WhenTraining(ask_then_interrupt))
    assert read_stop(paths) == StopCause.MAX_BYTES  # what the workers were told stays
    assert outcome.reason == "interrupted (SIGINT) with 2 of 6 captures"
    assert outcome.sweep_ends_with == ExitCode.INTERRUPTED


def test_time_limit_ends_the_run_after_the_iteration(make_plan):
    plan = make_plan("endless", max_time=1.5)
    started_s = time.monotonic()
    outcome = run(plan)
    assert time.monotonic() - started_s >= 1.5
    assert (outcome.state, outcome.exit_code) == (RunState.STOPPED, ExitCode.STOPPED)
    assert outcome.reason == "launch.max_time is over: stopped with 2 of 6 captures"
    assert json.loads(RunPaths(plan.run_dir).stop_path.read_text()) == {"cause": "max_time"}
    assert_nothing_left(plan)


def test_target_reached_before_the_time_limit_is_completed(make_plan):
    assert run(make_plan("normal", max_time=600.0)).state == RunState.COMPLETED


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_one_signal_is_a_graceful_stop(make_plan, signum, exit_code):
    plan = make_plan("endless+grandchild")
    stop = WhenTraining(lambda snapshot: os.kill(os.getpid(), signum))
    outcome = run(plan, stop)
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, exit_code)
    assert outcome.reason == f"interrupted ({signum.name}) with 2 of 6 captures"
    assert [r.state for r in stop.snapshots[-1].ranks] == ["done", "done"]
    assert_nothing_left(plan)


def test_signal_before_any_rank_trains_ends_the_run_at_once(make_plan):
    plan = make_plan("endless")
    plan = with_launch(plan, grace_s=300.0)
    started_s = time.monotonic()
    outcome = run(plan, on_claimed=lambda paths: interrupt_self())
    assert time.monotonic() - started_s < 30
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert outcome.reason == "interrupted (SIGINT) with 0 of 6 captures"
    assert_nothing_left(plan)


def test_deaf_workers_are_signalled_after_the_grace_time(make_plan):
    plan = make_plan("endless+deaf")
    stop = WhenTraining(interrupt_self)
    outcome = run(plan, stop)
    assert GRACE_S <= stop.seconds_since < 10
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert outcome.reason == (
        "interrupted (SIGINT) with 2 of 6 captures, by force: the workers did not end within 0.5 s"
    )
    stopping = [s for s in stop.snapshots if s.state == RunState.STOPPING]
    assert stopping[0].reason == "stopping after this iteration (SIGINT)"
    assert_nothing_left(plan)


def test_stubborn_workers_are_killed_two_seconds_after_that(make_plan):
    plan = make_plan("endless+deaf+stubborn+grandchild")
    stop = WhenTraining(lambda snapshot: os.kill(os.getpid(), signal.SIGTERM))
    outcome = run(plan, stop)
    assert stop.seconds_since < 10
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.TERMINATED)
    assert_nothing_left(plan)


def test_second_interrupt_forces_the_end_at_once(make_plan):
    plan = make_plan("endless+deaf+stubborn+grandchild", grace_s=300.0)
    pressed = []

    def press(snapshot):
        if both_train(snapshot) and len(pressed) < 2:
            pressed.append(time.monotonic())
            interrupt_self()

    outcome = run(plan, press)
    assert time.monotonic() - pressed[1] < 5
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert outcome.reason == "interrupted (SIGINT) with 2 of 6 captures, by force: Ctrl-C was pressed again"
    assert_nothing_left(plan)


def test_stop_that_cannot_be_written_goes_to_the_next_step_at_once(make_plan):
    plan = make_plan("endless+grandchild", grace_s=300.0)
    paths = RunPaths(plan.run_dir)

    def interrupt_without_a_folder(snapshot):
        paths.control_dir.rmdir()
        interrupt_self()

    stop = WhenTraining(interrupt_without_a_folder)
    outcome = run(plan, stop)
    assert stop.seconds_since < 10
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert outcome.reason == (
        "interrupted (SIGINT) with 2 of 6 captures, by force: "
        f"{paths.stop_path} cannot be written: No such file or directory"
    )
    assert_nothing_left(plan)


def test_hangup_is_ignored_under_nohup(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    paths = until_training(plan)
    launcher.send_signal(signal.SIGHUP)
    seen = read_snapshot(paths, time.time()).iteration
    until(lambda: read_snapshot(paths, time.time()).iteration > seen + 5, "the run goes on")
    request_stop(paths)
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (7, "stopped on request with 2 of 6 captures\n")


def test_ctrl_c_in_a_terminal_reaches_the_launcher_only(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan, start_new_session=True)
    until_training(plan)
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (130, "interrupted (SIGINT) with 2 of 6 captures\n")
