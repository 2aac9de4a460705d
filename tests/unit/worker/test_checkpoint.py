"""A checkpoint folder is judged by its names and headers: what is missing, damaged or another model's is told."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qcollect.plan.finding import Level
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import ModelSpec
from qcollect.worker.checkpoint import describe_missing, find_config_problem, read_checkpoint
from qcollect.worker.file_checks import find_pointer, read_header
from qcollect.worker.inspection import inspect_recipe
from qcollect.worker.model import build_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 2471645608\n".format("4d7a21" + "0" * 58)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole checkpoint, as one file and in parts; not to be changed."""
    folders = {}
    for name, size in (("single", "1GB"), ("parts", "40KB")):
        folders[name] = tmp_path_factory.mktemp("models") / name
        llama().save_pretrained(folders[name], max_shard_size=size)
    return folders


@pytest.fixture
def single(saved, tmp_path):
    return shutil.copytree(saved["single"], tmp_path / "single")


@pytest.fixture
def parts(saved, tmp_path):
    return shutil.copytree(saved["parts"], tmp_path / "parts")


def problem_of(folder):
    (finding,) = read_checkpoint(folder).findings
    assert (finding.check, finding.level) == ("checkpoint", Level.PROBLEM)
    return finding


def inspect(folder, *settings):
    """What a run's inspection says of the checkpoint, in words, problems and warnings."""
    data = ["data.path=$BUNDLED_DIR/text/encyclopedia.txt", "data.tokenizer=bytes", "data.sequence_length=32"]
    recipe = load_recipe("smollm2_135m_wikipedia", [f"model.checkpoint={folder}", *data, *settings])
    return [f for f in inspect_recipe(recipe).findings if f.check == "checkpoint"]


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewrite_header(file, change):
    """Change the header of a safetensors file and leave its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


# ---------------------------------------------------------------------------------------------
# Whole
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single", "parts"])
def test_a_whole_checkpoint_gives_names_and_shapes(saved, name):
    files = read_checkpoint(saved[name])
    assert files.findings == ()
    assert files.shapes == {n: tuple(p.shape) for n, p in llama().named_parameters()}
    assert (files.num_files > 1) == (name == "parts")
    assert files.num_bytes == sum(p.stat().st_size for p in saved[name].glob("*.safetensors"))


def test_tied_weights_need_no_output_head(saved):
    (finding,) = inspect(saved["single"])
    assert finding.level == Level.OK
    assert finding.message == (
        f"{saved['single']}: LlamaForCausalLM with 28,832 parameters; 20 tensors in 1 file(s), "
        f"{(saved['single'] / SINGLE).stat().st_size:,} bytes"
    )
    model = build_model(ModelSpec(checkpoint=str(saved["single"])), device="cpu")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


# keras-team/keras-hub PR 1895, QwenLM/Qwen3-VL-Embedding issue 89: tied by the files, untied by the configuration
def test_an_output_head_that_is_neither_there_nor_tied_is_refused_by_name(single):
    rewrite_config(single, tie_word_embeddings=False)
    (finding,) = inspect(single)
    assert finding == describe_missing(str(single), ["lm_head.weight"])
    assert finding.text == (
        f"model.checkpoint {single}: the files hold no lm_head.weight, which would train from random values; "
        "if it is tied to the embedding, set tie_word_embeddings to true in config.json"
    )


@pytest.mark.parametrize("kind", ["head_for_embedding", "without_prefix"])
def test_what_transformers_loads_whole_is_not_refused(single, kind):
    """Of two tied weights either may be stored, and a model saved without its head lacks a part in its names."""
    tensors = load_file(single / SINGLE)
    if kind == "head_for_embedding":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    else:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, single / SINGLE, {"format": "pt"})
    assert [f.level for f in inspect(single)] == [Level.OK]
    _, info = AutoModelForCausalLM.from_pretrained(single, output_loading_info=True)
    assert not info["missing_keys"]


# ---------------------------------------------------------------------------------------------
# Git LFS pointers
# ---------------------------------------------------------------------------------------------


# huggingface/transformers issue 27923, microsoft/OmniParser issue 34
@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_a_git_lfs_pointer_is_called_one_with_the_size_it_names(single, name):
    (single / name).write_text(POINTER)
    (finding,) = inspect(single)
    assert finding.level == Level.PROBLEM
    assert finding.message == (
        f"{single / name}: Git LFS pointer, real file not downloaded "
        f"(its size is 2,471,645,608 bytes, {len(POINTER)} are here)"
    )
    assert finding.advice == f"run 'git lfs pull' in {single}, or download the file itself"


@pytest.mark.parametrize("name", [INDEX, "model-00001-of-"])
def test_a_pointer_among_the_parts_is_found(parts, name):
    path = next(p for p in sorted(parts.iterdir()) if p.name.startswith(name))
    path.write_text(POINTER)
    assert problem_of(parts).message.startswith(f"{path}: Git LFS pointer, real file not downloaded (its size is ")


def test_every_part_that_is_a_pointer_is_named(parts):
    names = sorted(p for p in parts.glob("*.safetensors"))
    for path in names:
        path.write_text(POINTER)
    assert [f.message.split(": ")[0] for f in read_checkpoint(parts).findings] == [str(p) for p in names]


def test_a_pointer_may_end_its_lines_as_windows_does_or_lack_a_size(tmp_path):
    (tmp_path / "a").write_bytes(POINTER.replace("\n", "\r\n").encode())
    assert "its size is 2,471,645,608 bytes" in find_pointer("data", tmp_path / "a").message
    (tmp_path / "b").write_text(POINTER.split("size")[0])
    assert "not downloaded (108" not in find_pointer("data", tmp_path / "b").message
    assert find_pointer("data", tmp_path / "b").check == "data"
    (tmp_path / "c").write_text("version 2\n")
    assert find_pointer("data", tmp_path / "c") is None
    assert find_pointer("data", tmp_path / "gone") is None


# ---------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("", "is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "holds a JSON list, no object"),
    ],
)
def test_a_damaged_configuration_is_told_with_its_place(single, content, problem):
    (single / "config.json").write_text(content)
    finding = find_config_problem(single)
    assert finding.text == f"{single}/config.json: {problem}; download it again"


def test_weights_that_are_stored_quantized_are_refused(single):
    rewrite_config(single, quantization_config={"quant_method": "gptq", "bits": 4})
    assert find_config_problem(single).text == (
        f"{single}/config.json: the weights are stored quantized (quantization_config, method 'gptq'); "
        "take the model's unquantized checkpoint: qcollect quantizes by itself"
    )


def test_a_model_that_is_no_causal_language_model_is_told_by_its_type(single):
    (single / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (finding, *_) = inspect(single)
    assert finding.message.startswith(
        f"model.checkpoint {single}: no causal language model can be built of its config.json (model_type 't5'): "
    )


def test_a_missing_folder_says_where_to_put_it_and_what_needs_none(tmp_path):
    (finding,) = inspect(tmp_path / "gone")
    assert finding.text == (
        f"model.checkpoint {tmp_path}/gone: does not exist; put the model's folder (config.json, *.safetensors, "
        "tokenizer.json) there, or name another with --set model.checkpoint=DIR (--recipe tiny needs none)"
    )


def test_a_folder_without_configuration_is_told_with_what_else_it_lacks(tmp_path):
    assert [f.message for f in inspect(tmp_path)] == [
        f"model.checkpoint {tmp_path}: has no config.json",
        f"{tmp_path}: holds no weights; looked for model.safetensors and model.safetensors.index.json",
    ]


# ---------------------------------------------------------------------------------------------
# Weight files
# ---------------------------------------------------------------------------------------------


def test_every_missing_part_is_named(parts):
    gone = sorted(parts.glob("*.safetensors"))[1:]
    total = len(list(parts.glob("*.safetensors")))
    for path in gone:
        path.unlink()
    (finding,) = inspect(parts)
    names = ", ".join(path.name for path in gone)
    assert finding.text == (
        f"{parts / INDEX} names {total} files, and {total - 1} of them are missing: {names}; download them into {parts}"
    )


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(parts, content):
    (parts / INDEX).write_text(content)
    assert problem_of(parts).text == f"{parts / INDEX}: has no weight_map of tensor and file names; download it again"


def test_an_index_that_is_no_json_is_refused(parts):
    (parts / INDEX).write_text('{"weight_map": {"a"')
    assert problem_of(parts).message.startswith(f"{parts / INDEX}: is no JSON: Expecting ':' delimiter")


def test_parts_without_their_index_are_told_so(parts):
    (parts / INDEX).unlink()
    first = sorted(parts.glob("*.safetensors"))[0].name
    assert problem_of(parts).text == f"{parts / INDEX}: missing, although {first} is there; download the index too"


def test_the_single_file_is_taken_before_an_index_as_transformers_does(single, parts):
    shutil.copy(single / SINGLE, parts / SINGLE)
    for path in parts.glob("model-*"):
        path.unlink()
    assert read_checkpoint(parts).num_files == 1
    LlamaForCausalLM.from_pretrained(parts)


def test_pickled_weights_are_not_read_and_can_be_converted(single):
    model = LlamaForCausalLM.from_pretrained(single)
    (single / SINGLE).unlink()
    torch.save(model.state_dict(), single / "pytorch_model.bin")
    (single / "training_args.bin").write_bytes(b"")
    finding = problem_of(single)
    assert finding.message == f"{single}: holds pytorch_model.bin, and weights are read from safetensors only"
    head, command = finding.advice.split(": python -c ")
    assert head == (
        "download the model's *.safetensors; or, if you trust the file (it is unpickled), convert it and copy the "
        "tokenizer"
    )
    exec(command.strip('"'))
    converted = read_checkpoint(single.with_name("single-safetensors"))
    assert converted.findings == () and len(converted.shapes) == 20


def test_a_gguf_is_told_how_to_be_converted(tmp_path):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    assert problem_of(tmp_path).text == (
        f"{tmp_path}: holds model-q4.gguf, and weights are read from safetensors only; "
        f"'python recipes/convert_gguf.py {tmp_path}/model-q4.gguf DIR' makes a folder of it"
    )


@pytest.mark.parametrize("lost", [1, 5000])
def test_a_truncated_file_says_how_much_of_it_is_there(single, lost):
    file = single / SINGLE
    whole = file.stat().st_size
    os.truncate(file, whole - lost)
    assert problem_of(single).text == (f"{file}: is cut short, {whole - lost:,} of {whole:,} bytes; download it again")


def test_a_file_cut_inside_its_header_says_how_much_it_has_at_least(single):
    file = single / SINGLE
    length = int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, 100)
    assert problem_of(single).text == f"{file}: is cut short, 100 of at least {8 + length:,} bytes; download it again"


@pytest.mark.parametrize("content", [b"", b"abc", b"<!DOCTYPE html><html>"])
def test_what_is_no_safetensors_file_is_told_so(single, content):
    (single / SINGLE).write_bytes(content)
    assert problem_of(single).text == (
        f"{single / SINGLE}: is no safetensors file ({len(content)} bytes); download it again"
    )


def test_bytes_behind_the_data_are_told(single):
    file = single / SINGLE
    whole = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"12345")
    assert problem_of(single).message == (f"{file}: is longer than its header says, {whole + 5:,} of {whole:,} bytes")


def test_a_header_that_is_no_json_is_told(single):
    content = bytearray((single / SINGLE).read_bytes())
    content[8] = ord("[")
    (single / SINGLE).write_bytes(content)
    assert problem_of(single).message.startswith(f"{single / SINGLE}: its header is no JSON: ")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda h: h[NORM].update(shape=[31]), "is F32 [31], which is 124 bytes, and its data_offsets span 128"),
        (lambda h: h[NORM].update(dtype="F16"), "is F16 [32], which is 64 bytes, and its data_offsets span 128"),
        (lambda h: h[NORM].update(dtype="Q4"), "is of dtype 'Q4'; known: BOOL, U8, I8, F8_E4M3, "),
        (lambda h: h[NORM].update(shape=[-32]), "has no proper shape and data_offsets in the header"),
        (lambda h: h[NORM].update(data_offsets=[9]), "has no proper shape and data_offsets in the header"),
        (lambda h: h.update({NORM: 3}), "has no proper shape and data_offsets in the header"),
    ],
)
def test_a_tensor_whose_entry_contradicts_itself_is_named(single, change, problem):
    rewrite_header(single / SINGLE, change)
    assert problem_of(single).message.startswith(f"{single / SINGLE}: tensor {NORM} {problem}")


def test_tensors_that_overlap_are_named(single):
    def overlap(header):
        header["model.norm.weight"]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]

    rewrite_header(single / SINGLE, overlap)
    assert "begins at byte" in problem_of(single).message


def test_a_header_without_tensors_is_refused(single):
    rewrite_header(single / SINGLE, lambda header: header.clear())
    assert problem_of(single).message == f"{single / SINGLE}: its header names no tensors"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_every_dtype_that_safetensors_writes_is_known(tmp_path, dtype):
    tensors = {
        "a": torch.zeros(3, 2).to(dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
    }
    save_file(tensors, tmp_path / "file")
    assert read_header("checkpoint", tmp_path / "file") == {"a": (3, 2), "empty": (0,), "scalar": ()}


# ---------------------------------------------------------------------------------------------
# Files and configuration of two models
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"vocab_size": 300},
            "model.embed_tokens.weight is [320, 32] in the files and [300, 32] by config.json "
            "(vocab_size 300, hidden_size 32)",
        ),
        (
            {"intermediate_size": 96},
            "model.layers.0.mlp.gate_proj.weight is [64, 32] in the files and [96, 32] by config.json, "
            "model.layers.0.mlp.up_proj.weight is [64, 32] in the files and [96, 32] by config.json and 4 more",
        ),
    ],
)
def test_shapes_that_the_configuration_contradicts_are_named(single, changes, text):
    rewrite_config(single, **changes)
    (finding,) = inspect(single)
    assert finding.message == f"model.checkpoint {single}: {text}"
    assert finding.advice == (
        "config.json and the weights are of different models, or one of them was changed: download both again"
    )


def test_layers_that_the_files_lack_are_named(single):
    rewrite_config(single, num_hidden_layers=3)
    (finding,) = inspect(single)
    assert finding.text == (
        f"model.checkpoint {single}: the files hold no model.layers.2.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight, "
        "model.layers.2.mlp.up_proj.weight and 5 more, which would train from random values; "
        "download the checkpoint again, or see whether config.json belongs to it"
    )


def test_weights_the_model_has_no_place_for_are_warned_of(single):
    rewrite_config(single, num_hidden_layers=1)
    warning, whole = inspect(single)
    assert (warning.level, whole.level) == (Level.WARNING, Level.OK)
    assert warning.message == (
        f"model.checkpoint {single}: the model has no place for 9 tensors of the files: "
        "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight and 5 more"
    )
    assert warning.advice == (
        "they are left out; compare num_hidden_layers, architectures and model_type in config.json"
    )


# ---------------------------------------------------------------------------------------------
# Permissions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", SINGLE])
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(single, name):
    (single / name).chmod(0)
    assert inspect(single)[0].text == (
        f"{single / name}: cannot be read: Permission denied; make it readable for the user who starts runs"
    )


def test_an_error_of_the_file_system_is_told_with_the_file(single, monkeypatch):
    file = type(single)
    opened = file.open

    def refuse(self, *args, **kwargs):
        if self.name == SINGLE:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(file, "open", refuse)
    assert problem_of(single).text == (
        f"{single / SINGLE}: cannot be read: Permission denied; make it readable for the user who starts runs"
    )


def test_a_folder_that_may_not_be_entered_is_no_traceback(tmp_path, monkeypatch):
    def refuse(self, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "is_file", refuse)
    for finding in (find_config_problem(tmp_path), problem_of(tmp_path)):
        assert finding.message == f"{tmp_path}: cannot be read: Permission denied"
