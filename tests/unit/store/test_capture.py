import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash

from qcollect.errors import CaptureError
from qcollect.store.capture import describe_tensor, load_capture, save_capture

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def save(path: Path, tensor: torch.Tensor, **metadata: object):
    return save_capture(path, tensor, describe_tensor(tensor), metadata)


@contextmanager
def files_limited_to(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_capture_is_read_back(tmp_path):
    tensor = torch.randn(3, 4)
    metadata = {"rank": 0, "consumers": [{"gemm": "fprop", "scale": None}], "note": "é \u2028"}
    save_capture(tmp_path / "a.pt", tensor, describe_tensor(tensor), metadata)
    for mmap in (False, True):
        content = load_capture(tmp_path / "a.pt", mmap=mmap)
        assert list(content) == ["tensor", "tensor_info", "metadata"]
        assert torch.equal(content["tensor"], tensor)
        assert content["metadata"] == metadata
        assert content["tensor_info"]["shape"] == [3, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    """numpy has no bfloat16 and no float8: pytorch/pytorch issue 114634."""
    raw = torch.arange(256, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    save(tmp_path / "a.pt", tensor)
    loaded = load_capture(tmp_path / "a.pt")["tensor"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_files_load_in_a_process_that_does_not_know_qcollect(tmp_path):
    for name, dtype in (("a.pt", torch.float32), ("b.pt", torch.bfloat16), ("c.pt", torch.float8_e4m3fn)):
        save(tmp_path / name, torch.arange(4).to(dtype), consumers=[{"gemm": "fprop"}], layer_idx=None)
    program = """
import pathlib, sys, torch
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pt")):
    for mmap in (False, True):
        content = torch.load(path, weights_only=True, mmap=mmap)
        assert content["tensor"].float().tolist() == [0, 1, 2, 3], path
        assert content["metadata"] == {"consumers": [{"gemm": "fprop"}], "layer_idx": None}, path
        print(path.name, content["tensor_info"]["dtype"])
assert "qcollect" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-I", "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [
        *("a.pt", "torch.float32") * 2, *("b.pt", "torch.bfloat16") * 2, *("c.pt", "torch.float8_e4m3fn") * 2,
    ]  # fmt: skip


def test_size_and_hash_are_those_of_the_file(tmp_path):
    stored = save(tmp_path / "a.pt", torch.randn(1000, 7))
    content = (tmp_path / "a.pt").read_bytes()
    assert stored.path == tmp_path / "a.pt"
    assert stored.num_bytes == len(content)
    assert stored.xxh3_128 == xxhash.xxh3_128(content).hexdigest()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)], ids=str)
def test_tensors_without_dimensions_or_elements_are_saved(tmp_path, shape):
    save(tmp_path / "a.pt", torch.zeros(shape))
    assert load_capture(tmp_path / "a.pt")["tensor"].shape == torch.Size(shape)


def test_file_is_never_replaced(tmp_path):
    save(tmp_path / "a.pt", torch.ones(1))
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(FileExistsError):
        save(tmp_path / "a.pt", torch.zeros(1))
    assert (tmp_path / "a.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.pt"]


def test_file_is_never_replaced_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path / "a.pt", torch.ones(1))
    with pytest.raises(FileExistsError):
        save(tmp_path / "a.pt", torch.zeros(1))
    assert load_capture(tmp_path / "a.pt")["tensor"].item() == 1
    assert os.listdir(tmp_path) == ["a.pt"]


def test_unfinished_file_has_no_name_that_pt_matches(tmp_path, monkeypatch):
    link, sources = os.link, []
    monkeypatch.setattr(os, "link", lambda source, target: sources.append(Path(source)) or link(source, target))
    save(tmp_path / "a.pt", torch.ones(1))
    (source,) = sources
    assert source.parent == tmp_path
    assert source.name.startswith(".a.pt.")
    assert not source.match("*.pt")


@pytest.mark.parametrize("num_elements", [10_000, 1_000_000])
def test_full_disk_names_path_and_free_space_and_leaves_nothing(tmp_path, num_elements):
    tensor = torch.zeros(num_elements)
    with files_limited_to(20_000), pytest.raises(CaptureError) as error:
        save(tmp_path / "a.pt", tensor)
    text = str(error.value)
    assert text.startswith(f"{tmp_path / 'a.pt'}: cannot be written: File too large (")
    assert text.endswith(f"inodes free in {tmp_path})")
    assert " bytes and " in text
    assert os.listdir(tmp_path) == []


def test_last_byte_that_does_not_fit_is_noticed(tmp_path):
    size = save(tmp_path / "a.pt", torch.zeros(10)).num_bytes
    with files_limited_to(size - 1), pytest.raises(CaptureError, match="cannot be written: File too large"):
        save(tmp_path / "b.pt", torch.zeros(10))
    with files_limited_to(size):
        save(tmp_path / "c.pt", torch.zeros(10))
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "c.pt"]


def test_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(CaptureError) as error:
        save(tmp_path / "gone" / "a.pt", torch.zeros(1))
    assert str(error.value) == (
        f"{tmp_path}/gone/a.pt: cannot be written: No such file or directory (the folder {tmp_path}/gone is gone)"
    )


def test_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("qcollect.store.capture.write_parts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a.pt", torch.zeros(1))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 torn"])
def test_file_that_is_no_capture_is_named(tmp_path, content):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CaptureError) as error:
        load_capture(path)
    assert str(error.value).startswith(f"{path}: cannot be loaded: ")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CaptureError, match=f"^{tmp_path}/a.pt: cannot be loaded: "):
        load_capture(tmp_path / "a.pt")


def test_torch_file_of_another_kind_is_no_capture(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(CaptureError) as error:
        load_capture(tmp_path / "a.pt")
    assert str(error.value) == (
        f"{tmp_path}/a.pt: holds no capture (a dict with 'tensor', 'tensor_info' and 'metadata')"
    )


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def test_code_in_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"tensor": Evil(), "metadata": {}}, tmp_path / "a.pt")
    with pytest.raises(CaptureError, match="cannot be loaded"):
        load_capture(tmp_path / "a.pt")
    assert not (tmp_path / "evil").exists()


def test_tensor_info_is_json(tmp_path):
    tensor = torch.tensor([float("nan"), float("inf"), 1.0])
    assert json.loads(json.dumps(describe_tensor(tensor), allow_nan=False))["num_nan"] == 1
