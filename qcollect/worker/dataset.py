"""The recipe's data, ready to train on: indexed pairs or small text files -> this rank's batches."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from qcollect.data.batches import Batches, Documents, Layout, check_vocabulary, load_documents
from qcollect.data.indexed import IndexedDataset
from qcollect.data.pairs import resolve_prefix
from qcollect.data.tokenizer import Tokenizer, load_tokenizer
from qcollect.recipe.records import BYTES_TOKENIZER, Recipe

PAIR_SUFFIXES = (".bin", ".idx")
TEXT_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".xml", ".bz2", ".gz")


class JoinedDocuments:
    """Several datasets, one after the other."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts = parts
        self.lengths = torch.cat([part.lengths for part in parts])
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> torch.Tensor:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]


def is_text(path: str) -> bool:
    """Whether a data path names text, not (half of) an indexed pair or its prefix; it need not exist."""
    suffix = Path(path).suffix
    if suffix in TEXT_SUFFIXES:
        return not Path(f"{path}.idx").exists()
    return suffix not in PAIR_SUFFIXES and Path(path).is_file()


def tokenizer_spec(recipe: Recipe) -> str:
    """What text files are tokenized with: ``data.tokenizer``, ``model.tokenizer``, the checkpoint's, bytes."""
    return recipe.data.tokenizer or recipe.model.tokenizer or recipe.model.checkpoint or BYTES_TOKENIZER


def load_recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    return load_tokenizer(tokenizer_spec(recipe))


def load_recipe_documents(recipe: Recipe) -> Documents:
    """All documents ``data.path`` names.

    Raises:
        DatasetError: a file is missing or damaged.
    """
    parts: list[Documents] = []
    for path in recipe.data.path:
        if is_text(path):
            tokenizer = load_recipe_tokenizer(recipe)
            parts.append(load_documents([path], tokenizer, append_eos=recipe.data.append_eos))
        else:
            parts.append(IndexedDataset(resolve_prefix(path)))
    return parts[0] if len(parts) == 1 else JoinedDocuments(parts)


def make_batches(recipe: Recipe, *, rank: int, world_size: int, vocab_size: int | None) -> Batches:
    """This rank's batches of the recipe.

    Raises:
        DatasetError: missing, damaged, too little, or ids beyond ``vocab_size``.
    """
    documents = load_recipe_documents(recipe)
    if vocab_size is not None:
        check_vocabulary(documents, vocab_size, max_tokens=1 << 22)
    return Batches(
        documents,
        sequence_length=recipe.data.sequence_length,
        layout=cast(Layout, recipe.data.layout),
        micro_batch_size=recipe.train.micro_batch_size,
        micro_batches=recipe.train.micro_batches,
        rank=rank,
        world_size=world_size,
        seed=recipe.data.seed,
        vocab_size=vocab_size,
    )
