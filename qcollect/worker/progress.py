"""What a rank tells the outside while it works: progress and metrics. Small files, replaced whole."""

import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from qcollect.host.processes import ProcessId, identify
from qcollect.paths import RunPaths
from qcollect.store.capture import plain
from qcollect.store.files import append_line, write_json_atomic
from qcollect.vocab import RankInfo

MIN_INTERVAL_S = 0.5


@dataclass(slots=True, kw_only=True)
class ProgressReporter:
    """Writes ``progress/rankN.json``, if ``enabled``; about twice a second unless the state changes."""

    paths: RunPaths
    rank: RankInfo
    share: int
    device: str
    enabled: bool = True
    state: str = "loading"
    iteration: int = 0
    num_micro_batches: int = 0
    captured: int = 0
    num_bytes: int = 0
    loss: float | None = None
    waited_s: float = 0.0
    trigger: dict[str, Any] | None = None  # what is waited for
    num_deduped: int = 0
    deduped_bytes: int = 0
    _written_at: float = 0.0
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: ProcessId | None = field(default_factory=lambda: identify(os.getpid()))

    def update(self, *, force: bool = False, **fields: Any) -> None:
        """Take new values of the fields above and write them when it is time, at the latest half a second later."""
        force = force or fields.get("state", self.state) != self.state
        for name, value in fields.items():
            setattr(self, name, value)
        if not self.enabled:
            return
        wait_s = MIN_INTERVAL_S - (time.time() - self._written_at)
        if force or wait_s <= 0:
            if self._timer is not None:
                self._timer.cancel()
            self._write()
        elif self._timer is None or not self._timer.is_alive():
            # this rank may hang in what comes next, and what it did before must be known
            self._timer = threading.Timer(wait_s, self._write_late)
            self._timer.daemon = True
            self._timer.start()

    def _write_late(self) -> None:
        with suppress(OSError):  # the next update will say so on the training thread
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._written_at = time.time()
            self.paths.progress_dir.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.paths.progress_path(self.rank.rank), self._report(self._written_at))

    def _report(self, now: float) -> dict[str, Any]:
        return {
            "rank": self.rank.rank,
            "local_rank": self.rank.local_rank,
            **(self._process.to_dict() if self._process else {}),
            "state": self.state,
            "iteration": self.iteration,
            "num_micro_batches": self.num_micro_batches,
            "captured": self.captured,
            "share": self.share,
            "bytes": self.num_bytes,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "waited_s": self.waited_s,
            "trigger": self.trigger,
            "num_deduped": self.num_deduped,
            "deduped_bytes": self.deduped_bytes,
            "device": self.device,
            "updated_at": now,
        }


def append_metrics(paths: RunPaths, metrics: dict[str, Any]) -> None:
    """One line of ``metrics.jsonl``; a number that is not finite is written as a string."""
    append_line(paths.metrics_path, plain(metrics))
