"""When a run's captures begin: with its training, or in the iteration after the one that gives a trigger."""

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from qcollect.errors import CaptureError
from qcollect.host.capture_signal import CaptureSignal
from qcollect.paths import RunPaths
from qcollect.plan.trigger import TriggerEvent, describe_wait, read_event, record_event
from qcollect.recipe.records import TriggerSpec
from qcollect.vocab import Trigger
from qcollect.worker.watch import Watch


class Start:
    """The iteration a schedule counts from: ``iteration``, None while the trigger is waited for.

    As a context it takes SIGUSR1 for its own, if it waits for signals.

    Args:
        spec: what to wait for; None: nothing.
        paths: where a signal is looked for, and what was seen is kept.
        rank: this one.
        first_iteration: of the training.
        is_planned: under the launcher, where a run may be resumed: it goes on after the trigger that came before.
        has_captures: whether the run is one that is resumed and had come that far.

    Raises:
        CaptureError: it had, and what began its captures is not known any more.
    """

    def __init__(
        self,
        spec: TriggerSpec | None,
        paths: RunPaths,
        *,
        rank: int,
        first_iteration: int,
        is_planned: bool,
        has_captures: bool,
    ) -> None:
        self.iteration: int | None = first_iteration
        self.event: TriggerEvent | None = None
        self._paths = paths
        self._watch: Watch | None = None
        # under the launcher the signal comes as a file as well, which any thread finds
        is_served = not is_planned or threading.current_thread() is threading.main_thread()
        self._signal = CaptureSignal(enabled=spec is not None and Trigger.SIGNAL in spec.on and is_served)
        if spec is None:
            return
        event = read_event(paths) if is_planned else None
        if event is not None:
            self.event, self.iteration = event, event.start
            return
        if has_captures:
            raise CaptureError(
                f"rank {rank}: {paths.run_dir} holds captures, and {paths.trigger_path}, which says what they began "
                "with, is missing or damaged; begin anew with --overwrite"
            )
        self.iteration = None
        self._watch = Watch(spec, rank=rank, was_signalled=self._was_signalled)

    def __enter__(self) -> Self:
        self._signal.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal.__exit__(kind, error, trace)

    @property
    def needs_metrics(self) -> bool:
        """Whether what is waited for is seen in the metrics given to ``step``."""
        return self._watch is not None and set(self._watch.spec.on) != {Trigger.SIGNAL}

    def observe(self, iteration: int, metrics: Mapping[str, Any]) -> TriggerEvent | None:
        """What an iteration gives to those who wait."""
        return None if self._watch is None else self._watch.observe(iteration, metrics)

    def begin(self, event: TriggerEvent) -> None:
        """All ranks capture from now on; kept before anything is."""
        record_event(self._paths, event)
        self.event, self.iteration, self._watch = event, event.start, None

    def report(self) -> dict[str, Any] | None:
        """What is waited for, and what came nearest to it, as JSON; None: nothing is."""
        return None if self._watch is None else self._watch.report()

    def describe(self) -> str:
        """What the captures began with, or what was waited for, in a sentence."""
        return str(self.event) if self._watch is None else describe_wait(self._watch.spec, [self._watch.report()])

    def _was_signalled(self) -> bool:
        return self._signal.was_received or self._paths.signal_path.exists()
