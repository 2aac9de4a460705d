"""The ranks' common decision at the end of an iteration: one sum of a few counts, on a gloo group of its own."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, read_stop, request_stop
from qcollect.plan.trigger import METRICS, TriggerEvent
from qcollect.vocab import Trigger

_TRIGGERS = tuple(Trigger)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says.

    Args:
        asks_to_stop: it wants all to end, or ends itself.
        is_unfinished: it has not its share.
        bytes_ahead: what its files come to with the next iteration that captures.
        event: a trigger it has seen.
    """

    asks_to_stop: bool
    is_unfinished: bool
    bytes_ahead: int
    event: TriggerEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks do now: end, or capture from the next iteration on because of ``event``, or neither."""

    ends: bool
    event: TriggerEvent | None = None


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

    def decide(self, ballot: Ballot) -> Decision:
        """The decision that follows from all ranks' ballots.

        All end if one wants to or has, if all have their share, or if the next captures are too large. Of triggers
        seen in one iteration that of the first rank counts.
        """
        counts = torch.tensor(
            [ballot.asks_to_stop, ballot.is_unfinished, ballot.event is not None, ballot.bytes_ahead],
            dtype=torch.int64,
        )
        if self._group is not None:
            try:
                dist.all_reduce(counts, group=self._group)
            except RuntimeError:
                if read_stop(self._paths) != StopCause.DATA_END:
                    raise
                return Decision(ends=True)  # a rank's training is over, and the rank gone
        num_asking, num_unfinished, num_events, bytes_ahead = counts.tolist()
        if num_asking or not num_unfinished:
            return Decision(ends=True)
        if self._max_bytes is not None and bytes_ahead > self._max_bytes:
            if self._is_first:
                request_stop(self._paths, StopCause.MAX_BYTES)
            return Decision(ends=True)
        return Decision(ends=False, event=self._share(ballot.event) if num_events else None)

    def _share(self, event: TriggerEvent | None) -> TriggerEvent | None:
        """The event of the first rank that has one; on all ranks, since all know that there is one."""
        if self._group is None:
            return event
        row = torch.tensor(_to_row(event), dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, row, group=self._group)
        return next(found for found in map(_from_row, (r.tolist() for r in rows)) if found is not None)


def make_vote_group() -> Any:
    """A gloo group of all ranks: the vote never touches the accelerator's communicator. None without ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


_NOTHING = -1.0


def _to_row(event: TriggerEvent | None) -> list[float]:
    """An event as numbers; a value may be NaN, so what is absent has its own column or is 0."""
    if event is None:
        return [_NOTHING] * 6
    metric = _NOTHING if event.metric is None else METRICS.index(event.metric)
    return [_TRIGGERS.index(event.on), event.iteration, event.rank, metric, event.value or 0.0, event.reference or 0.0]


def _from_row(row: list[float]) -> TriggerEvent | None:
    on, iteration, rank, metric, value, reference = row
    if on == _NOTHING:
        return None
    return TriggerEvent(
        on=_TRIGGERS[int(on)],
        iteration=int(iteration),
        rank=int(rank),
        metric=None if metric == _NOTHING else METRICS[int(metric)],
        value=None if metric == _NOTHING else value,
        reference=reference or None,
    )
