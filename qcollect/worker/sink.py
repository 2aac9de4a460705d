"""What becomes of captures, as the collector and the taps see it: tensors in files, or statistics in lines."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from qcollect.formats.quantized import ScaleCodes
from qcollect.vocab import RankInfo
from qcollect.worker.frame import Claim, Frame, Taker
from qcollect.worker.saver import Observation
from qcollect.worker.state import STATE


class Sink(Taker, Protocol):
    """Takes what is wanted on the training thread and has it written by others; ``open`` to ``close``.

    What could not be written is raised by ``check``, or counted (``num_missing``, ``first_missing``), as
    ``capture.on_error`` says. ``num_deduped`` of what was written refers to other files, which left ``deduped_bytes``
    unwritten.
    """

    num_taken: int
    num_deduped: int
    deduped_bytes: int
    num_missing: int
    first_missing: str | None

    @property
    def is_open(self) -> bool: ...

    @property
    def num_bytes_taken(self) -> int:
        """What was taken comes to on disk, as far as that is known."""

    @property
    def num_written(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """What was written comes to."""

    @property
    def waited_s(self) -> float:
        """How long the training thread has waited for what was to be written."""

    def open(self, device: torch.device) -> None:
        """Take memory and start threads.

        Args:
            device: where the model is.
        """

    def begin(self, frame: Frame, tokens: torch.Tensor | None) -> None:
        """A micro-batch begins that something is wanted of.

        Args:
            tokens: its first input.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """What a rank says of all its captures alike.

    Args:
        trigger: what began them, None without a trigger.
    """

    quant_type: str
    rank: RankInfo
    loss_scale: float
    trigger: Callable[[], dict[str, Any] | None] = lambda: None

    def observe(
        self,
        claim: Claim,
        *,
        consumers: Sequence[dict[str, Any]] = (),
        sharding: dict[str, Any] | None = None,
        block_scales: ScaleCodes | None = None,
    ) -> Observation:
        """A wanted capture that has come up."""
        frame, _, planned, token_layout = claim
        return Observation(
            layer_type=planned.layer_type,
            layer_idx=planned.layer_idx,
            operation=planned.operation,
            phase=planned.phase,
            component=planned.component,
            quant_type=self.quant_type,
            tensor_name=planned.tensor_name,
            tensor=planned.tensor,
            module=planned.module,
            rank=self.rank,
            iteration=frame.iteration,
            micro_batch=frame.micro_batch,
            sample_idx=frame.sample_idx,
            num_samples=frame.num_samples,
            batch_idx=STATE.batch(),
            sequence_idx=STATE.sequence(),
            values=planned.values,
            consumers=consumers,
            token_layout=token_layout,
            loss_scale=self.loss_scale,
            token_hash=frame.token_hash,
            block_scales=block_scales,
            sharding=sharding,
            trigger=self.trigger(),
        )


def hash_tokens(tokens: torch.Tensor | None) -> str | None:
    """xxh3-64 of a micro-batch's first input, so that runs can prove they saw the same tokens. Waits for its device."""
    if tokens is None:
        return None
    data = tokens.detach().cpu().contiguous()
    num_bytes = data.numel() * data.element_size()
    return xxhash.xxh3_64(ctypes.string_at(data.data_ptr(), num_bytes) if num_bytes else b"").hexdigest()
