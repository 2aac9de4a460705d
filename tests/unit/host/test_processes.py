import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import qcollect.paths
from qcollect.host.processes import (
    adopting_orphans,
    find_by_token,
    find_run,
    identify,
    kill_all,
    launch_environment,
    parse_process,
    process_is,
    reap_adopted,
    wait_gone,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="by prctl and /proc")
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(qcollect.paths.__file__).parents[1])}


@pytest.fixture
def token():
    token = uuid.uuid4().hex
    yield token
    kill_all(lambda: find_by_token(token))


def start(token, code="import time; time.sleep(300)", **options):
    environment = ENVIRONMENT | {"QCOLLECT_RUN_TOKEN": token}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **options)


def until(condition):
    deadline = time.monotonic() + 30
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def test_process_is_known_by_pid_and_start_time():
    me = identify(os.getpid())
    assert process_is(me)
    assert not process_is(replace(me, pid=1))
    assert parse_process(me.to_dict()) == me


def test_start_time_in_ticks_decides_whatever_the_clock_says():
    me = identify(os.getpid())
    assert process_is(replace(me, create_time=me.create_time - 3600))
    boot_id, ticks = me.started.split(":")
    assert not process_is(replace(me, started=f"{boot_id}:{int(ticks) + 1}"))
    assert not process_is(replace(me, started=f"other:{ticks}"))


def test_without_ticks_the_start_time_by_the_clock_decides():
    me = replace(identify(os.getpid()), started=None)
    assert process_is(me)
    assert process_is(replace(me, create_time=me.create_time + 1))
    assert not process_is(replace(me, create_time=me.create_time - 60))


@pytest.mark.parametrize("pid", [None, "", "12", 0, -1, True, 2**80, 1.5, {}])
@pytest.mark.parametrize("create_time", [None, "x", 5.0])
def test_garbage_is_no_process(pid, create_time):
    assert not process_is(parse_process({"pid": pid, "create_time": create_time}))
    assert not process_is(parse_process({"pid": os.getpid(), "create_time": create_time}))
    assert not process_is(parse_process({"pid": os.getpid()}))


def test_ended_process_is_not_running_before_and_after_it_is_reaped(token):
    process = start(token, "pass")
    who = identify(process.pid)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert not process_is(who)
    process.wait()
    assert not process_is(who)
    assert identify(process.pid) is None


def test_environment_of_a_launch(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("HOME", "/home/somebody")
    environment = launch_environment(unset=("RANK", "NOT_SET"), env={"OMP_NUM_THREADS": "2"})
    assert "RANK" not in environment
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("/home/somebody", "2")


@linux_only
def test_run_is_found_by_its_token_with_what_it_started_without_it(token):
    code = f"import subprocess, time; subprocess.Popen({SLEEP!r}, env={{}}); time.sleep(300)"
    process = start(token, code)
    other = start(token + "x")
    try:
        until(lambda: len(find_run(token)) == 2)
        assert [p.pid for p in find_by_token(token)] == [process.pid]
        assert kill_all(lambda: find_run(token)) == 2
        assert other.poll() is None
        assert process.wait() == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()


@linux_only
def test_own_process_is_never_found(monkeypatch, token):
    code = f"from qcollect.host.processes import find_by_token; print(find_by_token({token!r}))"
    out, _ = start(token, code, stdout=subprocess.PIPE).communicate(timeout=30)
    assert out == "[]\n"


@linux_only
def test_child_ends_with_its_parent(token):
    child = "import signal, time; from qcollect.host.processes import die_with_parent as d; d(signal.SIGTERM)"
    child += "; print('ready', flush=True); time.sleep(300)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(300)"
    with start(token, code, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == "ready\n"
        (process,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        assert wait_gone([process], 30)


@linux_only
def test_child_whose_parent_has_ended_already_ends_at_once(token):
    code = "import signal, time; from qcollect.host.processes import die_with_parent as d; d(signal.SIGTERM, 1)"
    code += "; time.sleep(300)"
    assert start(token, code).wait(30) == -signal.SIGTERM


@linux_only
def test_orphans_are_adopted_and_reaped_and_other_children_are_not(token):
    started_at = time.time()
    theirs = subprocess.Popen(["false"], start_new_session=True)
    known = [theirs.pid]
    parent_code = (
        "import subprocess as s; print(s.Popen(['sleep', '300'], stdout=s.DEVNULL, start_new_session=True).pid)"
    )
    with adopting_orphans():
        out, _ = start(token, parent_code, stdout=subprocess.PIPE, start_new_session=True).communicate(timeout=30)
        orphan = psutil.Process(int(out))
        assert orphan.ppid() == os.getpid()
        assert kill_all(lambda: find_run(token)) == 1
        assert orphan.status() == psutil.STATUS_ZOMBIE
        assert reap_adopted(since=started_at, known=known) == 1
        assert not psutil.pid_exists(orphan.pid)
        assert reap_adopted(since=started_at, known=known) == 0
    assert theirs.wait() == 1
