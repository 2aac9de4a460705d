"""Sources become a dataset: whole or not at all, and nothing of the user's is overwritten unasked."""

import json
from pathlib import Path

import pytest

from qcollect.data.indexed import IndexedDataset
from qcollect.data.prepare import PrepareProgress, prepare
from qcollect.errors import DatasetError, OutputError


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "wiki.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "ab"}\n{"text": " "}\n{"text": "c"}\n', encoding="utf-8")
    return path


def test_documents_of_all_sources_are_written_in_order(tmp_path: Path, source: Path) -> None:
    (tmp_path / "in" / "more.txt").write_text("= T =\nx\n", encoding="utf-8")
    prefix = tmp_path / "out" / "new" / "wiki text.v1"
    ticks = iter((10.0, 12.5))
    report = prepare([source, tmp_path / "in" / "more.txt"], "bytes", prefix, clock=lambda: next(ticks))
    dataset = IndexedDataset(prefix)
    assert [bytes(d[:-1].tolist()) for d in dataset] == [b"ab", b"c", b"= T =\nx"]
    assert all(d[-1] == 256 for d in dataset)
    assert (report.num_documents, report.num_skipped, report.num_tokens) == (3, 1, 13)
    assert (report.dtype, report.num_bytes, report.duration_s) == ("uint16", 26, 2.5)
    assert sorted(report.paths) == sorted(prefix.parent.iterdir())
    assert [p.name for p in report.paths] == ["wiki text.v1.bin", "wiki text.v1.idx", "wiki text.v1.json"]


def test_the_description_says_what_a_dataset_was_made_from(tmp_path: Path, source: Path) -> None:
    prepare([source], "bytes", tmp_path / "wiki", append_eos=False)
    assert json.loads((tmp_path / "wiki.json").read_text(encoding="utf-8")) == {
        "schema": 1,
        "sources": [{"path": str(source), "kind": "jsonl", "bytes": source.stat().st_size}],
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eos_id": 256,
        "append_eos": False,
        "dtype": "uint16",
        "documents": 2,
        "skipped": 1,
        "tokens": 3,
    }


def test_the_same_sources_make_the_same_bytes(tmp_path: Path, source: Path) -> None:
    first, second = (prepare([source], "bytes", tmp_path / name).paths for name in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
def test_an_existing_file_is_refused_before_anything_is_written(tmp_path: Path, source: Path, ending: str) -> None:
    existing = tmp_path / f"wiki{ending}"
    existing.write_text("mine")
    with pytest.raises(OutputError, match=rf"wiki\{ending}: exists"):
        prepare([source], "bytes", tmp_path / "wiki")
    assert existing.read_text() == "mine"
    assert names(tmp_path) == ["in", existing.name]
    assert prepare([source], "bytes", tmp_path / "wiki", overwrite=True).num_documents == 2


def test_a_source_is_never_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "wiki.json"
    source.write_text('{"text": "a"}')
    with pytest.raises(OutputError, match="is a source and would be overwritten"):
        prepare([source], "bytes", tmp_path / "wiki", overwrite=True)
    assert names(tmp_path) == ["wiki.json"]


def test_a_prefix_may_be_given_as_one_of_its_files(tmp_path: Path, source: Path) -> None:
    assert prepare([source], "bytes", tmp_path / "v1.0.bin").paths[0] == tmp_path / "v1.0.bin"


@pytest.mark.parametrize(
    ("sources", "tokenizer", "message"),
    [
        (["none.txt"], "bytes", "none.txt: cannot be read"),
        ([], "bytes", "no source files named"),
        (["ok.txt"], "no-such-folder", "no such tokenizer folder"),
        (["ok.txt", "empty.jsonl"], "bytes", "empty.jsonl: holds no text"),
    ],
)
def test_bad_inputs_are_found_before_the_output_folder_is_made(
    tmp_path: Path, sources: list[str], tokenizer: str, message: str
) -> None:
    (tmp_path / "ok.txt").write_text("a")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DatasetError, match=message):
        prepare([tmp_path / s for s in sources], tokenizer, tmp_path / "out" / "wiki")
    assert not (tmp_path / "out").exists()


def test_a_bad_line_in_the_middle_leaves_no_dataset(tmp_path: Path, source: Path) -> None:
    source.write_text('{"text": "a"}\nnonsense\n')
    with pytest.raises(DatasetError, match=r"wiki\.jsonl:2: "):
        prepare([source], "bytes", tmp_path / "out" / "wiki")
    assert names(tmp_path / "out") == []


def test_sources_without_text_make_no_dataset(tmp_path: Path, source: Path) -> None:
    source.write_text('{"text": ""}\n')
    with pytest.raises(DatasetError, match=r"wiki\.jsonl: no document holds text"):
        prepare([source], "bytes", tmp_path / "out" / "wiki")
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("prefix", ["in", "in/wiki.jsonl/wiki"])
def test_a_prefix_that_cannot_be_written_is_refused(tmp_path: Path, source: Path, prefix: str) -> None:
    with pytest.raises(OutputError, match=r"is a folder; name a prefix in it|no files can be written there"):
        prepare([source], "bytes", tmp_path / prefix)


def test_progress_is_told_after_every_document(tmp_path: Path, source: Path) -> None:
    told: list[PrepareProgress] = []
    prepare([source, source], "bytes", tmp_path / "wiki", progress=told.append)
    assert [p.num_documents for p in told] == [1, 1, 2, 3, 3, 4]
    assert [p.done_frac for p in told] == sorted(p.done_frac for p in told)
    assert told[-1].done_frac == 1
