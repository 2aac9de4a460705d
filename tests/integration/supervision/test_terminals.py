"""Terminals that close, and launchers that do not need one."""

import contextlib
import os
import pty
import shlex
import signal
import threading
import time

import pytest
from fakes import REPOSITORY, launcher_command, run, until, until_gone, until_training

from qcollect.launch import detach
from qcollect.launch.detach import start_detached
from qcollect.launch.stop import stop_runs
from qcollect.monitor.run_record import read_run_record
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.stop import request_stop
from qcollect.store.files import write_json_atomic


@pytest.fixture
def terminal(tmp_path):
    """Starts a command on a terminal of its own; both are gone at the end."""
    opened = []

    def start(command, **variables):
        pid, descriptor = pty.fork()
        if pid == 0:
            os.chdir(tmp_path)
            environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "100"} | variables
            os.execvpe(command[0], command, environment)
        opened.append(Opened(pid, descriptor))
        return opened[-1]

    yield start
    for one in opened:
        one.end()


class Opened:
    def __init__(self, pid, descriptor):
        self.pid, self.descriptor, self.code = pid, descriptor, None
        os.set_blocking(descriptor, False)
        self.shown = b""

    def read(self):
        """What has been shown so far; a terminal that nobody reads blocks its programs."""
        with contextlib.suppress(OSError):
            self.shown += os.read(self.descriptor, 1 << 16)
        return self.shown

    def hang_up(self):
        os.close(self.descriptor)
        self.descriptor = -1

    def wait(self):
        return until(self._poll, "the program on the terminal has ended")[0]

    def _poll(self):
        if self.descriptor >= 0:
            self.read()
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return None if self.code is None else [self.code]

    def end(self):
        if self.code is None and self._poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        if self.descriptor >= 0:
            self.hang_up()


@pytest.fixture
def written(tmp_path):
    """A plan as a file."""

    def write(plan):
        path = tmp_path / f"{plan.quant_type}-{time.monotonic_ns()}.json"
        write_json_atomic(path, plan.to_dict())
        return path

    return write


def until_ended(paths):
    until(lambda: not read_run_record(paths).state.is_active, "the run has ended")
    return read_run_record(paths)


def test_closed_terminal_ends_the_run_as_an_interrupt_with_nothing_left(make_plan, written, terminal):
    plan = make_plan("endless+grandchild")
    window = terminal(launcher_command(written(plan)))
    paths = until_training(plan)
    window.read()
    window.hang_up()
    record = until_ended(paths)
    assert (str(record.state), record.exit_code) == ("interrupted", 143)
    assert record.reason == "interrupted (SIGHUP) with 2 of 6 captures"
    assert window.wait() in (143, 1)  # it has nowhere to print its outcome to
    until_gone(plan)


def test_closed_terminal_of_a_shell_ends_the_run_too(make_plan, written, terminal):
    plan = make_plan("endless+grandchild", show_ranks="all")
    window = terminal(["bash", "--norc", "-i", "-c", shlex.join(launcher_command(written(plan))) + "; true"])
    paths = until_training(plan)
    window.read()
    window.hang_up()
    record = until_ended(paths)
    assert (str(record.state), record.reason) == ("interrupted", "interrupted (SIGHUP) with 2 of 6 captures")
    window.wait()
    until_gone(plan)


def test_run_under_nohup_in_the_background_goes_on_when_the_terminal_closes(make_plan, written, terminal):
    """torchrun's own SIGHUP handler takes nohup's protection away: pytorch/pytorch issue 67538."""
    plan = make_plan("endless")
    command = f"nohup {shlex.join(launcher_command(written(plan)))} &\nwait"
    window = terminal(["bash", "--norc", "-c", command])
    paths = until_training(plan)
    window.read()
    window.hang_up()
    window.wait()
    seen = read_snapshot(paths, time.time()).iteration
    until(lambda: read_snapshot(paths, time.time()).iteration > seen + 5, "the run goes on")
    request_stop(paths)
    record = until_ended(paths)
    assert (str(record.state), record.reason) == ("stopped", "stopped on request with 2 of 6 captures")
    until_gone(plan)


