"""The stop file: that a run is to end before its target, and why. Workers and launcher write and read it.

Whoever writes first gives the reason. An empty file, as ``touch`` makes one, is a request.
"""

import json
import uuid
from contextlib import suppress
from enum import StrEnum

from qcollect.paths import RunPaths, temporary_path
from qcollect.store.files import read_json, rename_new


class StopCause(StrEnum):
    """Who asked a run to end before its target."""

    REQUEST = "request"
    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    SIGHUP = "SIGHUP"
    MAX_TIME = "max_time"
    MAX_BYTES = "max_bytes"
    DATA_END = "data_end"
    STALL = "stall"


def request_stop(paths: RunPaths, cause: StopCause = StopCause.REQUEST) -> None:
    """Ask the run to end after the iteration it is in; a stop that was asked for before keeps its cause.

    Raises:
        OSError: there is no run, or its folder cannot be written.
    """
    prepared = temporary_path(paths.stop_path, uuid.uuid4().hex[:12])
    with suppress(FileExistsError):
        try:
            prepared.write_bytes(json.dumps({"cause": cause}).encode() + b"\n")
            rename_new(prepared, paths.stop_path)
        except FileExistsError:
            raise
        except OSError:  # a full disk may still have room for an empty file
            paths.stop_path.touch()
        finally:
            prepared.unlink(missing_ok=True)


def read_stop(paths: RunPaths) -> StopCause | None:
    """Why the run was asked to end; None if it was not."""
    if not paths.stop_path.exists():
        return None
    cause = (read_json(paths.stop_path) or {}).get("cause")
    return StopCause(cause) if cause in list(StopCause) else StopCause.REQUEST
