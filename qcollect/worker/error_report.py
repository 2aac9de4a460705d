"""What a failing rank leaves for the launcher, on a full disk too. Imports no torch: it may be what failed."""

import time
import traceback
from contextlib import suppress

from qcollect.paths import RunPaths
from qcollect.store.files import write_json_atomic, write_json_in_place

# of a rank's error, kept free from the start
_RESERVED_BYTES = 16 * 1024


def reserve_error(paths: RunPaths, rank: int) -> None:
    """Keep room for ``write_error``: a full disk may be what the error is about."""
    with suppress(OSError):
        paths.errors_dir.mkdir(parents=True, exist_ok=True)
        paths.reserved_error_path(rank).write_bytes(b" " * _RESERVED_BYTES)


def release_error(paths: RunPaths, rank: int) -> None:
    """Give the room back: no error will come."""
    with suppress(OSError):
        paths.reserved_error_path(rank).unlink()


def write_error(paths: RunPaths, rank: int, local_rank: int, error: BaseException) -> None:
    """``errors/rankN.json``: what the launcher shows first when this rank is the one that failed.

    Raises:
        OSError: there is no room, not even what was reserved.
    """
    message, trace = str(error), "".join(traceback.format_exception(error))
    fields = {"rank": rank, "local_rank": local_rank, "type": type(error).__name__, "time": time.time()}
    try:
        paths.errors_dir.mkdir(parents=True, exist_ok=True)
        write_json_atomic(paths.error_path(rank), {**fields, "message": message, "traceback": trace})
    except OSError:
        # over the bytes that are there; JSON may take six for a character
        short = {"message": message[: _RESERVED_BYTES // 16], "traceback": trace[-_RESERVED_BYTES // 16 :]}
        write_json_in_place(paths.reserved_error_path(rank), {**fields, **short})
        paths.reserved_error_path(rank).rename(paths.error_path(rank))
    else:
        release_error(paths, rank)
