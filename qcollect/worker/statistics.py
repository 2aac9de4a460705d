"""Captures as statistics: numbers stay on the device until a micro-batch is over, then one thread writes its lines.

Kernels put their results straight into rows of a table of float64 numbers on the device, one row a measurement:

    a tensor             store.summary.FIELDS
    an operand, a type   formats.error_stats.TOTALS; of the gemm's own type from the pass that quantizes

Every micro-batch under way has a table. When all that is wanted of it was seen, or its iteration is over, another
stream copies the rows to page-locked memory, and a thread has its lines written, on the CPU by itself, with a CUDA
device by a process of its own (``write_lines``). Nothing on the training thread waits for the device.
"""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from qcollect.errors import CaptureError
from qcollect.formats.error_stats import NUM_TOTALS, Totals
from qcollect.formats.pending import PendingShares
from qcollect.formats.resolved import Quantizer
from qcollect.formats.scope import is_distributed
from qcollect.formats.triton_launch import PreparedCount, pending_stats
from qcollect.plan.schedule import PlannedCapture
from qcollect.recipe.conflicts import of_type
from qcollect.recipe.records import QuantSpec
from qcollect.store.files import LineFile
from qcollect.store.manifest import ManifestRecord
from qcollect.store.summary import FIELDS, summarize
from qcollect.store.summary_cuda import pending_summaries
from qcollect.store.summary_cuda import summarize as summarize_flat
from qcollect.store.summary_cuda import supports as has_kernel
from qcollect.vocab import CaptureKey, Gemm, LayerType
from qcollect.worker.counts import Counts
from qcollect.worker.engine import EngineSettings
from qcollect.worker.frame import Claim, Frame, WantKey, want_key
from qcollect.worker.gemm import Operand
from qcollect.worker.lines import (
    NOT_STORED,
    ROW_SIZE,
    LineTemplate,
    Measured,
    encode_moment,
    operand_text,
    tensor_text,
)
from qcollect.worker.policy import QuantPolicy, Use
from qcollect.worker.resume import Kept
from qcollect.worker.saver import Saver, describe_capture, plain_value
from qcollect.worker.sharding import describe_sharding, local_of
from qcollect.worker.sink import Observer, hash_tokens
from qcollect.worker.staging import identity_of
from qcollect.worker.state import STATE
from qcollect.worker.write_lines import Appended, LineProcess, append_lines
from qcollect.worker.writers import WriterPool

_MAX_QUEUED = 64  # micro-batches whose lines are to be written, until training waits
_SHARED = frozenset({"input"})  # what several modules may read: q, k and v, gate and up
_WITHOUT_FLOAT64 = ("mps",)

Shadows = Mapping[tuple[LayerType, str, Gemm], tuple[tuple[str, Quantizer], ...]]


def shadows_of(shadow: Sequence[str], quant: QuantSpec) -> Shadows:
    """The further types an operand of a gemm is measured under, by name.

    Raises:
        FormatError: a type, rule or rounding that does not exist together.
    """
    found: dict[tuple[LayerType, str, Gemm], tuple[tuple[str, Quantizer], ...]] = {}
    for name in shadow:
        policy = QuantPolicy.from_spec(of_type(quant, name))
        for layer_type in LayerType:
            for (tensor_name, gemm), quantizer in policy.by_layer_type(layer_type).items():
                place = (layer_type, tensor_name, gemm)
                found[place] = (*found.get(place, ()), (quantizer.quant_type.name, quantizer))
    return found


