"""Captures as statistics: numbers stay on the device until a micro-batch is over, then one thread writes its lines.

Kernels put their results straight into rows of a table of float64 numbers on the device, one row a measurement:

    a tensor             store.summary.FIELDS
    an operand, a type   formats.error_stats.TOTALS; of the gemm's own type from the pass that quantizes

Every micro-batch under way has a table. When all that is wanted of it was seen, or its iteration is over, another
stream copies the rows to page-locked memory, and a thread has its lines written, on the CPU by itself, with a CUDA
device by a process of its own (``write_lines``). Nothing on the training thread waits for the device.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from qcollect.formats.binding import prepare_both
from qcollect.formats.error_stats import NUM_TOTALS, Totals
from qcollect.formats.pending import PendingShares
from qcollect.formats.resolved import Quantizer
from qcollect.formats.scope import is_distributed
from qcollect.formats.triton_counts import PreparedPair, pending_stats
from qcollect.plan.schedule import PlannedCapture
from qcollect.store.files import LineFile
from qcollect.store.summary import summarize
from qcollect.store.summary_cuda import pending_summaries
from qcollect.store.summary_cuda import summarize as summarize_flat
from qcollect.vocab import CaptureKey, Gemm
from qcollect.worker.batch_writer import BatchWriter, head_of
from qcollect.worker.counts import Counts
from qcollect.worker.engine import EngineSettings
from qcollect.worker.frame import Claim, Frame, WantKey
from qcollect.worker.gemm import Operand
from qcollect.worker.lines import (
    LineTemplate,
)
from qcollect.worker.measured_sites import SHARED, MeasuredSites, OperandSite, Shadow, Shadows
from qcollect.worker.policy import Use
from qcollect.worker.resume import Kept
from qcollect.worker.saver import Saver, plain_value
from qcollect.worker.sharding import local_of
from qcollect.worker.sink import Observer
from qcollect.worker.state import STATE
from qcollect.worker.tables import AT_ONCE, SUMMARY, Batch, KnownRows, Pending, Table

_WITHOUT_FLOAT64 = ("mps",)


class StatisticsSink:
    """A ``Sink`` of statistics.

    Args:
        saver: of this rank; its folder, and what it says of every capture.
        captures: those of a micro-batch.
        shadows: types beside the gemms' own.
        on_written: called when a micro-batch was taken, and others may have been written.
    """

    describes_consumers = False

    def __init__(
        self,
        saver: Saver,
        settings: EngineSettings,
        observer: Observer,
        kept: Kept,
        *,
        captures: Sequence[PlannedCapture],
        shadows: Shadows,
        on_written: Callable[[], None],
    ) -> None:
        self.saver = saver
        self.settings = settings
        self.observer = observer
        self.kept = kept
        self.on_written = on_written
        self.counts = Counts()
        self._manifest = LineFile(saver.paths.manifest_path(observer.rank.rank), durable=settings.durability == "all")
        self._num_rows = sum(
            # a further type twice: where its other gemm turns out to read other memory, that is measured again
            1 if c.gemm is None else 1 + 2 * len(shadows.get((c.layer_type, c.tensor_name, c.gemm), ()))
            for c in captures
        )
        self._sites = MeasuredSites(saver, observer, shadows, captures)
        self._pairs: dict[tuple[int, int, torch.Size, torch.dtype], PreparedPair] = {}  # of planned captures
        self._open: dict[int, tuple[Frame, Batch]] = {}
        self.waited_s = 0.0
        self._writer: BatchWriter | None = None
        self._error: Exception | None = None
        self._pid = os.getpid()
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        self._pending: dict[int, Pending] = {}  # by stream

    # ---- life ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def open(self, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        if device.type in _WITHOUT_FLOAT64:
            device = torch.device("cpu")
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = self._sites.device = device
        self._writer = BatchWriter(
            self._manifest,
            self.settings,
            self._sites.templates,
            self.kept,
            self.counts,
            lambda: Table(self._num_rows, device),
            has_process=self._stream is not None,
        )

    def begin(self, frame: Frame, tokens: torch.Tensor | None) -> None:
        if self._writer is None:  # the rank has its share: what is wanted is to be compared, and nothing follows
            frame.wanted.clear()
            return
        moment = {
            "sample_idx": frame.sample_idx,
            "num_samples": frame.num_samples,
            "batch_idx": STATE.batch(),
            "sequence_idx": STATE.sequence(),
            "iteration": frame.iteration,
            "micro_batch": frame.micro_batch,
            "token_hash": None,
            "save_time": self.saver.clock().strftime("%Y-%m-%d %H:%M:%S"),
        }
        batch = Batch(
            iteration=frame.iteration,
            table=self._writer.take_table(),
            moment=moment,
            tokens=None if tokens is None else _to_host(tokens),
            expected=self._expected(frame),
        )
        self._open[id(frame)] = frame, batch
        if self._stream is not None:
            self._pending_of(batch)  # the stream that has made the tokens

    def forget(self) -> None:
        """Nothing: a micro-batch knows its own."""

    def end_iteration(self) -> None:
        for frame, batch in list(self._open.values()):
            self._ship(frame, batch)

    def check(self) -> None:
        error = self._error if self._writer is None else self._writer.error
        if error is not None:
            raise error

    def close(self) -> None:
        writer = self._writer
        if writer is None:
            return
        self.end_iteration()
        writer.close()
        self._writer, self._error, self.waited_s = None, writer.error, writer.waited_s
        self._pending.clear()

    # ---- what is taken -------------------------------------------------------------------------

    def take(self, claim: Claim, tensor: torch.Tensor, consumers: Sequence[dict[str, Any]]) -> None:
        frame, batch = self._open[id(claim.frame)]
        local = local_of(tensor)
        site = self._sites.of_tensor(claim, tensor, local)
        has_kernel = site.has_kernel and local.is_contiguous() and not local.is_neg()
        value = local if has_kernel else plain_value(local)
        known = batch.known.of(value) if claim.planned.tensor_name in SHARED else None
        row, is_new = (batch.row(), True) if known is None else batch.find(known, SUMMARY)
        if is_new:
            out = batch.table.summaries[row]
            # in the order of a file's bytes, whatever the strides: the same numbers added up in the same order
            value = value if has_kernel or value.is_contiguous() else value.contiguous()
            if has_kernel:
                summarize_flat(value, out, pending=self._pending_of(batch).summaries)
            elif value.device == self._device:
                summarize(value, out, self._pending_of(batch).summaries)
            else:
                out.copy_(summarize(value))
        self._record(batch, (site.template, (row,), None, None))
        self._ship_if_over(frame, batch)

    def consume_known(self, claim: Claim, operand: torch.Tensor) -> Operand | None:
        site = self._sites.known_operand(claim, operand)
        if site is None or site.own is None:
            return None
        frame, batch = self._open[id(claim.frame)]
        pending = self._pending_of(batch).totals
        if pending is None:
            return None
        known = batch.known.of(operand) if claim.planned.tensor_name in SHARED else None
        # what was measured for another module is measured again, since it has to be quantized again: the same numbers
        row, _ = _place(batch, site.quantizer, known)
        dense = operand if operand.is_contiguous() else operand.detach().contiguous()
        values = torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)
        site.own(dense, values, batch.table.totals[row].numbers, pending)
        self._record_known(batch, site, dense, row, pending, known)
        self._ship_if_over(frame, batch)
        return Operand(values=values)

    def consume_both_known(
        self, claims: tuple[Claim | None, Claim | None], matrix: torch.Tensor
    ) -> tuple[Operand, Operand] | None:
        last, first = claims
        if last is None or first is None or not matrix.is_contiguous():
            return None
        pair = self._pairs.get((id(last.planned), id(first.planned), matrix.shape, matrix.dtype))
        sites = self._sites.known_operand(last, matrix), self._sites.known_operand(first, matrix)
        if pair is None or sites[0] is None or sites[1] is None:
            return None
        frame, batch = self._open[id(last.frame)]
        pending = self._pending_of(batch).totals
        if pending is None:
            return None
        rows = batch.row(), batch.row()
        outs = torch.empty_like(matrix), torch.empty_like(matrix)
        pair(matrix, outs, _numbers_of(batch, *rows), pending)
        known = batch.known.of(matrix) if sites[0].shadows else None
        for site, row in zip((sites[0], sites[1]), rows, strict=True):
            self._record_known(batch, site, matrix, row, pending, known)
        self._ship_if_over(frame, batch)
        return Operand(values=outs[0]), Operand(values=outs[1])

    def _record_known(
        self,
        batch: Batch,
        site: OperandSite,
        operand: torch.Tensor,
        row: int,
        pending: PendingShares,
        known: KnownRows | None,
    ) -> None:
        """Measure an operand under the further types, too; ``row`` has its own."""
        rows = [row]
        for shadow, row, shared in _place_further(batch, site, operand, rows, known):
            if shadow.with_other is not None and shared is not None:
                # along the axis of its gemm, and along that of the gemm that reads it later
                other_row, _ = batch.find(shared, id(shadow.other))
                shadow.with_other(operand, (operand, operand), _numbers_of(batch, row, other_row), pending)
            elif shadow.prepared is not None:
                shadow.prepared(operand, operand, batch.table.totals[row].numbers, pending)
            else:
                self._measured(batch, row, operand.device, shadow.quantizer.bind(operand).measure)
        self._record(batch, (site.template, tuple(rows), None, None))

    def consume(self, claim: Claim, use: Use, quantize: Callable[..., Operand]) -> Operand:
        frame, batch = self._open[id(claim.frame)]
        consumed = self._consume(batch, claim, use, quantize)
        self._ship_if_over(frame, batch)
        return consumed

    def consume_both(self, claims: tuple[Claim | None, Claim | None], uses: tuple[Use, Use]) -> tuple[Operand, Operand]:
        last, first = claims
        claimed = last or first
        assert claimed is not None  # one of them is wanted
        frame, batch = self._open[id(claimed.frame)]
        found = None if last is None or first is None else self._consume_at_once(batch, (last, first), uses)
        if found is None:
            along_last, along_first = (
                use.operand() if claim is None else self._consume(batch, claim, use, Use.operand)
                for claim, use in zip(claims, uses, strict=True)
            )
            found = along_last, along_first
        self._ship_if_over(frame, batch)
        return found

    def _consume(self, batch: Batch, claim: Claim, use: Use, quantize: Callable[..., Operand]) -> Operand:
        x = use.binding.x
        known = batch.known.of(x) if claim.planned.tensor_name in SHARED else None
        rows = []
        if use.quantizer.is_identity:
            consumed = quantize(use)
        else:
            row, is_new = _place(batch, use.quantizer, known)
            rows.append(row)
            consumed = self._measured(batch, row, x.device, partial(quantize, use)) if is_new else quantize(use)
        self._record_use(batch, self._sites.of_operand(claim, use), use, rows, known)
        return consumed

    def _consume_at_once(
        self, batch: Batch, claims: tuple[Claim, Claim], uses: tuple[Use, Use]
    ) -> tuple[Operand, Operand] | None:
        """By one launch, where that can be: nothing of one matrix is measured for another module, too."""
        pending = self._pending_of(batch).totals
        if pending is None or uses[0].binding.x.device != self._device or claims[0].planned.tensor_name in SHARED:
            return None
        num_rows = batch.num_rows
        rows = batch.row(), batch.row()
        found = uses[0].measured_with(uses[1], _totals_of(batch, rows, pending))
        if found is None:
            batch.num_rows = num_rows
            return None
        for claim, use, row in zip(claims, uses, rows, strict=True):
            self._record_use(batch, self._sites.of_operand(claim, use), use, [row], None)
        x = uses[0].binding.x
        key = (id(claims[0].planned), id(claims[1].planned), x.shape, x.dtype)
        if key not in self._pairs and not is_distributed(uses[0].original):
            pair = prepare_both(*(use.binding for use in uses), with_values=True)
            if pair is not None:
                self._pairs[key] = pair
        return found

    def _record_use(self, batch: Batch, site: OperandSite, use: Use, rows: list[int], known: KnownRows | None) -> None:
        """Measure an operand under the further types, too; ``rows`` has its own."""
        x = use.binding.x
        for shadow, row, _ in _place_further(batch, site, x, rows, known):
            self._measured(batch, row, x.device, use.under(shadow.quantizer).measure)
        amax_place = None
        if use.amax is not None:
            amax_place = len(batch.amaxes)
            batch.amaxes.append(use.amax)
        self._record(batch, (site.template, tuple(rows), amax_place, use.seed))

    def _measured(self, batch: Batch, row: int, device: torch.device, measure: Callable[[Totals], Any]) -> Any:
        out = batch.table.totals[row]
        if device == self._device:
            out.pending = self._pending_of(batch).totals
            return measure(out)
        own = Totals(torch.empty(NUM_TOTALS, dtype=torch.float64, device=device))
        found = measure(own)
        out.numbers.copy_(own.numbers)
        return found

    def _pending_of(self, batch: Batch) -> Pending:
        """That of the current stream, on which something of a micro-batch is measured."""
        if self._stream is None:
            return AT_ONCE
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # at a tenth of the time
        pending = batch.streams.get(raw)
        if pending is None:
            pending = self._pending.get(raw)
            if pending is None:
                pending = Pending(pending_summaries(self._device), pending_stats(self._device))
                self._pending[raw] = pending
            batch.streams[raw] = pending
        return pending

    def _record(self, batch: Batch, record: tuple[LineTemplate, tuple[int, ...], int | None, int | None]) -> None:
        batch.records.append(record)
        self.counts.num_taken += record[0].want not in batch.expected

    def _ship_if_over(self, frame: Frame, batch: Batch) -> None:
        """Once all that was claimed is recorded: both of a pair were claimed before the first of them is."""
        if not frame.wanted:
            self._ship(frame, batch)

    # ---- from the table to the manifest --------------------------------------------------------

    def _expected(self, frame: Frame) -> dict[WantKey, CaptureKey]:
        """What is wanted of a micro-batch only to be compared with what is listed."""
        moment = (frame.iteration, frame.micro_batch)
        keys = [key for key in self.kept.to_compare if (key.iteration, key.micro_batch) == moment]
        return {(k.module, k.tensor_name, None if k.gemm is None else Gemm(k.gemm)): k for k in keys}

    def _ship(self, frame: Frame, batch: Batch) -> None:
        """Have a micro-batch's lines written; what comes of it later is not of it any more."""
        assert self._writer is not None
        del self._open[id(frame)]
        if os.getpid() != self._pid:  # forked from the one that has the thread
            return
        if self._stream is not None:
            self._send(batch, self._stream)
        elif batch.amaxes:
            torch.stack([amax.to(self._device) for amax in batch.amaxes], out=head_of(batch))
        self._writer.submit(batch)
        self.on_written()

    def _send(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        """Copies to the host, behind everything that was measured."""
        with torch.cuda.device(self._device):
            for raw, pending in batch.streams.items():
                source = _stream_of(raw, self._device)
                with torch.cuda.stream(source):
                    pending.finish()
                stream.wait_stream(source)
            with torch.cuda.stream(stream):
                table, num_rows = batch.table, batch.num_rows
                table.host[:num_rows].copy_(table.numbers[:num_rows], non_blocking=True)
                if batch.amaxes:
                    stacked = torch.stack([amax.to(self._device) for amax in batch.amaxes])
                    head_of(batch).copy_(stacked, non_blocking=True)
            batch.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            batch.arrived.record(stream)


def _place(batch: Batch, quantizer: Quantizer, known: KnownRows | None) -> tuple[int, bool]:
    """The row of an operand's errors under a type, and whether they are still to be measured."""
    if known is None or quantizer.draws:  # what is drawn depends on the module
        return batch.row(), True
    return batch.find(known, id(quantizer))


def _place_further(
    batch: Batch, site: OperandSite, x: torch.Tensor, rows: list[int], known: KnownRows | None
) -> Iterator[tuple[Shadow, int, KnownRows | None]]:
    """Adds the rows of an operand's errors under the further types to ``rows``; gives those that are to be measured
    still, with what is known of the operand's memory.
    """
    for shadow in site.shadows:
        if shadow.is_shared and known is None:
            known = batch.known.of(x)
        row, is_new = _place(batch, shadow.quantizer, known if shadow.is_shared else None)
        rows.append(row)
        if is_new:
            yield shadow, row, known


def _numbers_of(batch: Batch, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.table.totals[first].numbers, batch.table.totals[second].numbers


def _totals_of(batch: Batch, rows: tuple[int, int], pending: PendingShares) -> tuple[Totals, Totals]:
    """Of two measurements by one launch, whose results come later."""
    totals = batch.table.totals[rows[0]], batch.table.totals[rows[1]]
    totals[0].pending = totals[1].pending = pending
    return totals


def _stream_of(raw: int, device: torch.device) -> torch.cuda.Stream:
    if raw == 0:  # torch takes 0 for none, and would make a new one
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(raw, device)  # type: ignore[no-untyped-call]


def _to_host(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as they are now; on their way, where they come from a CUDA device."""
    if tokens.device.type != "cuda":
        return tokens.detach().cpu().clone()
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    return host.copy_(tokens.detach(), non_blocking=True)
