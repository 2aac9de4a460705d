from pathlib import Path

import pytest

from qcollect.errors import ExitCode
from qcollect.launch.outcome import Stop, StopCause, judge
from qcollect.monitor.failures import Failure
from qcollect.monitor.run_record import RunState

AGENT_LOG = Path("/run/.qcollect/logs/agent.log")
RANK_LOG = Path("/run/.qcollect/logs/rank00001.log")
RAISED = Failure(rank=1, time_s=100.5, log_path=RANK_LOG, exit_code=1, type="ValueError", message="bad tokenizer path")


def end(**changes):
    facts = {
        "captured": 50,
        "target": 50,
        "agent_exit_code": 0,
        "stop": None,
        "failures": (),
        "agent_log_path": AGENT_LOG,
        "now": 200.0,
    }
    outcome = judge(**facts | changes)
    return outcome.state, outcome.exit_code, outcome.reason


def test_target_reached_is_completed():
    assert end() == (RunState.COMPLETED, ExitCode.OK, "all 50 captures were taken")


def test_target_reached_in_the_iteration_of_a_stop_is_completed():
    assert end(stop=Stop(cause=StopCause.SIGINT))[:2] == (RunState.COMPLETED, ExitCode.OK)


@pytest.mark.parametrize("captured", [0, 49])
def test_clean_end_before_the_target_is_a_stop(captured):
    assert end(captured=captured) == (
        RunState.STOPPED,
        ExitCode.STOPPED,
        f"the training came to its end (data or iterations) with {captured} of 50 captures; "
        "the workers' logs: /run/.qcollect/logs",
    )


def test_more_captures_than_the_target_are_a_failure():
    assert end(captured=51) == (
        RunState.FAILED,
        ExitCode.WORKER,
        "the run ended with 51 of 50 captures; the workers' logs: /run/.qcollect/logs",
    )


@pytest.mark.parametrize(
    ("cause", "state", "exit_code", "reason"),
    [
        (StopCause.REQUEST, RunState.STOPPED, 7, "stopped on request with 12 of 50 captures"),
        (StopCause.SIGINT, RunState.INTERRUPTED, 130, "interrupted (SIGINT) with 12 of 50 captures"),
        (StopCause.SIGTERM, RunState.INTERRUPTED, 143, "interrupted (SIGTERM) with 12 of 50 captures"),
        (StopCause.SIGHUP, RunState.INTERRUPTED, 143, "interrupted (SIGHUP) with 12 of 50 captures"),
    ],
)
def test_stop_before_the_target_tells_its_cause(cause, state, exit_code, reason):
    assert end(captured=12, stop=Stop(cause=cause)) == (state, exit_code, reason)


def test_forced_stop_says_why():
    stop = Stop(cause=StopCause.SIGINT, forced_by="Ctrl-C was pressed again", escalated_at=150.0)
    assert end(captured=12, agent_exit_code=-9, stop=stop) == (
        RunState.INTERRUPTED,
        ExitCode.INTERRUPTED,
        "interrupted (SIGINT) with 12 of 50 captures, by force: Ctrl-C was pressed again",
    )


def test_stop_before_the_agent_is_started():
    assert end(captured=0, agent_exit_code=None, stop=Stop(cause=StopCause.SIGTERM))[1] == ExitCode.TERMINATED


def test_first_failure_is_the_headline_with_its_log():
    assert end(captured=12, agent_exit_code=1, failures=(RAISED,)) == (
        RunState.FAILED,
        ExitCode.WORKER,
        f"rank 1 failed: ValueError: bad tokenizer path; its log: {RANK_LOG}",
    )


def test_failure_while_workers_were_stopping_by_themselves_is_a_failure():
    stop = Stop(cause=StopCause.REQUEST)
    assert end(captured=12, agent_exit_code=1, failures=(RAISED,), stop=stop)[0] == RunState.FAILED


def test_failure_after_workers_were_signalled_only_follows():
    stop = Stop(cause=StopCause.REQUEST, forced_by="late", escalated_at=100.0)
    assert end(captured=12, agent_exit_code=1, failures=(RAISED,), stop=stop)[0] == RunState.STOPPED


def test_agent_killed_without_a_word_is_the_failure():
    assert end(captured=12, agent_exit_code=-9)[2] == (
        f"torchrun's agent was killed (signal 9), often out of memory; its log: {AGENT_LOG}"
    )


def test_a_trigger_is_told_with_how_the_run_ended():
    event = "triggered by signal at iteration 3 (rank 0)"
    assert end(trigger=event)[2] == f"all 50 captures were taken; {event}"
    stopped = end(captured=12, stop=Stop(cause=StopCause.DATA_END), trigger=event)
    assert stopped[2] == f"the training came to its end (data or iterations) with 12 of 50 captures; {event}"
    assert end(captured=0, trigger="it waited")[2] == (
        "the training came to its end (data or iterations) with 0 of 50 captures; it waited; "
        "the workers' logs: /run/.qcollect/logs"
    )
