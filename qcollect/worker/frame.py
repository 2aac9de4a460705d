"""One micro-batch as the hooks see it: what is still wanted, and where what is taken goes.

A frame is made when the root module's forward begins and is held by that forward's backward, so
a capture always carries the iteration, micro-batch and sample of the forward it belongs to.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qcollect.formats.quantized import ScaleCodes
from qcollect.plan.schedule import PlannedCapture
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.gemm import Operand
from qcollect.worker.policy import Quantizers, Use
from qcollect.worker.sharding import describe_sharding, is_sharded, local_of

Moment = tuple[int, int]  # iteration, micro-batch
WantKey = tuple[str, str, Gemm | None]  # module, tensor name, gemm (None: the original)
Wanted = dict[WantKey, tuple[int, PlannedCapture]]  # with the capture's counter in the schedule


def want_key(capture: PlannedCapture) -> WantKey:
    return capture.module, capture.tensor_name, capture.gemm


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenCapture:
    """A wanted tensor, seen; of a DTensor this rank's part.

    Args:
        counter: its place in the schedule.
        block_scales: of a quantized copy.
    """

    planned: PlannedCapture
    counter: int
    frame: "Frame"
    tensor: torch.Tensor
    consumers: list[dict[str, Any]]
    token_layout: str
    sharding: dict[str, Any] | None = None
    block_scales: ScaleCodes | None = None


@dataclass(slots=True, kw_only=True)
class Frame:
    """Wanted captures of one micro-batch. The first value seen of each wins; a recompute finds none wanted.

    ``num_calls`` counts the calls of each module, those without grad and those with grad apart; ``counts`` holds what
    was counted over operands; ``with_scales``: quantized copies come with the scales of their blocks.
    """

    iteration: int
    micro_batch: int
    sample_idx: int
    num_samples: int
    token_hash: str | None
    wanted: Wanted
    sink: Callable[[TakenCapture], None]
    with_scales: bool = False
    num_calls: Counter[tuple[str, bool]] = field(default_factory=Counter)
    counts: dict[tuple[Hashable, ...], torch.Tensor] = field(default_factory=dict)

    def of_call(self, module: str) -> "Frame | None":
        """This frame for the first call of a module, None for a later one: a group is of one call, there and back.

        Reentrant checkpointing calls twice, first without grad and in backward with grad: both are firsts.
        """
        call = (module, torch.is_grad_enabled())
        self.num_calls[call] += 1
        return self if self.num_calls[call] == 1 else None

    def was_called(self, module: str) -> bool:
        return (module, True) in self.num_calls or (module, False) in self.num_calls

    def wants(self, module: str, tensor_name: str, gemm: Gemm | None = None) -> bool:
        return (module, tensor_name, gemm) in self.wanted

    def describe(self, module: str, use: Use) -> dict[str, Any]:
        """``Use.describe``; the elements clamped are counted once for an original and its quantized copies."""
        key = (module, *use.count_key)
        if key not in self.counts:
            self.counts[key] = use.num_saturated()
        return use.describe(self.counts[key])

    def take(
        self,
        module: str,
        tensor_name: str,
        tensor: torch.Tensor,
        *,
        gemm: Gemm | None = None,
        consumers: list[dict[str, Any]],
        token_layout: str,
        block_scales: ScaleCodes | None = None,
    ) -> None:
        """Hand one wanted tensor on; the caller has asked ``wants``."""
        counter, planned = self.wanted.pop((module, tensor_name, gemm))
        self.sink(
            TakenCapture(
                planned=planned,
                counter=counter,
                frame=self,
                tensor=local_of(tensor),
                consumers=consumers,
                token_layout=token_layout,
                block_scales=block_scales,
                sharding=describe_sharding(tensor),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTap:
    """A module under observation: quantizes its operands and offers what it sees to a frame.

    Args:
        seed: of the run; what is drawn for an operand follows from it, the moment, the module and the gemm.
        moment: (iteration, micro-batch) of the forward that runs.
    """

    module: str
    layer_type: LayerType
    layer_idx: int | None
    quantizers: Quantizers
    seed: int = 0
    moment: Callable[[], Moment] = lambda: (0, 0)

    def operand(
        self,
        frame: Frame | None,
        tensor_name: str,
        tensor: torch.Tensor,
        gemm: Gemm,
        moment: Moment,
        *,
        token_layout: str,
        matrix: torch.Tensor | None = None,
    ) -> Operand:
        """``tensor`` as ``gemm`` consumes it; its quantized copy is offered to the frame.

        Args:
            frame: of the forward this belongs to; None when nothing is captured.
            tensor_name: of the operand.
            tensor: as the network computed it.
            gemm: the consumer.
            moment: of the forward this belongs to.
            token_layout: the meaning of the dimensions of what is returned.
            matrix: the operand as the gemm sees it, where that is not ``tensor``.
        """
        operand = tensor if matrix is None else matrix
        if self.quantizers[tensor_name, gemm].is_identity:
            return Operand(values=operand)
        use = self._use(tensor_name, gemm, operand, moment)
        consumed = use.operand()
        self._offer(frame, use, consumed, token_layout)
        return consumed

    def operands(
        self,
        frame: Frame | None,
        tensor_name: str,
        matrix: torch.Tensor,
        gemms: tuple[Gemm, Gemm],
        moment: Moment,
        *,
        token_layout: str,
    ) -> tuple[Operand, Operand]:
        """``matrix`` as two gemms consume it, one along its last axis and one along its first, in one pass."""
        if any(self.quantizers[tensor_name, gemm].is_identity for gemm in gemms):
            last, first = (
                self.operand(frame, tensor_name, matrix, gemm, moment, token_layout=token_layout) for gemm in gemms
            )
            return last, first
        last_use, first_use = (self._use(tensor_name, gemm, matrix, moment) for gemm in gemms)
        last, first = last_use.operands_with(first_use)
        self._offer(frame, last_use, last, token_layout)
        self._offer(frame, first_use, first, token_layout)
        return last, first

    def _offer(self, frame: Frame | None, use: Use, consumed: Operand, token_layout: str) -> None:
        if frame is None or not frame.wants(self.module, use.tensor_name, use.gemm):
            return
        values = consumed.values if consumed.factor is None else use.values()
        consumers = [frame.describe(self.module, use)]
        frame.take(
            self.module,
            use.tensor_name,
            values,
            gemm=use.gemm,
            consumers=consumers,
            token_layout=token_layout,
            block_scales=use.binding.scales() if frame.with_scales else None,
        )

    def values(
        self,
        frame: Frame | None,
        tensor_name: str,
        tensor: torch.Tensor,
        gemm: Gemm,
        moment: Moment,
        *,
        token_layout: str,
    ) -> torch.Tensor:
        """As ``operand``, for a kernel whose result no factor can be multiplied into."""
        if self.quantizers[tensor_name, gemm].is_identity:
            return tensor
        use = self._use(tensor_name, gemm, tensor, moment)
        consumed = Operand(values=use.values())
        self._offer(frame, use, consumed, token_layout)
        return consumed.values

    def _use(self, tensor_name: str, gemm: Gemm, operand: torch.Tensor, moment: Moment) -> Use:
        return Use.of(
            operand,
            self.quantizers[tensor_name, gemm],
            layer_type=self.layer_type,
            tensor_name=tensor_name,
            gemm=gemm,
            seeds=(self.seed, *moment, self.module),
        )

    def observe(
        self,
        frame: Frame | None,
        tensor_name: str,
        tensor: torch.Tensor,
        *,
        token_layout: str,
        matrices: Mapping[Gemm, torch.Tensor] | None = None,
    ) -> None:
        """Offer an original to the frame.

        Args:
            frame: as above.
            tensor_name: of the tensor.
            tensor: as the network computed it.
            token_layout: the meaning of its dimensions.
            matrices: by consuming gemm, the operand as that gemm sees it; empty for a result.
        """
        if frame is None:
            return
        is_wanted = frame.wants(self.module, tensor_name)
        consumers = []
        for gemm, matrix in (matrices or {}).items():
            # an abs max over ranks is asked for by all of them, also those that have their share
            if self.quantizers[tensor_name, gemm].is_identity or not (is_wanted or is_sharded(matrix)):
                continue
            use = self._use(tensor_name, gemm, matrix, (frame.iteration, frame.micro_batch))
            if is_wanted:
                consumers.append(frame.describe(self.module, use))
        if is_wanted:
            frame.take(self.module, tensor_name, tensor, consumers=consumers, token_layout=token_layout)
