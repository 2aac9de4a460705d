"""The indexed dataset: bytes as Megatron lays them out, written whole or not at all, read back equal."""

import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcollect.data.indexed import IndexedDataset, IndexedDatasetWriter
from qcollect.errors import DatasetError, OutputError


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(prefix: Path, documents: list[list[int]], vocab_size: int, *, overwrite: bool = False) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, vocab_size, overwrite=overwrite) as writer:
        for ids in documents:
            writer.add_document(ids)
    return IndexedDataset(prefix)


def test_ids_above_65535_are_stored_byte_for_byte_as_megatron_stores_them(tmp_path: Path) -> None:
    # huggingface/transformers issue 2825: uint16 turns 128000 into 62464 without an error.
    documents = [[128000, 5, 128001], [65535, 65536]]
    dataset = write(tmp_path / "llama", documents, 128256)
    assert [d.tolist() for d in dataset] == documents
    assert dataset.dtype == "int32"
    assert (tmp_path / "llama.bin").read_bytes() == bytes.fromhex("00f40100 05000000 01f40100 ffff0000 00000100")
    index = (tmp_path / "llama.idx").read_bytes()
    assert len(index) == 82
    assert index == (
        bytes.fromhex("4d4d494449445800 00") + struct.pack("<QBQQ", 1, 4, 2, 3)
        + struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 12) + struct.pack("<3q", 0, 1, 2)
    )  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), vocab_size=st.sampled_from([2, 257, 65499, 65500, 128256, 2**31 - 1]))
def test_what_is_written_is_read_back(tmp_path: Path, data: st.DataObject, vocab_size: int) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=9)
    documents = data.draw(st.lists(ids, min_size=1, max_size=9))
    dataset = write(tmp_path / "x", documents, vocab_size, overwrite=True)
    assert [d.tolist() for d in dataset] == documents
    assert dataset.lengths.tolist() == [len(d) for d in documents]
    assert (len(dataset), dataset.num_tokens) == (len(documents), sum(map(len, documents)))
    assert all(d.dtype == torch.int64 for d in dataset)


@pytest.mark.parametrize(
    ("code", "layout", "ids"),
    [
        (1, "B", [0, 255]),
        (2, "b", [0, 127]),
        (3, "h", [1, 32767]),
        (4, "i", [1, 2**31 - 1]),
        (5, "q", [1, 2**40]),
        (8, "H", [1, 65535]),
    ],
)
def test_every_integer_dtype_is_read(tmp_path: Path, code: int, layout: str, ids: list[int]) -> None:
    tokens = struct.pack(f"<2{layout}", *ids)
    (tmp_path / "x.bin").write_bytes(tokens)
    (tmp_path / "x.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, 2, 3)
        + struct.pack("<2i2q3q", 1, 1, 0, len(tokens) // 2, 0, 1, 2)
    )  # fmt: skip
    assert [d.tolist() for d in IndexedDataset(tmp_path / "x")] == [[ids[0]], [ids[1]]]


def test_an_offset_past_the_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2], [3]], 10)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into("<q", index, 34 + 2 * 4 + 8, 1000)
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DatasetError, match=r"x\.bin: 6 bytes, but .*x\.idx needs 1002"):
        IndexedDataset(tmp_path / "x")


def test_documents_count_from_either_end_and_no_further(tmp_path: Path) -> None:
    dataset = write(tmp_path / "x", [[1], [2]], 10)
    assert dataset[-1].tolist() == [2]
    with pytest.raises(IndexError, match="document 2 of 2"):
        dataset[2]


def test_a_document_read_does_not_share_memory_with_the_file(tmp_path: Path) -> None:
    dataset = write(tmp_path / "x", [[1, 2]], 10)
    dataset[0].zero_()
    assert dataset[0].tolist() == [1, 2]


def test_an_existing_pair_is_refused_and_left_alone_unless_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]], 10)
    with pytest.raises(OutputError, match=r"x\.bin: exists"):
        IndexedDatasetWriter(tmp_path / "x", 10)
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1]
    assert write(tmp_path / "x", [[2, 3]], 70000, overwrite=True)[0].tolist() == [2, 3]
    assert names(tmp_path) == ["x.bin", "x.idx"]


def test_a_pair_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", 10)
    writer.add_document([9])
    write(tmp_path / "x", [[1]], 10)
    with pytest.raises(OutputError, match="exists"):
        writer.close()
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1]
    assert names(tmp_path) == ["x.bin", "x.idx"]


def test_nothing_is_left_of_a_writer_that_failed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "x", 10) as writer:
        writer.add_document([1])
        assert sorted(tmp_path.glob("*.bin")) == []
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_failed_overwrite_leaves_the_older_pair(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]], 10)
    with pytest.raises(DatasetError), IndexedDatasetWriter(tmp_path / "x", 10, overwrite=True) as writer:
        writer.add_document([10])
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([10], "token id 10, outside the vocabulary of 10"), ([-1, 3], "token id -1"), ([], "has no tokens")],
)
def test_ids_outside_the_vocabulary_and_empty_documents_are_refused(
    tmp_path: Path, ids: list[int], message: str
) -> None:
    with pytest.raises(DatasetError, match=message), IndexedDatasetWriter(tmp_path / "x", 10) as writer:
        writer.add_document(ids)
    assert names(tmp_path) == []


def test_a_dataset_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no documents"):
        write(tmp_path / "x", [], 10)
    assert names(tmp_path) == []


def test_a_full_disk_is_an_output_error_and_leaves_nothing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    writer = IndexedDatasetWriter(tmp_path / "x", 10)
    writer.add_document([1])
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._stream.fileno())
    with pytest.raises(OutputError, match="No space left on device"):
        writer.close()
    assert names(tmp_path) == []


def test_a_folder_that_is_missing_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file or directory"):
        IndexedDatasetWriter(tmp_path / "none" / "x", 10)
