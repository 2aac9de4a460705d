import json
import os

import pytest

from qcollect.store.files import (
    append_line,
    count_lines,
    read_json,
    read_lines,
    read_tail,
    write_json_atomic,
    write_json_in_place,
    write_parts,
)


def test_document_is_read_back(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"a": 1})
    write_json_atomic(path, {"a": 2, "text": "é\u2028\udcff"})
    assert read_json(path) == {"a": 2, "text": "é\u2028\udcff"}
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1]", b"null", b"\xff\xfe", b"0"])
def test_torn_or_foreign_document_reads_as_none(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert read_json(path) is None


def test_missing_document_reads_as_none(tmp_path):
    assert read_json(tmp_path / "run.json") is None
    (tmp_path / "file").touch()
    assert read_json(tmp_path / "file" / "run.json") is None


def test_nan_is_refused_and_leaves_the_old_document(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json_atomic(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["run.json"]


def test_in_place_write_leaves_no_rest_of_a_longer_document(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"reason": "x" * 500})
    inode = path.stat().st_ino
    write_json_in_place(path, {"reason": "y"})
    assert read_json(path) == {"reason": "y"}
    assert path.stat().st_ino == inode


def test_lines_are_appended_one_write_each(tmp_path, monkeypatch):
    path, writes = tmp_path / "m.jsonl", []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(data) or write(file, data))
    append_line(path, {"a": 1})
    append_line(path, {"text": "two\nlines\u2028"})
    assert [json.loads(line) for line in read_lines(path)] == [{"a": 1}, {"text": "two\nlines\u2028"}]
    assert len(writes) == 2
    assert count_lines(path) == 2


def test_torn_tail_is_no_line_and_is_dropped_by_the_next_append(tmp_path):
    path = tmp_path / "m.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2, "to')
    assert read_lines(path) == [b'{"a": 1}']
    assert count_lines(path) == 1
    append_line(path, {"a": 3})
    assert read_lines(path) == [b'{"a": 1}', b'{"a": 3}']


def test_file_of_nothing_but_a_torn_line_starts_anew(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"x" * (3 << 20))
    append_line(path, {"a": 1})
    assert path.read_bytes() == b'{"a": 1}\n'


def test_line_that_does_not_fit_leaves_no_part_of_itself(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    append_line(path, {"a": 1})
    write, calls = os.write, []

    def fill_up(file, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, {"a": 2})
    assert path.read_bytes() == b'{"a": 1}\n'


def test_nan_in_a_line_is_refused(tmp_path):
    with pytest.raises(ValueError):
        append_line(tmp_path / "m.jsonl", {"loss": float("inf")})
    assert os.listdir(tmp_path) == []


def test_tail_starts_at_a_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"first\nsecond\nthird")
    assert read_tail(path, 9) == b"third"
    assert read_tail(path, 100) == b"first\nsecond\nthird"
    assert read_tail(tmp_path / "none", 100) == b""


def test_more_pieces_than_a_system_writes_at_once_are_all_written(tmp_path):
    write_parts(tmp_path / "a", [bytes([i % 251]) for i in range(5000)])
    assert (tmp_path / "a").read_bytes() == bytes(i % 251 for i in range(5000))
