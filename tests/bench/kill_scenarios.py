"""Every way a run can end, done to real runs: how long until all of it is gone, and what is left.

    python tests/bench/kill_scenarios.py                                     # all, three times each
    python tests/bench/kill_scenarios.py --times 1 --only ctrl_c stop_wait
    python tests/bench/kill_scenarios.py --list

A scenario starts ``qcollect run`` of the recipe ``tiny`` (random weights, two ranks, gloo) with a target that it
does not reach by itself, waits until every rank trains and has ``CAPTURES_FIRST`` files listed, and acts. A line
shows the worst of all times:

    procs     processes of the run before the act, the launcher and its guard among them
    seconds   from the act (of ``target`` and ``nohup``: from the last capture) until every process is gone
    left      processes alive after that, or after ``DEADLINE_S``: those with the run's token in their
              environment, and those below the launcher before the act, known by pid and start time
    zombies   of the same processes, ended and not waited for
    torn      what ``qcollect verify`` finds wrong, but for captures that were planned and not taken, whole files
              a killed writer had not listed yet, and temporaries, which are counted by themselves
    tmp       files under a temporary name anywhere in the output folder
    exit      the launcher's exit code, ``-`` when it is killed; of a detached one that in ``run.json``
    state     what ``qcollect status --json`` says afterwards

``_children`` scenarios have, in each rank, a DataLoader's worker process, an idle child, and a child in a session
of its own that ignores SIGTERM, SIGINT and SIGHUP. Exit code and state are held against ``qcollect/launch/README.md``.
A writer that is killed may leave the one file it was writing under its temporary name; where nobody is killed
none may be left. The exit code is 1 if anything is not as it should be. Needs Linux.
"""

import argparse
import json
import os
import platform
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from qcollect.errors import ExitCode
from qcollect.host.processes import find_by_token, find_descendants, find_run, is_alive, kill_all
from qcollect.monitor.run_record import RunRecord, RunState, read_run_record
from qcollect.monitor.snapshot import RunSnapshot, read_snapshot
from qcollect.paths import TEMPORARY_SUFFIX, RunPaths
from qcollect.store.folder import pt_files
from qcollect.store.verify import Problem

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NUM_RANKS = 2
CAPTURES_FIRST = 5  # of each rank, before anything is done
START_S = 300.0
DEADLINE_S = 150.0
END_S = 900.0  # of a run that ends by its target
ZOMBIE_S = 2.0  # for whoever inherits an orphan to wait for it
POLL_S = 0.1
FAST_POLL_S = 0.02
# ten captures an iteration and rank, twenty minutes and more on two cores
ENDLESS = ("--target", "40000", "--set", "capture.iterations=0-1999", "--set", "train.iterations=2000")
REACHABLE = ("--target", "400", "--set", "capture.iterations=0-19", "--set", "train.iterations=2000")
KILLED = None
# not what a torn file is: see the module's docstring
TOLERATED = (Problem.MISSING, Problem.UNLISTED, Problem.TEMPORARY)


# ---------------------------------------------------------------------------------------------
# The training script of the ``_children`` scenarios
# ---------------------------------------------------------------------------------------------


def train_with_children() -> None:
    """The recipe's training in a process that has started others."""
    from torch.utils.data import DataLoader

    # kept until the training ends: a loader that is dropped ends its worker
    loader = iter(DataLoader(range(10**9), num_workers=1))
    next(loader)
    _start_child("", start_new_session=False)
    _start_child("for s in (SIGTERM, SIGINT, SIGHUP): signal(s, SIG_IGN)", start_new_session=True)
    sys.path.insert(0, str(RECIPES))
    import train

    train.main()


def _start_child(preparation: str, *, start_new_session: bool) -> None:
    """A child that is idle for longer than any scenario; returns once it is prepared."""
    code = f"import time\nfrom signal import *\n{preparation}\nprint(flush=True)\ntime.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=start_new_session)
    assert child.stdout is not None
    child.stdout.readline()


# ---------------------------------------------------------------------------------------------
# A launch: its program, with or without a terminal, and its processes
# ---------------------------------------------------------------------------------------------


class OnFile:
    """A program whose output goes to a file."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        with (folder / "launcher.out").open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """There is no terminal."""


class OnTerminal:
    """A program that leads the session of a terminal; what it shows is read and kept in a file."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._shown_path = folder / "launcher.out"
        self._code: int | None = None
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], list(command), os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"})
        os.set_blocking(self._terminal, False)

    def poll(self) -> int | None:
        self._read()
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def close(self) -> None:
        """Close the terminal's window."""
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def _read(self) -> None:
        """A terminal that nobody reads blocks its programs."""
        if self._terminal >= 0:
            with suppress(OSError), self._shown_path.open("ab") as file:
                file.write(os.read(self._terminal, 1 << 16))


