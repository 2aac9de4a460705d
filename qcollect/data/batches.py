"""Documents -> the batch a rank trains on at (iteration, micro-batch): random access, a pure function of the seed.

Samples are numbered over the whole run. The one at place b of a micro-batch is

    g = ((iteration * micro_batches + micro_batch) * world_size + rank) * micro_batch_size + b

and is item ``order(seed, epoch)[g % n]`` of the n items, ``epoch = g // n``: each epoch sees every item once, in
an order of its own.

    packed  an item is a window of ``sequence_length`` tokens over all documents, one after the other.
            (batch, sequence_length), no padding, no mask. What is left behind the last window is not seen.
    padded  an item is a document, cut to ``sequence_length``. (batch, longest in the micro-batch), padded at the
            right, mask 0/1. Documents of less than two tokens hold nothing to predict and are no items.

Labels are the input ids (a model shifts them itself), -100 on padding. Padding is known by length, never by id: a
tokenizer without a pad token may pad with its end token, and the end that closes a document keeps its label.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import torch

from qcollect.data.sources import find_sources, read_documents
from qcollect.data.tokenizer import Tokenizer, encode_document, require_eos
from qcollect.errors import DatasetError, UsageError

IGNORED_LABEL = -100
Layout = Literal["packed", "padded"]


class Documents(Protocol):
    """What batches are made from; ``IndexedDataset`` and ``TokenDocuments`` are."""

    @property
    def lengths(self) -> torch.Tensor: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> torch.Tensor: ...


class TokenDocuments:
    """Documents in memory: each (tokens,) int64.

    Attributes:
        lengths: (documents,) int64.
    """

    def __init__(self, documents: Iterable[Sequence[int] | torch.Tensor]) -> None:
        self._documents = [torch.as_tensor(d, dtype=torch.int64) for d in documents]
        self.lengths = torch.tensor([len(d) for d in self._documents], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._documents)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._documents[index]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch of one rank, on CPU.

    Attributes:
        input_ids: (micro_batch_size, tokens) int64.
        attention_mask: the same shape, int64, 1 on tokens and 0 on padding; None when nothing is padded (packed).
        labels: the same shape, int64, -100 on padding.
        first_sample_idx: global index of the first sample.
        num_samples: samples in it, numbered on from the first.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    labels: torch.Tensor
    first_sample_idx: int
    num_samples: int


class Batches:
    """The batches of one rank.

    Args:
        documents: an ``IndexedDataset`` or ``TokenDocuments``.
        sequence_length: tokens of a sample (packed) or its upper bound (padded); 2 or more.
        layout: "packed" or "padded".
        micro_batch_size: samples in a micro-batch.
        micro_batches: micro-batches of a rank in an iteration.
        rank: global rank.
        world_size: ranks that share the data.
        seed: of the order.
        pad_id: id on padding; any id of the vocabulary will do, padding is masked by length.
        vocab_size: of the model; each batch is checked against it. None: not checked.

    Raises:
        DatasetError: not enough data for one sample.
        UsageError: a number or layout out of range.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        sequence_length: int,
        layout: Layout,
        micro_batch_size: int = 1,
        micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        pad_id: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        _check_at_least(2, sequence_length=sequence_length)
        _check_at_least(1, micro_batch_size=micro_batch_size, micro_batches=micro_batches, world_size=world_size)
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank}; ranks are 0 to {world_size - 1}")
        self._items = _make_items(documents, layout, sequence_length)
        self._micro_batch_size, self._micro_batches = micro_batch_size, micro_batches
        self._rank, self._world_size = rank, world_size
        self._seed, self._pad_id, self._vocab_size = seed, pad_id, vocab_size

    @property
    def num_items(self) -> int:
        """Items of an epoch."""
        return len(self._items)

    def first_sample_idx(self, iteration: int, micro_batch: int = 0) -> int:
        """Global index of the first sample of a micro-batch."""
        if iteration < 0 or not 0 <= micro_batch < self._micro_batches:
            raise IndexError(f"iteration {iteration}, micro-batch {micro_batch} of {self._micro_batches}")
        step = iteration * self._micro_batches + micro_batch
        return (step * self._world_size + self._rank) * self._micro_batch_size

    def batch(self, iteration: int, micro_batch: int = 0) -> Batch:
        """The micro-batch of this rank; the same for the same arguments, in whatever order it is asked for.

        Raises:
            DatasetError: holds a token id outside ``vocab_size``.
        """
        first = self.first_sample_idx(iteration, micro_batch)
        samples = [self._sample(g) for g in range(first, first + self._micro_batch_size)]
        if self._vocab_size is not None:
            for g, sample in enumerate(samples, start=first):
                _check_ids(sample, self._vocab_size, f"sample {g}")
        if self._items.is_packed:
            ids = torch.stack(samples)
            return _batch(first, ids, attention_mask=None, labels=ids.clone())
        return _padded_batch(first, samples, self._pad_id)

    def _sample(self, global_idx: int) -> torch.Tensor:
        epoch, position = divmod(global_idx, self.num_items)
        return self._items[int(sample_order(self._seed, epoch, self.num_items)[position])]


