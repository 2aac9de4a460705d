"""What begins the captures of a run that waits, and the two files about it.

``control/signal`` is the request of a signal: the launcher makes it, every rank looks for it.
``trigger.json`` is what was seen, written by the ranks before anything is captured: a resumed run captures
the same iterations whatever happens the second time.
"""

import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from qcollect.paths import RunPaths, temporary_path
from qcollect.recipe.records import TriggerSpec
from qcollect.store.files import read_json, rename_new
from qcollect.vocab import Trigger

METRICS = ("loss", "grad_norm")
JUMPS = {Trigger.LOSS_SPIKE: "loss", Trigger.GRAD_NORM_JUMP: "grad_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerEvent:
    """A trigger that was seen.

    Args:
        on: which.
        iteration: in which; captures begin with the next.
        rank: by which rank, the first of several.
        metric: ``loss`` or ``grad_norm``; None: a signal.
        value: of the metric.
        reference: the median it was compared with.
    """

    on: Trigger
    iteration: int
    rank: int
    metric: str | None = None
    value: float | None = None
    reference: float | None = None

    @property
    def start(self) -> int:
        """The first iteration that is captured."""
        return self.iteration + 1

    def to_dict(self) -> dict[str, Any]:
        """JSON only: NaN and infinity are their names."""
        return asdict(self) | {"on": str(self.on), "value": _plain(self.value)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """
        Raises:
            KeyError, TypeError, ValueError: it is not what ``to_dict`` gives.
        """
        value = fields["value"]
        return cls(
            on=Trigger(fields["on"]),
            iteration=int(fields["iteration"]),
            rank=int(fields["rank"]),
            metric=fields["metric"],
            value=None if value is None else float(value),
            reference=fields["reference"],
        )

    def __str__(self) -> str:
        """``triggered by loss_spike at iteration 120 (rank 0: loss 9.1, 2.8 times the median 3.2)``"""
        seen = "" if self.value is None else f": {self.metric} {self.value:.4g}"
        if self.value is not None and self.reference:
            seen += f", {self.value / self.reference:.3g} times the median {self.reference:.4g}"
        return f"triggered by {self.on} at iteration {self.iteration} (rank {self.rank}{seen})"


def request_capture(paths: RunPaths) -> None:
    """Ask the ranks to capture from the next iteration on, if they wait for a signal.

    Raises:
        OSError: the folder cannot be written.
    """
    paths.signal_path.touch()


def record_event(paths: RunPaths, event: TriggerEvent) -> None:
    """Keep what was seen; whichever rank is first writes it, and all have the same.

    Raises:
        OSError: it cannot be written.
    """
    prepared = temporary_path(paths.trigger_path, uuid.uuid4().hex[:12])
    paths.state_dir.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        try:
            prepared.write_text(json.dumps(event.to_dict(), allow_nan=False) + "\n", encoding="ascii")
            rename_new(prepared, paths.trigger_path)
        finally:
            prepared.unlink(missing_ok=True)


def read_event(paths: RunPaths) -> TriggerEvent | None:
    """What was seen; None: nothing yet, or a file that cannot be read."""
    return parse_event(read_json(paths.trigger_path))


def parse_event(fields: object) -> TriggerEvent | None:
    """The event ``TriggerEvent.to_dict`` gave; None if it is none."""
    if not isinstance(fields, Mapping):
        return None
    try:
        return TriggerEvent.from_dict(fields)
    except (KeyError, TypeError, ValueError):
        return None


def describe_wait(spec: TriggerSpec, reports: Iterable[Mapping[str, Any]]) -> str:
    """What was waited for and what came nearest to it, in a sentence.

    Args:
        reports: of the ranks, as ``worker.watch`` gives them.
    """
    told = list(reports)
    parts = [_describe_nearest(on, spec, told) for on in JUMPS if on in spec.on]
    if Trigger.NAN in spec.on:
        given = [metric for metric in METRICS if _is_given(metric, told)]
        parts.append(
            f"no {' or '.join(given)} was NaN or infinite" if given else _NOT_GIVEN.format(" or ".join(METRICS))
        )
    parts += ["no signal came"] if Trigger.SIGNAL in spec.on else []
    return f"capture.trigger waited for {', '.join(spec.on)}, and none came: {'; '.join(parts)}"


_NOT_GIVEN = "step was given no {}"


def _is_given(metric: str, reports: Iterable[Mapping[str, Any]]) -> bool:
    return any(metric in report.get("metrics", ()) for report in reports)


def _describe_nearest(on: Trigger, spec: TriggerSpec, reports: Sequence[Mapping[str, Any]]) -> str:
    metric = JUMPS[on]
    if not _is_given(metric, reports):
        return _NOT_GIVEN.format(metric)
    factor = spec.loss_factor if on == Trigger.LOSS_SPIKE else spec.grad_norm_factor
    known = [found for report in reports if (found := report.get("nearest", {}).get(metric))]
    nearest = max(known, key=lambda found: float(found["ratio"]), default=None)
    if nearest is None:
        return f"no {metric} was compared ({spec.warmup} before it are needed)"
    return (
        f"the largest {metric} was {float(nearest['ratio']):.3g} times its median, in iteration "
        f"{nearest['iteration']} ({factor:g} are needed)"
    )


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
