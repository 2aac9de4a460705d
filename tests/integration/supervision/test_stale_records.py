"""A record that names a process which is not the run's launcher: nobody is signalled, nothing is blocked."""

import json
import os
import signal
import socket
import subprocess
import time

import psutil
import pytest
from fakes import run, until_gone, until_training

from qcollect.errors import OutputError
from qcollect.host.processes import RUN_TOKEN_VARIABLE, identify
from qcollect.launch.claim import ClaimMode
from qcollect.launch.stop import stop_runs
from qcollect.monitor.run_record import RunState
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import RunPaths


@pytest.fixture
def sleeper():
    """A live process that has nothing to do with any run."""
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def killed_run(make_plan, launch):
    """A run whose launcher was killed; all of it is gone."""
    plan = make_plan("endless")
    launcher = launch(plan)
    paths = until_training(plan)
    launcher.kill()
    launcher.wait()
    until_gone(plan)
    return paths


def edit(paths, **fields):
    record = json.loads(paths.run_path.read_text())
    paths.run_path.write_text(json.dumps(record | fields))


def shown(paths):
    return read_snapshot(paths, time.time()).state_text


def launcher_records(sleeper):
    own = time.time() - 3600
    return {
        "pid 1": {"pid": 1, "create_time": own},
        "a live process": {"pid": sleeper.pid, "create_time": own},
        "no start time": {"pid": sleeper.pid},
        "zero": {"pid": 0, "create_time": own},
        "negative": {"pid": -1, "create_time": own},
        "huge": {"pid": 1 << 40, "create_time": own},
        "text": {"pid": str(sleeper.pid), "create_time": own},
        "garbage": "garbage",
        "empty": {},
        "none": None,
    }


RECORDS = list(launcher_records(psutil.Process()))


@pytest.mark.parametrize("name", RECORDS)
def test_stale_launcher_is_lost_never_signalled_and_can_be_taken_over(killed_run_folder, sleeper, name, make_plan):
    paths = killed_run_folder
    edit(paths, launcher=launcher_records(sleeper)[name])
    assert shown(paths) == "lost"
    [stopped] = stop_runs(paths.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.num_killed) == (False, 0)
    assert stopped.message == "its launcher is gone; it has left no process"
    assert not paths.stop_path.exists()
    assert sleeper.poll() is None
    assert run(make_plan("normal", name="next"), mode=ClaimMode.OVERWRITE).state == RunState.COMPLETED
    assert sleeper.poll() is None


@pytest.fixture
def killed_run_folder(make_plan):
    """What a launcher killed right after it had claimed its folder leaves."""
    plan = make_plan("normal", name="before")
    paths = RunPaths(plan.run_dir)
    run(plan)
    edit(paths, state="running", exit_code=None, ended_at=None, reason=None)
    return paths


def test_launcher_killed_for_real_is_lost_and_its_run_can_be_resumed(killed_run, make_plan):
    assert shown(killed_run) == "lost"
    outcome = run(make_plan("normal", name="next"), mode=ClaimMode.RESUME)
    assert outcome.state == RunState.COMPLETED
    assert shown(killed_run) == "completed"
    assert len(list(killed_run.run_dir.glob("*.pt"))) == 6


def test_live_process_under_the_pid_of_a_killed_launcher_is_left_alone(killed_run, sleeper):
    """Runs are short and pids are used again soon: a start time within a second or two is no proof."""
    record = json.loads(killed_run.run_path.read_text())
    edit(killed_run, launcher=record["launcher"] | {"pid": sleeper.pid})
    assert shown(killed_run) == "lost"
    assert not stop_runs(killed_run.run_dir, now=time.time(), wait=False)[0].was_asked
    assert sleeper.poll() is None


@pytest.mark.parametrize("content", [b"", b"0", b"garbage", b"[]", b'{"launcher": {"pid": '])
def test_damaged_record_is_lost_and_stop_does_nothing(killed_run_folder, content, make_plan):
    killed_run_folder.run_path.write_bytes(content)
    assert shown(killed_run_folder) == "lost"
    [stopped] = stop_runs(killed_run_folder.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.num_killed) == (False, 0)
    assert stopped.message == f"{killed_run_folder.run_path} is missing or damaged; nothing was done"
    assert run(make_plan("normal", name="next"), mode=ClaimMode.OVERWRITE).state == RunState.COMPLETED


