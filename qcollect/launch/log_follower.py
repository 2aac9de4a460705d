"""The logs of ranks, followed while they grow: whole lines, each by itself."""

from collections.abc import Iterator, Sequence

from qcollect.paths import RunPaths

# what a single look takes from one log; the rest comes with the next
_MAX_BYTES = 1 << 20


class LogFollower:
    """New lines of some ranks' logs, in the order they were looked at.

    A line that redraws itself (``\\r``) is what it showed last; bytes that are no UTF-8 are replaced.
    """

    def __init__(self, paths: RunPaths, ranks: Sequence[int]) -> None:
        self._paths = paths
        # what earlier runs of this folder have left in the logs is not shown
        self._positions = {rank: self._size(rank) for rank in ranks}
        self._unfinished = dict.fromkeys(ranks, b"")

    def read(self) -> Iterator[tuple[int, str]]:
        """(rank, line) for every line that is whole by now."""
        for rank in self._positions:
            *lines, rest = (self._unfinished[rank] + self._read_new(rank)).split(b"\n")
            self._unfinished[rank] = _shorten(rest)
            yield from ((rank, _shown(line)) for line in lines)

    def finish(self) -> Iterator[tuple[int, str]]:
        """What is left, a last line without its end too; for when the ranks are gone."""
        position = None
        while position != self._positions:
            position = dict(self._positions)
            yield from self.read()
        for rank, rest in self._unfinished.items():
            if rest:
                yield rank, _shown(rest)
            self._unfinished[rank] = b""

    def _size(self, rank: int) -> int:
        try:
            return self._paths.log_path(rank).stat().st_size
        except FileNotFoundError:
            return 0

    def _read_new(self, rank: int) -> bytes:
        try:
            with self._paths.log_path(rank).open("rb") as log:
                log.seek(self._positions[rank])
                new = log.read(_MAX_BYTES)
        except FileNotFoundError:
            return b""
        self._positions[rank] += len(new)
        return new


def _shorten(rest: bytes) -> bytes:
    """A line that has no end yet, without what it has overwritten itself; of an endless one the last part."""
    overwritten = rest[:-1].rfind(b"\r") + 1
    return rest[overwritten:][-_MAX_BYTES:]


def _shown(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
