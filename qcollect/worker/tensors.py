"""Captures as tensors in files: each is offered to the engine, which stages it and has it written."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from qcollect.formats.quantized import ScaleCodes
from qcollect.worker.counts import Counts
from qcollect.worker.engine import CaptureEngine, EngineSettings
from qcollect.worker.frame import Claim, Frame
from qcollect.worker.gemm import Operand
from qcollect.worker.policy import Use
from qcollect.worker.resume import Kept, key_of
from qcollect.worker.saver import Observation, Saver, Source, fix_value
from qcollect.worker.sharding import describe_sharding, local_of
from qcollect.worker.sink import Observer
from qcollect.worker.tokens import hash_tokens

_TOKEN_DTYPE = torch.int64  # as tokenizers and embeddings have it


class TensorSink:
    """A ``Sink`` of tensors.

    Args:
        needed_bytes: of host memory, what the captures of an iteration come to; 0: not known.
        on_written: called when something may have been written.
    """

    describes_consumers = True

    def __init__(
        self,
        saver: Saver,
        settings: EngineSettings,
        observer: Observer,
        kept: Kept,
        *,
        needed_bytes: int,
        on_written: Callable[[], None],
    ) -> None:
        self.saver = saver
        self.settings = settings
        self.observer = observer
        self.kept = kept
        self.needed_bytes = needed_bytes
        self.on_written = on_written
        self.counts = Counts()
        self.waited_s = 0.0
        self._engine: CaptureEngine | None = None
        self._error: Exception | None = None  # of the engine that was closed
        self._held: list[tuple[torch.Tensor, Observation, Claim, Source]] = []

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    def open(self, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        self._engine = CaptureEngine(
            self.saver,
            self.settings,
            device=device,
            needed_bytes=self.needed_bytes,
            num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            on_shipped=self.on_written,
        )
        self._engine.stager.prepare(device, {*dtypes, _TOKEN_DTYPE})
        self.counts = self._engine.counts

    def begin(self, frame: Frame, tokens: torch.Tensor | None) -> None:
        if tokens is None:
            return
        if self._engine is not None and self._engine.stager.travels(tokens):
            frame.tokens[tokens.device] = tokens.clone()  # hashed by whoever writes: nobody waits for the device
        else:
            frame.token_hash = hash_tokens(tokens)

    def forget(self) -> None:
        if self._engine is not None:
            self._engine.forget()

    def end_iteration(self) -> None:
        self.forget()

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._engine is not None:
            self._engine.check()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        self.waited_s = engine.waited_s
        try:
            engine.check()
        except Exception as error:
            self._error = error

    # ---- what is taken -------------------------------------------------------------------------

    def take(self, claim: Claim, tensor: torch.Tensor, consumers: Sequence[dict[str, Any]]) -> None:
        self._take(claim, tensor, consumers)

    def consume_known(self, claim: Claim, operand: torch.Tensor) -> Operand | None:
        return None

    def consume_both_known(
        self, claims: tuple[Claim | None, Claim | None], matrix: torch.Tensor
    ) -> tuple[Operand, Operand] | None:
        return None

    def consume(self, claim: Claim, use: Use, quantize: Callable[..., Operand]) -> Operand:
        consumed = quantize(use)
        self._take_copy(claim, use, consumed)
        return consumed

    def consume_both(self, claims: tuple[Claim | None, Claim | None], uses: tuple[Use, Use]) -> tuple[Operand, Operand]:
        consumed = uses[0].operands_with(uses[1])
        for claim, use, operand in zip(claims, uses, consumed, strict=True):
            if claim is not None:
                self._take_copy(claim, use, operand)
        return consumed

    def _take_copy(self, claim: Claim, use: Use, consumed: Operand) -> None:
        values = consumed.values if consumed.factor is None else use.values()
        consumers = [claim.frame.describe(use)]
        self._take(claim, values, consumers, use.binding.scales() if self.saver.packing.needs_scales else None)

    def _take(
        self,
        claim: Claim,
        tensor: torch.Tensor,
        consumers: Sequence[dict[str, Any]],
        block_scales: ScaleCodes | None = None,
    ) -> None:
        local = local_of(tensor)
        if self.kept.to_compare:
            key = key_of(claim.planned, claim.frame, self.observer.rank.rank)
            if key in self.kept.to_compare:
                self.kept.compare(key, local)
                self._submit_held()
                return
        sharding = describe_sharding(tensor)
        seen = self.observer.observe(claim, consumers=consumers, sharding=sharding, block_scales=block_scales)
        if self.kept.is_proven(claim.frame.iteration):
            self._submit(local, seen, claim, Source.of(local))
        else:  # the few that a killed run had not finished before the one that is compared
            self._held.append((fix_value(local), seen, claim, Source.of(local)))

    def _submit_held(self) -> None:
        held, self._held = self._held, []
        for capture in held:
            self._submit(*capture)

    def _submit(self, tensor: torch.Tensor, seen: Observation, claim: Claim, source: Source) -> None:
        assert self._engine is not None  # there is something to capture
        self._engine.submit(tensor, seen, claim.counter, source=source, tokens=claim.frame.tokens_near(tensor.device))
        if not claim.frame.wanted:  # the last of its micro-batch: what follows may take long, or never come to its end
            self._engine.forget()
