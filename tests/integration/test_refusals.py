"""What cannot work is refused before a worker starts, with what is wrong, where, and what to do."""

import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch

from qcollect.formats.catalog import QUANT_TYPES
from qcollect.paths import RunPaths

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("nothing_starts")]

KNOWN_TYPES = f"known: {', '.join(sorted(QUANT_TYPES))}"


@pytest.fixture
def refuse(qcollect_here, tmp_path):
    """The message of a command that must be refused with ``exit_code`` and must leave nothing behind."""

    def run(*args: str, exit_code: int, out: Path | None = None) -> str:
        out_dir = tmp_path / "out" if out is None else out
        existed = os.path.lexists(out_dir)  # not Path.exists, which raises for a name too long
        result = qcollect_here(*args, "--out", str(out_dir), cwd=tmp_path)
        assert (result.exit_code, result.out) == (exit_code, ""), result.err
        assert os.path.lexists(out_dir) == existed
        message = result.err[result.err.index("error: ") :]
        assert "Traceback" not in message
        return message

    return run


@pytest.fixture
def small(small_recipe):
    return ("--recipe", str(small_recipe))


# -- usage: exit code 2 -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("run", "mxfp9"), ("run", "--quant", "mxfp9"), ("sweep", "--quant", "mxfp9")])
def test_an_unknown_quant_type_names_the_known_ones(refuse, small, command):
    message = refuse(*command, *small, exit_code=2)
    assert message.startswith(f"error: quant type 'mxfp9' is not known; {KNOWN_TYPES}; did you mean 'mxfp8'?")
    assert "'qcollect formats'" in message


def test_two_quant_types_for_one_run_are_a_conflict(refuse, small):
    message = refuse("run", "mxfp8", "--quant", "mxfp4", *small, exit_code=2)
    assert "two quant types were given, 'mxfp8' and --quant 'mxfp4'; run takes one, sweep several" in message


@pytest.mark.parametrize("flags", [(), ("--all", "--quant", "mxfp8")])
def test_a_sweep_needs_either_all_types_or_some(refuse, small, flags):
    message = refuse("sweep", *flags, *small, exit_code=2)
    assert message == "error: give --all (the recipe's quant types) or --quant TYPE, once or several times\n"


def test_an_unknown_recipe_names_the_known_ones(refuse):
    message = refuse("run", "mxfp8", "--recipe", "tyni", exit_code=2)
    assert "no bundled recipe 'tyni'" in message and "tiny" in message and "./tyni.yaml" in message


def test_a_missing_recipe_file_names_where_it_was_looked_for(refuse, tmp_path):
    message = refuse("run", "mxfp8", "--recipe", "mine.yaml", exit_code=2)
    assert f"no recipe file mine.yaml (in {tmp_path})" in message and "qcollect recipes ls" in message


def test_an_unknown_key_names_the_near_one(refuse, small):
    message = refuse("run", "mxfp8", *small, "--set", "capture.targt=3", exit_code=2)
    assert message == "error: --set capture.targt: unknown key; did you mean 'capture.target'?\n"


def test_a_scale_rule_the_type_does_not_have_names_setting_and_type(refuse, small):
    message = refuse("run", "hifp8", *small, "--set", "quant.scale_rule=ceil", exit_code=2)
    assert message == (
        "error: --set quant.scale_rule: quant.scale_rule is 'ceil', and hifp8 takes none; leave it out\n"
    )


def test_a_scale_rule_one_swept_type_does_not_have_names_that_type(refuse, small):
    message = refuse("sweep", "--all", *small, "--set", "quant.scale_rule=ceil", exit_code=2)
    assert message == (
        "error: recipe small with quant type hifp8: quant.scale_rule is 'ceil', and hifp8 takes none; leave it out\n"
    )


