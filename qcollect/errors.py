"""Everything that can go wrong for a user, and the exit code each kind ends with.

    QcollectError                      1   a fault of ours
    ├── UsageError                     2   the request is wrong
    │   ├── RecipeError                    a recipe, or an override of one
    │   ├── FormatError (ValueError)       a quant type, rule, rounding, axis or dtype
    │   └── SelectionError                 a selector that matches nothing
    ├── PreflightError                 3   the request is right, this machine or folder cannot serve it
    │   ├── CheckpointError                model files
    │   ├── DatasetError                   data files, tokenizers
    │   ├── OutputError                    output folders
    │   ├── DeviceError                    accelerators
    │   ├── ScheduleError                  a target the run cannot produce
    │   └── MissingExtraError              an optional dependency that is not installed
    ├── WorkerError                    4   a worker process failed
    └── CaptureError                   4   a capture could not be taken, written or read

A message says what happened, where (path, key, rank, value) and what to do.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the commands; ``run.json`` holds the code beside the reason."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    PREFLIGHT = 3
    WORKER = 4
    STALLED = 5
    SWEEP_PARTLY_FAILED = 6
    STOPPED = 7
    INTERRUPTED = 130
    TERMINATED = 143


class QcollectError(Exception):
    """Root of the tree; commands turn it into its message on stderr and ``exit_code``."""

    exit_code = ExitCode.INTERNAL


class UsageError(QcollectError):
    exit_code = ExitCode.USAGE


class RecipeError(UsageError):
    pass


class FormatError(UsageError, ValueError):
    pass


class SelectionError(UsageError):
    pass


class PreflightError(QcollectError):
    exit_code = ExitCode.PREFLIGHT


class CheckpointError(PreflightError):
    pass


class DatasetError(PreflightError):
    pass


class OutputError(PreflightError):
    pass


class DeviceError(PreflightError):
    pass


class ScheduleError(PreflightError):
    pass


class MissingExtraError(PreflightError):
    """An optional dependency is missing; the message is the one-line way to get it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install 'qcollect[{extra}]'")


class WorkerError(QcollectError):
    exit_code = ExitCode.WORKER


class CaptureError(QcollectError):
    exit_code = ExitCode.WORKER