@lru_cache(maxsize=2)  # a micro-batch touches two epochs at most, unless an epoch is smaller than it
def sample_order(seed: int, epoch: int, num_items: int) -> torch.Tensor:
    """(num_items,) int64: the order of the items in an epoch, a permutation given by the arguments alone."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randperm(num_items, generator=generator)


def load_documents(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, append_eos: bool = True, text_field: str = "text"
) -> TokenDocuments:
    """The documents of small text files, tokenized into memory. Documents without text are left out.

    Raises:
        DatasetError: a file cannot be read, or none holds text.
        MissingExtraError: a dump, and its parser is not installed.
    """
    if append_eos:
        require_eos(tokenizer)
    documents = [
        torch.tensor(encode_document(tokenizer, text, append_eos=append_eos), dtype=torch.int64)
        for source in find_sources(paths)
        for text in read_documents(source, text_field=text_field)
        if text
    ]
    if not documents:
        raise DatasetError(f"{', '.join(map(str, paths))}: no document holds text")
    return TokenDocuments(documents)


def check_vocabulary(documents: Documents, vocab_size: int, *, max_tokens: int = 1 << 26) -> None:
    """Nothing, if the documents' token ids lie in a model's vocabulary.

    Looks at documents from the front until ``max_tokens`` are seen; ``Batches(vocab_size=...)`` checks what is
    trained on besides.

    Raises:
        DatasetError: an id outside; names the document and the id.
    """
    num_seen = 0
    for index in range(len(documents)):
        ids = documents[index]
        _check_ids(ids, vocab_size, f"document {index}")
        num_seen += len(ids)
        if num_seen >= max_tokens:
            return


# ---------------------------------------------------------------------------------------------
# Items
# ---------------------------------------------------------------------------------------------


class _PackedItems:
    """Windows of ``sequence_length`` tokens over the documents in their order."""

    is_packed = True

    def __init__(self, documents: Documents, sequence_length: int) -> None:
        self._documents = documents
        self._sequence_length = sequence_length
        self._ends = documents.lengths.cumsum(0)
        self.num_tokens = int(self._ends[-1]) if len(documents) else 0

    def __len__(self) -> int:
        return self.num_tokens // self._sequence_length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._sequence_length
        stop = start + self._sequence_length
        document = int(torch.searchsorted(self._ends, start, right=True))
        parts: list[torch.Tensor] = []
        while start < stop:
            ids = self._documents[document]
            offset = start - (int(self._ends[document]) - len(ids))
            parts.append(ids[offset : offset + stop - start])
            start += len(parts[-1])
            document += 1
        return torch.cat(parts)


class _PaddedItems:
    """Documents of two tokens or more, cut to ``sequence_length``."""

    is_packed = False

    def __init__(self, documents: Documents, sequence_length: int) -> None:
        self._documents = documents
        self._sequence_length = sequence_length
        self._indices = (documents.lengths >= 2).nonzero().flatten()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._documents[int(self._indices[index])][: self._sequence_length]


def _make_items(documents: Documents, layout: str, sequence_length: int) -> _PackedItems | _PaddedItems:
    if layout == "packed":
        packed = _PackedItems(documents, sequence_length)
        if len(packed) == 0:
            raise DatasetError(
                f"{len(documents)} documents hold {packed.num_tokens} tokens, less than one sample of "
                f"{sequence_length} (data.sequence_length); take more data or a shorter sequence"
            )
        return packed
    if layout == "padded":
        padded = _PaddedItems(documents, sequence_length)
        if len(padded) == 0:
            raise DatasetError(f"of {len(documents)} documents none has the 2 tokens a sample needs; take more data")
        return padded
    raise UsageError(f"data.layout is {layout!r}; known: packed, padded")


def _padded_batch(first_sample_idx: int, samples: list[torch.Tensor], pad_id: int) -> Batch:
    shape = (len(samples), max(len(ids) for ids in samples))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
    for row, ids in enumerate(samples):
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = ids
    return _batch(first_sample_idx, input_ids, attention_mask=attention_mask, labels=labels)


def _batch(
    first_sample_idx: int, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> Batch:
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=labels,
        first_sample_idx=first_sample_idx,
        num_samples=len(input_ids),
    )


def _check_ids(ids: torch.Tensor, vocab_size: int, where: str) -> None:
    if len(ids) == 0:
        return
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise DatasetError(
            f"{where} holds token id {low if low < 0 else high}, outside the model's vocabulary of {vocab_size}; "
            "the data was made with another tokenizer: prepare it with the model's own"
        )


def _check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UsageError(f"{name} is {number}; it must be {least} or more")
