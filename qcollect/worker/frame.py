"""One micro-batch as the hooks see it: what is still wanted, and where what is taken goes.

A frame is made when the root module's forward begins and is held by that forward's backward, so
a capture always carries the iteration, micro-batch and sample of the forward it belongs to.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from qcollect.plan.schedule import PlannedCapture
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.content import Findings
from qcollect.worker.gemm import Operand
from qcollect.worker.policy import Quantizers, Use
from qcollect.worker.sharding import is_sharded

Moment = tuple[int, int]  # iteration, micro-batch
WantKey = tuple[str, str, Gemm | None]  # module, tensor name, gemm (None: the original)
Wanted = dict[WantKey, tuple[int, PlannedCapture]]  # with the capture's counter in the schedule


def want_key(capture: PlannedCapture) -> WantKey:
    return capture.module, capture.tensor_name, capture.gemm


class Claim(NamedTuple):
    """A wanted capture that has come up: it is wanted no more.

    ``counter`` is its place in the schedule, ``token_layout`` the meaning of its dimensions.
    """

    frame: "Frame"
    counter: int
    planned: PlannedCapture
    token_layout: str


class Taker(Protocol):
    """What becomes of wanted tensors. Whatever is kept of one is its value at the moment of the call.

    ``describes_consumers``: originals come with an entry for each gemm that reads them.
    """

    @property
    def describes_consumers(self) -> bool: ...

    def take(self, claim: Claim, tensor: torch.Tensor, consumers: Sequence[dict[str, Any]]) -> None:
        """An original; of a DTensor this rank's part is taken."""

    def consume_known(self, claim: Claim, operand: torch.Tensor) -> Operand | None:
        """``consume``, where all but the operand's values is known from before; None: it has to be asked."""

    def consume_both_known(
        self, claims: tuple[Claim | None, Claim | None], matrix: torch.Tensor
    ) -> tuple[Operand, Operand] | None:
        """``consume_both``, likewise."""

    def consume(self, claim: Claim, use: Use, quantize: Callable[..., Operand]) -> Operand:
        """What a gemm consumes, and what is wanted of it.

        Args:
            quantize: ``Use.operand`` or ``Use.whole``.
        """

    def consume_both(self, claims: tuple[Claim | None, Claim | None], uses: tuple[Use, Use]) -> tuple[Operand, Operand]:
        """What two gemms consume of one matrix, along its last axis and along its first; one of them is wanted."""


@dataclass(slots=True, kw_only=True)
class Frame:
    """Wanted captures of one micro-batch. The first value seen of each wins; a recompute finds none wanted.

    ``num_calls`` counts the calls of each module, those without grad and those with grad apart; ``counts`` holds what
    was counted over operands. ``tokens`` has copies of its first input, by device, where the hash of that is not known
    yet.
    """

    iteration: int
    micro_batch: int
    sample_idx: int
    num_samples: int
    wanted: Wanted
    taker: Taker
    token_hash: str | None = None
    tokens: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    num_calls: Counter[tuple[str, bool]] = field(default_factory=Counter)
    counts: Findings[torch.Tensor] = field(default_factory=Findings)

    def of_call(self, module: str) -> "Frame | None":
        """This frame for the first call of a module, None for a later one: a group is of one call, there and back.

        Reentrant checkpointing calls twice, first without grad and in backward with grad: both are firsts.
        """
        call = (module, torch.is_grad_enabled())
        self.num_calls[call] += 1
        return self if self.num_calls[call] == 1 else None

    def tokens_near(self, device: torch.device) -> torch.Tensor | None:
        """A copy of its first input on the device of a capture, or, of one on the CPU, on that it came on."""
        if not self.tokens:
            return None
        if device not in self.tokens:
            own = next(iter(self.tokens.values()))
            self.tokens[device] = own if device.type == "cpu" else own.to(device, non_blocking=True)
        return self.tokens[device]

    def was_called(self, module: str) -> bool:
        return (module, True) in self.num_calls or (module, False) in self.num_calls

    def claim(self, module: str, tensor_name: str, gemm: Gemm | None = None, *, token_layout: str) -> Claim | None:
        """The wanted capture that this is, once; None: it is not wanted, or not any more."""
        found = self.wanted.pop((module, tensor_name, gemm), None)
        return None if found is None else Claim(self, *found, token_layout)

    def describe(self, use: Use) -> dict[str, Any]:
        """``Use.describe``; the elements clamped are counted once for an original, its copies and all that read it."""
        known, key = self.counts.of(use.binding.x), use.count_key
        count = None if known is None else known.get(key)
        if count is None:
            count = use.num_saturated()
            if known is not None:
                known[key] = count
        return use.describe(count)


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
        """``tensor`` as ``gemm`` consumes it, which is offered to the frame.

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
        return self._consume(frame, tensor_name, operand, gemm, moment, token_layout, Use.operand)

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
        return self._consume(frame, tensor_name, tensor, gemm, moment, token_layout, Use.whole).values

    def _consume(
        self,
        frame: Frame | None,
        tensor_name: str,
        operand: torch.Tensor,
        gemm: Gemm,
        moment: Moment,
        token_layout: str,
        quantize: Callable[..., Operand],
    ) -> Operand:
        claim = None if frame is None else frame.claim(self.module, tensor_name, gemm, token_layout=token_layout)
        if claim is None:
            if self.quantizers[tensor_name, gemm].is_identity:
                return Operand(values=operand)
            return quantize(self._use(tensor_name, gemm, operand, moment))
        taker = claim.frame.taker
        known = taker.consume_known(claim, operand)
        return known or taker.consume(claim, self._use(tensor_name, gemm, operand, moment), quantize)

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
        claims: tuple[Claim | None, Claim | None] = None, None
        if frame is not None:
            claims = (
                frame.claim(self.module, tensor_name, gemms[0], token_layout=token_layout),
                frame.claim(self.module, tensor_name, gemms[1], token_layout=token_layout),
            )
            known = frame.taker.consume_both_known(claims, matrix)
            if known is not None:
                return known
        last_use, first_use = (self._use(tensor_name, gemm, matrix, moment) for gemm in gemms)
        if frame is None or claims == (None, None):
            return last_use.operands_with(first_use)
        return frame.taker.consume_both(claims, (last_use, first_use))

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
        claim = frame.claim(self.module, tensor_name, token_layout=token_layout)
        consumers = []
        for gemm, matrix in (matrices or {}).items() if frame.taker.describes_consumers else ():
            # an abs max over ranks is asked for by all of them, also those that have their share
            if self.quantizers[tensor_name, gemm].is_identity or not (claim is not None or is_sharded(matrix)):
                continue
            use = self._use(tensor_name, gemm, matrix, (frame.iteration, frame.micro_batch))
            if claim is not None:
                consumers.append(frame.describe(use))
        if claim is not None:
            frame.taker.take(claim, tensor, consumers)
