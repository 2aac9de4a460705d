"""Every file name inside an output directory.

OUT/
  mxfp8/                          run_dir
    2024..._query.pt              captures (by_iteration layout: iter00000/2024..._query.pt)
    .qcollect/                    state_dir: published once; whoever publishes it owns the run
      plan.json  run.json  metrics.jsonl  inspect.json
      manifest/rank00000.jsonl  progress/rank00000.json  errors/rank00000.json
      logs/rank00000.log  logs/agent.log  logs/launcher.log  logs/torchrun/  control/stop  control/signal
      trigger.json                  what began the captures of a run that waited
      logs/rank00000.stacks         of a run that stalled
      index.sqlite                  made from the manifests, by whoever lists them; may be removed
      torn/                         what 'qcollect verify --repair' has set aside
"""

import os
from dataclasses import dataclass
from pathlib import Path

STATE_DIR_NAME = ".qcollect"
DISPLACED_PREFIX = ".qcollect.displaced-"
TEMPORARY_SUFFIX = ".tmp"

CACHE_VARIABLE = "QCOLLECT_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The names of one run's files; pure, nothing is created or read."""

    run_dir: Path

    @property
    def state_dir(self) -> Path:
        return self.run_dir / STATE_DIR_NAME

    @property
    def plan_path(self) -> Path:
        return self.state_dir / "plan.json"

    @property
    def run_path(self) -> Path:
        return self.state_dir / "run.json"

    @property
    def metrics_path(self) -> Path:
        return self.state_dir / "metrics.jsonl"

    @property
    def manifest_dir(self) -> Path:
        return self.state_dir / "manifest"

    @property
    def index_path(self) -> Path:
        """An index over the manifests; what it holds follows from them."""
        return self.state_dir / "index.sqlite"

    @property
    def torn_dir(self) -> Path:
        """Where a repair puts files and manifests it takes out of the run."""
        return self.state_dir / "torn"

    @property
    def progress_dir(self) -> Path:
        return self.state_dir / "progress"

    @property
    def errors_dir(self) -> Path:
        return self.state_dir / "errors"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def agent_log_path(self) -> Path:
        return self.logs_dir / "agent.log"

    @property
    def launcher_log_path(self) -> Path:
        """What a detached launcher would have shown."""
        return self.logs_dir / "launcher.log"

    @property
    def torchrun_dir(self) -> Path:
        """Where torchrun keeps what it writes itself."""
        return self.logs_dir / "torchrun"

    @property
    def agent_error_path(self) -> Path:
        return self.errors_dir / "agent.json"

    @property
    def control_dir(self) -> Path:
        return self.state_dir / "control"

    @property
    def stop_path(self) -> Path:
        return self.control_dir / "stop"

    @property
    def signal_path(self) -> Path:
        """There once a signal asked for captures to begin."""
        return self.control_dir / "signal"

    @property
    def trigger_path(self) -> Path:
        return self.state_dir / "trigger.json"

    def manifest_path(self, rank: int) -> Path:
        return self.manifest_dir / f"rank{rank:05d}.jsonl"

    def progress_path(self, rank: int) -> Path:
        return self.progress_dir / f"rank{rank:05d}.json"

    def error_path(self, rank: int) -> Path:
        return self.errors_dir / f"rank{rank:05d}.json"

    def reserved_error_path(self, rank: int) -> Path:
        """Room kept on the disk for a rank's error; renamed to it when there is no other."""
        return self.errors_dir / f"rank{rank:05d}.reserved"

    def log_path(self, rank: int) -> Path:
        return self.logs_dir / f"rank{rank:05d}.log"

    def stacks_path(self, rank: int) -> Path:
        """Where a rank's threads are, written when it is asked for them."""
        return self.logs_dir / f"rank{rank:05d}.stacks"

    def leave_path(self, rank: int) -> Path:
        """When a rank left with 0."""
        return self.progress_dir / f"rank{rank:05d}.leave.json"

    def state_dirs(self) -> tuple[Path, ...]:
        """The directories inside ``state_dir`` a run needs, to be made once it is owned."""
        return (self.manifest_dir, self.progress_dir, self.errors_dir, self.logs_dir, self.control_dir)

    def capture_folder(self, iteration: int, *, by_iteration: bool) -> Path:
        return self.run_dir / f"iter{iteration:05d}" if by_iteration else self.run_dir

    def displaced_dir(self, token: str) -> Path:
        """Where a run's state goes, by one atomic rename, before its files are removed."""
        return self.run_dir / f"{DISPLACED_PREFIX}{token}"


def temporary_path(path: Path, token: str) -> Path:
    """A name beside ``path`` that ``*.pt`` does not match and no other writer uses."""
    return path.with_name(f".{path.name}.{token}{TEMPORARY_SUFFIX}")


def find_runs(directory: Path) -> list[RunPaths]:
    """The runs in ``directory``: itself, or its direct children, by name."""
    candidates = [directory, *sorted(p for p in directory.iterdir() if p.is_dir())] if directory.is_dir() else []
    return [RunPaths(p) for p in candidates if (p / STATE_DIR_NAME).is_dir()]


def cache_dir(name: str) -> Path:
    """The user's folder for what is kept from run to run and can be made again, by what it is."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qcollect" / name
