"""Megatron's indexed dataset as a sequence of documents.

``len`` counts sequences. ``qcollect data prepare`` and Megatron's own preprocessing write one sequence a
document; a dataset split into sentences is read sentence by sentence.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from qcollect.data.pairs import bin_path, check_pair, check_size, idx_path, read_header, resolve_prefix
from qcollect.data.writer import IndexedDatasetWriter
from qcollect.errors import DatasetError

__all__ = ["IndexedDataset", "IndexedDatasetWriter", "check_pair", "resolve_prefix"]


class IndexedDataset:
    """Reads ``{prefix}.bin`` and ``{prefix}.idx``; the tokens stay on disk (memory-mapped) until asked for.

    Args:
        prefix: a prefix, or any path ``resolve_prefix`` takes.

    Attributes:
        prefix: the resolved prefix.
        dtype: how the ids are stored ("uint16", "int32", ...).
        lengths: (sequences,) int64, tokens in each.

    Raises:
        DatasetError: no such pair, a bad index, or one that points outside the .bin.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = resolve_prefix(prefix)
        header = read_header(self.prefix)
        self.dtype = header.dtype.name
        self._storage_dtype: torch.dtype = getattr(torch, header.dtype.name)
        self._itemsize = header.dtype.itemsize
        count = header.num_sequences
        self.lengths = _read_table(idx_path(self.prefix), header.lengths_offset, count, torch.int32).long()
        self._pointers = _read_table(idx_path(self.prefix), header.pointers_offset, count, torch.int64)
        self._check_bounds()
        self._tokens = _map(bin_path(self.prefix))

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> torch.Tensor:
        """The ids of one document: (tokens,) int64, memory of its own."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.prefix}: document {index} of {len(self)}")
        start, length = int(self._pointers[index]), int(self.lengths[index])
        if length == 0:
            return torch.empty(0, dtype=torch.int64)
        raw = bytearray(memoryview(self._tokens)[start : start + length * self._itemsize])
        return torch.frombuffer(raw, dtype=self._storage_dtype).to(torch.int64)

    def _check_bounds(self) -> None:
        if len(self) == 0:
            check_size(self.prefix, needed=0, shortest=0)
            return
        ends = self._pointers + self.lengths * self._itemsize
        check_size(self.prefix, needed=int(ends.max()), shortest=int(self.lengths.min()))
        if int(self._pointers.min()) < 0:
            raise DatasetError(f"{idx_path(self.prefix)}: holds a negative offset; prepare the dataset again")


def _read_table(path: Path, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    with path.open("rb") as stream:
        stream.seek(offset)
        raw = bytearray(stream.read(count * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype)


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as stream:
        if path.stat().st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
