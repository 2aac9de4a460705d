"""The recipe's data looked at before a launch: present, whole, made for this model, and enough of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from qcollect.data.batches import Batches, Documents, Layout, check_vocabulary
from qcollect.data.pairs import bin_path, idx_path, read_header, resolve_prefix
from qcollect.data.tokenizer import BYTES, TOKENIZER_FILES, Tokenizer
from qcollect.errors import DatasetError, QcollectError
from qcollect.plan.finding import Finding, Level
from qcollect.recipe.records import Recipe
from qcollect.store.files import read_json
from qcollect.worker.dataset import (
    JoinedDocuments,
    is_text,
    load_recipe_documents,
    load_recipe_tokenizer,
    tokenizer_spec,
)
from qcollect.worker.file_checks import find_pointer

CHECK, TOKENIZER_CHECK = "data", "tokenizer"
# a model's vocabulary may be padded a little beyond its tokenizer's
SMALL_VOCABULARY_FRAC = 0.9
# of a large .bin, pieces spread over the file: 4 Mi tokens, whatever its size
NUM_PIECES = 64
PIECE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What was found; ``num_samples`` of one epoch, None if the data cannot be used."""

    findings: tuple[Finding, ...]
    num_samples: int | None = None


def check_data(recipe: Recipe, vocab_size: int | None) -> DataReport:
    """The data and, where text is to be tokenized, the tokenizer. Finds problems, raises nothing.

    Args:
        recipe: its ``data``.
        vocab_size: of the model; None: ids are not compared with it.
    """
    findings = [*_find_pointers(recipe), *check_tokenizer(recipe, vocab_size)]
    if any(finding.level == Level.PROBLEM for finding in findings):
        return DataReport(findings=tuple(findings))
    opened = [_open(recipe, path, vocab_size) for path in recipe.data.path]
    parts = [part for part in opened if isinstance(part, _Part)]
    findings += [finding for finding in opened if isinstance(finding, Finding)]
    if len(parts) < len(opened):
        return DataReport(findings=tuple(findings))
    documents = parts[0].documents if len(parts) == 1 else JoinedDocuments([part.documents for part in parts])
    try:
        num_samples = _count_samples(recipe, documents)
    except QcollectError as error:
        return DataReport(findings=(*findings, Finding.of_error(CHECK, error)))
    findings += _find_small_vocabularies(recipe, vocab_size)
    findings.append(_describe(recipe, parts, num_samples, vocab_size))
    return DataReport(findings=tuple(findings), num_samples=num_samples)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """What one path of the data names, opened; how many of its ids were compared with the vocabulary."""

    documents: Documents
    num_seen: int

    @property
    def num_tokens(self) -> int:
        return int(self.documents.lengths.sum())


def _count_samples(recipe: Recipe, documents: Documents) -> int:
    return Batches(
        documents,
        sequence_length=recipe.data.sequence_length,
        layout=cast(Layout, recipe.data.layout),
        micro_batch_size=recipe.train.micro_batch_size,
    ).num_items


def _describe(recipe: Recipe, parts: Sequence[_Part], num_samples: int, vocab_size: int | None) -> Finding:
    num_documents, num_tokens = sum(len(p.documents) for p in parts), sum(p.num_tokens for p in parts)
    at_most = "" if recipe.data.layout == "packed" else "at most "
    held = (
        f"{', '.join(recipe.data.path)}: {num_documents:,} documents, {num_tokens:,} tokens, "
        f"{num_samples:,} samples of {at_most}{recipe.data.sequence_length:,} tokens"
    )
    if vocab_size is None:
        return Finding.ok(CHECK, held)
    num_seen = sum(p.num_seen for p in parts)
    part = "all tokens" if num_seen == num_tokens else f"{num_seen:,} tokens, spread over the files,"
    return Finding.ok(CHECK, f"{held}; {part} were looked at, their ids are below {vocab_size:,}")


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------


def _find_pointers(recipe: Recipe) -> Iterator[Finding]:
    for path in (file for name in recipe.data.path for file in _files_of(name)):
        pointer = find_pointer(CHECK, path)
        if pointer is not None:
            yield pointer


def _files_of(path: str) -> tuple[Path, ...]:
    if is_text(path):
        return (Path(path),)
    try:
        prefix = resolve_prefix(path)
    except QcollectError:  # told when it is opened
        return ()
    return (idx_path(prefix), bin_path(prefix))


# ---------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------


