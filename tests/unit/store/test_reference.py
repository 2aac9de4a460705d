"""Files whose tensor is in another file of their folder."""

import shutil

import pytest
import torch
from typer.testing import CliRunner

import qcollect
from qcollect.cli import app
from qcollect.errors import CaptureError
from qcollect.store.capture import describe_tensor, load, load_any_capture, load_capture, save_capture
from qcollect.store.compact import is_same, value_entries, zstd_entries
from qcollect.store.reference import FORM, Reference, find_reference, hash_payload, reference_entries

TENSOR = torch.arange(600.0).reshape(20, 30).bfloat16()


def save(path, entries, **metadata):
    return save_capture(path, entries, describe_tensor(TENSOR), metadata)


@pytest.fixture
def folder(tmp_path):
    """``a.pt`` with a tensor, and ``b.pt`` that refers to it."""
    folder = tmp_path / "run"
    folder.mkdir()
    entries = value_entries(TENSOR)
    save(folder / "a.pt", entries, tensor_name="input", storage="values")
    refer(folder, entries)
    return folder


def refer(folder, entries, file="a.pt", name="b.pt"):
    reference = reference_entries(file, entries, hash_payload(entries))
    save(folder / name, reference, tensor_name="other", storage=FORM, stored_in=file)


def test_a_reference_gives_the_other_files_tensor_and_its_own_metadata(folder):
    for mmap in (False, True):
        content = load_capture(folder / "b.pt", mmap=mmap)
        assert is_same(content["tensor"], TENSOR)
        assert content["metadata"] == {"tensor_name": "other", "storage": "reference", "stored_in": "a.pt"}
        assert content.keys() == {"tensor", "tensor_info", "metadata"}
    assert is_same(load(folder / "b.pt"), TENSOR) and is_same(qcollect.load(folder / "b.pt"), TENSOR)
    assert is_same(load_any_capture(folder / "b.pt")["tensor"], TENSOR)


def test_a_reference_says_by_itself_what_it_refers_to(folder):
    content = torch.load(folder / "b.pt", weights_only=True)
    assert content.keys() == {"storage", "tensor_info", "metadata"}
    assert content["storage"] == {
        "form": "reference",
        "file": "a.pt",
        "dtype": "torch.bfloat16",
        "shape": [20, 30],
        "xxh3_128": hash_payload({"tensor": TENSOR}).xxh3_128,
    }
    digest = content["storage"]["xxh3_128"]
    assert find_reference(content) == Reference(file="a.pt", xxh3_128=digest)
    assert load_any_capture(folder / "b.pt", follow=False)["storage"] == content["storage"]


def test_a_folder_that_is_moved_is_whole(folder, tmp_path, monkeypatch):
    folder.rename(tmp_path / "moved")
    assert is_same(load(tmp_path / "moved" / "b.pt"), TENSOR)
    monkeypatch.chdir(tmp_path / "moved")
    assert is_same(load("b.pt"), TENSOR)


def test_a_compressed_tensor_is_referred_to_as_it_is_stored(tmp_path):
    pytest.importorskip("zstandard")
    entries = zstd_entries(torch.zeros(2000)) | {"rows": torch.arange(3)}
    save(tmp_path / "a.pt", entries)
    refer(tmp_path, entries)
    content = load_capture(tmp_path / "b.pt")
    assert is_same(content["tensor"], torch.zeros(2000))
    # what stands beside it comes along
    assert content["rows"].tolist() == [0, 1, 2] and content["storage"]["form"] == "zstd"


@pytest.mark.parametrize("read", [load, load_capture, load_any_capture])
def test_a_missing_target_is_named_with_the_reference(folder, read):
    (folder / "a.pt").unlink()
    with pytest.raises(CaptureError) as error:
        read(folder / "b.pt")
    where = f"{folder / 'b.pt'}: its tensor is in {folder / 'a.pt'}"
    assert str(error.value) == f"{where}, which is gone; the two belong into one folder"


def test_a_torn_target_is_named_with_the_reference(folder):
    (folder / "a.pt").write_bytes(b"nothing")
    with pytest.raises(CaptureError) as error:
        load(folder / "b.pt")
    where = f"{folder / 'b.pt'}: its tensor is in {folder / 'a.pt'}"
    assert str(error.value).startswith(f"{where}, which cannot be used: cannot be loaded: ")


@pytest.mark.parametrize("other", [TENSOR + 1, TENSOR.reshape(30, 20), TENSOR.view(torch.float16)], ids=str)
def test_a_target_that_stores_something_else_is_noticed(folder, other):
    (folder / "a.pt").unlink()
    save(folder / "a.pt", other)
    with pytest.raises(CaptureError) as error:
        load(folder / "b.pt")
    where = f"{folder / 'b.pt'}: its tensor is in {folder / 'a.pt'}"
    now, before = (hash_payload({"tensor": tensor}).xxh3_128 for tensor in (other, TENSOR))
    what = f"the xxh3-128 of what it stores is {now}, and was {before}"
    assert str(error.value) == f"{where}, which holds another one by now ({what})"