class Launch:
    """One run, from its command to the look at what it left."""

    def __init__(self, folder: Path, scenario: "Scenario") -> None:
        self.paths = RunPaths(folder / "out" / "mxfp8")
        self.folder = folder
        self.scenario = scenario
        self.seen: set[psutil.Process] = set()
        command = [*scenario.prefix, *qcollect("run", "mxfp8", *_run_arguments(scenario), "--out", str(folder / "out"))]
        self.program = OnTerminal(command, folder) if scenario.on_terminal else OnFile(command, folder)

    @property
    def record(self) -> RunRecord:
        record = read_run_record(self.paths)
        assert record is not None and record.launcher is not None, f"{self.paths.run_path} cannot be read"
        return record

    @property
    def token(self) -> str | None:
        record = read_run_record(self.paths)
        return record.run_token if record is not None else None

    def snapshot(self) -> RunSnapshot:
        return read_snapshot(self.paths, time.time())

    def pids(self, *names: str) -> list[int]:
        """Of ``launcher``, ``agent``, ``worker`` (that of the last rank)."""
        record, worker = self.record, self.snapshot().ranks[-1].pid
        pid_of = {
            "launcher": record.launcher and record.launcher.pid,
            "agent": record.agent and record.agent.pid,
            "worker": worker,
        }
        return [pid for name in names if (pid := pid_of[name]) is not None]

    # -- waiting ----------------------------------------------------------------------------------

    def until(self, condition: Callable[[], object], what: str, timeout_s: float, poll_s: float = POLL_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.program.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(poll_s)

    def until_capturing(self, num_captures: int = CAPTURES_FIRST) -> None:
        """Until every rank trains and has listed some files."""

        def is_capturing() -> bool:
            ranks = self.snapshot().ranks if self.paths.run_path.exists() else ()
            if self.program.poll() is not None and not self.scenario.is_detached:
                raise RuntimeError(f"the run ended before anything was done to it: {self.last_words()}")
            ready = [r for r in ranks if r.state == "training" and r.captured >= num_captures]
            return len(ready) == NUM_RANKS

        self.until(is_capturing, "every rank captures", START_S)

    def until_gone(self, timeout_s: float) -> float:
        """When the last process was gone (monotonic), or the time was over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._is_gone():
            time.sleep(FAST_POLL_S)
        return time.monotonic()

    def _is_gone(self) -> bool:
        has_ended = self.program.poll() is not None
        return has_ended and not any(map(is_alive, self.seen)) and not find_by_token(self.record.run_token)

    # -- processes --------------------------------------------------------------------------------

    def look(self) -> None:
        """Keep in mind who is there, so that it is found again without parent and token."""
        for pid in self.pids("launcher"):
            self.seen |= {psutil.Process(pid), *find_descendants(pid)}
        self.seen |= set(find_run(self.record.run_token))

    def left(self) -> list[psutil.Process]:
        return [p for p in {*self.seen, *find_by_token(self.record.run_token)} if is_alive(p)]

    def zombies(self) -> list[psutil.Process]:
        """Of the processes seen; orphans may need a moment until they are waited for."""
        deadline = time.monotonic() + ZOMBIE_S
        while (found := [p for p in self.seen if _is_zombie(p)]) and time.monotonic() < deadline:
            self.program.poll()
            time.sleep(POLL_S)
        return found

    def last_words(self) -> str:
        path = self.folder / "launcher.out"
        return path.read_text(errors="replace")[-400:] if path.exists() else ""

    def end(self) -> None:
        """Kill whatever there still is of it, whatever happened."""
        token = self.token
        below = [*find_descendants(self.program.pid), *self.seen]
        if self.program.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.program.pid, signal.SIGKILL)
        kill_all(lambda: [*below, *(find_run(token) if token else [])])
        self.program.close()
        with suppress(TimeoutError):
            self.until(lambda: self.program.poll() is not None, "the launcher has ended", ZOMBIE_S)


def qcollect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "qcollect", *arguments]


def _run_arguments(scenario: "Scenario") -> list[str]:
    children = ["--set", f"script={Path(__file__).resolve()}"] if scenario.has_children else []
    detached = ["--detach"] if scenario.is_detached else []
    common = ["--recipe", "tiny", "--nproc", str(NUM_RANKS), "--set", "launch.device=cpu"]
    return [*common, *scenario.extent, *children, *detached]


def _is_zombie(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() == psutil.STATUS_ZOMBIE
    return False


# ---------------------------------------------------------------------------------------------
# What is done to a run; each returns when the clock starts (monotonic)
# ---------------------------------------------------------------------------------------------


def send(signum: signal.Signals) -> Callable[[Launch], float]:
    def act(launch: Launch) -> float:
        started_s = time.monotonic()
        os.kill(launch.program.pid, signum)
        return started_s

    return act


def press(launch: Launch) -> float:
    started_s = time.monotonic()
    assert isinstance(launch.program, OnTerminal)
    launch.program.press_ctrl_c()
    return started_s


def press_twice(launch: Launch) -> float:
    """The second once the first has been obeyed: two at once are one signal to a process."""
    press(launch)
    launch.until(lambda: launch.record.state != RunState.RUNNING, "the run is stopping", DEADLINE_S, FAST_POLL_S)
    if launch.program.poll() is None:
        press(launch)
    return time.monotonic()


def freeze_and_press_twice(launch: Launch) -> float:
    """No iteration ends any more, so the first Ctrl-C cannot do it."""
    os.kill(launch.pids("worker")[0], signal.SIGSTOP)
    return press_twice(launch)


def close_terminal(launch: Launch) -> float:
    started_s = time.monotonic()
    launch.program.close()
    return started_s


def close_terminal_and_go_on(launch: Launch) -> float:
    """The run must not mind, and end by its target."""
    captured = launch.snapshot().captured
    launch.program.close()
    launch.until(lambda: launch.snapshot().captured > captured + 20, "the run goes on", DEADLINE_S)
    return until_target(launch)


def until_target(launch: Launch) -> float:
    """When the last capture was written; this waits for the launcher only, so as not to slow the run down."""
    launch.until(lambda: launch.program.poll() is not None, "the target is reached", END_S, FAST_POLL_S)
    return time.monotonic() - (time.time() - last_capture_s(launch.paths))


def kill(*names: str) -> Callable[[Launch], float]:
    """SIGKILL all of them before one of them can act on the other's end."""

    def act(launch: Launch) -> float:
        pids = launch.pids(*names)
        for pid in pids if len(pids) > 1 else ():
            os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return started_s

    return act


def stop_and_wait(launch: Launch) -> float:
    started_s = time.monotonic()
    stopping = OnFile(qcollect("stop", str(launch.folder / "out"), "--wait"), launch.folder)
    launch.until(lambda: stopping.poll() is not None, "qcollect stop --wait returns", DEADLINE_S)
    assert stopping.poll() == 0, f"qcollect stop --wait ended with {stopping.poll()}: {launch.last_words()}"
    assert not launch.record.state.is_active, "qcollect stop --wait returned before the run had ended"
    return started_s


def close_terminal_and_stop(launch: Launch) -> float:
    captured = launch.snapshot().captured
    launch.program.close()
    launch.until(lambda: launch.snapshot().captured > captured + 20, "the detached run goes on", DEADLINE_S)
    return stop_and_wait(launch)


def last_capture_s(paths: RunPaths) -> float:
    """When the newest capture was written (unix seconds)."""
    return max((paths.run_dir / file).stat().st_mtime for file in pt_files(paths.run_dir))


# ---------------------------------------------------------------------------------------------
# Scenarios
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is done, and how ``qcollect/launch/README.md`` says that the run ends then.

    ``exit_code`` None: the launcher is killed. ``is_forced``: writers are killed.
    """

    name: str
    act: Callable[[Launch], float]
    exit_code: ExitCode | None
    state: RunState
    on_terminal: bool = False
    is_forced: bool = False
    has_children: bool = False
    is_detached: bool = False
    extent: tuple[str, ...] = ENDLESS
    prefix: tuple[str, ...] = ()

    @property
    def max_temporaries(self) -> int:
        return NUM_RANKS if self.is_forced else 0


def _with_children(has_children: bool) -> Iterator[Scenario]:
    suffix = "_children" if has_children else ""

    def scenario(name: str, act: Callable[[Launch], float], exit_code: Any, state: RunState, **more: Any) -> Scenario:
        settings = {"has_children": has_children, **more}
        return Scenario(name=name + suffix, act=act, exit_code=exit_code, state=state, **settings)

    interrupted = RunState.INTERRUPTED
    yield scenario("ctrl_c", press, ExitCode.INTERRUPTED, interrupted, on_terminal=True)
    yield scenario("sigterm", send(signal.SIGTERM), ExitCode.TERMINATED, interrupted)
    for names, exit_code, state in (
        (("launcher",), KILLED, RunState.LOST),
        (("agent",), ExitCode.WORKER, RunState.FAILED),
        (("worker",), ExitCode.WORKER, RunState.FAILED),
        (("launcher", "agent"), KILLED, RunState.LOST),
    ):
        yield scenario("_".join(("kill", *names)), kill(*names), exit_code, state, is_forced=True)
    yield scenario("target", until_target, ExitCode.OK, RunState.COMPLETED, extent=REACHABLE)


def _scenarios() -> Iterator[Scenario]:
    interrupted, terminal = RunState.INTERRUPTED, {"on_terminal": True}
    twice = {"exit_code": ExitCode.INTERRUPTED, "state": interrupted, "is_forced": True, **terminal}
    yield Scenario(name="sigint", act=send(signal.SIGINT), exit_code=ExitCode.INTERRUPTED, state=interrupted)
    yield Scenario(name="sighup", act=send(signal.SIGHUP), exit_code=ExitCode.TERMINATED, state=interrupted)
    yield Scenario(name="ctrl_c_twice", act=press_twice, **twice)
    yield Scenario(name="ctrl_c_twice_frozen", act=freeze_and_press_twice, **twice)
    yield Scenario(
        name="terminal_closed", act=close_terminal, exit_code=ExitCode.TERMINATED, state=interrupted, **terminal
    )
    yield Scenario(
        name="nohup",
        act=close_terminal_and_go_on,
        exit_code=ExitCode.OK,
        state=RunState.COMPLETED,
        extent=REACHABLE,
        prefix=("nohup",),
        **terminal,
    )
    yield Scenario(name="stop_wait", act=stop_and_wait, exit_code=ExitCode.STOPPED, state=RunState.STOPPED)
    yield Scenario(
        name="detach_stop_wait",
        act=close_terminal_and_stop,
        exit_code=ExitCode.STOPPED,
        state=RunState.STOPPED,
        is_detached=True,
        **terminal,
    )
    yield from _with_children(False)
    yield from _with_children(True)


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One time of one scenario; ``problems`` are complete sentences, none if all is as it should be."""

    scenario: str
    procs: int = 0
    seconds: float | None = None
    left: int = 0
    zombies: int = 0
    torn: int = 0
    tmp: int = 0
    unlisted: int = 0
    captured: int = 0
    exit_code: int | None = None
    state: str = "?"
    problems: tuple[str, ...] = field(default=())

    @property
    def exit_text(self) -> str:
        return "-" if self.exit_code is None else str(self.exit_code)


def measure(scenario: Scenario) -> Measured:
    """Do a scenario once; a step that does not come about is a problem, too."""
    folder = Path(tempfile.mkdtemp(prefix=f"qcollect-{scenario.name}-"))
    launch = Launch(folder, scenario)
    try:
        return _measure(launch)
    except Exception as error:
        return Measured(scenario=scenario.name, problems=(f"{type(error).__name__}: {error}",))
    finally:
        launch.end()
        shutil.rmtree(folder, ignore_errors=True)


def _measure(launch: Launch) -> Measured:
    scenario = launch.scenario
    if scenario.is_detached:
        launch.until(lambda: launch.program.poll() is not None, "the command that detaches has left", START_S)
        assert launch.program.poll() == 0, f"--detach ended with {launch.program.poll()}: {launch.last_words()}"
    launch.until_capturing()
    launch.look()
    started_s = scenario.act(launch)
    gone_s = launch.until_gone(DEADLINE_S)
    left, zombies = launch.left(), launch.zombies()
    status = _answer("status", launch)
    findings = _answer("verify", launch)["findings"]
    measured = Measured(
        scenario=scenario.name,
        procs=len(launch.seen),
        seconds=gone_s - started_s,
        left=len(left),
        zombies=len(zombies),
        torn=sum(finding["problem"] not in TOLERATED for finding in findings),
        tmp=sum(1 for path in launch.folder.rglob(f".*{TEMPORARY_SUFFIX}")),
        unlisted=sum(finding["problem"] == Problem.UNLISTED for finding in findings),
        captured=status["captured"],
        exit_code=_exit_code(launch, status),
        state=status["state"],
    )
    return _judged(measured, scenario, _details(left, zombies, findings), status["reason"])


def _answer(command: str, launch: Launch) -> dict[str, Any]:
    """What ``qcollect COMMAND --json`` says of the run."""
    done = subprocess.run(
        qcollect(command, str(launch.folder / "out"), "--json"),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.stdout, f"qcollect {command} --json ended with {done.returncode}: {done.stderr[-400:]}"
    answer: dict[str, Any] = json.loads(done.stdout)[0]
    return answer


def _exit_code(launch: Launch, status: dict[str, Any]) -> int | None:
    """The launcher's; None if it was killed. Nobody here waits for a detached one: it has recorded its own."""
    code = status["exit_code"] if launch.scenario.is_detached else launch.program.poll()
    return None if code == -signal.SIGKILL else code


def _details(
    left: Iterable[psutil.Process], zombies: Iterable[psutil.Process], findings: Iterable[dict[str, Any]]
) -> list[str]:
    """What is left or torn, each by its name."""
    torn = [f for f in findings if f["problem"] not in TOLERATED]
    return [
        *(f"left: {_describe(process)}" for process in left),
        *(f"zombie: {_describe(process)}" for process in zombies),
        *(f"{finding['problem']}: {finding['path']}: {finding['what']}" for finding in torn),
    ]


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} (parent {process.ppid()}) {' '.join(process.cmdline())[:200]}"
    return f"{process.pid} (gone meanwhile)"


def _judged(measured: Measured, scenario: Scenario, details: Sequence[str], reason: str | None) -> Measured:
    problems = list(details)
    if measured.exit_code != scenario.exit_code:
        expected = "killed" if scenario.exit_code is None else int(scenario.exit_code)
        problems.append(f"the exit code is {measured.exit_text}, not {expected}")
    if measured.state != scenario.state:
        problems.append(f"the state is {measured.state}, not {scenario.state}: {reason}")
    if measured.tmp > scenario.max_temporaries:
        problems.append(f"{measured.tmp} temporary file(s) are left; at most {scenario.max_temporaries} may be")
    if measured.unlisted and not scenario.is_forced:
        problems.append(f"{measured.unlisted} file(s) are in no manifest, and nobody was killed")
    return Measured(**{**asdict(measured), "problems": tuple(problems)})


# ---------------------------------------------------------------------------------------------
# Reporting
# ---------------------------------------------------------------------------------------------

HEADERS = (
    "scenario",
    "times",
    "procs",
    "seconds",
    "left",
    "zombies",
    "torn",
    "tmp",
    "exit",
    "state",
    "as it should be",
)
WIDTHS = (30, 5, 5, 7, 4, 7, 4, 3, 7, 12, 15)


def row_of(results: Sequence[Measured]) -> tuple[str, ...]:
    """The worst of several times; exit codes and states that differ are all named."""
    seconds = [result.seconds for result in results if result.seconds is not None]
    counts = [str(max(getattr(r, name) for r in results)) for name in ("left", "zombies", "torn", "tmp")]
    return (
        results[0].scenario,
        str(len(results)),
        str(min(result.procs for result in results)),
        f"{max(seconds):.2f}" if seconds else "?",
        *counts,
        "/".join(sorted({result.exit_text for result in results})),
        "/".join(sorted({result.state for result in results})),
        "no" if any(result.problems for result in results) else "yes",
    )


def print_row(cells: Sequence[str]) -> None:
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip(), flush=True)


