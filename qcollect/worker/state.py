"""Who this process is and where training stands: rank, iteration, sample.

Each value is taken from the first of: set by hand, tracked by the collector, the environment, a default.
"""

import os
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from qcollect.vocab import RankInfo


@dataclass
class TensorCollectionState:
    """Process-wide collection state. Fields set by hand win over what the collector tracks."""

    current_rank: int | None = None
    current_sample_idx: int | None = None
    current_iteration: int | None = None
    batch_idx: int | None = None
    sequence_idx: int | None = None
    tracked: dict[str, int] = field(default_factory=dict)

    def track(self, **values: int) -> None:
        """What the collector knows; loses against a value set by hand."""
        self.tracked.update(values)

    def clear(self) -> None:
        self.current_rank = self.current_sample_idx = self.current_iteration = None
        self.batch_idx = self.sequence_idx = None
        self.tracked.clear()

    def rank(self, tensor: torch.Tensor | None = None) -> int:
        if self.current_rank is not None:
            return self.current_rank
        return detect_rank(tensor).rank

    def sample_idx(self) -> int:
        return self._first(self.current_sample_idx, "sample_idx", "CURRENT_SAMPLE_IDX")

    def iteration(self) -> int:
        return self._first(self.current_iteration, "iteration", "TENSOR_SAVER_ITERATION")

    def batch(self) -> int:
        return self._first(self.batch_idx, "batch_idx", None)

    def sequence(self) -> int:
        return self._first(self.sequence_idx, "sequence_idx", None)

    def micro_batch(self) -> int:
        return self.tracked.get("micro_batch", 0)

    def num_samples(self) -> int:
        return self.tracked.get("num_samples", 1)

    def _first(self, by_hand: int | None, tracked: str, variable: str | None) -> int:
        if by_hand is not None:
            return by_hand
        if tracked in self.tracked:
            return self.tracked[tracked]
        return _env_int(variable) or 0 if variable else 0


STATE = TensorCollectionState()
_warned_default_rank = False


def detect_rank(tensor: torch.Tensor | None = None) -> RankInfo:
    """This process's ranks: torch.distributed, ``RANK``, ``LOCAL_RANK``, the tensor's device index, else 0.

    The last resort warns once a process: files of several processes would share rank 0.
    """
    global _warned_default_rank
    found = find_rank(tensor)
    if found is not None:
        return found
    if not _warned_default_rank:
        _warned_default_rank = True
        warnings.warn(
            "qcollect: no rank found (not set by hand, no torch.distributed, RANK or LOCAL_RANK); using rank 0",
            stacklevel=3,
        )
    return RankInfo(rank=0, local_rank=0, world_size=_env_int("WORLD_SIZE") or 1)


def find_rank(tensor: torch.Tensor | None = None) -> RankInfo | None:
    """As ``detect_rank``, but None where nothing says which rank this is."""
    local_rank = _env_int("LOCAL_RANK")
    world_size = _env_int("WORLD_SIZE") or 1
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        local = rank if local_rank is None else local_rank
        return RankInfo(rank=rank, local_rank=local, world_size=dist.get_world_size(), source="torch.distributed")
    rank_variable = _env_int("RANK")
    if rank_variable is not None:
        return RankInfo(rank=rank_variable, local_rank=local_rank or 0, world_size=world_size, source="RANK")
    if local_rank is not None:
        return RankInfo(rank=local_rank, local_rank=local_rank, world_size=world_size, source="LOCAL_RANK")
    if tensor is not None and tensor.device.index is not None and tensor.device.type != "cpu":
        index = tensor.device.index
        return RankInfo(rank=index, local_rank=index, world_size=world_size, source="device")
    return None


def _env_int(name: str | None) -> int | None:
    text = os.environ.get(name, "") if name else ""
    try:
        return int(text)
    except ValueError:
        return None
