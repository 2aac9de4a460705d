"""Megatron-LM's own reader and writer agree with ours, where megatron-core is installed."""

from pathlib import Path

import pytest
import torch

from qcollect.data.indexed import IndexedDataset, IndexedDatasetWriter
from qcollect.data.pairs import check_pair

megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DOCUMENTS = [[5, 6, 7], [8], list(range(300))]
VOCAB_SIZES = [1000, 65499, 65500, 128256]


def documents_for(vocab_size: int) -> list[list[int]]:
    return [*DOCUMENTS, [vocab_size - 1, 0]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_megatron_reads_what_we_write(tmp_path: Path, vocab_size: int) -> None:
    prefix = tmp_path / "ours text_document"
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for ids in documents_for(vocab_size):
            writer.add_document(ids)
    for use_mmap in (True, False):
        theirs = megatron.IndexedDataset(str(prefix), mmap=use_mmap)
        assert [theirs[i].tolist() for i in range(len(theirs))] == documents_for(vocab_size)
        assert theirs.document_indices.tolist() == list(range(len(theirs) + 1))
        assert theirs.index.dtype == megatron.DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_we_read_and_write_the_same_bytes_as_megatron(tmp_path: Path, vocab_size: int) -> None:
    dtype = megatron.DType.optimal_dtype(vocab_size)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    writer = IndexedDatasetWriter(tmp_path / "ours", vocab_size)
    for ids in documents_for(vocab_size):
        builder.add_document(torch.tensor(ids), [len(ids)])
        writer.add_document(ids)
    builder.finalize(str(tmp_path / "theirs.idx"))
    writer.close()
    assert [d.tolist() for d in IndexedDataset(tmp_path / "theirs")] == documents_for(vocab_size)
    assert check_pair(tmp_path / "theirs").num_tokens == sum(map(len, documents_for(vocab_size)))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()


def test_sentences_and_modes_of_megatron_are_read(tmp_path: Path) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), multimodal=True)
    builder.add_document(torch.arange(5), [2, 3], [0, 1])
    builder.add_document(torch.arange(4), [4], [0])
    builder.finalize(str(tmp_path / "x.idx"))
    info = check_pair(tmp_path / "x")
    assert (info.num_sequences, info.num_documents) == (3, 2)
    assert [d.tolist() for d in IndexedDataset(tmp_path / "x")] == [[0, 1], [2, 3, 4], [0, 1, 2, 3]]
