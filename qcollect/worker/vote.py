"""The ranks' common decision at the end of an iteration: one sum of a few counts, on a gloo group of its own."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, read_stop, request_stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says.

    Args:
        asks_to_stop: it wants all to end, or ends itself.
        is_unfinished: it has not its share.
        bytes_ahead: what its files come to with the next iteration that captures.
    """

    asks_to_stop: bool
    is_unfinished: bool
    bytes_ahead: int


class Vote:
    """Has all ranks come to the same decision.

    Args:
        group: of all ranks, on the CPU; None: this one is alone.
        paths: where a stop is read and written.
        is_first: whether this rank speaks for all where one has to.
        max_bytes: of all ranks' files; None: no limit.
    """

    def __init__(self, group: Any, paths: RunPaths, *, is_first: bool, max_bytes: int | None = None) -> None:
        self._group = group
        self._paths = paths
        self._is_first = is_first
        self._max_bytes = max_bytes

    def ends(self, ballot: Ballot) -> bool:
        """Whether all ranks end now: one wants to or has, all have their share, or the next captures are too large."""
        counts = torch.tensor([ballot.asks_to_stop, ballot.is_unfinished, ballot.bytes_ahead], dtype=torch.int64)
        if self._group is not None:
            try:
                dist.all_reduce(counts, group=self._group)
            except RuntimeError:
                if read_stop(self._paths) != StopCause.DATA_END:
                    raise
                return True  # a rank's training is over, and the rank gone
        num_asking, num_unfinished, bytes_ahead = counts.tolist()
        if num_asking or not num_unfinished:
            return True
        if self._max_bytes is None or bytes_ahead <= self._max_bytes:
            return False
        if self._is_first:
            request_stop(self._paths, StopCause.MAX_BYTES)
        return True


def make_vote_group() -> Any:
    """A gloo group of all ranks: the vote never touches the accelerator's communicator. None without ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")
