"""The lines of micro-batches: read from the tables that came to the host, compared with listed ones, written."""

import ctypes
import json
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from qcollect.errors import CaptureError
from qcollect.formats.resolved import Quantizer
from qcollect.store.files import LineFile
from qcollect.store.manifest import ManifestRecord
from qcollect.worker.counts import Counts
from qcollect.worker.engine import EngineSettings
from qcollect.worker.lines import LineTemplate, Measured, encode_moment
from qcollect.worker.resume import Kept
from qcollect.worker.tables import Batch, Table
from qcollect.worker.tokens import hash_tokens
from qcollect.worker.write_lines import Appended, LineProcess, append_lines
from qcollect.worker.writers import WriterPool

_MAX_QUEUED = 64  # micro-batches whose lines are to be written, until training waits


class BatchWriter:
    """Writes the lines of micro-batches by a thread, or has a process of its own do it. Tables go round.

    Args:
        manifest: where lines go.
        templates: by their numbers; more may come.
        kept: of a resumed run, what is listed already.
        counts: of lines, kept up to date.
        make_table: a new one.
        has_process: where the interpreter is the training thread's.
    """

    def __init__(
        self,
        manifest: LineFile,
        settings: EngineSettings,
        templates: list[LineTemplate],
        kept: Kept,
        counts: Counts,
        make_table: Callable[[], Table],
        *,
        has_process: bool,
    ) -> None:
        self.waited_s = 0.0
        self.error: Exception | None = None
        self._manifest, self._templates, self._kept, self._make_table = manifest, templates, kept, make_table
        self._counts = counts
        self._goes_on = settings.on_error == "continue"
        self._process = LineProcess(manifest, goes_on=self._goes_on) if has_process else None
        self._pool: WriterPool[Batch] = WriterPool(1, self._write)
        self._tables: SimpleQueue[Table] = SimpleQueue()  # those that are free
        self._num_queued = 0
        self._lock = threading.Lock()
        self._held: list[str] = []

    def take_table(self) -> Table:
        """One for a micro-batch; waits while too many are to be written."""
        if self._num_queued >= _MAX_QUEUED:
            started = time.monotonic()
            table = self._tables.get()
            self.waited_s += time.monotonic() - started
            return table
        return self._make_table() if self._tables.empty() else self._tables.get()

    def submit(self, batch: Batch) -> None:
        """Have a micro-batch's lines written once it has arrived."""
        with self._lock:
            self._num_queued += 1
        self._pool.submit(batch)

    def close(self) -> None:
        """Write what was submitted, and end."""
        self._pool.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for appended in process.close():
                self._note(appended)
        except CaptureError as error:
            self.error = self.error or error

    def _write(self, batch: Batch) -> None:
        try:
            if batch.arrived is not None:
                batch.arrived.synchronize()
            if self.error is None:  # or training ends: what follows the lines that failed is not written
                self._write_measured(batch, self._read(batch))
        except Exception as error:
            self.error = error
        finally:
            with self._lock:
                self._num_queued -= 1
            self._tables.put(batch.table)

    def _read(self, batch: Batch) -> Measured:
        """What came to the host; the table may be filled again."""
        numbers = batch.table.host[: batch.num_rows]
        amaxes, scales = _scales(batch)
        token_hash = None if batch.tokens is None else hash_tokens(batch.tokens)
        return Measured(
            records=[(template.number, rows, place, seed) for template, rows, place, seed in batch.records],
            moment=encode_moment({**batch.moment, "token_hash": token_hash}),
            numbers=ctypes.string_at(numbers.data_ptr(), numbers.nbytes) if batch.num_rows else b"",
            amaxes=amaxes,
            scales=scales,
        )

    def _write_measured(self, batch: Batch, measured: Measured) -> None:
        if batch.expected or self._held or not self._kept.is_proven(batch.iteration):
            self._append(self._compared(batch, measured.lines(self._templates)), batch.iteration)
        elif self._process is not None:
            for appended in self._process.write(measured, self._templates):
                self._note(appended)
        else:
            self._note(append_lines(self._manifest, measured.lines(self._templates)))

    def _compared(self, batch: Batch, lines: list[str]) -> list[str]:
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
                self._kept.compare_statistics(key, ManifestRecord.from_dict(json.loads(line)))
        return new

    def _append(self, lines: list[str], iteration: int) -> None:
        self._held += lines
        if not self._held or not self._kept.is_proven(iteration):  # nothing of two different trainings
            return
        held, self._held = self._held, []
        self._note(append_lines(self._manifest, held))

    def _note(self, appended: Appended) -> None:
        counts = self._counts
        counts.num_written += appended.num_written
        counts.num_bytes += appended.num_bytes
        counts.num_bytes_taken = counts.num_bytes
        if appended.reason is None:
            return
        if not self._goes_on:
            raise CaptureError(appended.reason)
        counts.num_missing += appended.num_missing
        counts.first_missing = counts.first_missing or appended.reason


def head_of(batch: Batch) -> torch.Tensor:
    """Where the abs maxima of a micro-batch come to on the host."""
    return batch.table.host_amaxes[: len(batch.amaxes)]


def _scales(batch: Batch) -> tuple[list[float], list[float]]:
    """The abs max of each use that has one, and the scale that follows from it."""
    if not batch.amaxes:
        return [], []
    amaxes = head_of(batch)
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