def check_tokenizer(recipe: Recipe, vocab_size: int | None) -> list[Finding]:
    """Nothing, where all data are tokenized already; else whether the tokenizer loads and is the model's."""
    if not any(is_text(path) for path in recipe.data.path):
        return []
    spec = tokenizer_spec(recipe)
    names = () if spec == BYTES else (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json")
    pointers = [p for name in names if (p := find_pointer(TOKENIZER_CHECK, Path(spec) / name)) is not None]
    if pointers:
        return pointers
    try:
        tokenizer = load_recipe_tokenizer(recipe)
    except QcollectError as error:
        return [Finding.of_error(TOKENIZER_CHECK, error)]
    return [_compare_vocabulary(recipe, tokenizer, vocab_size)]


def _compare_vocabulary(recipe: Recipe, tokenizer: Tokenizer, vocab_size: int | None) -> Finding:
    said = f"{tokenizer.name}: {tokenizer.vocab_size:,} ids"
    if vocab_size is None:
        return Finding.ok(TOKENIZER_CHECK, said)
    if tokenizer.vocab_size > vocab_size:
        return Finding.warning(
            TOKENIZER_CHECK,
            f"{said}, and the model has {vocab_size:,}",
            "it is another model's, or has added tokens; name the model's own with --set data.tokenizer=DIR",
        )
    if recipe.model.checkpoint is not None and tokenizer.vocab_size < SMALL_VOCABULARY_FRAC * vocab_size:
        return Finding.warning(
            TOKENIZER_CHECK,
            f"{said}, and the model was trained with {vocab_size:,}",
            "leave data.tokenizer and model.tokenizer out to take the checkpoint's",
        )
    return Finding.ok(TOKENIZER_CHECK, f"{said} of the model's {vocab_size:,}")


# ---------------------------------------------------------------------------------------------
# Contents
# ---------------------------------------------------------------------------------------------


def _open(recipe: Recipe, path: str, vocab_size: int | None) -> _Part | Finding:
    try:
        documents = load_recipe_documents(replace(recipe, data=replace(recipe.data, path=(path,))))
        num_seen = 0 if vocab_size is None else _check_ids(path, documents, vocab_size)
    except QcollectError as error:
        return Finding.of_error(CHECK, error)
    return _Part(documents=documents, num_seen=num_seen)


def _check_ids(path: str, documents: Documents, vocab_size: int) -> int:
    """How many tokens were looked at: of an indexed pair a sample, of text, which is in memory, all."""
    if not is_text(path):
        return check_ids_of_pair(resolve_prefix(path), vocab_size)
    num_tokens = int(documents.lengths.sum())
    try:
        check_vocabulary(documents, vocab_size, max_tokens=num_tokens + 1)
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    return num_tokens


def check_ids_of_pair(prefix: Path, vocab_size: int) -> int:
    """How many tokens of ``{prefix}.bin`` were looked at; all ids are in the vocabulary.

    Raises:
        DatasetError: one is not; the message names file, token and id.
    """
    dtype = read_header(prefix).dtype
    path = bin_path(prefix)
    num_tokens = path.stat().st_size // dtype.itemsize
    storage: torch.dtype = getattr(torch, dtype.name)
    num_seen = 0
    with path.open("rb") as stream:
        for start in piece_starts(num_tokens):
            stream.seek(start * dtype.itemsize)
            raw = bytearray(stream.read(PIECE_TOKENS * dtype.itemsize))
            ids = torch.frombuffer(raw, dtype=storage).to(torch.int64)
            foreign = ((ids < 0) | (ids >= vocab_size)).nonzero()
            if len(foreign):
                place = int(foreign[0])
                raise DatasetError(
                    f"{path}: token {start + place:,} has id {int(ids[place])}, outside the model's vocabulary of "
                    f"{vocab_size}; the data was made with another tokenizer: prepare it with the model's own"
                )
            num_seen += len(ids)
    return num_seen


def piece_starts(num_tokens: int) -> list[int]:
    """Where the pieces begin: one after the other in a small file, spread evenly from begin to end in a large one."""
    if num_tokens <= NUM_PIECES * PIECE_TOKENS:
        return list(range(0, num_tokens, PIECE_TOKENS))
    last = num_tokens - PIECE_TOKENS
    return [last * i // (NUM_PIECES - 1) for i in range(NUM_PIECES)]


def _find_small_vocabularies(recipe: Recipe, vocab_size: int | None) -> Iterator[Finding]:
    """Pairs that, by what ``qcollect data prepare`` wrote beside them, another model's tokenizer made."""
    if recipe.model.checkpoint is None or vocab_size is None:
        return
    for path in (p for p in recipe.data.path if not is_text(p)):
        prepared = read_json(Path(f"{resolve_prefix(path)}.json")) or {}
        size = prepared.get("vocab_size")
        if isinstance(size, int) and size < SMALL_VOCABULARY_FRAC * vocab_size:
            yield Finding.warning(
                CHECK,
                f"{path} was prepared with the tokenizer {prepared.get('tokenizer')} of {size:,} ids, and the model "
                f"has {vocab_size:,}",
                f"prepare it again with --tokenizer {recipe.model.checkpoint}",
            )
