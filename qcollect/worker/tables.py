"""Tables that numbers are measured into, one for each micro-batch under way."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from qcollect.formats.error_stats import NUM_TOTALS, Totals
from qcollect.formats.pending import PendingShares
from qcollect.store.summary import FIELDS
from qcollect.vocab import CaptureKey
from qcollect.worker.content import Findings
from qcollect.worker.frame import WantKey
from qcollect.worker.lines import ROW_SIZE, LineTemplate

KnownRows = dict[Hashable, int]  # by what was measured: the summary, or the errors under a quantizer, by its id
SUMMARY = "summary"


class Table:
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


class Pending(NamedTuple):
    """Of one stream: what is measured there, and put into its rows a hundred at a time."""

    summaries: PendingShares | None
    totals: PendingShares | None

    def finish(self) -> None:
        for shares in self:
            if shares is not None:
                shares.finish()


AT_ONCE = Pending(None, None)


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """What was measured in one micro-batch.

    Args:
        moment: the metadata its records share.
        tokens: its first input, in host memory when ``arrived`` has come.
        expected: of a resumed run, what is listed already and must come out the same.
        records: template, rows, place in ``amaxes``, seed.
        known: rows by the memory and by what was measured in it.
        streams: on which something was measured, and what waits there.
    """

    iteration: int
    table: Table
    moment: dict[str, Any]
    tokens: torch.Tensor | None
    expected: dict[WantKey, CaptureKey]
    num_rows: int = 0
    records: list[tuple[LineTemplate, tuple[int, ...], int | None, int | None]] = field(default_factory=list)
    amaxes: list[torch.Tensor] = field(default_factory=list)
    known: Findings[int] = field(default_factory=Findings)
    streams: dict[int, Pending] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None

    def row(self) -> int:
        self.num_rows += 1
        return self.num_rows - 1

    def find(self, rows: KnownRows, what: Hashable) -> tuple[int, bool]:
        """The row of a measurement among those ``known`` of a tensor, and whether it is still to be made."""
        row = rows.get(what)
        if row is not None:
            return row, False
        row = rows[what] = self.row()
        return row, True
