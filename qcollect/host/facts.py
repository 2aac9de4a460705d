"""What this machine and this shell are: cores, disk, versions, rank variables. Reads no GPU library."""

import os
import platform
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from qcollect._version import __version__
from qcollect.vocab import RankInfo

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "typer",
    "rich",
    "pydantic",
    "PyYAML",
    "psutil",
    "xxhash",
    "mwparserfromhell",
    "zstandard",
    "megatron-core",
)
VARIABLES = (
    "CUSTOM_QUANT_TYPE",
    "TENSOR_SAVE_DIR",
    "TENSOR_SAVE_ENABLED",
    "TENSOR_SAVER_ITERATION",
    "CURRENT_SAMPLE_IDX",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "QCOLLECT_LOG",
    "QCOLLECT_AUTO",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Free bytes and inodes for this user on the file system of a folder; inodes None where there are none."""

    free_bytes: int
    free_inodes: int | None


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loopback_interface() -> str | None:
    """The network interface that holds 127.0.0.1 (``lo``); None if it has no name here."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None


def disk_space(folder: Path) -> DiskSpace:
    """Space where ``folder`` is, or where its first existing parent is."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    stat = os.statvfs(existing)
    return DiskSpace(free_bytes=stat.f_bavail * stat.f_frsize, free_inodes=stat.f_favail if stat.f_files else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderProbe:
    """What happened when a file was made in a folder, linked, renamed and removed.

    ``problem`` says what failed first (``cannot be written to: Read-only file system``), None if
    nothing did; ``can_link`` whether a second name can be given to a file.
    """

    folder: Path
    problem: str | None
    can_link: bool = True


def probe_folder(folder: Path) -> FolderProbe:
    """Try what a run does in ``folder``, with an empty file; nothing stays."""
    # as long as the names of captures get, with their temporary part
    first, second = (folder / f".qcollect-probe-{uuid.uuid4().hex}{'-' * 130}.tmp" for _ in range(2))
    can_link, step = True, "written to"
    try:
        first.touch(exist_ok=False)
        try:
            os.link(first, second)
            second.unlink()
        except OSError:
            can_link = False
        step = "used: a file in it cannot be renamed"
        first.rename(second)
        step = "used: a file in it cannot be removed"
        second.unlink()
    except OSError as error:
        return FolderProbe(folder=folder, problem=f"cannot be {step}: {error.strerror or error}", can_link=can_link)
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink()
    return FolderProbe(folder=folder, problem=None, can_link=can_link)


def package_versions() -> dict[str, str | None]:
    """Installed versions; None for a package that is not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def detect_rank(environ: Mapping[str, str] | None = None) -> RankInfo:
    """The rank a saver would detect from this shell's variables: ``RANK``, ``LOCAL_RANK``, else 0."""
    environ = os.environ if environ is None else environ
    numbers = {
        name: int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if environ.get(name, "").isdecimal()
    }
    source = next((name for name in ("RANK", "LOCAL_RANK") if name in numbers), "default")
    return RankInfo(
        rank=numbers.get(source, 0),
        local_rank=numbers.get("LOCAL_RANK", 0),
        world_size=numbers.get("WORLD_SIZE", 1),
        source=source,
    )


def environment_report() -> dict[str, Any]:
    """Versions, platform and variables, JSON-ready."""
    rank = detect_rank()
    return {
        "qcollect": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": num_cores(),
        "packages": package_versions(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "rank": {
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "world_size": rank.world_size,
            "source": rank.source,
        },
    }
