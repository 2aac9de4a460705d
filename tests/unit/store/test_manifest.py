import pytest

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.manifest import ManifestRecord, append_line, read_manifest, read_manifests


def line(name, rank=0):
    return {
        "file": name,
        "bytes": 7,
        "xxh3_128": "ab",
        "metadata": {"rank": rank},
        "tensor_info": {"shape": [2]},
    }


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "mxfp8")
    paths.manifest_dir.mkdir(parents=True)
    return paths


def test_captures_of_all_ranks_are_read_in_order(paths):
    for rank, name in ((1, "c.pt"), (0, "a.pt"), (0, "b.pt")):
        append_line(paths.manifest_path(rank), line(name, rank))
    records = read_manifests(paths)
    assert [r.file for r in records] == ["a.pt", "b.pt", "c.pt"]
    assert records[0] == ManifestRecord(
        file="a.pt", bytes=7, xxh3_128="ab", metadata={"rank": 0}, tensor_info={"shape": [2]}
    )


def test_torn_last_line_is_dropped(paths):
    path = paths.manifest_path(0)
    append_line(path, line("a.pt"))
    with path.open("ab") as file:
        file.write(b'{"file": "b.pt", "byt')
    assert [r.file for r in read_manifest(path)] == ["a.pt"]


def test_damaged_line_is_named_with_its_number_and_what_to_do(paths):
    path = paths.manifest_path(0)
    append_line(path, line("a.pt"))
    with path.open("ab") as file:
        file.write(b'{"file": "b.pt"}\n')
    with pytest.raises(CaptureError) as error:
        read_manifest(path)
    assert str(error.value) == (
        f"{path}:2: no manifest line (KeyError: 'bytes'); every line but the last must be whole; mend it or remove it"
    )


def test_no_manifest_means_no_captures(paths):
    assert read_manifest(paths.manifest_path(3)) == []
    assert read_manifests(paths) == []
