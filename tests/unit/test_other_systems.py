"""What does not run a launch works on other systems: in processes that look like Windows and macOS to qcollect.

Third-party packages are imported first, as the Linux builds they are; then what the system would not have is
taken away, and qcollect is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qcollect.paths
from qcollect.errors import PreflightError
from qcollect.host.platform import require_linux
from qcollect.paths import RunPaths
from qcollect.store.capture import save_capture
from qcollect.store.files import append_line, write_json_atomic

REPOSITORY = Path(qcollect.paths.__file__).parents[1]
MISSING = {
    "darwin": {
        "modules": (),
        "signals": ("SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX"),
        "os": ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "eventfd"),
    },
    "win32": {
        "modules": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"),
        "signals": (
            *(
                "SIGKILL",
                "SIGBUS",
                "SIGHUP",
                "SIGQUIT",
                "SIGUSR1",
                "SIGUSR2",
                "SIGCHLD",
                "SIGCONT",
                "SIGSTOP",
                "SIGPIPE",
            ),
            *("SIGALRM", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGXCPU", "SIGXFSZ", "SIGPWR", "SIGRTMIN", "SIGRTMAX"),
            *("pthread_sigmask", "sigwait", "sigwaitinfo", "sigtimedwait", "setitimer", "alarm", "pause"),
        ),
        "os": (
            *(
                "statvfs",
                "sched_getaffinity",
                "sched_setaffinity",
                "posix_fadvise",
                "posix_fallocate",
                "fork",
                "killpg",
            ),
            *("getuid", "geteuid", "getgid", "getsid", "setsid", "getpgid", "uname", "pread", "pwrite", "WNOHANG"),
            *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "chown", "mkfifo", "getloadavg", "memfd_create", "eventfd"),
        ),
    },
}

# what torch and others call late and would have in a build for that system is looked up before it is gone
PREPARE = """
import ctypes, importlib.abc, json, os, pkgutil, signal, sys
import multiprocessing.util, asyncio, subprocess, tempfile, shutil, uuid, getpass, logging.handlers, platform, socket
import sysconfig, zoneinfo
import psutil, pydantic, rich.console, rich.live, rich.progress, rich.table, torch, typer, typer.testing, xxhash, yaml

