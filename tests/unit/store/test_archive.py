"""Our archives beside torch's own writer, and torch's reader on ours."""

import io
import zipfile

import pytest
import torch

from qcollect.store.archive import archive_parts

DTYPES = [
    torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.complex64, torch.bool,
    torch.int64,
]  # fmt: skip
SHAPES = [(), (0,), (3, 0, 2), (37, 1), (5, 7)]
PLAIN = {"tensor_info": {"shape": [1, 2], "name": "é"}, "metadata": {"x": [1, 2.5, None, "é" * 300], "y": True}}


def archive_of(entries) -> bytes:
    parts = archive_parts(entries, PLAIN)
    assert parts is not None
    return b"".join(bytes(part) for part in parts)


def tensor_of(dtype, shape) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(torch.float32).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class _Memory:
    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data) -> int:
        self.content += bytes(data)
        return len(data)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_reads_back_what_an_archive_was_made_of(dtype, shape, tmp_path):
    tensor = tensor_of(dtype, shape)
    path = tmp_path / "a.pt"
    path.write_bytes(archive_of({"tensor": tensor, "scales": {"fprop": torch.arange(3), "own": [tensor]}}))
    for mmap in (False, True):
        content = torch.load(path, weights_only=True, mmap=mmap)
        assert list(content) == ["tensor", "scales", "tensor_info", "metadata"]
        assert {name: content[name] for name in PLAIN} == PLAIN
        assert content["scales"]["fprop"].tolist() == [0, 1, 2]
        for found in (content["tensor"], content["scales"]["own"][0]):
            assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert torch.equal(bits(found), bits(tensor))


def test_a_part_of_another_tensor_and_a_transposed_one_come_back():
    whole = torch.arange(12.0)
    views = {"part": whole[2:5], "transposed": whole.view(3, 4).t()}
    content = torch.load(io.BytesIO(archive_of(views)), weights_only=True)
    for name, view in views.items():
        assert torch.equal(content[name], view)


def test_nothing_of_the_plain_sections_leaks_into_the_memory_of_the_pickles_beside_it():
    text = "the same string"
    content = torch.load(
        io.BytesIO(archive_of({"a": text, "tensor": torch.ones(2), "b": [text, text], "c": {"d": text}})),
        weights_only=True,
    )
    assert (content["a"], content["b"], content["c"]) == (text, [text, text], {"d": text})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_torchs_own_writer_but_for_the_id(shape):
    ours = archive_of({"tensor": tensor_of(torch.bfloat16, shape), "rows": torch.arange(3)})
    memory = _Memory()
    writer = torch._C.PyTorchFileWriter(memory, False, 64)
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        for entry in archive.infolist():
            header = ours[entry.header_offset :][:30]
            start = entry.header_offset + 30 + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
            assert start % 64 == 0
            if entry.filename.endswith(("/version", "/serialization_id")):
                continue  # torch writes them by itself
            writer.write_record(
                entry.filename.removeprefix("archive/"), ours[start:][: entry.file_size], entry.file_size
            )
    writer.write_end_of_file()
    theirs, id_start = bytes(memory.content), start
    assert len(theirs) == len(ours)
    assert theirs[:id_start] == ours[:id_start]
    assert theirs[id_start + 40 :] == ours[id_start + 40 :]


def test_four_gibibytes_are_left_to_torch(monkeypatch):
    monkeypatch.setattr("qcollect.store.archive._MAX_BYTES", 1 << 16)
    assert archive_parts({"tensor": torch.zeros(1 << 14)}, PLAIN) is None
    assert archive_parts({"tensor": torch.zeros(1 << 13)}, PLAIN) is not None
    assert archive_parts({"tensor": torch.zeros(1)}, {"metadata": {"x": "y" * (1 << 16)}}) is None
