"""Data are looked at before a launch: real files, a model's own ids, enough of them; a large file by samples."""

import os
import struct
from array import array
from itertools import pairwise

import pytest

from qcollect.data.pairs import HEADER, MAGIC, bin_path
from qcollect.data.prepare import prepare
from qcollect.plan.finding import Level
from qcollect.recipe.load import load_recipe
from qcollect.worker import data_checks
from qcollect.worker.data_checks import NUM_PIECES, PIECE_TOKENS, check_data, piece_starts

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 5368709120\n".format("4d7a21" + "0" * 58)


def recipe_of(*paths, **settings):
    keys = {"data.sequence_length": 32, "data.tokenizer": "bytes"} | settings
    listed = "[" + ", ".join(f'"{path}"' for path in paths) + "]"
    return load_recipe("tiny", [f"data.path={listed}", *(f"{key}={value}" for key, value in keys.items())])


def write_pair(prefix, ids, code=8, typecode="H"):
    """A Megatron dataset of one document."""
    prefix.with_suffix(".bin").write_bytes(array(typecode, ids).tobytes())
    index = struct.pack("<iqqq", len(ids), 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(HEADER.pack(MAGIC, 1, code, 1, 2) + index)
    return prefix


def write_sparse_pair(prefix, lengths):
    """A dataset of zeros that takes no room on the disk."""
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(4 * sum(lengths))
    starts = [4 * sum(lengths[:i]) for i in range(len(lengths))]
    tables = array("i", lengths).tobytes() + array("q", [*starts, *range(len(lengths) + 1)]).tobytes()
    prefix.with_suffix(".idx").write_bytes(HEADER.pack(MAGIC, 1, 4, len(lengths), len(lengths) + 1) + tables)
    return prefix


def only(findings, level):
    return [finding for finding in findings if finding.level == level]


# ---------------------------------------------------------------------------------------------
# What is there
# ---------------------------------------------------------------------------------------------


def test_a_pair_is_counted_and_all_of_a_small_one_looked_at(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [1, 2, 3, 319] * 25)
    report = check_data(recipe_of(prefix), vocab_size=320)
    (finding,) = report.findings
    assert finding.check == "data"
    assert finding.message == (
        f"{prefix}: 1 documents, 100 tokens, 3 samples of 32 tokens; all tokens were looked at, their ids are below 320"
    )
    assert report.num_samples == 3


def test_without_a_model_ids_are_not_judged(tmp_path):
    report = check_data(recipe_of(write_pair(tmp_path / "corpus", [60000] * 64)), vocab_size=None)
    assert [f.level for f in report.findings] == [Level.OK]
    assert report.findings[0].message.endswith("2 samples of 32 tokens")


def test_text_is_tokenized_and_looked_at_whole(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    report = check_data(recipe_of(tmp_path / "text.txt"), vocab_size=320)
    assert [(f.check, f.message) for f in report.findings] == [
        ("tokenizer", "bytes: 257 ids of the model's 320"),
        (
            "data",
            f"{tmp_path}/text.txt: 1 documents, 301 tokens, 9 samples of 32 tokens; all tokens were looked at, "
            "their ids are below 320",
        ),
    ]


def test_samples_of_the_padded_layout_are_documents(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    recipe = recipe_of(tmp_path / "text.jsonl", **{"data.layout": "padded"})
    assert "2 samples of at most 32 tokens" in check_data(recipe, vocab_size=320).findings[-1].message


def test_several_data_sets_are_counted_together_and_every_bad_one_is_told(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    pair = write_pair(tmp_path / "corpus", [1] * 100)
    report = check_data(recipe_of(tmp_path / "text.txt", pair), vocab_size=320)
    assert report.num_samples == 400 // 32
    report = check_data(recipe_of(tmp_path / "gone", pair, tmp_path / "gone.txt"), vocab_size=320)
    assert [f.message.split(":")[0] for f in only(report.findings, Level.PROBLEM)] == [
        f"{tmp_path}/gone",
        f"{tmp_path}/gone.txt",
    ]
    assert report.num_samples is None


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "text.txt", "text.jsonl"])
def test_a_git_lfs_pointer_is_called_one_and_never_read_as_text(tmp_path, name):
    write_pair(tmp_path / "corpus", [1] * 64)
    (tmp_path / name).write_text(POINTER)
    path = tmp_path / ("corpus" if name.startswith("corpus") else name)
    (finding,) = only(check_data(recipe_of(path), vocab_size=320).findings, Level.PROBLEM)
    assert finding.text == (
        f"{tmp_path / name}: Git LFS pointer, real file not downloaded (its size is 5,368,709,120 bytes, "
        f"{len(POINTER)} are here); run 'git lfs pull' in {tmp_path}, or download the file itself"
    )


def test_a_pair_that_is_cut_short_is_told_with_both_sizes(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [1] * 100)
    os.truncate(f"{prefix}.bin", 150)
    (finding,) = check_data(recipe_of(prefix), vocab_size=320).findings
    assert finding.text == (
        f"{prefix}.bin: 150 bytes, but {prefix}.idx needs 200: cut short. 'qcollect data prepare' writes a dataset."
    )


def test_a_text_that_is_no_utf8_is_told_with_its_line(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"fine\ncaf\xe9 \n")
    finding = check_data(recipe_of(tmp_path / "text.txt"), vocab_size=320).findings[-1]
    assert (finding.level, finding.check) == (Level.PROBLEM, "data")
    assert finding.message.startswith(f"{tmp_path}/text.txt:2: not UTF-8")


def test_data_too_short_for_one_sample_are_refused(tmp_path):
    (finding,) = check_data(recipe_of(write_pair(tmp_path / "corpus", [1] * 31)), vocab_size=320).findings
    assert finding.message == ("1 documents hold 31 tokens, less than one sample of 32 (data.sequence_length)")
    assert finding.advice == "take more data or a shorter sequence"


# ---------------------------------------------------------------------------------------------
# Vocabulary
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "bad"), [(0, 320), (77, 4000), (99, 65535)])
def test_an_id_outside_the_vocabulary_is_told_with_its_place(tmp_path, place, bad):
    ids = [5] * 100
    ids[place] = bad
    prefix = write_pair(tmp_path / "corpus", ids)
    (finding,) = check_data(recipe_of(prefix), vocab_size=320).findings
    assert finding.text == (
        f"{prefix}.bin: token {place} has id {bad}, outside the model's vocabulary of 320; "
        "the data was made with another tokenizer: prepare it with the model's own"
    )


