import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.paths import RunPaths
from qcollect.store import catalog
from qcollect.store.catalog import ROW_ID, Catalog
from qcollect.store.files import append_line
from qcollect.store.manifest import read_manifests

quick = settings(max_examples=60, deadline=None, derandomize=True)


def line(counter=1, **metadata):
    return {
        "file": f"20241201_143022_{counter:04d}_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt",
        "bytes": 7,
        "xxh3_128": "ab",
        "metadata": {"rank": 0, "iteration": 0, "operation": "forward", "phase": "pre", "tensor_name": "query"}
        | metadata,
        "tensor_info": {"shape": [2, 3], "abs_max": 1.5, "min": None},
    }


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "mxfp8")
    paths.manifest_dir.mkdir(parents=True)
    return paths


def contents(paths):
    with Catalog(paths) as found:
        return list(found.records()), found.fields, found.damaged


def rebuilt(paths):
    """What a catalog made from nothing holds."""
    with tempfile.TemporaryDirectory() as folder:
        copy = RunPaths(Path(folder) / paths.run_dir.name)
        shutil.copytree(paths.manifest_dir, copy.manifest_dir)
        records, fields, damaged = contents(copy)
        return records, fields, [(d.path.name, d.number, d.problem) for d in damaged]


def kept(paths):
    records, fields, damaged = contents(paths)
    return records, fields, [(d.path.name, d.number, d.problem) for d in damaged]


def test_values_come_back_with_their_types_by_rank_and_as_saved(paths):
    values = {
        "a": 1,
        "b": 1.0,
        "c": True,
        "d": None,
        "e": "text",
        "f": [1, {"x": None}],
        "g": 1 << 70,
        "h": "\udcff\0é",
        "i": -0.0,
    }
    for rank in (1, 0):
        append_line(paths.manifest_path(rank), line(rank=rank, **values))
        append_line(paths.manifest_path(rank), line(2, rank=rank))
    with Catalog(paths) as found:
        assert len(found) == 4
        assert list(found.records()) == read_manifests(paths)
        assert list(found.rows(["metadata.rank", "counter"])) == [[0, 1], [0, 2], [1, 1], [1, 2]]
        ((first, *_),) = [list(found.rows([f"metadata.{name}" for name in values]))]
        assert [(type(v), v) for v in first] == [(type(v), v) for v in values.values()]
        assert list(found.rows(["metadata.a", "nothing"]))[1] == [None, None]


def test_an_index_that_is_up_to_date_is_not_written_again(paths):
    append_line(paths.manifest_path(0), line())
    with Catalog(paths) as found:
        assert found.was_stale
    before = paths.index_path.stat()
    with Catalog(paths) as found:
        assert (len(found), found.was_stale) == (1, False)
    assert paths.index_path.stat() == before
    assert sorted(os.listdir(paths.state_dir)) == ["index.sqlite", "manifest"]


def test_only_what_was_added_is_read(paths, monkeypatch):
    append_line(paths.manifest_path(0), line())
    assert len(contents(paths)[0]) == 1
    read = []
    record_fields = catalog.record_fields
    monkeypatch.setattr(catalog, "record_fields", lambda record: read.append(record.file) or record_fields(record))
    append_line(paths.manifest_path(0), line(2, new="x"))
    records, fields, _ = contents(paths)
    assert [r.metadata.get("new") for r in records] == [None, "x"]
    assert read == [line(2)["file"]]
    assert "metadata.new" in fields


def test_a_line_that_is_being_written_is_none_until_it_ends(paths):
    append_line(paths.manifest_path(0), line())
    raw = json.dumps(line(2)).encode()
    with paths.manifest_path(0).open("ab") as file:
        file.write(raw[:40])
        file.flush()
        assert len(contents(paths)[0]) == 1
        file.write(raw[40:] + b"\n")
    assert kept(paths) == rebuilt(paths)
    assert len(contents(paths)[0]) == 2


