"""A folder for one run of ``collect``: taken by one, for all its ranks. The launcher has a claim of its own."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qcollect.errors import OutputError
from qcollect.paths import RunPaths


def claim_directory(run_dir: Path, group: Any) -> None:
    """Take ``run_dir`` for one run of ``collect``, exclusively, once for all ranks of ``group``.

    Raises:
        OutputError: it holds a run, or cannot be written. On every rank alike.
    """
    is_first = group is None or dist.get_rank() == 0
    problem = _claim(run_dir) if is_first else None
    failed = torch.tensor([int(problem is not None)], dtype=torch.int32)
    if group is not None:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        raise OutputError(problem or f"{run_dir} could not be taken; rank 0 says why")


def _claim(run_dir: Path) -> str | None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        RunPaths(run_dir).state_dir.mkdir()
    except FileExistsError:
        return f"{run_dir} holds a run already; give another out_dir, or remove that run"
    except OSError as error:
        return f"{run_dir} cannot be written: {os.strerror(error.errno or 0)}"
    return None
