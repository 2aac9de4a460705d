"""What lies in a run folder besides its state: captures under their final names, and unfinished ones.

Captures stand in the run folder itself or, in the by_iteration layout, in its ``iter*`` folders. A name in
any of the forms ``CaptureName`` reads is a capture's; other ``.pt`` files are somebody else's and left alone.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from qcollect.paths import STATE_DIR_NAME, TEMPORARY_SUFFIX, RunPaths
from qcollect.vocab import CaptureName

_ITERATION_DIR = re.compile(r"iter\d+")
_TEMPORARY = re.compile(rf"\.(?P<name>.+\.pt)\.[^.]+{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)


def parse_name(file: str) -> CaptureName | None:
    """The fields of a capture's file name (a path's last part); None if it has no known form."""
    try:
        return CaptureName.parse(file.rpartition("/")[2])
    except ValueError:
        return None


def is_inside(file: str) -> bool:
    """Whether ``file``, as a manifest names it, lies where captures of the run may be."""
    parts = PurePosixPath(file).parts
    is_flat = len(parts) == 1
    is_by_iteration = len(parts) == 2 and _ITERATION_DIR.fullmatch(parts[0]) is not None
    return (is_flat or is_by_iteration) and parts[-1] not in ("..", "/") and "\0" not in file


def capture_dirs(run_dir: Path) -> list[Path]:
    """The folders captures may be in: the run folder, then its ``iter*`` folders by name; none if it is gone."""
    try:
        with os.scandir(run_dir) as entries:
            names = [e.name for e in entries if _ITERATION_DIR.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [run_dir, *(run_dir / name for name in sorted(names))]


def pt_files(run_dir: Path) -> Iterator[str]:
    """Every ``.pt`` file, relative to the run folder as manifests name it, folder by folder in no order."""
    for folder in capture_dirs(run_dir):
        prefix = "" if folder == run_dir else f"{folder.name}/"
        yield from (prefix + name for name in _names(folder) if name.endswith(".pt") and not name.startswith("."))


def temporaries(run_dir: Path) -> Iterator[Path]:
    """Captures that were being written when their writer ended."""
    for folder in capture_dirs(run_dir):
        yield from (folder / name for name in sorted(_names(folder)) if final_name(name) is not None)


def final_name(temporary: str) -> CaptureName | None:
    """What a temporary file was to become; None if it is no capture's temporary file."""
    match = _TEMPORARY.fullmatch(temporary)
    name = parse_name(match["name"]) if match else None
    return None if name is None or name.rank is None else name


def run_dir_of(path: Path) -> Path:
    """The run folder a capture's file is in."""
    return path.parent.parent if _ITERATION_DIR.fullmatch(path.parent.name) else path.parent


def find_captures(directory: Path) -> list[RunPaths]:
    """The folders with captures in ``directory``: itself and its direct children, by name.

    A folder counts with a state folder, or without one when it holds files with a capture's name.
    """
    if not directory.is_dir():
        return []
    children = sorted(p for p in directory.iterdir() if p.is_dir() and not _ITERATION_DIR.fullmatch(p.name))
    folders = [directory, *(p for p in children if not p.name.startswith("."))]
    return [RunPaths(p) for p in folders if (p / STATE_DIR_NAME).is_dir() or _holds_captures(p)]


def _holds_captures(folder: Path) -> bool:
    return any(parse_name(file) is not None for file in pt_files(folder))


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return []
