"""Which trigger an iteration gives: the metrics of a rank, one after the other, and the signal it was sent."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from qcollect.plan.trigger import JUMPS, METRICS, TriggerEvent
from qcollect.recipe.records import TriggerSpec
from qcollect.vocab import Trigger


def find_reference(history: Sequence[float], *, window: int, warmup: int) -> float | None:
    """What the value after ``history`` is compared with: the median of its last ``window`` values.

    A median, since a mean is raised by the very spikes it is to tell (those below the factor, or in the first
    iterations), and then misses the next.

    Args:
        history: finite values.

    Returns:
        None where there is nothing to compare with: fewer than ``warmup`` values, or a median that is not above 0, of
        which no factor makes sense.
    """
    if len(history) < warmup:
        return None
    reference = median(list(history)[-window:])
    return reference if reference > 0 else None


def is_jump(value: float, reference: float | None, factor: float) -> bool:
    """Whether ``value`` is above ``factor`` times ``reference``: infinity is, NaN is not, and without one nothing."""
    return reference is not None and value > factor * reference


class JumpDetector:
    """Whether the next value of a metric jumps; ``nearest`` is the largest finite one in relation to its reference."""

    def __init__(self, spec: TriggerSpec, factor: float) -> None:
        self.nearest: dict[str, Any] | None = None
        self._spec = spec
        self._factor = factor
        self._history: deque[float] = deque(maxlen=max(spec.window, spec.warmup))

    def observe(self, value: float, iteration: int) -> float | None:
        """The reference that ``value`` jumps above; None: it does not."""
        reference = find_reference(self._history, window=self._spec.window, warmup=self._spec.warmup)
        if math.isfinite(value):
            self._history.append(value)
            ratio = 0.0 if reference is None else value / reference
            if ratio > (self.nearest or {"ratio": 0.0})["ratio"] and math.isfinite(ratio):
                self.nearest = {"ratio": ratio, "iteration": iteration}
        return reference if is_jump(value, reference, self._factor) else None


class Watch:
    """Looks at each iteration of this rank until one gives a trigger.

    Args:
        spec: what to look for.
        rank: this one.
        was_signalled: whether the signal has come.
    """

    def __init__(self, spec: TriggerSpec, *, rank: int, was_signalled: Callable[[], bool]) -> None:
        self.spec = spec
        self._rank = rank
        self._was_signalled = was_signalled
        factors = {Trigger.LOSS_SPIKE: spec.loss_factor, Trigger.GRAD_NORM_JUMP: spec.grad_norm_factor}
        self._given: set[str] = set()
        self._detectors = {on: JumpDetector(spec, factors[on]) for on in JUMPS if on in spec.on}

    def observe(self, iteration: int, metrics: Mapping[str, Any]) -> TriggerEvent | None:
        """What the iteration gives; of several what is not finite comes first, a signal last.

        Args:
            metrics: as ``step`` gets them: numbers, or tensors of one. What is not there is not looked at.
        """
        values = {name: float(metrics[name]) for name in METRICS if metrics.get(name) is not None}
        self._given |= values.keys()
        found = [self._event(Trigger.NAN, iteration, name, values[name]) for name in self._not_finite(values)]
        for on, detector in self._detectors.items():
            metric = JUMPS[on]
            reference = detector.observe(values[metric], iteration) if metric in values else None
            if reference is not None:
                found.append(self._event(on, iteration, metric, values[metric], reference))
        if Trigger.SIGNAL in self.spec.on and self._was_signalled():
            found.append(self._event(Trigger.SIGNAL, iteration))
        return next(iter(found), None)

    def report(self) -> dict[str, Any]:
        """What is waited for, in which metrics, and what came nearest to it; JSON."""
        nearest = {JUMPS[on]: detector.nearest for on, detector in self._detectors.items()}
        return {"waiting_for": list(self.spec.on), "metrics": sorted(self._given), "nearest": nearest}

    def _not_finite(self, values: Mapping[str, float]) -> list[str]:
        return [n for n, value in values.items() if not math.isfinite(value)] if Trigger.NAN in self.spec.on else []

    def _event(
        self,
        on: Trigger,
        iteration: int,
        metric: str | None = None,
        value: float | None = None,
        reference: float | None = None,
    ) -> TriggerEvent:
        return TriggerEvent(
            on=on, iteration=iteration, rank=self._rank, metric=metric, value=value, reference=reference
        )
