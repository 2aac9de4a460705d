"""A launcher that is killed, alone or with its agent: the guard ends what the kernel does not."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from fakes import REPOSITORY, WhenTraining, guards, run, until, until_gone, until_training

from qcollect.errors import OutputError
from qcollect.host.processes import RUN_TOKEN_VARIABLE, find_by_token, process_is
from qcollect.launch.claim import ClaimMode
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import RunPaths

WORST = "endless+stubborn+deaf+grandchild"


def kill_together(*pids):
    """SIGKILL all of them before one of them can act on the other's end."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("with_agent", [False, True], ids=["launcher", "launcher_and_agent"])
@pytest.mark.parametrize("behaviour", ["endless", WORST])
def test_killed_launcher_takes_everything_with_it_after_the_grace_time(make_plan, launch, behaviour, with_agent):
    plan = make_plan(behaviour)
    launcher = launch(plan)
    paths = until_training(plan)
    record = read_run_record(paths)
    assert len(guards(plan)) == 1
    kill_together(launcher.pid, *([record.agent.pid] if with_agent else []))
    launcher.wait()
    until_gone(plan)
    until(lambda: not process_is(record.agent), "the agent has ended")
    until(lambda: guards(plan) == [], "the guard has ended")
    assert read_snapshot(paths, time.time()).state == RunState.LOST


def test_guard_gives_workers_the_grace_time(make_plan, launch):
    plan = make_plan(WORST, grace_s=2.0)
    launcher = launch(plan)
    until_training(plan)
    launcher.kill()
    launcher.wait()
    killed_s = time.monotonic()
    until_gone(plan)
    assert 1.0 < time.monotonic() - killed_s < 20


def test_guard_does_not_keep_what_ended_by_itself(make_plan, launch):
    plan = make_plan("endless", grace_s=300.0)
    launcher = launch(plan)
    until_training(plan)
    launcher.kill()
    launcher.wait()
    until_gone(plan)  # the agent ends its workers, which listen
    until(lambda: guards(plan) == [], "the guard has ended")


def test_guard_ends_with_a_run_that_ends_well(make_plan):
    plan, seen = make_plan("normal", share=10), []
    run(plan, lambda snapshot: seen.extend(guards(plan)) if not seen else None)
    assert len(seen) == 1
    assert not seen[0].is_running()


def test_guard_belongs_to_no_terminal_and_carries_no_token(make_plan):
    plan, seen = make_plan("endless"), []

    def look(snapshot):
        guard = guards(plan)[0]
        seen.append((os.getsid(guard.pid) == guard.pid, RUN_TOKEN_VARIABLE in guard.environ()))
        os.kill(os.getpid(), signal.SIGTERM)

    run(plan, WhenTraining(look))
    assert seen == [(True, False)]


def test_killed_guard_does_not_change_how_a_run_ends(make_plan):
    plan = make_plan("normal", share=30)
    kill = WhenTraining(lambda snapshot: guards(plan)[0].kill())
    assert run(plan, kill).state == RunState.COMPLETED


@pytest.fixture
def bystander():
    """A process that no run has started, of another token."""
    process = subprocess.Popen(["sleep", "300"], env={RUN_TOKEN_VARIABLE: "another"}, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def guard_of(token, grace_s=0.0):
    command = [sys.executable, "-m", "qcollect.launch.guard", token, str(grace_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})


@pytest.mark.parametrize(("word", "is_killed"), [(b".", False), (b"", True), (b"?", True)])
def test_guard_kills_unless_it_is_told_that_all_is_well(bystander, word, is_killed, request):
    token = f"guarded-{os.getpid()}-{word.hex()}"
    guarded = subprocess.Popen(["sleep", "300"], env={RUN_TOKEN_VARIABLE: token}, start_new_session=True)
    try:
        guard = guard_of(token)
        guard.communicate(word, timeout=60)
        assert guard.returncode == 0
        if is_killed:
            assert guarded.wait(60) == -signal.SIGKILL
        else:
            assert guarded.poll() is None
        assert bystander.poll() is None
    finally:
        guarded.kill()
        guarded.wait()


def test_run_whose_launcher_was_killed_can_be_taken_over(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan)
    paths = until_training(plan)
    launcher.kill()
    launcher.wait()
    until_gone(plan)
    outcome = run(make_plan("normal", name="next"), mode=ClaimMode.OVERWRITE)
    assert outcome.state == RunState.COMPLETED
    assert read_snapshot(paths, time.time()).num_files == 6


def test_what_a_killed_launcher_left_is_ended_before_its_folder_is_taken_over(make_plan, launch):
    plan = make_plan(WORST, grace_s=300.0)
    launcher = launch(plan)
    until_training(plan)
    left = find_by_token(plan.run_token)
    assert len(left) >= 5  # agent, two workers and a child of each
    launcher.kill()
    launcher.wait()
    during = []
    outcome = run(
        make_plan("normal", name="next"),
        mode=ClaimMode.OVERWRITE,
        on_claimed=lambda paths: during.extend(find_by_token(plan.run_token)),
    )
    assert outcome.state == RunState.COMPLETED
    assert during == []


def test_second_run_in_a_folder_is_refused_and_changes_nothing(make_plan, launch):
    plan = make_plan("endless")
    first = launch(plan)
    until_training(plan)
    with pytest.raises(OutputError, match=f"in use by run run-fake .running, pid {first.pid} on "):
        run(make_plan("normal", name="second"), mode=ClaimMode.OVERWRITE)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert (first.returncode, out) == (130, "interrupted (SIGINT) with 2 of 6 captures\n")
    assert find_by_token(plan.run_token) == []


def test_agent_killed_together_with_a_worker(make_plan):
    plan = make_plan(WORST)
    paths = RunPaths(plan.run_dir)
    kill = WhenTraining(lambda s: kill_together(read_run_record(paths).agent.pid, s.ranks[1].pid))
    outcome = run(plan, kill)
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, 4)
    until_gone(plan)
    assert [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE] == []
