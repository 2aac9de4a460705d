"""Processes of this machine: who they are, how they end with their parent, how none is left behind.

A pid alone names nobody, since it is used again; pid and start time do. Linux counts that in ticks
since the boot, which nobody can set; the wall clock's start time, all there is elsewhere, moves
when the clock is set. Everything here signals only processes that were found by those, or by the
run's token in their environment.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

RUN_TOKEN_VARIABLE = "QCOLLECT_RUN_TOKEN"
PARENT_VARIABLE = "QCOLLECT_PARENT"
DETACHED_VARIABLE = "QCOLLECT_DETACHED"

# Linux, <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# Start times by the wall clock are computed from the boot time, which moves when the clock is set.
_CREATE_TIME_TOLERANCE_S = 2.0
# of /proc/PID/stat behind the name in parentheses: field 22 of proc(5), which counts from 1
_START_TICKS_FIELD = 22 - 3
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, told apart from a later one with the same pid by when it started.

    Args:
        create_time: unix seconds.
        started: ``BOOT_ID:TICKS``, exact; None where the system does not tell.
    """

    pid: int
    create_time: float
    started: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def identify(pid: int) -> ProcessId | None:
    """The identity of a process that exists now; None if it is gone."""
    try:
        return ProcessId(pid=pid, create_time=psutil.Process(pid).create_time(), started=_started(pid))
    except psutil.Error:
        return None


def parse_process(value: object) -> ProcessId | None:
    """The identity that ``to_dict`` wrote; None for what is none (empty, no numbers, garbage)."""
    match value:
        case {"pid": bool()}:
            return None
        case {"pid": int(pid), "create_time": int() | float() as create_time, **rest} if pid > 0:
            started = rest.get("started")
            exact = started if isinstance(started, str) else None
            return ProcessId(pid=pid, create_time=float(create_time), started=exact)
        case _:
            return None


def process_is(who: ProcessId | None) -> bool:
    """Whether the process recorded as ``who`` is still running here; False for a zombie and for None."""
    if who is None:
        return False
    try:
        process = psutil.Process(who.pid)
        return _is_same(process, who) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OverflowError):
        return False


def _is_same(process: psutil.Process, who: ProcessId) -> bool:
    if who.started is not None and (started := _started(who.pid)) is not None:
        return started == who.started
    return abs(process.create_time() - who.create_time) <= _CREATE_TIME_TOLERANCE_S


def _started(pid: int) -> str | None:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{boot_id}:{fields[_START_TICKS_FIELD]}"


def launch_environment(*, unset: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without ``unset`` and with ``env``."""
    removed = set(unset)
    return {key: value for key, value in os.environ.items() if key not in removed} | dict(env)


def is_detached() -> bool:
    """Whether this launcher was started to run on without a terminal."""
    return DETACHED_VARIABLE in os.environ


# ---------------------------------------------------------------------------------------------
# Ending with the parent, adopting orphans (Linux; without effect elsewhere)
# ---------------------------------------------------------------------------------------------


def die_with_parent(signum: signal.Signals, expected_parent: int | None = None) -> None:
    """Have the kernel send ``signum`` to this process when its parent ends.

    Args:
        signum: SIGTERM leaves time to flush, SIGKILL does not.
        expected_parent: the parent's pid as the parent said it; if it has ended already, which
            the kernel does not report afterwards, the signal is sent at once.

    The parent is the *thread* that started this process: start it from a thread that lives as long
    as the program (the main thread).
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), signum)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Inside, processes below this one whose parent ends become its children, not those of pid 1."""
    before = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


# ---------------------------------------------------------------------------------------------
# Finding and ending what a run has started
# ---------------------------------------------------------------------------------------------


def find_by_token(token: str) -> list[psutil.Process]:
    """The processes whose environment at start held the run's token; never this one."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _token_of(p) == token]


def find_run(token: str) -> list[psutil.Process]:
    """The processes that carry a run's token, and those below them that were started without it."""
    carriers = find_by_token(token)
    return list({*carriers, *(p for carrier in carriers for p in find_descendants(carrier.pid))})


def find_descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid``, without it; empty if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill_all(find: Callable[[], Sequence[psutil.Process]], *, rounds: int = 3, wait_s: float = 2.0) -> int:
    """SIGKILL what ``find`` finds until it finds nothing, at most ``rounds`` times.

    Several rounds, for processes that were being started meanwhile; ``wait_s`` bounds each, for
    one that cannot die (in uninterruptible sleep).

    Returns:
        How many processes were killed.
    """
    killed: set[psutil.Process] = set()
    for _ in range(rounds):
        processes = [p for p in find() if is_alive(p)]
        if not processes:
            break
        for process in processes:
            with suppress(psutil.Error):
                process.kill()  # psutil compares the start time first
        killed.update(processes)
        wait_gone(processes, wait_s)
    return len(killed)


def wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> bool:
    """Wait until none of ``processes`` runs any more (zombies do not); False on timeout."""
    deadline = time.monotonic() + timeout_s
    while any(is_alive(p) for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def reap_adopted(*, since: float, known: Iterable[int], wait_s: float = 1.0) -> int:
    """Reap the ended orphans this process has adopted, and no child that somebody else waits for.

    An orphan of a run is a child of ours now, in a session other than ours (the agent began one),
    not among ``known`` (pids of the children there were before) and not older than ``since``. One
    that is just ending is waited for, at most ``wait_s``.

    Returns:
        How many were reaped.
    """
    num_reaped, deadline = 0, time.monotonic() + wait_s
    while True:
        adopted = list(_find_adopted(since, frozenset(known)))
        num_reaped += sum(_reap(child) for child in adopted)
        if not any(_is_ending(child) for child in adopted) or time.monotonic() > deadline:
            return num_reaped
        time.sleep(_POLL_S)


def _find_adopted(since: float, known: frozenset[int]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        with suppress(psutil.Error, OSError):
            is_new = child.pid not in known and child.create_time() >= since - _CREATE_TIME_TOLERANCE_S
            if is_new and os.getsid(child.pid) != os.getsid(0):
                yield child


def _reap(child: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return child.status() == psutil.STATUS_ZOMBIE and os.waitpid(child.pid, os.WNOHANG)[0] == child.pid
    return False


def _is_ending(child: psutil.Process) -> bool:
    """Whether a process is past its end and no zombie yet: its memory is gone, and its command line with it."""
    with suppress(psutil.Error):
        return child.is_running() and not child.cmdline()
    return False


def _token_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN_TOKEN_VARIABLE)
    except (psutil.Error, OSError):  # another user's, a zombie, gone
        return None