sysconfig.get_config_vars()
pydantic.TypeAdapter(list[int]).validate_python([1])
torch.zeros(2).to(torch.bfloat16).sum()
system, missing, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in missing["modules"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in missing["modules"]:
    sys.modules.pop(name, None)
for module, names in ((signal, missing["signals"]), (os, missing["os"])):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
class NoLibrary:
    def __init__(self, *args, **kwargs):
        raise OSError("no such library")
ctypes.CDLL = NoLibrary
sys.platform = system
sys.argv = ["qcollect"]

import contextlib, io
def command(*arguments):
    from qcollect.cli import main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("a command ends its process")
"""

IMPORTS = """
import importlib
import qcollect
# they run a launch, or are programs
SKIPPED = ("qcollect.launch", "qcollect.sweep")
def walk(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.startswith(SKIPPED) or found.name.endswith("__main__"):
            continue
        yield found.name
        if found.ispkg:
            yield from walk(importlib.import_module(found.name))
names = list(walk(qcollect))
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
assert not failed, failed
for package in ("formats", "store", "vocab", "paths", "recipe", "plan", "monitor", "cli", "host", "data", "worker"):
    assert any(name.startswith(f"qcollect.{package}") for name in names), package
assert not [name for name in sys.modules if name.startswith(SKIPPED)]
for name in qcollect.__all__:
    getattr(qcollect, name)
"""

READING = """
import qcollect
run_dir = folder

y = qcollect.fake_quantize(torch.tensor([0.1, -3.0, 500.0]), "mxfp8")
assert y.tolist() == [0.1015625, -3.0, 448.0], y
run = qcollect.open_run(run_dir)
(capture,) = run.select(tensor_name="query")
assert capture.load().tolist() == [1.0, 2.0]

code, out, err = command("formats")
assert (code, err) == (0, ""), (code, err)
assert "mxfp8" in out and "hifp8" in out
code, out, err = command("status", run_dir)
assert code == 0, err
assert "mxfp8" in out and "killed (signal 9)" in out + err, out
code, out, err = command("status", run_dir, "--json")
assert json.loads(out)[0]["captured"] == 1, out
code, out, err = command("recipes", "show", "tiny")
assert code == 0, err
"""

REFUSAL = """
name = {"win32": "Windows", "darwin": "macOS"}[system]
for arguments in (("run", "mxfp8", "--recipe", "tiny"), ("sweep", "--all", "--recipe", "tiny")):
    code, out, err = command(*arguments, "--out", folder)
    assert (code, out) == (3, ""), (code, out, err)
    assert err.startswith(f"error: qcollect {arguments[0]} needs Linux ("), err
    assert f"this is {name}; what works here: qcollect formats" in err, err
assert not os.path.lexists(folder)
"""

WRITING = """
from pathlib import Path
import shutil
from qcollect.store.capture import write_failure
shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(3000, 1000, 2000)  # it was built for this system
if system == "win32":
    message = str(write_failure(Path(folder) / "a.pt", OSError(28, "No space left on device")))
    assert message.endswith(f": cannot be written: No space left on device (2,000 bytes free in {folder})"), message
"""


@pytest.fixture(params=["win32", "darwin"])
def elsewhere(request):
    """Runs a program as if on another system."""

    def run(program: str, folder: Path) -> None:
        missing = json.dumps(MISSING[request.param])
        command = [sys.executable, "-c", PREPARE + program, request.param, missing, str(folder)]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture
def run_dir(tmp_path):
    """A run that failed on a Linux machine, with one capture."""
    paths = RunPaths(tmp_path / "mxfp8")
    for folder in paths.state_dirs():
        folder.mkdir(parents=True)
    metadata = {"tensor_name": "query", "rank": 0}
    stored = save_capture(paths.run_dir / "query.pt", torch.tensor([1.0, 2.0]), {}, metadata)
    fields = {"file": "query.pt", "bytes": stored.num_bytes, "xxh3_128": stored.xxh3_128}
    append_line(paths.manifest_path(0), fields | {"metadata": metadata, "tensor_info": {}})
    started = {"pid": 10, "create_time": 5.0}
    record = {"schema": 1, "run_id": "run-a", "run_token": "t", "quant_type": "mxfp8", "state": "failed"}
    record |= {"reason": "rank 0 was killed (signal 9), often out of memory", "exit_code": 4, "host": "there"}
    record |= {"launcher": started, "agent": started, "target": 8, "world_size": 1, "recipe_name": "tiny"}
    record |= dict.fromkeys(("started_at", "ended_at"), "2024-12-01T14:29:22.000+00:00")
    write_json_atomic(paths.run_path, record)
    failure = {"rank": 0, "local_rank": 0, "pid": 11, "exitcode": -9, "signal": 9, "time": 1}
    write_json_atomic(paths.agent_error_path, {"failures": [failure]})
    return paths.run_dir


def test_every_module_that_runs_no_launch_can_be_imported(elsewhere, tmp_path):
    elsewhere(IMPORTS, tmp_path)


def test_formats_runs_and_captures_can_be_read(elsewhere, run_dir):
    elsewhere(READING, run_dir)


def test_a_launch_says_that_it_needs_linux_and_what_works(elsewhere, tmp_path):
    elsewhere(REFUSAL, tmp_path / "out")


def test_a_file_that_cannot_be_written_is_told_with_the_space_there_is(elsewhere, tmp_path):
    elsewhere(WRITING, tmp_path)


@pytest.mark.parametrize(("system", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("freebsd14", "freebsd14")])
def test_the_system_is_named(monkeypatch, system, name):
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(PreflightError) as refused:
        require_linux("qcollect sweep")
    assert str(refused.value).startswith(
        "qcollect sweep needs Linux (it ends processes with prctl, locks and signals), "
    )
    assert f"and this is {name}; what works here: qcollect formats" in str(refused.value)


def test_nothing_is_said_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    require_linux()