class _Table:
    """Rows for the measurements of one micro-batch.

    Args:
        num_rows: how many.
        device: where they are measured.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.numbers = torch.empty(num_rows, ROW_SIZE, dtype=torch.float64, device=device)
        self.summaries = [row[: len(FIELDS)] for row in self.numbers.unbind()]
        self.totals = [Totals(row[:NUM_TOTALS]) for row in self.numbers.unbind()]
        is_cuda = device.type == "cuda"
        self.host = torch.empty(self.numbers.shape, dtype=torch.float64, pin_memory=True) if is_cuda else self.numbers
        self.host_amaxes = torch.empty(num_rows, dtype=torch.float32, pin_memory=is_cuda)


class _Pending(NamedTuple):
    """Of one stream: what is measured there, and put into its rows a hundred at a time."""

    summaries: PendingShares | None
    totals: PendingShares | None

    def finish(self) -> None:
        for shares in self:
            if shares is not None:
                shares.finish()


_AT_ONCE = _Pending(None, None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    """What was measured in one micro-batch.

    Args:
        moment: the metadata its records share.
        tokens: its first input, in host memory when ``arrived`` has come.
        expected: of a resumed run, what is listed already and must come out the same.
        records: template, rows, place in ``amaxes``, seed.
        known: rows by what they are the measurement of, while that memory is alive.
        streams: on which something was measured, and what waits there.
    """

    iteration: int
    table: _Table
    moment: dict[str, Any]
    tokens: torch.Tensor | None
    expected: dict[WantKey, CaptureKey]
    num_rows: int = 0
    records: list[tuple[LineTemplate, tuple[int, ...], int | None, int | None]] = field(default_factory=list)
    amaxes: list[torch.Tensor] = field(default_factory=list)
    known: dict[Hashable, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    streams: dict[int, _Pending] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None

    def row(self) -> int:
        self.num_rows += 1
        return self.num_rows - 1

    def find(self, what: Hashable, tensor: torch.Tensor) -> tuple[int, bool]:
        """The row of a measurement, and whether it is still to be made; the same memory is measured once."""
        found = self.known.get(what)
        if found is not None and not found[0].expired():  # type: ignore[no-untyped-call]
            return found[1], False
        row = self.row()
        self.known[what] = StorageWeakRef(tensor.untyped_storage()), row  # type: ignore[no-untyped-call]
        return row, True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """An operand of a gemm, of one shape: its lines, and the types it is measured under beside its own."""

    template: LineTemplate
    own: PreparedCount | None
    shadows: tuple[tuple[Quantizer, PreparedCount | None], ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSite:
    """A tensor of one kind: its lines, and whether kernels count it as it is."""

    template: LineTemplate
    layout: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    has_kernel: bool

    def fits(self, tensor: torch.Tensor, layout: str) -> bool:
        return (
            self.shape == tensor.shape
            and self.dtype is tensor.dtype
            and self.requires_grad == tensor.requires_grad
            and self.is_leaf == tensor.is_leaf
            and self.device == tensor.device
            and self.layout == layout
        )


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
        self.shadows = shadows
        self.on_written = on_written
        self.counts = Counts()
        self.waited_s = 0.0
        self._manifest = LineFile(saver.paths.manifest_path(observer.rank.rank), durable=settings.durability == "all")
        self._num_rows = sum(
            1 if c.gemm is None else 1 + len(shadows.get((c.layer_type, c.tensor_name, c.gemm), ())) for c in captures
        )
        self._templates: list[LineTemplate] = []
        self._tensor_sites: dict[Hashable, _TensorSite] = {}
        self._last_tensor_sites: dict[int, _TensorSite] = {}  # by planned capture, which the schedule keeps
        self._sites: dict[Hashable, _Site] = {}
        self._last_sites: dict[int, _Site] = {}
        self._open: dict[int, tuple[Frame, _Batch]] = {}
        self._pool: WriterPool[_Batch] | None = None
        self._error: Exception | None = None
        self._pid = os.getpid()
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        self._process: LineProcess | None = None  # where the interpreter is the training thread's
        self._pending: dict[int, _Pending] = {}  # by stream
        self._tables: SimpleQueue[_Table] = SimpleQueue()  # those that are free
        self._num_queued = 0
        self._lock = threading.Lock()
        self._held: list[str] = []

    # ---- life ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    def open(self, device: torch.device) -> None:
        if device.type in _WITHOUT_FLOAT64:
            device = torch.device("cpu")
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._process = LineProcess(self._manifest, goes_on=self.settings.on_error == "continue")
        self._device = device
        self._pool = WriterPool(1, self._write)

    def begin(self, frame: Frame, tokens: torch.Tensor | None) -> None:
        if not self.is_open:  # the rank has its share: what is wanted is to be compared, and nothing follows
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
        batch = _Batch(
            iteration=frame.iteration,
            table=self._take_table(),
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
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._pool is None:
            return
        self.end_iteration()
        self._pool.close()
        self._pool = None
        process, self._process = self._process, None
        if process is not None:
            try:
                for appended in process.close():
                    self._note(appended)
            except CaptureError as error:
                self._error = self._error or error
        self._tables = SimpleQueue()
        self._pending.clear()

    # ---- what is taken -------------------------------------------------------------------------

    def take(self, claim: Claim, tensor: torch.Tensor, consumers: Sequence[dict[str, Any]]) -> None:
        frame, batch = self._open[id(claim.frame)]
        local = local_of(tensor)
        site = self._tensor_site(claim, tensor, local)
        has_kernel = site.has_kernel and local.is_contiguous() and not local.is_neg()
        value = local if has_kernel else plain_value(local)
        identity = identity_of(value) if claim.planned.tensor_name in _SHARED else None
        row, is_new = (batch.row(), True) if identity is None else batch.find(identity, value)
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
        self._record(frame, batch, (site.template, (row,), None, None))

    def consume(self, claim: Claim, use: Use, quantize: Callable[..., Operand]) -> Operand:
        frame, batch = self._open[id(claim.frame)]
        x, site = use.binding.x, self._operand_site(claim, use)
        identity = identity_of(x) if claim.planned.tensor_name in _SHARED else None
        rows = []
        if use.quantizer.is_identity:
            consumed = quantize(use)
        else:
            row, is_new = _place(batch, use.quantizer, identity, x)
            rows.append(row)
            if not is_new:
                consumed = quantize(use)
            elif site.own is not None and x.is_contiguous() and (pending := self._pending_of(batch).totals) is not None:
                values = torch.empty(x.shape, dtype=x.dtype, device=x.device)
                site.own(x, values, batch.table.totals[row].numbers, pending)
                consumed = Operand(values=values)
            else:
                consumed = self._measured(batch, row, x.device, partial(quantize, use))
        self._record_use(frame, batch, site, use, rows, identity)
        return consumed

    def consume_both(self, claims: tuple[Claim | None, Claim | None], uses: tuple[Use, Use]) -> tuple[Operand, Operand]:
        if claims[0] is not None and claims[1] is not None:
            found = self._consume_at_once((claims[0], claims[1]), uses)
            if found is not None:
                return found
        last, first = (
            use.operand() if claim is None else self.consume(claim, use, Use.operand)
            for claim, use in zip(claims, uses, strict=True)
        )
        return last, first

    def _consume_at_once(self, claims: tuple[Claim, Claim], uses: tuple[Use, Use]) -> tuple[Operand, Operand] | None:
        """By one launch, where that can be: nothing of one matrix is measured for another module, too."""
        frame, batch = self._open[id(claims[0].frame)]
        pending = self._pending_of(batch).totals
        if pending is None or uses[0].binding.x.device != self._device or claims[0].planned.tensor_name in _SHARED:
            return None
        rows = batch.num_rows, batch.num_rows + 1
        totals = batch.table.totals[rows[0]], batch.table.totals[rows[1]]
        totals[0].pending = totals[1].pending = pending
        found = uses[0].measured_with(uses[1], totals)
        if found is None:
            return None
        batch.num_rows += 2
        for claim, use, row in zip(claims, uses, rows, strict=True):
            self._record_use(frame, batch, self._operand_site(claim, use), use, [row], None)
        return found

    def _record_use(
        self, frame: Frame, batch: _Batch, site: _Site, use: Use, rows: list[int], identity: Hashable | None
    ) -> None:
        """Measure an operand under the further types, too; ``rows`` has its own."""
        x = use.binding.x
        for quantizer, prepared in site.shadows:
            row, is_new = _place(batch, quantizer, identity, x)
            rows.append(row)
            if not is_new:
                continue
            if prepared is not None and x.is_contiguous() and (pending := self._pending_of(batch).totals) is not None:
                prepared(x, x, batch.table.totals[row].numbers, pending)
            else:
                self._measured(batch, row, x.device, use.under(quantizer).measure)
        amax_place = None
        if use.amax is not None:
            amax_place = len(batch.amaxes)
            batch.amaxes.append(use.amax)
        self._record(frame, batch, (site.template, tuple(rows), amax_place, use.seed))

    def _measured(self, batch: _Batch, row: int, device: torch.device, measure: Callable[[Totals], Any]) -> Any:
        out = batch.table.totals[row]
        if device == self._device:
            out.pending = self._pending_of(batch).totals
            return measure(out)
        own = Totals(torch.empty(NUM_TOTALS, dtype=torch.float64, device=device))
        found = measure(own)
        out.numbers.copy_(own.numbers)
        return found

    def _pending_of(self, batch: _Batch) -> _Pending:
        """That of the current stream, on which something of a micro-batch is measured."""
        if self._stream is None:
            return _AT_ONCE
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # at a tenth of the time
        pending = batch.streams.get(raw)
        if pending is None:
            pending = self._pending.get(raw)
            if pending is None:
                pending = _Pending(pending_summaries(self._device), pending_stats(self._device))
                self._pending[raw] = pending
            batch.streams[raw] = pending
        return pending

    def _record(
        self,
        frame: Frame,
        batch: _Batch,
        record: tuple[LineTemplate, tuple[int, ...], int | None, int | None],
    ) -> None:
        batch.records.append(record)
        self.counts.num_taken += record[0].want not in batch.expected
        if not frame.wanted:
            self._ship(frame, batch)

    # ---- templates -----------------------------------------------------------------------------

    def _tensor_site(self, claim: Claim, tensor: torch.Tensor, local: torch.Tensor) -> _TensorSite:
        last = self._last_tensor_sites.get(id(claim.planned))
        if last is not None and last.fits(local, claim.token_layout) and not is_distributed(tensor):
            return last
        sharding = describe_sharding(tensor) if is_distributed(tensor) else None
        key = (
            id(claim.planned), local.shape, local.dtype, local.device, local.requires_grad, local.is_leaf,
            claim.token_layout, None if sharding is None else str(sharding),
        )  # fmt: skip
        site = self._tensor_sites.get(key)
        if site is None:
            metadata = self._metadata(claim, sharding)
            info = _describe(local, requires_grad=local.requires_grad, is_leaf=local.is_leaf)
            template = self._make_template(
                text=tensor_text(metadata, info), want=want_key(claim.planned), num_elements=local.numel()
            )
            site = self._tensor_sites[key] = _TensorSite(
                template=template,
                layout=claim.token_layout,
                shape=local.shape,
                dtype=local.dtype,
                device=local.device,
                requires_grad=local.requires_grad,
                is_leaf=local.is_leaf,
                has_kernel=local.numel() > 0 and local.device == self._device and has_kernel(local),
            )
        if sharding is None:
            self._last_tensor_sites[id(claim.planned)] = site
        return site

    def _make_template(self, **fields: Any) -> LineTemplate:
        template = LineTemplate(number=len(self._templates), **fields)
        self._templates.append(template)
        return template

    def _operand_site(self, claim: Claim, use: Use) -> "_Site":
        x = use.binding.x
        is_plain = not is_distributed(use.original)
        last = self._last_sites.get(id(claim.planned)) if is_plain else None
        if last is not None and last.shape == x.shape and last.dtype is x.dtype and last.device == x.device:
            return last
        sharding = describe_sharding(use.original) if is_distributed(use.original) else None
        key = (
            id(claim.planned), x.shape, x.dtype, x.device, claim.token_layout,
            None if sharding is None else str(sharding),
        )  # fmt: skip
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._make_site(claim, use, sharding)
        if is_plain:
            self._last_sites[id(claim.planned)] = site
        return site

    def _make_site(self, claim: Claim, use: Use, sharding: dict[str, Any] | None) -> "_Site":
        x, planned, quantizer = use.binding.x, claim.planned, use.quantizer
        own = () if quantizer.is_identity else (quantizer.quant_type.name,)
        shadows = self.shadows.get((planned.layer_type, planned.tensor_name, use.gemm), ())
        others = [(name, shadow) for name, shadow in shadows if name not in own]
        names = (*own, *(name for name, _ in others))
        consumer = use.describe(torch.zeros((), dtype=torch.int64))
        metadata = self._metadata(claim, sharding, consumers=[consumer])
        is_here = x.device == self._device and sharding is None
        return _Site(
            shape=x.shape,
            dtype=x.dtype,
            device=x.device,
            template=self._make_template(
                text=operand_text(metadata, consumer, _describe(x, requires_grad=False, is_leaf=True), names),
                want=want_key(planned),
                num_elements=x.numel(),
                num_types=len(names),
                is_quantized=bool(own),
                quantizer=None if use.amax is None else quantizer,
            ),
            own=use.binding.prepare_count(with_values=True) if is_here else None,
            shadows=tuple((q, use.under(q).prepare_count(with_values=False) if is_here else None) for _, q in others),
        )

    def _metadata(
        self, claim: Claim, sharding: dict[str, Any] | None, consumers: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        seen = self.observer.observe(claim, sharding=sharding)
        packed = {**NOT_STORED, "consumers": consumers}
        return describe_capture(seen, self.saver.run_id, self.saver.device, self.saver.clock(), packed)

    # ---- from the table to the manifest --------------------------------------------------------

    def _take_table(self) -> _Table:
        assert self._pool is not None
        if self._num_queued >= _MAX_QUEUED:
            started = time.monotonic()
            table = self._tables.get()
            self.waited_s += time.monotonic() - started
            return table
        return _Table(self._num_rows, self._device) if self._tables.empty() else self._tables.get()

    def _expected(self, frame: Frame) -> dict[WantKey, CaptureKey]:
        """What is wanted of a micro-batch only to be compared with what is listed."""
        moment = (frame.iteration, frame.micro_batch)
        keys = [key for key in self.kept.to_compare if (key.iteration, key.micro_batch) == moment]
        return {(k.module, k.tensor_name, None if k.gemm is None else Gemm(k.gemm)): k for k in keys}

    def _ship(self, frame: Frame, batch: _Batch) -> None:
        """Have a micro-batch's lines written; what comes of it later is not of it any more."""
        assert self._pool is not None
        del self._open[id(frame)]
        if os.getpid() != self._pid:  # forked from the one that has the thread
            return
        if self._stream is not None:
            self._send(batch, self._stream)
        elif batch.amaxes:
            torch.stack([amax.to(self._device) for amax in batch.amaxes], out=_head(batch))
        with self._lock:
            self._num_queued += 1
        self._pool.submit(batch)
        self.on_written()

    def _send(self, batch: _Batch, stream: torch.cuda.Stream) -> None:
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
                    _head(batch).copy_(stacked, non_blocking=True)
            batch.arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            batch.arrived.record(stream)

    def _write(self, batch: _Batch) -> None:
        try:
            if batch.arrived is not None:
                batch.arrived.synchronize()
            if self._error is None:  # or training ends: what follows the lines that failed is not written
                self._write_measured(batch, self._read(batch))
        except Exception as error:
            self._error = error
        finally:
            with self._lock:
                self._num_queued -= 1
            self._tables.put(batch.table)

    def _read(self, batch: _Batch) -> Measured:
        """What came to the host; the table may be filled again."""
        numbers = batch.table.host[: batch.num_rows]
        amaxes, scales = _scales(batch)
        return Measured(
            records=[(template.number, rows, place, seed) for template, rows, place, seed in batch.records],
            moment=encode_moment({**batch.moment, "token_hash": hash_tokens(batch.tokens)}),
            numbers=ctypes.string_at(numbers.data_ptr(), numbers.nbytes) if batch.num_rows else b"",
            amaxes=amaxes,
            scales=scales,
        )

    def _write_measured(self, batch: _Batch, measured: Measured) -> None:
        if batch.expected or self._held or not self.kept.is_proven(batch.iteration):
            self._append(self._compared(batch, measured.lines(self._templates)), batch.iteration)
        elif self._process is not None:
            for appended in self._process.write(measured, self._templates):
                self._note(appended)
        else:
            self._note(append_lines(self._manifest, measured.lines(self._templates)))

    def _compared(self, batch: _Batch, lines: list[str]) -> list[str]:
        """Lines that are not listed already; those that are were compared.

        Raises:
            CaptureError: they are not the same.
        """
        new = []
        for (template, *_), line in zip(batch.records, lines, strict=True):
            key = batch.expected.get(template.want)
            if key is None:
                new.append(line)
            else:
                self.kept.compare_statistics(key, ManifestRecord.from_dict(json.loads(line)))
        return new

    def _append(self, lines: list[str], iteration: int) -> None:
        self._held += lines
        if not self._held or not self.kept.is_proven(iteration):  # nothing of two different trainings
            return
        held, self._held = self._held, []
        self._note(append_lines(self._manifest, held))

    def _note(self, appended: Appended) -> None:
        counts = self.counts
        counts.num_written += appended.num_written
        counts.num_bytes += appended.num_bytes
        counts.num_bytes_taken = counts.num_bytes
        if appended.reason is None:
            return
        if self.settings.on_error == "stop":
            raise CaptureError(appended.reason)
        counts.num_missing += appended.num_missing
        counts.first_missing = counts.first_missing or appended.reason