@pytest.mark.parametrize(("flag", "key"), [("--target", "capture.target"), ("--nproc", "launch.nproc")])
def test_a_flag_out_of_range_is_named_as_the_flag(refuse, small, flag, key):
    assert refuse("run", "mxfp8", *small, flag, "0", exit_code=2) == f"error: {flag}: {key} is 0; must be at least 1\n"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("capture.layers=7", "capture.layers is [7]: index 7 does not exist, there are 2 (0-1)"),
        ("capture.modules=*.q_prj", "capture.modules: '*.q_prj' matches nothing; did you mean '*.q_proj'"),
        ("capture.tensor_names=querry", "'querry' matches nothing; did you mean 'query'"),
        ("capture.iterations=0-99", "index 20 does not exist, there are 20 (0-19); see train.iterations"),
        ("capture.ranks=5", "capture.ranks is [5]: index 5 does not exist, there are 2 (0-1)"),
    ],
)
def test_a_selector_that_matches_nothing_names_the_alternatives(refuse, small, setting, text):
    assert text in refuse("run", "mxfp8", *small, "--set", setting, exit_code=2)


@pytest.mark.parametrize(("out", "text"), [("", "--out is empty"), ("~/x", "--out is '~/x': '~' is not expanded")])
def test_an_output_folder_that_is_surely_not_meant_is_refused(qcollect_here, small, tmp_path, out, text):
    result = qcollect_here("run", "mxfp8", *small, "--out", out, cwd=tmp_path)
    assert result.exit_code == 2 and text in result.err
    assert list(tmp_path.iterdir()) == []


# -- preflight: exit code 3 -------------------------------------------------------------------------


def test_a_missing_checkpoint_and_missing_data_are_told_together(refuse, tmp_path):
    message = refuse("run", "mxfp8", exit_code=3)  # the default recipe, from a folder that holds neither
    data = tmp_path / "dataset/wikipedia_processed/wikipedia_processed_text_document"
    assert f"model.checkpoint {tmp_path / 'model/llama3.2-1b'}: does not exist; put the model's folder" in message
    assert "--set model.checkpoint=DIR" in message
    assert f"{data}: no dataset there; looked for {data}.bin and {data}.idx" in message
    assert "qcollect data prepare" in message


@pytest.mark.parametrize(("present", "missing"), [(".bin", ".idx"), (".idx", ".bin")])
def test_half_of_a_dataset_names_the_missing_half(refuse, small, tmp_path, present, missing):
    (tmp_path / f"wiki.v1{present}").write_bytes(b"\0" * 64)
    message = refuse("run", "mxfp8", *small, "--set", f"data.path={tmp_path}/wiki.v1", exit_code=3)
    assert f"{tmp_path}/wiki.v1{missing}: missing, although {tmp_path}/wiki.v1{present} is there" in message


@pytest.mark.parametrize("given", ["pair", "pair.bin", "pair.idx", "."])
def test_a_dataset_may_be_named_by_prefix_half_or_folder(qcollect_here, small, tmp_path, given):
    _write_pair(tmp_path / "data" / "pair")
    settings = ("--set", f"data.path={tmp_path}/data/{given}", "--out", str(tmp_path / "out"))
    result = qcollect_here("run", "mxfp8", *small, *settings, "--dry-run", "--json")
    assert result.exit_code == 0, result.err


@pytest.mark.parametrize(
    ("name", "problem"), [("gone", "no dataset there"), ("gone.txt", "cannot be read: No such file or directory")]
)
def test_missing_data_is_named(refuse, small, tmp_path, name, problem):
    message = refuse("run", "mxfp8", *small, "--set", f"data.path={name}", exit_code=3)
    assert f"{tmp_path}/{name}: {problem}" in message


@pytest.mark.parametrize(("script", "problem"), [("gone.py", "does not exist"), (".", "is a folder")])
def test_a_training_script_that_is_no_file_is_named(refuse, small, tmp_path, script, problem):
    message = refuse("run", "mxfp8", *small, "--set", f"script={script}", exit_code=3)
    assert f"script {tmp_path / script} {problem}; name the training script" in message


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerators")
def test_device_ids_on_a_machine_without_devices(refuse, small):
    message = refuse("run", "mxfp8", *small, "--set", "launch.device=auto", "--gpu-ids", "0,2", exit_code=3)
    assert "--gpu-ids 0,2 names 2 device(s) and torch sees none of them; leave it out to run on the CPU" in message