def test_a_target_with_other_metadata_is_the_same(folder):
    (folder / "a.pt").unlink()
    save(folder / "a.pt", TENSOR, note="written anew")
    assert is_same(load(folder / "b.pt"), TENSOR)


def test_no_reference_is_followed_through_another(folder):
    refer(folder, value_entries(TENSOR), file="b.pt", name="c.pt")
    with pytest.raises(CaptureError, match=r"c.pt: its tensor is in .*b.pt, which cannot be used: it is a reference i"):
        load(folder / "c.pt")
    refer(folder, value_entries(TENSOR), file="d.pt", name="d.pt")
    with pytest.raises(CaptureError, match="it is a reference itself"):
        load(folder / "d.pt")


@pytest.mark.parametrize("where", ["../a.pt", "sub/a.pt", "/a.pt", "./a.pt", "sub/../a.pt", "..", ".", "", "a\0.pt"])
def test_nothing_outside_the_folder_is_ever_opened(folder, where):
    for other in (folder.parent, folder / "sub"):
        other.mkdir(exist_ok=True)
        shutil.copy(folder / "a.pt", other / "a.pt")
    refer(folder, value_entries(TENSOR), file=where, name="c.pt")
    for read in (load, load_capture, load_any_capture):
        with pytest.raises(CaptureError) as error:
            read(folder / "c.pt")
        what = f"refers to {where!r}, which is no file of its own folder, and is not followed there"
        assert str(error.value) == f"{folder / 'c.pt'}: {what}"


@pytest.mark.parametrize("storage", [{"file": 3, "xxh3_128": "0"}, {"file": "a.pt"}, {"file": "a.pt", "xxh3_128": 0}])
def test_a_reference_that_names_nothing_is_no_capture(folder, storage):
    save(folder / "c.pt", {"storage": {"form": FORM, **storage}})
    with pytest.raises(CaptureError, match=r"c.pt: is a reference that names no file, or no hash$"):
        load(folder / "c.pt")


def test_a_file_with_a_tensor_is_no_reference():
    assert find_reference({"tensor": TENSOR, "storage": {"form": FORM}}) is None
    assert find_reference({"tensor": TENSOR}) is find_reference(TENSOR) is find_reference({"storage": None}) is None


def test_payloads_are_told_apart_by_all_they_store():
    entries = {"codes": torch.arange(8), "scales": {"fprop": torch.ones(2), "wgrad": torch.zeros(0)}, "micro": [TENSOR]}
    entries |= {"storage": {"form": "codes", "shape": [8], "dtype": "torch.float32", "gemm": "fprop"}}
    same = dict(reversed(entries.items())) | {"scales": dict(reversed(entries["scales"].items()))}
    digest = hash_payload(entries).xxh3_128
    assert hash_payload(same | {"metadata": {"a": 1}, "tensor_info": {}}).xxh3_128 == digest
    assert hash_payload(entries).num_bytes == 8 * 8 + 8 + TENSOR.numel() * 2
    others = [
        {"codes": torch.arange(8).flip(0)},
        {"codes": torch.arange(8).view(torch.float64)},
        {"codes": torch.arange(8).reshape(2, 4)},
        {"scales": {"dgrad": torch.ones(2), "wgrad": torch.zeros(0)}},
        {"scales": {"fprop": torch.ones(2)}},
        {"micro": TENSOR},
        {"storage": {**entries["storage"], "gemm": "dgrad"}},
        {"rows": torch.zeros(0)},
    ]
    digests = {hash_payload(entries | other).xxh3_128 for other in others}
    assert len(digests) == len(others) and digest not in digests
    # bits, not values
    assert hash_payload({"tensor": torch.tensor([0.0])}) != hash_payload({"tensor": torch.tensor([-0.0])})
    nan = torch.tensor([float("nan")])
    assert hash_payload({"tensor": nan}) == hash_payload({"tensor": nan.clone()})


def test_what_cannot_be_hashed_is_no_payload():
    with pytest.raises(CaptureError, match="holds what captures do not hold: TypeError"):
        hash_payload({"tensor": TENSOR, "note": b"bytes"})


def test_show_gives_the_tensor_a_file_refers_to(folder):
    shown = CliRunner().invoke(app, ["show", str(folder / "b.pt")])
    assert shown.exit_code == 0
    for line in ("  storage: reference", "  stored_in: a.pt", "shape: 20x30", "first values: 0.0 1.0 2.0 3.0 4.0 5.0"):
        assert line in shown.stdout
    (folder / "a.pt").unlink()
    shown = CliRunner().invoke(app, ["show", str(folder / "b.pt")])
    assert shown.exit_code != 0
    assert f"its tensor is in {folder / 'a.pt'}, which is gone" in str(shown.exception)
    assert str(shown.exception).count(f"{folder / 'b.pt'}: ") == 1