def _place(batch: _Batch, quantizer: Quantizer, identity: Hashable | None, x: torch.Tensor) -> tuple[int, bool]:
    """The row of an operand's errors under a type, and whether they are still to be measured."""
    if identity is None or quantizer.draws:  # what is drawn depends on the module
        return batch.row(), True
    return batch.find((identity, id(quantizer)), x)


def _stream_of(raw: int, device: torch.device) -> torch.cuda.Stream:
    if raw == 0:  # torch takes 0 for none, and would make a new one
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(raw, device)  # type: ignore[no-untyped-call]


def _head(batch: _Batch) -> torch.Tensor:
    return batch.table.host_amaxes[: len(batch.amaxes)]


def _scales(batch: _Batch) -> tuple[list[float], list[float]]:
    """The abs max of each use that has one, and the scale that follows from it."""
    if not batch.amaxes:
        return [], []
    amaxes = _head(batch)
    scales = torch.empty_like(amaxes)
    places: dict[int, tuple[Quantizer, list[int]]] = {}
    for template, _, place, _ in batch.records:
        if place is not None and template.quantizer is not None:
            places.setdefault(id(template.quantizer), (template.quantizer, []))[1].append(place)
    for quantizer, chosen in places.values():
        found = quantizer.scale_of(amaxes[chosen])
        assert found is not None
        scales[chosen] = found
    return amaxes.tolist(), scales.tolist()


def _describe(tensor: torch.Tensor, *, requires_grad: bool, is_leaf: bool) -> dict[str, Any]:
    """``tensor_info`` without its statistics."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "requires_grad": requires_grad,
        "is_leaf": is_leaf,
    }


def _to_host(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as they are now; on their way, where they come from a CUDA device."""
    if tokens.device.type != "cuda":
        return tokens.detach().cpu().clone()
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    return host.copy_(tokens.detach(), non_blocking=True)
