"""What this machine offers a run: memory, sockets, limits, device files. Facts only; ``launch.checks`` judges them."""

import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from qcollect.host.facts import package_versions

# a name server that does not answer keeps a look-up for half a minute
RESOLVE_TIMEOUT_S = 2.0
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """This machine and this interpreter.

    Args:
        system: ``Linux``, ``Darwin``, ...
        has_proc: whether /proc shows processes.
        python: version.
        packages: installed versions by name; None: not installed.
        host_name: as the system says it.
        host_name_problem: why it does not resolve; None if it does.
        loopback_problem: why nobody can be reached at a port of 127.0.0.1; None if one can.
        available_bytes: memory a new process can have, the control group's limit included.
        max_open_files: of a process; None: no limit.
        shared_memory_bytes: free in /dev/shm; None where there is none.
        device_files: of accelerators: ``/dev/nvidia0``, ...
    """

    system: str
    has_proc: bool
    python: tuple[int, int, int]
    packages: dict[str, str | None]
    host_name: str
    host_name_problem: str | None
    loopback_problem: str | None
    available_bytes: int
    max_open_files: int | None
    shared_memory_bytes: int | None
    device_files: tuple[str, ...]


def read_machine() -> MachineFacts:
    """The facts as they are now. Opens a socket and closes it; nothing leaves this machine but a name look-up."""
    host_name = socket.gethostname()
    return MachineFacts(
        system=platform.system(),
        has_proc=Path("/proc/self/stat").exists(),
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        packages=package_versions(),
        host_name=host_name,
        host_name_problem=find_resolve_problem(host_name),
        loopback_problem=_find_loopback_problem(),
        available_bytes=available_memory(),
        max_open_files=_max_open_files(),
        shared_memory_bytes=_free_bytes(_SHARED_MEMORY),
        device_files=tuple(sorted(str(p) for p in Path("/dev").glob("nvidia[0-9]*"))),
    )


def find_resolve_problem(
    name: str, *, resolve: Callable[[str], str] = socket.gethostbyname, timeout_s: float = RESOLVE_TIMEOUT_S
) -> str | None:
    """Why ``name`` has no address; None if it has one."""
    answers: list[str | None] = []

    def ask() -> None:
        try:
            resolve(name)
        except (OSError, UnicodeError) as error:  # the latter for names longer than a host's may be
            answers.append((error.strerror if isinstance(error, OSError) else None) or str(error))
        else:
            answers.append(None)

    # a look-up cannot be interrupted; the thread is left behind and does not keep the process
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else f"no answer within {timeout_s:g} s"


def _find_loopback_problem() -> str | None:
    """Why nobody can listen and be reached on 127.0.0.1: where the interface is down a port can still be bound."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=RESOLVE_TIMEOUT_S):
                return None
    except OSError as error:
        return error.strerror or str(error)


def available_memory(root: Path = _CGROUP_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be allocated without swapping, here and in every control group around this process."""
    groups = [free for folder in _memory_groups(root, membership) if (free := _group_free(folder)) is not None]
    return min([psutil.virtual_memory().available, *groups])


def _memory_groups(root: Path, membership: Path) -> list[Path]:
    """This process's memory control groups, with their parents; in a container its own is the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base = root if number == "0" else root / "memory"
        leaf = base / path.lstrip("/")
        folders += [folder for folder in (leaf, *leaf.parents) if folder.is_relative_to(base)]
    return folders


def _group_free(folder: Path) -> int | None:
    """Limit minus use, what can be dropped from the page cache not counted; None without a limit."""
    for limit_name, used_name, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
            match = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return max(0, limit - used + (int(match[1]) if match else 0))
    return None


def _max_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _free_bytes(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return stat.f_bavail * stat.f_frsize
