"""What becomes of captures, as the collector and the taps see it: tensors in files, or statistics in lines."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from qcollect.formats.quantized import ScaleCodes
from qcollect.plan.schedule import PlannedCapture
from qcollect.vocab import RankInfo
from qcollect.worker.counts import Counts
from qcollect.worker.frame import Claim, Frame, Taker
from qcollect.worker.saver import Observation
from qcollect.worker.state import STATE


class Sink(Taker, Protocol):
    """Takes what is wanted on the training thread and has it written by others; ``open`` to ``close``.

    What could not be written is raised by ``check``, or counted, as ``capture.on_error`` says.
    """

    counts: Counts
    waited_s: float  # how long the training thread has waited for what was to be written, once that is over

    @property
    def is_open(self) -> bool: ...

    def open(self, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        """Take memory and start threads.

        Args:
            device, dtypes: of the model's parameters; of dtypes those that can be quantized.
        """

    def begin(self, frame: Frame, tokens: torch.Tensor | None) -> None:
        """A micro-batch begins that something is wanted of.

        Args:
            tokens: its first input, dense; of a DTensor this rank's part.
        """

    def forget(self) -> None:
        """Nothing seen so far is the value of a tensor that is seen from now on."""

    def end_iteration(self) -> None:
        """All is taken that its micro-batches give."""

    def check(self) -> None:
        """Raise what could not be written.

        Raises:
            CaptureError: with the path, why, and what is free there.
        """

    def close(self) -> None:
        """Write what is taken, end the threads and give the memory back; never raises what could not be written."""


@dataclass(slots=True, kw_only=True, eq=False)
class Observer:
    """What a rank says of all its captures alike.

    Args:
        trigger: what began them, None without a trigger.
    """

    quant_type: str
    rank: RankInfo
    loss_scale: float
    trigger: Callable[[], dict[str, Any] | None] = lambda: None
    # what does not change, by the planned capture and by the micro-batch, which are kept alive
    _by_plan: dict[int, tuple[PlannedCapture, tuple[Any, ...]]] = field(default_factory=dict)
    _of_frame: tuple[Frame, tuple[Any, ...]] | None = None

    def observe(
        self,
        claim: Claim,
        *,
        consumers: Sequence[dict[str, Any]] = (),
        sharding: dict[str, Any] | None = None,
        block_scales: ScaleCodes | None = None,
    ) -> Observation:
        """A wanted capture that has come up."""
        planned = claim.planned
        found = self._by_plan.get(id(planned))
        if found is None:
            found = self._by_plan[id(planned)] = planned, self._planned(planned)
        of_frame = self._of_frame
        if of_frame is None or of_frame[0] is not claim.frame:
            of_frame = self._of_frame = claim.frame, self._moment(claim.frame)
        own = (planned.values, claim.token_layout, consumers, sharding, block_scales, None)
        return Observation._make((*found[1], *of_frame[1], *own))

    def _planned(self, planned: PlannedCapture) -> tuple[Any, ...]:
        names = ("layer_type", "layer_idx", "operation", "phase", "component", "tensor_name", "tensor", "module")
        fields = {name: getattr(planned, name) for name in names}
        fields |= {"quant_type": self.quant_type, "rank": self.rank}
        values = (fields[name] for name in Observation._fields[: len(fields)])
        # another process gets plain text faster than members of an enumeration
        return tuple(str(value) if isinstance(value, str) else value for value in values)

    def _moment(self, frame: Frame) -> tuple[Any, ...]:
        return (
            frame.iteration, frame.micro_batch, frame.sample_idx, frame.num_samples, STATE.batch(), STATE.sequence(),
            self.loss_scale, frame.token_hash, self.trigger(),
        )  # fmt: skip
