"""Wanted captures that did not come: an error in a planned run, others of the list elsewhere.

Without the launcher nobody has looked at the model's forward beforehand, so a wanted gradient may
turn out not to exist (the input of the first linear needs none). The target stays exact: the next
captures of the schedule take the places, in the next iteration.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qcollect.errors import CaptureError
from qcollect.plan.schedule import PlannedCapture
from qcollect.worker.frame import Frame, Wanted, WantKey, want_key
from qcollect.worker.unserved import summarize

MAX_IDLE_ITERATIONS = 3

Place = tuple[int, PlannedCapture]  # a capture with its counter


@dataclass(slots=True, kw_only=True)
class Shortfall:
    """What one rank is still owed.

    Args:
        rank: for messages.
        captures: the schedule's list.
        next_position: of the list, behind the rank's cut.
        is_planned: whether a missing capture is an error.
        replaces: whether others of the list are taken instead; where all of them are taken anyhow, less comes.
    """

    rank: int
    captures: Sequence[PlannedCapture]
    next_position: int
    is_planned: bool
    replaces: bool = True
    _owed: list[Place] = field(default_factory=list)
    _impossible: set[WantKey] = field(default_factory=set)
    _absent: set[WantKey] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _num_idle: int = 0

    def collect(self, *, scheduled: Wanted) -> Wanted:
        """What is owed and one micro-batch can give beside ``scheduled``; it is not owed any more."""
        wanted: Wanted = {}
        later = []
        for number, capture in self._owed:
            replacement = self._replace(capture, taken=scheduled | wanted)
            if replacement is None:
                later.append((number, capture))
            else:
                wanted[want_key(replacement)] = (number, replacement)
        self._owed = later
        return wanted

    def _replace(self, capture: PlannedCapture, *, taken: Wanted) -> PlannedCapture | None:
        """``capture``, or the next of the list that is possible and not taken; None if there is none."""
        unusable = self._impossible | self._absent | taken.keys()
        for _ in range(len(self.captures) + 1):
            if want_key(capture) not in unusable:
                return capture
            capture = self.captures[self.next_position % len(self.captures)]
            self.next_position += 1
        return None

    def settle(self, frames: Iterable[Frame], *, unstarted: Iterable[Place], iteration: int, num_taken: int) -> int:
        """End an iteration: what its frames still want is owed, or will not come.

        Args:
            frames: of the iteration's micro-batches.
            unstarted: wanted of micro-batches that were to come and did not.
            iteration: for messages.
            num_taken: captures it gave.

        Returns:
            How many will not come.

        Raises:
            CaptureError: the run is planned, or several iterations in a row gave nothing of what is owed.
        """
        missing: list[Place] = []
        self._absent.clear()
        for frame in frames:
            missing += frame.wanted.values()
            for key in frame.wanted:
                # where its module ran there is no gradient; a module that did not run may do so another time
                (self._impossible if frame.was_called(key[0]) else self._absent).add(key)
        missing += unstarted
        if not missing:
            if self._owed and not num_taken:
                self._refuse_idling()
            return 0
        counter, first = missing[0]
        named = f"{len(missing)} captures, first number {counter}, {first.module} {first.operation} {first.tensor_name}"
        if self.is_planned:
            raise CaptureError(
                f"rank {self.rank}, iteration {iteration}: did not see {named}; the script's model differs from the "
                "recipe's, the module did not run, or the micro-batch did not come"
            )
        self._tell_absent(iteration)
        self._num_idle = 0 if num_taken else self._num_idle + 1
        if self._num_idle >= MAX_IDLE_ITERATIONS or len(self._impossible) == len(self.captures):
            raise CaptureError(f"rank {self.rank}: {named} do not come up in the model's training forward")
        if not self.replaces:
            return len(missing)
        self._owed += missing
        return 0

    def _refuse_idling(self) -> None:
        """What is owed is asked for in every iteration: nothing ran that could give it."""
        self._num_idle += 1
        if self._num_idle >= MAX_IDLE_ITERATIONS:
            raise CaptureError(
                f"rank {self.rank}: {len(self._owed)} captures are to come, and for {self._num_idle} iterations the "
                "model's own forward did not run in training mode; call model.train(), and the model that was given "
                "to collect (a compiled copy may have run)"
            )

    def _tell_absent(self, iteration: int) -> None:
        names = sorted({key[0] for key in self._absent} - self._told)
        if names:
            self._told.update(names)
            warnings.warn(
                f"qcollect: rank {self.rank}: not called in iteration {iteration}: {summarize(names)}; "
                + (
                    "what was to be captured there is taken elsewhere" if self.replaces else "nothing is captured there"
                ),
                stacklevel=4,
            )