@pytest.mark.parametrize("change", ["shrink", "replace", "prefix", "same size", "remove", "remove field"])
def test_a_manifest_that_is_another_one_is_read_anew(paths, change):
    manifest = paths.manifest_path(0)
    for counter in (1, 2):
        append_line(manifest, line(counter, only=1) if counter == 2 else line(counter))
    append_line(paths.manifest_path(1), line(rank=1))
    contents(paths)
    first, second = manifest.read_bytes().splitlines(keepends=True)
    if change == "shrink":
        manifest.write_bytes(first)
    elif change == "replace":
        manifest.unlink()
        append_line(manifest, line(9))
        append_line(manifest, line(8))
        append_line(manifest, line(7))
    elif change == "prefix":
        manifest.write_bytes(second + first + second)
    elif change == "same size":
        manifest.write_bytes(first.replace(b'"ab"', b'"cd"') + second)
    elif change == "remove":
        manifest.unlink()
    else:
        manifest.write_bytes(first + first)
    assert kept(paths) == rebuilt(paths)
    assert contents(paths)[0] == read_manifests(paths)


def test_a_damaged_line_is_named_and_the_others_are_there(paths):
    append_line(paths.manifest_path(0), line())
    with paths.manifest_path(0).open("ab") as file:
        file.write(b'{"file": "x"}\nnot json\n[]\n')
    append_line(paths.manifest_path(0), line(2))
    records, _, damaged = contents(paths)
    assert len(records) == 2
    assert [(d.path, d.number) for d in damaged] == [(paths.manifest_path(0), n) for n in (2, 3, 4)]
    assert damaged[0].problem == "KeyError: 'bytes'"


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "flipped", "foreign", "other schema"])
def test_a_damaged_or_foreign_index_is_made_anew(paths, damage):
    append_line(paths.manifest_path(0), line())
    expected = kept(paths)
    whole = paths.index_path.read_bytes()
    if damage == "foreign":
        paths.index_path.unlink()
        sqlite3.connect(paths.index_path).executescript("CREATE TABLE captures (x); INSERT INTO captures VALUES (1)")
    elif damage == "other schema":
        db = sqlite3.connect(":memory:")
        db.deserialize(whole[:-16])
        db.execute("PRAGMA user_version = 99")
        image = db.serialize()
        paths.index_path.write_bytes(image + catalog.xxhash.xxh3_128_digest(image))
    else:
        position = whole.index(b"query")
        damaged = {
            "empty": b"",
            "garbage": b"x" * 5000,
            "truncated": whole[:-5000],
            "flipped": whole[:position] + b"Q" + whole[position + 1 :],
        }
        paths.index_path.write_bytes(damaged[damage])
    with Catalog(paths) as found:
        assert found.was_stale
    assert kept(paths) == expected
    with Catalog(paths) as found:
        assert not found.was_stale


def test_the_index_is_a_database_any_tool_reads(paths):
    append_line(paths.manifest_path(0), line())
    contents(paths)
    db = sqlite3.connect(f"file:{paths.index_path}?mode=ro", uri=True)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert db.execute("SELECT count(*) FROM captures").fetchone() == (1,)