def to_markdown(rows: Iterable[Sequence[str]]) -> str:
    lines = [HEADERS, ("---", *("---:",) * 8, "---", "---"), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_json(results: Sequence[Measured], times: int) -> dict[str, Any]:
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    return {"machine": machine, "times": times, "results": [asdict(result) for result in results]}


@contextmanager
def signals_as_by_default() -> Iterator[None]:
    """Programs started inside begin with the usual signals, also if this one ignores some (``nohup``, ``&``).

    A SIGTERM to this one ends it by way of every ``finally``.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda number, frame: None)  # goes on here, and starts programs with the default
    signal.signal(signal.SIGTERM, leave)
    yield


def run_scenarios(names: Iterable[str], times: int) -> tuple[list[Measured], list[tuple[str, ...]]]:
    """Every scenario so often; its line is printed when it is done, what is wrong right below."""
    measured, rows = [], []
    print_row(HEADERS)
    for name in names:
        results = [measure(SCENARIOS[name]) for _ in range(times)]
        rows.append(row_of(results))
        print_row(rows[-1])
        for problem in dict.fromkeys(problem for result in results for problem in result.problems):
            print(f"    {problem}", flush=True)
        measured += results
    return measured, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how often each is done (default 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--list", action="store_true", help="print the scenarios' names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single result")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SCENARIOS))
        return 0
    with signals_as_by_default():
        measured, rows = run_scenarios(arguments.only, arguments.times)
    if arguments.json:
        arguments.json.write_text(json.dumps(to_json(measured, arguments.times), indent=2) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(to_markdown(rows))
    return int(any(result.problems for result in measured))


if __name__ == "__main__":
    # a rank of a ``_children`` scenario runs this file as its training script
    sys.exit(train_with_children() if "QCOLLECT_PLAN" in os.environ else main())
