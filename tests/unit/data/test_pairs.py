"""How a path names a dataset, and what is found wrong with a pair before anything is launched."""

import subprocess
import sys
from pathlib import Path

import pytest

from qcollect.data.pairs import check_pair, resolve_prefix, token_dtype
from qcollect.data.writer import IndexedDatasetWriter
from qcollect.errors import DatasetError


def write_pair(prefix: Path, documents: list[list[int]] | None = None) -> Path:
    with IndexedDatasetWriter(prefix, 1000) as writer:
        for ids in documents or [[1, 2, 3]]:
            writer.add_document(ids)
    return prefix


@pytest.mark.parametrize("name", ["plain", "with space", "wiki.v1.0", "glob[ab]*?", "-n", "été"])
def test_prefix_either_file_and_the_folder_name_the_same_pair(tmp_path: Path, name: str) -> None:
    prefix = write_pair(tmp_path / name)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path, str(prefix)):
        assert resolve_prefix(path) == prefix


def test_a_prefix_that_ends_like_a_file_is_taken_as_it_stands(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "odd.bin")
    assert resolve_prefix(prefix) == prefix


def test_a_folder_with_two_pairs_is_refused_naming_both(tmp_path: Path) -> None:
    first, second = write_pair(tmp_path / "a"), write_pair(tmp_path / "b")
    with pytest.raises(DatasetError, match="holds 2 datasets") as caught:
        resolve_prefix(tmp_path)
    assert str(first) in str(caught.value) and str(second) in str(caught.value)


def test_a_lone_half_beside_one_pair_is_passed_over(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a")
    (tmp_path / "pytorch_model.bin").touch()
    assert resolve_prefix(tmp_path) == prefix


@pytest.mark.parametrize("gone", [".bin", ".idx"])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx", "/.."])
def test_a_missing_half_is_named(tmp_path: Path, gone: str, ending: str) -> None:
    prefix = write_pair(tmp_path / "a.b")
    Path(f"{prefix}{gone}").unlink()
    path = tmp_path if ending == "/.." else Path(f"{prefix}{ending}")
    with pytest.raises(DatasetError) as caught:
        resolve_prefix(path)
    assert str(caught.value).startswith(f"{prefix}{gone}: missing")


def test_nothing_there_says_what_was_looked_for_and_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="qcollect data prepare") as caught:
        resolve_prefix(tmp_path / "none")
    assert f"{tmp_path}/none.bin" in str(caught.value) and f"{tmp_path}/none.idx" in str(caught.value)
    with pytest.raises(DatasetError, match="no dataset in this folder"):
        resolve_prefix(tmp_path)


def test_check_says_what_a_pair_holds(tmp_path: Path) -> None:
    info = check_pair(write_pair(tmp_path / "a", [[1, 2, 3], [4]]))
    assert (info.dtype, info.num_sequences, info.num_documents, info.num_tokens, info.num_bytes) == (
        "uint16", 2, 2, 4, 8,
    )  # fmt: skip


def test_tokens_cut_short_are_refused_with_both_sizes(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a")
    Path(f"{prefix}.bin").write_bytes(b"\0\0")
    with pytest.raises(DatasetError, match=r"a\.bin: 2 bytes, but .*a\.idx needs 6"):
        check_pair(prefix)


@pytest.mark.parametrize(
    ("offset", "patch", "message"),
    [
        (0, b"XXXX", "not an index of Megatron's"),
        (9, b"\x02", "index version 2; known: 1"),
        (17, b"\x07", "token dtype code 7; known: 1 "),
        (18, b"\xff", "255 sequences"),
        (34, b"\xff\xff\xff\xff", "negative length"),
    ],
)
def test_a_damaged_index_is_refused_with_its_path(tmp_path: Path, offset: int, patch: bytes, message: str) -> None:
    prefix = write_pair(tmp_path / "a")
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[offset : offset + len(patch)] = patch
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DatasetError, match=message) as caught:
        check_pair(prefix)
    assert f"{prefix}.idx" in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 20, 40])
def test_an_index_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    prefix = write_pair(tmp_path / "a")
    index = Path(f"{prefix}.idx")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(DatasetError, match=r"a\.idx"):
        check_pair(prefix)


def test_vocabularies_from_65500_on_are_stored_as_int32() -> None:
    assert [token_dtype(n).name for n in (257, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]


def test_preflight_and_preparation_import_no_torch() -> None:
    code = (
        "import sys, qcollect.data.pairs, qcollect.data.prepare;"
        "sys.exit(','.join({'torch', 'transformers', 'numpy', 'mwparserfromhell'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
