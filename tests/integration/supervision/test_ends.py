"""Runs that end by themselves, well or not: no process, no zombie, the right code and reason."""

import os
import signal
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from fakes import WhenTraining, agent_pid, assert_nothing_left, run

from qcollect.errors import ExitCode
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.paths import RunPaths


def test_run_that_reaches_its_target_is_completed(make_plan):
    plan, snapshots = make_plan("normal", share=20), []
    outcome = run(plan, snapshots.append)
    assert (outcome.state, outcome.exit_code) == (RunState.COMPLETED, ExitCode.OK)
    assert outcome.reason == "all 40 captures were taken"
    assert_nothing_left(plan)

    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code, record.reason) == (RunState.COMPLETED, 0, outcome.reason)
    assert record.ended_at >= record.started_at
    assert record.agent.pid != record.launcher.pid == os.getpid()
    counts = [s.captured for s in snapshots]
    assert counts == sorted(counts) and counts[-1] == 40
    assert snapshots[-1].state == RunState.COMPLETED
    assert [snapshots[0].phase, snapshots[-1].phase] == ["starting", "completed"]


def test_training_that_ends_short_of_the_target_is_stopped_not_completed(make_plan):
    plan = make_plan("short")
    outcome = run(plan)
    assert (outcome.state, outcome.exit_code) == (RunState.STOPPED, ExitCode.STOPPED)
    logs = RunPaths(plan.run_dir).logs_dir
    assert outcome.reason == (
        f"the training came to its end (data or iterations) with 4 of 6 captures; the workers' logs: {logs}"
    )
    assert_nothing_left(plan)


def test_grandchildren_do_not_outlive_a_run_that_ends_well(make_plan):
    plan = make_plan("grandchild")
    assert run(plan).exit_code == ExitCode.OK
    assert_nothing_left(plan)


def test_handlers_and_other_children_are_left_alone(make_plan):
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    ended = subprocess.Popen(["false"], start_new_session=True)
    try:
        run(make_plan("normal"))
        assert {s: signal.getsignal(s) for s in before} == before
        assert other.poll() is None
        assert ended.wait() == 1  # its exit code was not taken from us
    finally:
        other.kill()
        other.wait()


# ---------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------


def test_rank_that_raises_is_the_headline(make_plan):
    plan = make_plan("raise+endless")
    outcome = run(plan)
    log = RunPaths(plan.run_dir).log_path(1)
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    assert outcome.reason == f"rank 1 failed: ValueError: bad tokenizer path; its log: {log}"
    assert outcome.log_tail == ("rank 1 starts", "Traceback (most recent call last): ...")
    assert [(f.rank, f.was_ended) for f in outcome.failures] == [(1, False), (0, True)]
    assert_nothing_left(plan)


def test_rank_killed_by_signal_9_is_explained_and_its_last_words_are_kept(make_plan):
    plan = make_plan("die+endless")
    outcome = run(plan)
    log = RunPaths(plan.run_dir).log_path(1)
    assert outcome.exit_code == ExitCode.WORKER
    assert outcome.reason == f"rank 1 was killed (signal 9), often out of memory; its log: {log}"
    assert outcome.log_tail == ("rank 1 starts", "one", "two", "three", "no end")
    assert log.read_bytes() == b"rank 1 starts\none\ntwo\nthree\nno end"
    assert_nothing_left(plan)


def test_rank_that_left_early_is_the_headline_when_the_other_fails_after_it(make_plan):
    plan = make_plan("leave+deaf", share=4)
    outcome = run(plan)
    log = RunPaths(plan.run_dir).log_path(0)
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    assert outcome.reason == (
        f"rank 0 left early (exit code 0) after 2 iteration(s); the others could not go on without it; its log: {log}"
    )
    assert [(f.rank, f.exit_code, f.type) for f in outcome.failures] == [(0, 0, None), (1, 1, "RuntimeError")]
    assert_nothing_left(plan)


def test_rank_that_left_after_the_other_failed_is_not_to_blame(make_plan):
    plan = make_plan("leave_after+deaf", share=4)
    outcome = run(plan)
    assert outcome.reason.startswith("rank 1 failed: RuntimeError: Connection closed by peer; its log: ")
    assert 0 not in [f.exit_code for f in outcome.failures]
    assert_nothing_left(plan)


def test_survivors_that_ignore_sigterm_get_the_grace_time_not_torchruns_half_minute(make_plan):
    plan = make_plan("raise+endless+stubborn+deaf+grandchild")
    started_s = time.monotonic()
    outcome = run(plan)
    assert time.monotonic() - started_s < 25
    assert outcome.reason.startswith("rank 1 failed: ValueError: bad tokenizer path; its log: ")
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, 1), (0, -9)]
    assert_nothing_left(plan)


def test_agent_killed_while_workers_ignore_sigterm(make_plan):
    plan = make_plan("endless+stubborn+deaf+grandchild")
    paths = RunPaths(plan.run_dir)
    kill = WhenTraining(lambda snapshot: os.kill(agent_pid(paths), signal.SIGKILL))
    outcome = run(plan, kill)
    assert kill.seconds_since < 10
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    assert outcome.reason == (
        f"torchrun's agent was killed (signal 9), often out of memory; its log: {paths.agent_log_path}"
    )
    assert_nothing_left(plan)


def test_children_without_the_token_end_with_their_workers(make_plan):
    plan = make_plan("endless+stubborn+deaf+nameless")
    paths = RunPaths(plan.run_dir)
    pids = []

    def kill_agent(snapshot):
        pids.extend(int((paths.logs_dir / f"nameless{rank}").read_text()) for rank in range(2))
        os.kill(agent_pid(paths), signal.SIGKILL)

    run(plan, WhenTraining(kill_agent))
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert_nothing_left(plan)


def test_worker_killed_from_outside(make_plan):
    plan = make_plan("endless+stubborn+deaf+grandchild")
    kill = WhenTraining(lambda snapshot: os.kill(snapshot.ranks[0].pid, signal.SIGKILL))
    outcome = run(plan, kill)
    assert kill.seconds_since < 20, "torchrun's own half minute was waited for"
    assert outcome.reason.startswith("rank 0 was killed (signal 9), often out of memory; its log: ")
    assert_nothing_left(plan)


def test_program_that_cannot_be_started_is_recorded(make_plan):
    plan = replace(make_plan("normal"), agent_argv=("/no/such/python",))
    with pytest.raises(Exception, match="/no/such/python cannot be started"):
        run(plan)
    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code) == (RunState.FAILED, ExitCode.INTERNAL)
    assert_nothing_left(plan)


def test_error_in_the_launcher_ends_the_run(make_plan):
    plan = make_plan("endless+stubborn")

    def fail(snapshot):
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        run(plan, WhenTraining(fail))
    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code) == (RunState.FAILED, ExitCode.INTERNAL)
    assert record.reason == "the launcher failed: RuntimeError: no terminal"
    assert_nothing_left(plan)
