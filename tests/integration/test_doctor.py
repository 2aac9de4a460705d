"""``doctor`` and ``run`` tell the same: what one calls a problem refuses the other, before anything is launched."""

import importlib
import os
import re
import shutil
import struct
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 2471645608\n".format("4d7a21" + "0" * 58)
BUNDLED = Path(__file__).parents[2] / "recipes" / "text" / "encyclopedia.txt"


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    supervisor = importlib.import_module("qcollect.launch.supervisor")
    monkeypatch.setattr(supervisor, "execute", lambda *args, **kwargs: pytest.fail("a run was about to begin"))


@pytest.fixture
def checkpoint(tied_checkpoint, tmp_path):
    """A checkpoint in two parts with a tokenizer, of which a test may break something."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = shutil.copytree(tied_checkpoint, tmp_path / "model")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def pair(tmp_path):
    """A Megatron dataset of one document of 4096 tokens."""
    prefix = tmp_path / "data" / "corpus"
    prefix.parent.mkdir()
    tokens = [i % 256 for i in range(4096)]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    prefix.with_suffix(".idx").write_bytes(head + struct.pack("<iqqq", len(tokens), 0, 0, 1))
    return prefix


@pytest.fixture
def told(qcollect_here, small_recipe, tmp_path):
    """The problems both commands tell of the small recipe with these settings; nothing is left behind."""

    def run(*settings):
        flags = [word for setting in settings for word in ("--set", setting)]
        common = ("--recipe", str(small_recipe), *flags, "--out", str(tmp_path / "out"))
        refused = qcollect_here("run", "mxfp8", *common, cwd=tmp_path)
        examined = qcollect_here("doctor", *common, "--json", cwd=tmp_path)
        assert (refused.exit_code, refused.out, examined.exit_code) == (3, "", 3), refused.err + examined.err
        assert not os.path.lexists(tmp_path / "out")
        problems = [f for f in examined.json["findings"] if f["level"] == "problem"]
        texts = [f"{f['message']}; {f['advice']}" if f["advice"] else f["message"] for f in problems]
        assert refused.err[refused.err.index("error: ") :] == "error: " + "\n".join(texts) + "\n"
        for text in (refused.err, examined.out):
            assert "Traceback" not in text and "too large" not in text
        return texts

    return run


def of_model(checkpoint, data):
    return (f"model.checkpoint={checkpoint}", "model.config=null", "model.tokenizer=null", f"data.path={data}")


# huggingface/transformers issue 27923, microsoft/OmniParser issue 34
@pytest.mark.parametrize(
    "name",
    [
        "model/model-00001-of-",
        "model/model.safetensors.index.json",
        "model/config.json",
        "model/tokenizer.json",
        "data/corpus.bin",
        "data/corpus.idx",
    ],
)
def test_a_git_lfs_pointer_is_told_by_its_path_and_size_and_nothing_is_launched(told, checkpoint, pair, tmp_path, name):
    path = next(p for p in sorted((tmp_path / Path(name).parent).iterdir()) if p.name.startswith(Path(name).name))
    path.write_text(POINTER)
    data = BUNDLED if "tokenizer" in name else pair  # of tokens that are there already no tokenizer is read
    assert told(*of_model(checkpoint, data)) == [
        f"{path}: Git LFS pointer, real file not downloaded (its size is 2,471,645,608 bytes, {len(POINTER)} are "
        f"here); run 'git lfs pull' in {path.parent}, or download the file itself"
    ]


def test_everything_that_is_wrong_is_told_at_once(told, checkpoint, pair, tmp_path):
    for path in sorted(checkpoint.glob("model-*"))[1:]:
        path.unlink()
    os.truncate(f"{pair}.bin", 10)
    missing, short = told(*of_model(checkpoint, pair))
    assert f"{checkpoint}/model.safetensors.index.json names " in missing and "are missing: model-00002-of-" in missing
    assert short.startswith(f"{pair}.bin: 10 bytes, but {pair}.idx needs 8192: cut short.")


def test_ids_of_another_model_are_told_with_their_place(told, pair):
    assert told(f"data.path={pair}", "model.config.vocab_size=200") == [
        f"{pair}.bin: token 200 has id 200, outside the model's vocabulary of 200; "
        "the data was made with another tokenizer: prepare it with the model's own"
    ]


# ---------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------


def test_a_recipe_with_everything_is_fine(qcollect_process, small_recipe, tmp_path):
    result = qcollect_process("doctor", "--recipe", str(small_recipe), cwd=tmp_path)
    assert result.exit_code == 0, result.out
    *lines, last = result.out.splitlines()
    assert last.startswith("small: nothing forbids a run")
    assert all(re.match(r"(ok|warning) +[a-z_]+ +\S", line) for line in lines)
    assert "\x1b" not in result.out
    assert list(tmp_path.iterdir()) == []


def test_without_a_recipe_the_missing_model_is_told_with_what_needs_none(qcollect_here, tmp_path):
    result = qcollect_here("doctor", cwd=tmp_path)
    assert result.exit_code == 3
    (line,) = (line for line in result.out.splitlines() if re.match("problem +checkpoint ", line))
    assert f"model.checkpoint {tmp_path}/model/llama3.2-1b: does not exist; put the model's folder" in line
    assert line.endswith("--set model.checkpoint=DIR (--recipe tiny needs none)")
    assert result.out.splitlines()[-1] == (
        "llama32_1b_wikipedia: 2 problems, a run would be refused; not checked because of that: capture, memory, space"
    )


def test_a_request_that_is_wrong_is_no_finding(qcollect_here, tmp_path):
    assert qcollect_here("doctor", "--recipe", "tyni", cwd=tmp_path).exit_code == 2
    assert qcollect_here("doctor", "--recipe", "tiny", "--set", "capture.targt=1", cwd=tmp_path).exit_code == 2


# ---------------------------------------------------------------------------------------------
# What a dry run counts
# ---------------------------------------------------------------------------------------------

NUM_LAYERS, NUM_RANKS, HIDDEN, FFN, KEYS, TOKENS, BYTES = 2, 2, 64, 96, 32, 32, 2
LINEARS = [
    (HIDDEN, HIDDEN),
    (HIDDEN, KEYS),
    (HIDDEN, KEYS),
    (HIDDEN, HIDDEN),
    (HIDDEN, FFN),
    (HIDDEN, FFN),
    (FFN, HIDDEN),
]
FILE_BYTES = 4096  # around a tensor, at most


# wandb/wandb issue 1383: how many files there will be is known before
@pytest.mark.parametrize(("iterations", "num_steps"), [("0", 1), ("0-2", 3)])
def test_a_dry_run_of_a_sweep_counts_files_and_bytes(qcollect_here, small_recipe, tmp_path, iterations, num_steps):
    num_directions, types = 2, ["mxfp8", "mxfp4", "hifp8"]
    num_tensors = 3 * len(LINEARS) + 4  # input, weight, output; query, key, value, output
    num_files = NUM_LAYERS * num_tensors * num_directions * num_steps * NUM_RANKS
    sizes = [TOKENS * i + i * o + TOKENS * o for i, o in LINEARS] + [TOKENS * (HIDDEN + KEYS + KEYS + HIDDEN)]
    num_bytes = NUM_LAYERS * sum(sizes) * BYTES * num_directions * num_steps * NUM_RANKS + FILE_BYTES * num_files

    flags = ("--set", f"capture.iterations={iterations}", "--target", str(num_files))
    common = ("sweep", "--all", "--recipe", str(small_recipe), *flags, "--out", str(tmp_path / "out"), "--dry-run")
    plans = qcollect_here(*common, "--json").json
    assert [plan["quant_type"] for plan in plans] == types
    assert [plan["target"] for plan in plans] == [num_files] * 3
    assert [plan["num_bytes"] for plan in plans] == [num_bytes] * 3
    shown = qcollect_here(*common).out
    assert (
        f"in total: 3 runs, {3 * num_files:,} files, about {3 * num_bytes / 1048576:.1f} MiB; nothing was started"
        in (shown)
    )
    more = qcollect_here(*common, "--json", "--target", str(num_files + 1))
    assert f"{num_files} files" in more.err and more.exit_code == 3
    assert not (tmp_path / "out").exists()
