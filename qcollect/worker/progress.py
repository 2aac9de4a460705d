"""What a rank tells the outside while it works: progress, metrics, errors. Small files, replaced whole."""

import math
import os
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import psutil

from qcollect.paths import RunPaths
from qcollect.store.capture import plain
from qcollect.store.files import append_line, write_json_atomic
from qcollect.vocab import RankInfo

MIN_INTERVAL_S = 0.5


@dataclass(slots=True, kw_only=True)
class ProgressReporter:
    """Writes ``progress/rankN.json``, if ``enabled``; at most twice a second unless the state changes."""

    paths: RunPaths
    rank: RankInfo
    share: int
    device: str
    enabled: bool = True
    state: str = "loading"
    iteration: int = 0
    captured: int = 0
    num_bytes: int = 0
    loss: float | None = None
    _written_at: float = 0.0
    _create_time: float = field(default_factory=lambda: psutil.Process().create_time())

    def update(self, *, force: bool = False, **fields: Any) -> None:
        """Take new values of the fields above and write them when it is time (or ``force``)."""
        force = force or fields.get("state", self.state) != self.state
        for name, value in fields.items():
            setattr(self, name, value)
        now = time.time()
        if not self.enabled or (not force and now - self._written_at < MIN_INTERVAL_S):
            return
        self._written_at = now
        self.paths.progress_dir.mkdir(parents=True, exist_ok=True)
        write_json_atomic(
            self.paths.progress_path(self.rank.rank),
            {
                "rank": self.rank.rank,
                "local_rank": self.rank.local_rank,
                "pid": os.getpid(),
                "create_time": self._create_time,
                "state": self.state,
                "iteration": self.iteration,
                "captured": self.captured,
                "share": self.share,
                "bytes": self.num_bytes,
                "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
                "device": self.device,
                "updated_at": now,
            },
        )


def append_metrics(paths: RunPaths, metrics: dict[str, Any]) -> None:
    """One line of ``metrics.jsonl``; a number that is not finite is written as a string."""
    append_line(paths.metrics_path, plain(metrics))


def write_error(paths: RunPaths, rank: int, local_rank: int, error: BaseException) -> None:
    """``errors/rankN.json``: what the launcher shows first when this rank is the one that failed."""
    paths.errors_dir.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        paths.error_path(rank),
        {
            "rank": rank,
            "local_rank": local_rank,
            "type": type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
            "time": time.time(),
        },
    )
