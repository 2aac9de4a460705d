"""A run that no longer moves: noticed, its ranks' stacks kept, the rank that differs named.

Progress is what ranks report: their state, iteration, micro-batch and captures. When nothing of it
changes on any rank for the recipe's ``launch.stall_timeout_s``, each worker is sent SIGUSR2, which has
it write the stacks of all its threads (faulthandler works inside a stuck collective, where no Python
signal handler runs). One rank is mostly elsewhere than the others: not in the collective they
wait in, or behind.
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from qcollect.host.processes import find_descendants
from qcollect.monitor.snapshot import ENDED, RankSnapshot
from qcollect.paths import RunPaths

_LOADING = ("waiting", "loading")
_LOADING_TIMEOUT_S = 600.0
_DUMP_WAIT_S = 5.0
_POLL_S = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVE = re.compile(r"torch/distributed/")


@dataclass(slots=True)
class ProgressWatch:
    """When any rank last moved. Until all of them train the timeout is not below ten minutes: models load slowly."""

    timeout_s: float | None
    _seen: object = None
    _moved_s: float | None = None

    def has_stalled(self, ranks: Sequence[RankSnapshot], now_s: float) -> bool:
        """Whether nothing has changed for the timeout; ``now_s`` is monotonic."""
        seen = [(r.rank, r.state, r.iteration, r.num_micro_batches, r.captured) for r in ranks]
        if seen != self._seen or self._moved_s is None:
            self._seen, self._moved_s = seen, now_s
        if self.timeout_s is None:
            return False
        is_loading = any(rank.state in _LOADING for rank in ranks)
        return now_s - self._moved_s >= (max(self.timeout_s, _LOADING_TIMEOUT_S) if is_loading else self.timeout_s)


def find_workers(agent_pid: int) -> dict[int, psutil.Process]:
    """torchrun's workers by rank, as the environment each was started with tells."""
    workers = {}
    for process in find_descendants(agent_pid):
        with suppress(psutil.Error, ValueError):
            if process.ppid() == agent_pid:
                workers[int(process.environ()["RANK"])] = process
    return workers


def dump_stacks(paths: RunPaths, workers: Mapping[int, psutil.Process]) -> dict[int, str]:
    """Have each worker write its stacks, and read them. A worker that is not ready to is left alone.

    Returns:
        By rank; without an entry for a rank that gave none.
    """
    asked: dict[int, tuple[psutil.Process, int]] = {}
    for rank, process in workers.items():
        start = _registered_bytes(paths, rank, process.pid)
        if start is not None:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGUSR2)
                asked[rank] = (process, start)
    deadline = time.monotonic() + _DUMP_WAIT_S
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {rank: paths.stacks_path(rank).stat().st_size for rank in asked}
        if now == sizes and all(now[rank] > start for rank, (_, start) in asked.items()):
            break
        sizes = now
    stacks = {rank: _read_from(paths, rank, start) for rank, (_, start) in asked.items()}
    return {rank: text for rank, text in stacks.items() if text}


def _registered_bytes(paths: RunPaths, rank: int, pid: int) -> int | None:
    """How long a rank's stacks file is, if this process has opened it: before, the signal would end the process."""
    with suppress(OSError):
        content = paths.stacks_path(rank).read_bytes()
        last_owner = re.findall(rb"^rank \d+, pid (\d+)$", content, re.MULTILINE)[-1:]
        return len(content) if last_owner == [str(pid).encode()] else None
    return None


def _read_from(paths: RunPaths, rank: int, start: int) -> str:
    return paths.stacks_path(rank).read_bytes()[start:].decode("utf-8", errors="replace")


def main_frames(stacks: str) -> list[str]:
    """``FILE:LINE in FUNCTION`` of the main thread, innermost first; it is the last faulthandler lists."""
    frames: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(f"{match['file']}:{match['line']} in {match['function']}")
    return frames


def explain_stall(ranks: Sequence[RankSnapshot], stacks: Mapping[int, str]) -> str:
    """Which rank differs, and where it and the others are."""
    frames = {rank: main_frames(text) for rank, text in stacks.items()}
    known = [r for r in ranks if r.rank in frames]
    gone = [r.rank for r in ranks if r.rank not in frames and r.state in ENDED]
    silent = [r.rank for r in ranks if r.rank not in frames and r.state not in ENDED]
    different = gone or _find_different(known, frames)
    parts = []
    if different and len(ranks) > 1:
        parts.append(f"{_names(different)} {'differs' if len(different) == 1 else 'differ'} from the others")
    if gone:
        parts.append(f"{_names(gone)} {'has' if len(gone) == 1 else 'have'} left")
    parts += [_place(_names(group), frames[group[0]]) for group in _groups(known, frames, different)]
    if silent:
        parts.append(f"{_names(silent)} gave no stack")
    return "; ".join(parts)


def _find_different(ranks: Sequence[RankSnapshot], frames: Mapping[int, list[str]]) -> list[int]:
    """The ranks outside the collective the others are in, else those that are behind, else an odd one out."""
    place = {r.rank: tuple(frames[r.rank]) for r in ranks}
    tests: tuple[Callable[[RankSnapshot], tuple[int, int]], ...] = (
        lambda r: (int(any(_COLLECTIVE.search(frame) for frame in place[r.rank])), 0),
        lambda r: (r.iteration or 0, r.num_micro_batches or 0),
    )
    for test in tests:
        values = {r.rank: test(r) for r in ranks}
        if len(set(values.values())) > 1:
            return [rank for rank, value in values.items() if value == min(values.values())]
    counts = Counter(place.values()).most_common()
    if len(counts) < 2 or counts[0][1] == counts[-1][1]:
        return []
    return [rank for rank, where in place.items() if where == counts[-1][0]]


def _groups(
    ranks: Sequence[RankSnapshot], frames: Mapping[int, list[str]], different: Sequence[int]
) -> list[list[int]]:
    """Ranks at the same place together, those that differ first."""
    by_place: dict[tuple[bool, str], list[int]] = {}
    for rank in sorted(ranks, key=lambda r: r.rank not in different):
        place = (frames[rank.rank] or ["?"])[0]
        by_place.setdefault((rank.rank not in different, place), []).append(rank.rank)
    return list(by_place.values())


def _place(who: str, frames: Sequence[str]) -> str:
    inner = frames[0] if frames else "an unknown place"
    # inside a library the script's own line says more
    own = next((frame for frame in frames if f"{os.sep}site-packages{os.sep}" not in frame and "<" not in frame), None)
    return f"{who} at {inner}" + (f", called from {own}" if own is not None and own != inner else "")


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
