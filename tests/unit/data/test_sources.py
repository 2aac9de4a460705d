"""Files become documents: nothing is cut that belongs together, and what cannot be read says where."""

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qcollect.data import sources
from qcollect.data.sources import SourceKind, SourceReader, find_source, find_sources, read_documents
from qcollect.errors import DatasetError, MissingExtraError

DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" version="0.10" xml:lang="en">
<page><title>A</title><ns>0</ns><revision><text>'''First''' [[article]].</text></revision></page>
<page><title>B</title><ns>0</ns><revision><text>{{disambiguation}}</text></revision></page>
<page><title>Talk:A</title><ns>1</ns><revision><text>chat</text></revision></page>
<page><title>C</title><ns>0</ns><revision><text>Third.</text></revision></page>
</mediawiki>
"""


def documents(path: Path, content: bytes | str, **options: str) -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_documents(find_source(path), **options))


# JSON lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [bytes, bz2.compress, gzip.compress])
def test_json_lines_end_at_newline_alone(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    # wbolster/jsonlines issue 53: str.splitlines makes four pieces of these two lines.
    raw = '{"text": "a\u2028b\u2029\u0085c"}\n{"text": "d"}\n'.encode()
    assert documents(tmp_path / "x.jsonl", compress(raw)) == ["a\u2028b\u2029\u0085c", "d"]


def test_crlf_ends_a_bom_blank_lines_and_a_missing_last_newline_are_read(tmp_path: Path) -> None:
    raw = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\n\n{"text": "c"}'
    assert documents(tmp_path / "x.jsonl", raw) == ["a", "b", "c"]


def test_the_text_of_a_json_line_is_kept_as_it_is(tmp_path: Path) -> None:
    assert documents(tmp_path / "x.json", '{"text": "  a\\r\\n\\u00e9 "}\n{"text": " \\n"}') == ["  a\r\né ", ""]


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    assert documents(tmp_path / "x.jsonl", '{"text": "a\\ud83d b\\ud83d\\ude00"}') == ["a? b😀"]


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    assert documents(tmp_path / "x.jsonl", '{"body": "a"}', text_field="body") == ["a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b"', "not a JSON object on one line"),
        ('"b"', "a JSON str; one object"),
        ('{"title": "b", "body": "c"}', "no field 'text'; it has: 'title', 'body'"),
        ('{"text": null}', "field 'text' is NoneType, not text"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        documents(tmp_path / "x.jsonl", f'{{"text": "a"}}\n{line}\n')
    assert str(caught.value).startswith(f"{tmp_path}/x.jsonl:2: ")


def test_bytes_that_are_not_utf8_are_named_by_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"x\.jsonl:2: not UTF-8"):
        documents(tmp_path / "x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n')


def test_a_json_array_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"one JSON array.*jq"):
        documents(tmp_path / "x.json", '\n[{"text": "a"}]')


def test_files_are_utf8_in_a_locale_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "é\u2028"}', encoding="utf-8")
    (tmp_path / "x.txt").write_text("é", encoding="utf-8")
    code = (
        "import sys; from qcollect.data.sources import find_source, read_documents;"
        "print([ascii(d) for p in sys.argv[1:] for d in read_documents(find_source(p))])"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "x.jsonl"), str(tmp_path / "x.txt")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([ascii("é\u2028"), ascii("é")])


# Plain text -----------------------------------------------------------------------------------


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    assert documents(tmp_path / "x.txt", "\na\r\n\n== b ==\nc\u2028d\n\n") == ["a\n\n== b ==\nc\u2028d"]


def test_article_headings_split_a_text_file(tmp_path: Path) -> None:
    text = "lead\n\n= One =\n\nbody = 1\n= not =one\n== Section ==\nx\n = Two = \ny\n"
    assert documents(tmp_path / "x.txt", text) == [
        "lead",
        "= One =\n\nbody = 1\n= not =one\n== Section ==\nx",
        " = Two = \ny",
    ]


def test_a_long_document_ends_at_the_next_blank_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_DOCUMENT_CHARS", 5)
    assert documents(tmp_path / "x.txt", "abc\n\nabcdef\nghi\n\nz\n") == ["abc\n\nabcdef\nghi", "z"]


# Dumps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["w.xml", "w.xml.bz2", "enwiki-latest-pages-articles1.xml-p10p30302.bz2", "dump-shortened.bz2", "w"]
)
def test_a_dump_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    pytest.importorskip("mwparserfromhell")
    content = bz2.compress(DUMP.encode()) if name.endswith(".bz2") else DUMP.encode()
    assert documents(tmp_path / name, content) == ["First article.", "", "Third."]
    assert find_source(tmp_path / name).kind is SourceKind.WIKIPEDIA


def test_a_multistream_dump_and_a_utf16_one_are_read(tmp_path: Path) -> None:
    pytest.importorskip("mwparserfromhell")
    streams = b"".join(bz2.compress(line.encode()) for line in DUMP.splitlines())
    assert documents(tmp_path / "w.xml.bz2", streams) == ["First article.", "", "Third."]
    utf16 = f'<?xml version="1.0" encoding="utf-16"?>{DUMP}'.encode("utf-16")
    assert documents(tmp_path / "w.xml", utf16) == ["First article.", "", "Third."]


@pytest.mark.parametrize("content", [DUMP.encode()[:-30], bz2.compress(DUMP.encode() * 50)[:-9]])
def test_a_dump_cut_short_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("mwparserfromhell")
    with pytest.raises(DatasetError, match=r"w\.xml: cannot be read: "):
        documents(tmp_path / "w.xml", content)


def test_a_dump_without_its_parser_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qcollect\[data\]'"):
        documents(tmp_path / "w.xml", DUMP)


# What is not read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.parquet", "PAR1", "not a file that is read here. Read are Wikipedia XML dumps, .jsonl"),
        ("README", "hello", "not a file that is read here"),
        ("x.xml", "<html></html>", "not a file that is read here"),
        ("x.txt", "", "holds no text"),
        ("x.jsonl.bz2", "BZh9 not really", "cannot be read: "),
    ],
)
def test_other_files_are_refused_with_what_is_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        documents(tmp_path / name, content)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_folders_missing_files_and_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is a folder; name files"):
        find_source(tmp_path)
    with pytest.raises(DatasetError, match="No such file or directory"):
        find_source(tmp_path / "none.txt")
    with pytest.raises(DatasetError, match="no source files named"):
        find_sources([])


def test_a_reader_says_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * 9000}) + "\n" for _ in range(50)))
    reader = SourceReader(find_source(path))
    assert reader.read_frac == 0
    fractions = [reader.read_frac for _ in reader]
    assert fractions == sorted(fractions) and 0 < fractions[0] < 0.5 and fractions[-1] == 1
