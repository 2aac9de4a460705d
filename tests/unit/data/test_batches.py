"""Batches: every sample once an epoch, the same for the same arguments, padding masked by length."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.data.batches import Batches, TokenDocuments, check_vocabulary, load_documents, sample_order
from qcollect.data.indexed import IndexedDataset, IndexedDatasetWriter
from qcollect.data.tokenizer import ByteTokenizer
from qcollect.errors import DatasetError, UsageError

EOS = 9


def numbered(num_documents: int, length: int = 2) -> TokenDocuments:
    """Documents [i, i, ...]: a sample says which document it is."""
    return TokenDocuments([[i] * length for i in range(num_documents)])


def test_the_end_that_closes_a_document_keeps_its_label_and_only_padding_is_masked() -> None:
    # huggingface/transformers issue 22794: pad = eos masked by id hides every real end from the loss.
    documents = TokenDocuments([[1, 2, 3, EOS], [4, 5, 6, 7, 8, EOS]])
    batch = Batches(documents, sequence_length=16, layout="padded", micro_batch_size=2, pad_id=EOS).batch(0)
    assert batch.attention_mask is not None
    rows = sorted(zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.labels.tolist(), strict=True))
    assert rows == [
        ([1, 2, 3, EOS, EOS, EOS], [1, 1, 1, 1, 0, 0], [1, 2, 3, EOS, -100, -100]),
        ([4, 5, 6, 7, 8, EOS], [1, 1, 1, 1, 1, 1], [4, 5, 6, 7, 8, EOS]),
    ]
    assert {t.dtype for t in (batch.input_ids, batch.attention_mask, batch.labels)} == {torch.int64}


def test_packed_samples_are_windows_over_all_documents_without_padding() -> None:
    documents = TokenDocuments([[1, 2, 3, EOS], [], [4, EOS], [5, 6, 7, 8, EOS]])
    batches = Batches(documents, sequence_length=3, layout="packed", micro_batch_size=3)
    batch = batches.batch(0)
    assert sorted(batch.input_ids.tolist()) == [[1, 2, 3], [5, 6, 7], [EOS, 4, EOS]]
    assert batch.attention_mask is None
    assert torch.equal(batch.labels, batch.input_ids)
    assert batches.num_items == 3  # the last two tokens fill no window


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    sequence_length=st.integers(2, 9),
)
def test_packed_windows_tile_the_tokens(lengths: list[int], sequence_length: int) -> None:
    tokens = torch.arange(sum(lengths))
    if len(tokens) < sequence_length:
        return
    documents = TokenDocuments(torch.split(tokens, lengths))
    batches = Batches(documents, sequence_length=sequence_length, layout="packed")
    windows = sorted(batches.batch(i).input_ids.flatten().tolist() for i in range(batches.num_items))
    assert sum(windows, []) == list(range(len(tokens) // sequence_length * sequence_length))  # noqa: RUF017


def test_padded_samples_are_cut_and_padded_to_the_longest_of_their_micro_batch() -> None:
    documents = TokenDocuments([[1] * 9, [2] * 4, [3] * 2])
    batches = Batches(documents, sequence_length=5, layout="padded", micro_batch_size=3)
    batch = batches.batch(0)
    assert batch.input_ids.shape == (3, 5)
    assert batch.attention_mask is not None
    assert sorted(batch.attention_mask.sum(1).tolist()) == [2, 4, 5]
    alone = Batches(documents, sequence_length=5, layout="padded")
    assert sorted(alone.batch(i).input_ids.shape[1] for i in range(3)) == [2, 4, 5]


def test_documents_with_nothing_to_predict_are_no_samples() -> None:
    documents = TokenDocuments([[], [1], [2, 2]])
    batches = Batches(documents, sequence_length=4, layout="padded")
    assert batches.num_items == 1
    assert batches.batch(0).input_ids.tolist() == [[2, 2]]


@settings(deadline=None)
@given(
    num_documents=st.integers(1, 30),
    world_size=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    micro_batch_size=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_ranks_and_micro_batches_number_the_samples_of_each_epoch_without_gap_or_repeat(
    num_documents: int, world_size: int, micro_batches: int, micro_batch_size: int, seed: int
) -> None:
    per_iteration = world_size * micro_batches * micro_batch_size
    seen: dict[int, int] = {}
    for iteration in range(2 * num_documents // per_iteration + 1):
        for rank in range(world_size):
            batches = Batches(
                numbered(num_documents), sequence_length=2, layout="packed", micro_batch_size=micro_batch_size,
                micro_batches=micro_batches, rank=rank, world_size=world_size, seed=seed,
            )  # fmt: skip
            for micro_batch in range(micro_batches):
                batch = batches.batch(iteration, micro_batch)
                assert batch.num_samples == micro_batch_size
                expected = ((iteration * micro_batches + micro_batch) * world_size + rank) * micro_batch_size
                assert batch.first_sample_idx == expected
                for b, row in enumerate(batch.input_ids.tolist()):
                    seen[batch.first_sample_idx + b] = row[0]
    assert sorted(seen) == list(range(len(seen)))
    for epoch in range(len(seen) // num_documents):
        items = [seen[epoch * num_documents + i] for i in range(num_documents)]
        assert sorted(items) == list(range(num_documents))


def test_a_batch_is_the_same_in_whatever_order_it_is_asked_for() -> None:
    def make() -> Batches:
        return Batches(numbered(7), sequence_length=2, layout="packed", micro_batch_size=2, seed=3)

    forward, backward = make(), make()
    ahead = [forward.batch(i).input_ids.tolist() for i in range(20)]
    back = [backward.batch(i).input_ids.tolist() for i in reversed(range(20))]
    assert ahead == back[::-1]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {tuple(sample_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    torch.manual_seed(1)
    first = sample_order(0, 0, 50).tolist()
    sample_order.cache_clear()
    torch.manual_seed(2)
    assert sample_order(0, 0, 50).tolist() == first


def test_an_indexed_dataset_gives_the_batches_its_documents_in_memory_give(tmp_path: Path) -> None:
    documents = [[i, i + 1, EOS] for i in range(8)]
    with IndexedDatasetWriter(tmp_path / "x", 10) as writer:
        for ids in documents:
            writer.add_document(ids)
    for layout in ("packed", "padded"):
        on_disk, in_memory = (
            Batches(d, sequence_length=4, layout=layout, micro_batch_size=2)
            for d in (IndexedDataset(tmp_path / "x"), TokenDocuments(documents))
        )
        assert all(torch.equal(on_disk.batch(i).input_ids, in_memory.batch(i).input_ids) for i in range(4))


def test_too_little_data_is_refused_with_the_numbers() -> None:
    with pytest.raises(DatasetError, match="2 documents hold 4 tokens, less than one sample of 8"):
        Batches(numbered(2), sequence_length=8, layout="packed")
    with pytest.raises(DatasetError, match="of 2 documents none has the 2 tokens"):
        Batches(numbered(2, length=1), sequence_length=8, layout="padded")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="sequence_length is 1; it must be 2 or more"):
        Batches(numbered(2), sequence_length=1, layout="packed")
    with pytest.raises(UsageError, match="rank is 2; ranks are 0 to 1"):
        Batches(numbered(2), sequence_length=2, layout="packed", rank=2, world_size=2)
    with pytest.raises(UsageError, match="'ragged'; known: packed, padded"):
        Batches(numbered(2), sequence_length=2, layout="ragged")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="iteration 0, micro-batch 1 of 1"):
        Batches(numbered(2), sequence_length=2, layout="packed").batch(0, 1)


def test_ids_outside_the_models_vocabulary_are_refused_naming_the_document() -> None:
    documents = TokenDocuments([[1, 2], [], [3, 300]])
    check_vocabulary(documents, 301)
    with pytest.raises(DatasetError, match="document 2 holds token id 300, outside the model's vocabulary of 300"):
        check_vocabulary(documents, 300)
    batches = Batches(documents, sequence_length=4, layout="packed", vocab_size=300)
    with pytest.raises(DatasetError, match="sample 0 holds token id 300"):
        batches.batch(0)


def test_text_files_are_tokenized_into_memory(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("= A =\na\n= B =\nb\n")
    (tmp_path / "y.jsonl").write_text('{"text": ""}\n{"text": "c"}\n')
    documents = load_documents([tmp_path / "x.txt", tmp_path / "y.jsonl"], ByteTokenizer())
    assert [bytes(d[:-1].tolist()) for d in documents] == [b"= A =\na", b"= B =\nb", b"c"]
    assert documents.lengths.tolist() == [8, 8, 2]
    assert all(documents[i][-1] == 256 for i in range(3))
    (tmp_path / "y.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DatasetError, match="no document holds text"):
        load_documents([tmp_path / "y.jsonl"], ByteTokenizer())