def test_ctrl_c_typed_twice_forces_the_end(make_plan, written, terminal):
    plan = make_plan("endless+deaf+stubborn+grandchild", grace_s=300.0)
    window = terminal(launcher_command(written(plan)))
    paths = until_training(plan)
    os.write(window.descriptor, b"\x03")
    until(lambda: b"press Ctrl-C again to force" in window.read(), "the hint is shown")
    os.write(window.descriptor, b"\x03")
    assert window.wait() == 130
    assert read_run_record(paths).reason.endswith("by force: Ctrl-C was pressed again")
    until_gone(plan)


# ---------------------------------------------------------------------------------------------
# Detached
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def detached_command(tmp_path, monkeypatch):
    """What a detached launcher is started with: a script in place of ``python -m qcollect``."""

    def use(body):
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(REPOSITORY))}\nshift 2\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(detach.sys, "executable", str(script))

    return use


def test_detached_run_is_found_by_status_and_stop_and_writes_its_own_log(make_plan, written, detached_command):
    plan = make_plan("endless", show_ranks=0)
    paths = RunPaths(plan.run_dir)
    detached_command("echo checking; exec " + shlex.join(launcher_command(written(plan))))
    started = start_detached([plan.run_dir.parent / "other", plan.run_dir], ["run", "mxfp8", "--detach"])
    pid = read_run_record(paths).launcher.pid
    assert (started.run_dir, started.exit_code) == (plan.run_dir, 0)
    out = plan.run_dir.parent
    assert started.messages == (
        "checking",
        f"goes on as process {pid}: 'qcollect status {out}' shows it, 'qcollect stop {out}' ends it, "
        f"its log is {paths.launcher_log_path}",
    )
    assert os.getsid(pid) == pid  # no terminal's hangup reaches it
    until_training(plan)
    assert read_snapshot(paths, time.time()).state_text == "running"
    stop_runs(out, now=time.time(), wait=True)
    assert read_run_record(paths).reason == "stopped on request with 2 of 6 captures"
    os.waitpid(pid, 0)
    log = paths.launcher_log_path.read_text()
    assert "[rank 0] rank 0 starts\n" in log
    assert log.endswith("stopped on request with 2 of 6 captures\n")
    until_gone(plan)


def test_detached_launch_that_is_refused_shows_why_and_gives_its_exit_code(make_plan, written, detached_command):
    plan = make_plan("normal")
    run(plan)
    detached_command("exec " + shlex.join(launcher_command(written(plan))))
    started = start_detached([plan.run_dir], ["run", "mxfp8", "--detach"])
    assert (started.run_dir, started.exit_code) == (None, 3)
    assert started.messages[0].startswith(f"{plan.run_dir} already holds run run-fake (completed, pid ")


def test_only_the_launchers_own_detach_flag_is_taken_away(tmp_path, detached_command):
    detached_command(f'printf "%s\\n" "$QCOLLECT_DETACHED" "$@" > {shlex.quote(str(tmp_path / "seen"))}; exit 3')
    start_detached([tmp_path], ["run", "--detach", "mxfp8", "--", "--detach", "", "a b"])
    assert (tmp_path / "seen").read_text() == "1\nrun\nmxfp8\n--\n--detach\n\na b\n"


def test_starter_that_is_interrupted_ends_what_it_started(tmp_path, detached_command):
    pid_path = tmp_path / "pid"
    detached_command(f"echo $$ > {shlex.quote(str(pid_path))}; exec sleep 300")

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:

        def press():
            until(lambda: pid_path.exists() and pid_path.read_text().endswith("\n"), "it has started")
            os.kill(os.getpid(), signal.SIGUSR1)

        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            start_detached([tmp_path / "never"], ["run"])
        presser.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_path.read_text()), 0)


def test_run_that_is_over_before_anybody_looked_is_still_told(make_plan, written, detached_command, monkeypatch):
    plan = make_plan("normal")
    detached_command("exec " + shlex.join(launcher_command(written(plan))))
    monkeypatch.setattr(detach, "_POLL_S", 2.0)  # it looks again when all is over
    started = start_detached([plan.run_dir], ["run", "mxfp8", "--detach"])
    assert (started.run_dir, started.exit_code) == (plan.run_dir, 0)