def test_run_of_another_host_is_unknown_and_only_asked(killed_run_folder, sleeper, make_plan):
    paths = killed_run_folder
    edit(paths, host="elsewhere", launcher=identify(sleeper.pid).to_dict())
    assert shown(paths) == "unknown (recorded on elsewhere)"
    [stopped] = stop_runs(paths.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.num_killed) == (True, 0)
    assert stopped.message == f"is a run of elsewhere; asked to end through {paths.stop_path}"
    assert paths.stop_path.exists()
    assert sleeper.poll() is None
    with pytest.raises(OutputError, match=" on elsewhere, started "):  # its files have just changed
        run(make_plan("normal", name="next"), mode=ClaimMode.OVERWRITE)


def test_run_of_another_host_that_has_been_silent_for_long_can_be_taken_over(killed_run_folder, make_plan):
    paths = killed_run_folder
    edit(paths, host="elsewhere")
    for path in paths.state_dir.rglob("*"):
        os.utime(path, (1.0, 1.0))
    assert run(make_plan("normal", name="next"), mode=ClaimMode.OVERWRITE).state == RunState.COMPLETED


# ---------------------------------------------------------------------------------------------
# qcollect stop
# ---------------------------------------------------------------------------------------------


def test_stop_of_a_live_run_ends_it_and_can_be_waited_for(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan)
    paths = until_training(plan)
    [stopped] = stop_runs(paths.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.num_killed, stopped.message) == (
        True,
        0,
        "asked to end after the iteration it is in",
    )
    assert shown(paths) == "stopped"
    out, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (7, "stopped on request with 2 of 6 captures\n")
    until_gone(plan)


def test_stop_of_a_run_that_has_ended_does_nothing_and_says_so(make_plan):
    plan = make_plan("normal")
    run(plan)
    paths = RunPaths(plan.run_dir)
    [stopped] = stop_runs(paths.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.message) == (False, "has ended already (completed); nothing was done")
    assert not paths.stop_path.exists()


def test_stop_of_a_lost_run_ends_only_what_carries_its_token(killed_run_folder, sleeper, tmp_path):
    paths = killed_run_folder
    edit(paths, launcher={"pid": sleeper.pid, "create_time": 1.0}, agent=identify(sleeper.pid).to_dict())
    token = json.loads(paths.run_path.read_text())["run_token"]
    left = subprocess.Popen(["sleep", "300"], env={RUN_TOKEN_VARIABLE: token}, start_new_session=True)
    other = subprocess.Popen(["sleep", "300"], env={RUN_TOKEN_VARIABLE: token + "1"}, start_new_session=True)
    try:
        [stopped] = stop_runs(paths.run_dir, now=time.time(), wait=True)
        assert (stopped.was_asked, stopped.num_killed) == (False, 1)
        assert stopped.message == "its launcher is gone; ended 1 process(es) it had left"
        assert left.wait(60) == -signal.SIGKILL
        assert other.poll() is None and sleeper.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_stop_without_a_token_kills_nothing(killed_run_folder):
    edit(killed_run_folder, run_token="", launcher=None)
    [stopped] = stop_runs(killed_run_folder.run_dir, now=time.time(), wait=True)
    assert (stopped.was_asked, stopped.num_killed) == (False, 0)


def test_stop_of_a_folder_asks_its_active_runs_and_names_the_others(make_plan, launch):
    run(make_plan("normal", name="ended", folder="bf16"))
    plan = make_plan("endless", name="live")
    launcher = launch(plan)
    paths = until_training(plan)
    ended, live = stop_runs(paths.run_dir.parent, now=time.time(), wait=True)
    assert (ended.run_dir.name, ended.was_asked) == ("bf16", False)
    assert (live.run_dir.name, live.was_asked) == ("mxfp8", True)
    assert launcher.wait(60) == 7


def test_stop_where_there_is_no_run_says_what_to_name(tmp_path):
    with pytest.raises(OutputError, match="holds no run"):
        stop_runs(tmp_path, now=time.time(), wait=False)


def test_host_of_this_machine_is_what_records_hold(killed_run_folder):
    assert json.loads(killed_run_folder.run_path.read_text())["host"] == socket.gethostname()
