"""One micro-batch as the hooks see it: what is still wanted, and where what is taken goes.

A frame is made when the root module's forward begins and is held by that forward's backward, so
a capture always carries the iteration, micro-batch and sample of the forward it belongs to.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qcollect.plan.schedule import PlannedCapture
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.policy import Quantizers, describe_consumer

WantKey = tuple[str, str, Gemm | None]  # module, tensor name, gemm (None: the original)
Wanted = dict[WantKey, tuple[int, PlannedCapture]]  # with the capture's counter in the schedule


def want_key(capture: PlannedCapture) -> WantKey:
    return capture.module, capture.tensor_name, capture.gemm


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenCapture:
    """A wanted tensor, seen: ``counter`` is its place in the schedule."""

    planned: PlannedCapture
    counter: int
    frame: "Frame"
    tensor: torch.Tensor
    consumers: list[dict[str, Any]]
    token_layout: str


@dataclass(slots=True, kw_only=True)
class Frame:
    """Wanted captures of one micro-batch. The first value seen of each wins; a recompute finds none wanted.

    ``num_calls`` counts the calls of each module, those without grad and those with grad apart.
    """

    iteration: int
    micro_batch: int
    sample_idx: int
    num_samples: int
    token_hash: str | None
    wanted: Wanted
    sink: Callable[[TakenCapture], None]
    num_calls: Counter[tuple[str, bool]] = field(default_factory=Counter)

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

    def take(
        self,
        module: str,
        tensor_name: str,
        tensor: torch.Tensor,
        *,
        gemm: Gemm | None = None,
        consumers: list[dict[str, Any]],
        token_layout: str,
    ) -> None:
        """Hand one wanted tensor on; the caller has asked ``wants``."""
        counter, planned = self.wanted.pop((module, tensor_name, gemm))
        self.sink(
            TakenCapture(
                planned=planned,
                counter=counter,
                frame=self,
                tensor=tensor,
                consumers=consumers,
                token_layout=token_layout,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTap:
    """A module under observation: quantizes its operands and offers what it sees to a frame.

    ``gemms`` are those the module runs in this forward: an input without grad has no dgrad.
    """

    module: str
    layer_type: LayerType
    layer_idx: int | None
    quantizers: Quantizers

    def operand(
        self,
        frame: Frame | None,
        tensor_name: str,
        tensor: torch.Tensor,
        gemm: Gemm,
        *,
        token_layout: str,
        matrix: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``tensor`` as ``gemm`` consumes it; its quantized copy is offered to the frame.

        Args:
            frame: of the forward this belongs to; None when nothing is captured.
            tensor_name: of the operand.
            tensor: as the network computed it.
            gemm: the consumer.
            token_layout: the meaning of the dimensions of what is returned.
            matrix: the operand as the gemm sees it, where that is not ``tensor``.
        """
        operand = tensor if matrix is None else matrix
        quantizer = self.quantizers[tensor_name, gemm]
        if quantizer.is_identity:
            return operand
        quantized, scale = quantizer(operand)
        if frame is not None and frame.wants(self.module, tensor_name, gemm):
            consumer = describe_consumer(self.layer_type, tensor_name, gemm, quantizer, operand, scale)
            frame.take(self.module, tensor_name, quantized, gemm=gemm, consumers=[consumer], token_layout=token_layout)
        return quantized

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
        if frame is None or not frame.wants(self.module, tensor_name):
            return
        consumers = []
        for gemm, matrix in (matrices or {}).items():
            quantizer = self.quantizers[tensor_name, gemm]
            if not quantizer.is_identity:
                scale = quantizer.scale_of(matrix)
                consumers.append(describe_consumer(self.layer_type, tensor_name, gemm, quantizer, matrix, scale))
        frame.take(self.module, tensor_name, tensor, consumers=consumers, token_layout=token_layout)