def test_an_impossible_target_is_refused_with_the_possible_one(refuse, small):
    message = refuse("run", "mxfp8", *small, "--target", "201", exit_code=3)
    assert "target 201 is more than this run can produce: 200 files" in message
    assert "lower --target" in message and "capture.iterations=spread:K" in message


def test_the_possible_target_itself_is_taken(qcollect_here, small, tmp_path):
    result = qcollect_here("run", "mxfp8", *small, "--target", "200", "--dry-run", "--json", "--out", str(tmp_path))
    assert result.json["shares"] == [100, 100]


def test_an_output_folder_below_a_file_names_that_file(refuse, small, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    message = refuse("run", "mxfp8", *small, exit_code=3, out=file / "x")
    assert f"{file / 'x' / 'mxfp8'} cannot be made: {file} is not a folder; choose another folder with --out" in message
    assert file.read_text() == "mine"


def test_a_name_too_long_for_the_file_system_is_no_traceback(refuse, small, tmp_path):
    message = refuse("run", "mxfp8", *small, exit_code=3, out=tmp_path / ("a" * 300))
    assert "File name too long; choose another folder with --out" in message


@pytest.mark.parametrize("command", [("run", "mxfp8"), ("run", "mxfp8", "--overwrite")])
def test_a_folder_with_files_of_somebody_else_is_left_alone(refuse, small, tmp_path, command, list_tree):
    folder = tmp_path / "out" / "mxfp8"
    folder.mkdir(parents=True)
    (folder / "model_weights.pt").write_bytes(b"precious")
    before = list_tree(tmp_path)
    message = refuse(*command, *small, exit_code=3, out=tmp_path / "out")
    assert f"{folder} holds 1 .pt file(s) that no manifest names, such as model_weights.pt; nothing was" in message
    assert list_tree(tmp_path) == before


@pytest.mark.parametrize("state", ["failed", "interrupted", "stopped", "running"])
def test_a_folder_with_a_run_that_did_not_complete_is_left_alone(refuse, small, tmp_path, state, list_tree):
    folder = tmp_path / "out" / "mxfp8"
    paths = RunPaths(folder)
    paths.manifest_dir.mkdir(parents=True)
    (folder / "capture.pt").write_bytes(b"captured")
    launcher = {"pid": 1, "create_time": 0.0}  # no process of this machine: the run is over whatever its state
    record = {
        "schema": 1,
        "run_id": "4f5e",
        "run_token": "t",
        "quant_type": "mxfp8",
        "state": state,
        "host": "elsewhere",
    }
    record |= {"launcher": launcher, "target": 8, "world_size": 2, "recipe_name": "small", "started_at": None}
    paths.run_path.write_text(json.dumps(record))
    _age(folder)
    before = list_tree(tmp_path)
    message = refuse("run", "mxfp8", *small, exit_code=3, out=tmp_path / "out")
    assert f"{folder} already holds run 4f5e ({state}, pid 1 on elsewhere, " in message
    assert "--overwrite" in message
    assert list_tree(tmp_path) == before


# -- tied embeddings --------------------------------------------------------------------------------


def test_a_checkpoint_without_an_output_head_that_is_not_tied_is_refused(refuse, small, tied_checkpoint, tmp_path):
    untied = tmp_path / "untied"
    shutil.copytree(tied_checkpoint, untied)
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    settings = [f"model.checkpoint={untied}", "model.config=null", "model.tokenizer=bytes"]
    message = refuse("run", "mxfp8", *small, *(t for s in settings for t in ("--set", s)), exit_code=3)
    assert f"model.checkpoint {untied}: the files hold no lm_head.weight" in message
    assert "set tie_word_embeddings to true in config.json" in message


def _write_pair(prefix: Path) -> None:
    """A Megatron dataset of one document of 4096 tokens, as uint16."""
    prefix.parent.mkdir()
    tokens = [i % 256 for i in range(4096)]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    index = struct.pack("<i", len(tokens)) + struct.pack("<q", 0) + struct.pack("<qq", 0, 1)
    prefix.with_suffix(".idx").write_bytes(header + index)


def _age(folder: Path) -> None:
    """As if nothing had changed for a day: a run of another host counts as alive while its files change."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 86400,) * 2)