def test_a_negative_id_is_outside_as_well(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [5, -3] * 50, code=4, typecode="i")
    assert "token 1 has id -3, outside" in check_data(recipe_of(prefix), vocab_size=320).findings[0].message


def test_ids_of_text_outside_the_vocabulary_are_told_with_the_file(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    warning, problem = check_data(recipe_of(tmp_path / "text.txt"), vocab_size=100).findings
    assert warning.text == (
        "bytes: 257 ids, and the model has 100; it is another model's, or has added tokens; "
        "name the model's own with --set data.tokenizer=DIR"
    )
    assert problem.message == (
        f"{tmp_path}/text.txt: document 0 holds token id 256, outside the model's vocabulary of 100"
    )


def test_pieces_cover_a_small_file_and_spread_over_a_large_one():
    assert piece_starts(0) == []
    assert piece_starts(PIECE_TOKENS + 1) == [0, PIECE_TOKENS]
    starts = piece_starts(10**11)
    assert (starts[0], starts[-1]) == (0, 10**11 - PIECE_TOKENS)
    assert len(starts) == NUM_PIECES
    gaps = {later - earlier for earlier, later in pairwise(starts)}
    assert max(gaps) - min(gaps) <= 1


def test_of_a_large_file_only_the_pieces_are_read(tmp_path, monkeypatch):
    """100 GB: header, tables and 64 pieces, 17 MB, whatever the size."""
    prefix = write_sparse_pair(tmp_path / "large", [10**9] * 25)
    assert bin_path(prefix).stat().st_size == 10**11
    read = []
    frombuffer = data_checks.torch.frombuffer
    monkeypatch.setattr(
        data_checks.torch, "frombuffer", lambda raw, dtype: read.append(len(raw)) or frombuffer(raw, dtype=dtype)
    )
    report = check_data(recipe_of(prefix), vocab_size=320)
    assert sum(read) < 4 * NUM_PIECES * PIECE_TOKENS + 10_000
    assert report.findings[-1].message == (
        f"{prefix}: 25 documents, 25,000,000,000 tokens, 781,250,000 samples of 32 tokens; 4,194,304 tokens, "
        "spread over the files, were looked at, their ids are below 320"
    )
    with bin_path(prefix).open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(struct.pack("<i", 999))
    (problem,) = only(check_data(recipe_of(prefix), vocab_size=320).findings, Level.PROBLEM)
    assert problem.message.startswith(f"{prefix}.bin: token 24,999,999,999 has id 999, outside")


# ---------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------


def test_a_pair_needs_no_tokenizer(tmp_path):
    prefix = write_pair(tmp_path / "corpus", [1] * 64)
    recipe = recipe_of(prefix, **{"data.tokenizer": tmp_path / "gone"})
    assert [f.check for f in check_data(recipe, vocab_size=320).findings] == ["data"]


def test_text_needs_one_that_loads(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    recipe = recipe_of(tmp_path / "text.txt", **{"data.tokenizer": tmp_path / "gone"})
    (finding,) = check_data(recipe, vocab_size=320).findings
    assert finding.check == "tokenizer"
    assert finding.text == (f"{tmp_path}/gone: no such tokenizer folder; give a folder with tokenizer.json, or 'bytes'")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_tokenizer_that_is_a_git_lfs_pointer_is_called_one(tmp_path, name):
    (tmp_path / "text.txt").write_text("words " * 50)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer" / name).write_text(POINTER)
    recipe = recipe_of(tmp_path / "text.txt", **{"data.tokenizer": tmp_path / "tokenizer"})
    (finding,) = check_data(recipe, vocab_size=320).findings
    assert (finding.check, finding.level) == ("tokenizer", Level.PROBLEM)
    assert finding.message.startswith(f"{tmp_path}/tokenizer/{name}: Git LFS pointer, real file not downloaded (its ")


def test_what_was_prepared_with_a_much_smaller_tokenizer_is_warned_of(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    prepare([tmp_path / "text.txt"], "bytes", tmp_path / "corpus")
    recipe = load_recipe(
        "smollm2_135m_wikipedia",
        [f"model.checkpoint={tmp_path}", f"data.path={tmp_path}/corpus", "data.sequence_length=32"],
    )
    (warning,) = only(check_data(recipe, vocab_size=49152).findings, Level.WARNING)
    assert warning.text == (
        f"{tmp_path}/corpus was prepared with the tokenizer bytes of 257 ids, and the model has 49,152; "
        f"prepare it again with --tokenizer {tmp_path}"
    )


def test_text_for_a_checkpoint_by_bytes_is_warned_of(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 50)
    recipe = load_recipe(
        "smollm2_135m_wikipedia",
        [f"model.checkpoint={tmp_path}", f"data.path={tmp_path}/text.txt", "data.tokenizer=bytes",
         "data.sequence_length=32"],
    )  # fmt: skip
    (warning,) = only(check_data(recipe, vocab_size=49152).findings, Level.WARNING)
    assert warning.text == (
        "bytes: 257 ids, and the model was trained with 49,152; "
        "leave data.tokenizer and model.tokenizer out to take the checkpoint's"
    )
