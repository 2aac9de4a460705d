"""The real torchrun, whose workers need no torch; and an agent that was started ahead."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from fakes import HERE, REPOSITORY, assert_nothing_left, interrupt_self, run, until

from qcollect.errors import ExitCode
from qcollect.host.processes import find_by_token
from qcollect.launch.claim import ClaimMode
from qcollect.launch.prepared import AGENT_COMMAND, PreparedAgent
from qcollect.launch.supervisor import Watcher, execute
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.paths import RunPaths

ONE_NODE = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


@pytest.fixture
def torchrun_plan(make_plan):
    def build(behaviour, *options):
        script = str(HERE / "fake_torchrun_worker.py")
        plan = make_plan("normal", share=0)
        argv = (*AGENT_COMMAND, *(options or ONE_NODE), script, behaviour)
        return replace(plan, agent_argv=argv, env=plan.env | {"OMP_NUM_THREADS": "1"})

    return build


def test_run_whose_workers_end_well(torchrun_plan):
    plan = torchrun_plan("end")
    assert run(plan).exit_code == ExitCode.OK
    assert_nothing_left(plan)


def test_rank_that_was_killed_is_named_and_torchruns_summary_is_not_the_headline(torchrun_plan):
    plan = torchrun_plan("die")
    outcome = run(plan)
    paths = RunPaths(plan.run_dir)
    assert outcome.reason == f"rank 1 was killed (signal 9), often out of memory; its log: {paths.log_path(1)}"
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, -9), (0, -15)]
    agent_log = paths.agent_log_path.read_text()
    assert agent_log.splitlines()[-1] == "torchrun failed: rank 1 (exit -9), rank 0 (exit -15)"
    assert "Traceback" not in agent_log
    assert_nothing_left(plan)


def test_torchrun_is_signalled_once_when_workers_do_not_stop(torchrun_plan):
    plan = torchrun_plan("endless")
    outcome = run(plan, WhenRunning())
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert outcome.reason.endswith("by force: the workers did not end within 0.5 s")
    assert_nothing_left(plan)


class WhenRunning:
    """Presses Ctrl-C once both workers have written their progress."""

    def __init__(self):
        self.pressed = False

    def __call__(self, snapshot):
        if not self.pressed and all(rank.pid for rank in snapshot.ranks):
            self.pressed = True
            interrupt_self()


def test_torchrun_that_cannot_start_says_why(torchrun_plan):
    plan = torchrun_plan(
        "end", "--nproc-per-node", "2", "--rdzv-backend", "no_such_backend", "--rdzv-endpoint", "localhost:0"
    )
    outcome = run(plan)
    paths = RunPaths(plan.run_dir)
    assert outcome.exit_code == ExitCode.WORKER
    assert outcome.reason.startswith("torchrun's agent failed: ValueError: ")
    assert "no_such_backend" in outcome.reason
    assert outcome.reason.endswith(f"; its log: {paths.agent_log_path}")
    assert "Traceback" not in paths.agent_log_path.read_text()
    assert_nothing_left(plan)


# ---------------------------------------------------------------------------------------------
# An agent started ahead
# ---------------------------------------------------------------------------------------------


def test_prepared_agent_runs_what_it_is_given_as_its_launchers_agent(torchrun_plan):
    plan = torchrun_plan("die")
    paths = RunPaths(plan.run_dir)
    with PreparedAgent(plan.run_token) as agent:
        [prepared] = until(lambda: find_by_token(plan.run_token), "the agent is there")
        outcome = execute(plan, mode=ClaimMode.NEW, watcher=Watcher(on_tick=lambda snapshot: None), agent=agent)
    assert read_run_record(paths).agent.pid == prepared.pid
    assert outcome.reason == f"rank 1 was killed (signal 9), often out of memory; its log: {paths.log_path(1)}"
    assert paths.agent_log_path.read_text().splitlines()[-1].startswith("torchrun failed: rank 1 (exit -9)")
    assert_nothing_left(plan)


def test_prepared_agent_is_not_used_for_another_command(make_plan):
    plan = make_plan("normal")
    with PreparedAgent(plan.run_token) as agent:
        [prepared] = until(lambda: find_by_token(plan.run_token), "the agent is there")
        outcome = execute(plan, mode=ClaimMode.NEW, watcher=Watcher(on_tick=lambda snapshot: None), agent=agent)
    assert outcome.state == RunState.COMPLETED
    assert read_run_record(RunPaths(plan.run_dir)).agent.pid != prepared.pid
    assert not psutil.pid_exists(prepared.pid)
    assert_nothing_left(plan)


def test_prepared_agent_that_has_died_is_replaced(torchrun_plan):
    plan = torchrun_plan("end")
    with PreparedAgent(plan.run_token) as agent:
        [prepared] = until(lambda: find_by_token(plan.run_token), "the agent is there")
        prepared.kill()
        until(lambda: prepared.status() == psutil.STATUS_ZOMBIE, "it has ended")
        outcome = execute(plan, mode=ClaimMode.NEW, watcher=Watcher(on_tick=lambda snapshot: None), agent=agent)
    assert outcome.state == RunState.COMPLETED
    assert_nothing_left(plan)


def test_prepared_agent_without_orders_ends_with_the_launch():
    token = f"prepared-{os.getpid()}"
    with pytest.raises(RuntimeError), PreparedAgent(token):
        [prepared] = until(lambda: find_by_token(token), "the agent is there")
        raise RuntimeError("the model cannot be looked at")
    assert not psutil.pid_exists(prepared.pid)


def test_agent_that_is_not_wanted_is_not_started():
    token = f"prepared-{os.getpid()}-not"
    with PreparedAgent(token, enabled=False) as agent:
        assert find_by_token(token) == []
        assert agent.give(AGENT_COMMAND, {}, HERE / "agent.log") is None


def test_prepared_agent_ends_when_its_launcher_is_killed():
    token = f"prepared-{os.getpid()}-killed"
    code = (
        "import time\n"
        "from qcollect.launch.prepared import PreparedAgent\n"
        f"with PreparedAgent({token!r}):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(300)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        until(lambda: len(find_by_token(token)) == 1, "the agent has started")
        launcher.send_signal(signal.SIGKILL)
    until(lambda: find_by_token(token) == [], "the agent has ended")