@pytest.mark.parametrize("refusal", ["no space", "no serialize", "a folder in its place"])
def test_where_the_index_cannot_be_written_the_answer_is_the_same(paths, monkeypatch, refusal):
    append_line(paths.manifest_path(0), line())
    if refusal == "no space":
        replace = Path.replace
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    elif refusal == "no serialize":
        replace = Path.open

        def refuse(self, mode="r", *args, **kwargs):
            if "x" in mode:
                raise PermissionError(13, "Permission denied")
            return replace(self, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
    else:
        paths.index_path.mkdir()
    with Catalog(paths) as found:
        assert [r.file for r in found.records()] == [line()["file"]]
    assert sorted(p.name for p in paths.state_dir.iterdir() if p.is_file()) == []


def test_a_folder_without_state_has_no_captures_and_gets_no_state(tmp_path):
    with Catalog(RunPaths(tmp_path)) as found:
        assert (len(found), found.fields, list(found.rows(["file"])), found.find("x")) == (0, [], [], None)
    assert os.listdir(tmp_path) == []


def test_a_capture_is_found_by_its_file_and_by_its_row(paths):
    for counter in (1, 2, 3):
        append_line(paths.manifest_path(0), line(counter, number=counter))
    with Catalog(paths) as found:
        record = found.find(line(2)["file"])
        assert record is not None and record.metadata["number"] == 2
        assert found.find("nothing.pt") is None
        ((row_id,),) = [row for row in found.rows([ROW_ID, "counter"]) if row.pop() == 3]
        assert found.record(row_id).metadata["number"] == 3
        assert list(found.rows(["counter"], [row_id])) == [[3]]


def test_more_fields_than_sqlite_has_columns(paths):
    append_line(paths.manifest_path(0), line(**{f"field{i}": i for i in range(2500)}))
    append_line(paths.manifest_path(0), line(2, field2400="x"))
    with Catalog(paths) as found:
        assert list(found.records()) == read_manifests(paths)
        assert list(found.rows(["metadata.field2400", "metadata.rank"])) == [[2400, 0], ["x", 0]]
    assert kept(paths) == rebuilt(paths)


def test_the_gemm_of_a_quantized_copy_is_a_field(paths):
    consumers = [{"gemm": "wgrad", "axis": 0}]
    append_line(paths.manifest_path(0), line(values="quantized", consumers=consumers))
    append_line(paths.manifest_path(0), line(2, values="original", consumers=consumers))
    with Catalog(paths) as found:
        assert list(found.rows(["gemm"])) == [["wgrad"], [None]]


def test_several_may_bring_it_up_to_date_at_once(paths):
    for counter in range(300):
        append_line(paths.manifest_path(0), line(counter + 1))
    program = (
        "import sys; from pathlib import Path; from qcollect.paths import RunPaths;"
        "from qcollect.store.catalog import Catalog\n"
        "for _ in range(5):\n"
        "    paths = RunPaths(Path(sys.argv[1]))\n"
        "    paths.index_path.unlink(missing_ok=True)\n"
        "    with Catalog(paths) as found: assert len(list(found.records())) == 300\n"
    )

    def run(_):
        return subprocess.run([sys.executable, "-c", program, str(paths.run_dir)], capture_output=True, check=False)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    assert [(r.returncode, r.stderr) for r in results] == [(0, b"")] * 3
    with Catalog(paths) as found:
        assert (len(found), found.was_stale) == (300, False)
    assert sorted(os.listdir(paths.state_dir)) == ["index.sqlite", "manifest"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.dictionaries(st.sampled_from(["a", "A", "b", "é", "x y", 'q"', "\udcff"]), JSON, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), FIELDS),
        st.tuples(st.just("tear"), st.integers(0, 2), st.binary(max_size=20).filter(lambda b: b"\n" not in b)),
        st.tuples(st.just("damage"), st.integers(0, 2), st.sampled_from([b"\n", b"{}\n", b"[1]\n", b"\xff\n"])),
        st.tuples(st.just("cut"), st.integers(0, 2), st.integers(0, 400)),
        st.tuples(st.just("swap"), st.integers(0, 2), st.just(None)),
        st.tuples(st.just("remove"), st.integers(0, 2), st.just(None)),
        st.tuples(st.just("look"), st.just(0), st.just(None)),
    ),
    max_size=14,
)


@quick
@given(STEPS)
def test_index_rebuilt_equals_index_kept(steps):
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "mxfp8")
        paths.manifest_dir.mkdir(parents=True)
        for counter, (step, rank, value) in enumerate(steps):
            manifest = paths.manifest_path(rank)
            content = manifest.read_bytes() if manifest.exists() else b""
            if step == "append":
                append_line(manifest, line(counter, rank=rank, **value))
            elif step in ("tear", "damage"):
                manifest.write_bytes(content + value)
            elif step == "cut":
                manifest.write_bytes(content[: -value or None])
            elif step == "swap":
                manifest.write_bytes(b"".join(reversed(content.splitlines(keepends=True))))
            elif step == "remove":
                manifest.unlink(missing_ok=True)
            else:
                kept(paths)
        assert kept(paths) == rebuilt(paths)
        with Catalog(paths) as found:
            assert not found.was_stale
