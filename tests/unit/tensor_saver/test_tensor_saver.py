import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import qcollect
from qcollect import tensor_saver
from qcollect.errors import CaptureError, FormatError, UsageError
from qcollect.store.capture import load_capture
from qcollect.tensor_saver import (
    TensorCollectionState,
    TensorSaver,
    get_current_rank_and_sample,
    get_tensor_saver,
    initialize_tensor_collection,
    save_attention_tensors,
    save_linear_tensors,
    save_tensor,
    set_global_batch_idx,
    set_global_iteration,
    set_global_rank,
    set_global_sample_idx,
    set_global_sequence_idx,
)
from qcollect.vocab import CaptureName
from qcollect.worker import state

NAMES = (
    "TensorSaver", "get_tensor_saver", "save_tensor", "save_attention_tensors", "save_linear_tensors",
    "TensorCollectionState", "initialize_tensor_collection", "set_global_rank", "set_global_sample_idx",
    "set_global_iteration", "set_global_batch_idx", "set_global_sequence_idx", "get_current_rank_and_sample",
)  # fmt: skip
X = torch.arange(6.0).reshape(2, 3)


def metadata(path):
    return load_capture(path)["metadata"]


def output(**settings):
    return save_tensor(tensor=X, layer_type="linear", operation="forward", tensor_name="output", **settings)


# ---- the calls of the first users -----------------------------------------------------------------


def test_every_name_is_there():
    assert set(NAMES) <= set(tensor_saver.__all__)
    assert all(callable(getattr(tensor_saver, name)) for name in NAMES)


def test_attention_call_of_the_first_users():
    attention_mask, kind = torch.zeros(1, 1, 4, 4), "causal"
    results = save_attention_tensors(
        query=X,
        key=X + 1,
        value=X + 2,
        quant_type="hifp8",
        operation="forward",
        layer_idx=0,
        metadata={
            "attention_mask_shape": list(attention_mask.shape) if attention_mask is not None else None,
            "attn_mask_type": str(kind) if kind is not None else None,
        },
    )
    assert list(results) == ["query", "key", "value"]
    for i, (name, path) in enumerate(results.items()):
        content = load_capture(path)
        assert torch.equal(content["tensor"], X + i)
        assert content["metadata"]["attention_mask_shape"] == [1, 1, 4, 4]
        assert content["metadata"]["attn_mask_type"] == "causal"
        fields = CaptureName.parse(Path(path).name)
        assert (fields.layer_type, fields.layer_idx, fields.operation) == ("attention", 0, "forward")
        assert (fields.phase, fields.component, fields.quant_type, fields.tensor) == ("pre", "FA", "hifp8", name)


def test_linear_calls_of_the_first_users():
    weight = torch.ones(4, 3)
    forward = save_linear_tensors(
        input_tensor=X,
        weight=weight,
        quant_type="mxfp8",
        operation="forward",
        layer_idx=1,
        metadata={"sequence_parallel": False, "use_bias": True, "tp_group_size": None},
    )
    backward = save_linear_tensors(
        input_tensor=torch.zeros(2, 4),
        weight=weight,
        quant_type="mxfp8",
        operation="backward",
        layer_idx=1,
        metadata={"sequence_parallel": False, "wgrad_compute": True, "tp_group_size": None},
    )
    assert list(forward) == ["input", "weight"]
    assert list(backward) == ["grad_output", "weight"]
    assert metadata(forward["input"])["use_bias"] is True
    assert metadata(backward["grad_output"])["tensor_name"] == "grad_output"
    assert Path(backward["grad_output"]).name.endswith(
        "_linear_L1_backward_pre_linear_mxfp8_rank0_sample0_grad_output.pt"
    )


def test_single_tensor_call_of_the_first_users(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    path = save_tensor(
        tensor=X,
        layer_type="linear",
        operation="forward",
        quant_type="bf16",
        tensor_name="output",
        layer_idx=getattr(None, "layer_idx", None),
        phase="post",
        component="linear",
        rank=int(os.environ.get("LOCAL_RANK", 0)),
        sample_idx=int(os.environ.get("CURRENT_SAMPLE_IDX", 0)),
        metadata={"note": 1},
    )
    assert re.fullmatch(
        r"\d{8}_\d{6}_0001_iter000_linear_forward_post_linear_bf16_rank0_sample0_output\.pt", Path(path).name
    )
    assert metadata(path)["note"] == 1


def test_arguments_by_position_are_in_the_order_of_the_first_users():
    path = save_tensor(X, "linear", "forward", "bf16", "output", 3, "post", "linear", 2, 5, {"a": 1})
    found = metadata(path)
    assert (found["layer_idx"], found["phase"], found["rank"], found["sample_idx"], found["a"]) == (3, "post", 2, 5, 1)
    results = save_attention_tensors(X, X, X, "mxfp4", "forward", 7, {"b": 2})
    assert (metadata(results["key"])["layer_idx"], metadata(results["key"])["b"]) == (7, 2)
    results = save_linear_tensors(X, None, "mxfp4", "forward", 7, {"b": 2})
    assert list(results) == ["input"]
    assert metadata(results["input"])["b"] == 2


def test_saver_that_initializes_itself():
    saver = get_tensor_saver()
    path = saver.save_tensor(
        tensor=X,
        layer_type="linear",
        operation="forward",
        quant_type="bf16",
        tensor_name="output",
        layer_idx=0,
        phase="post",
        component="linear",
    )
    assert (metadata(path)["rank"], metadata(path)["sample_idx"], metadata(path)["iteration"]) == (0, 0, 0)
    assert get_tensor_saver() is saver


def test_state_that_moves_in_a_training_loop():
    saver = get_tensor_saver()
    paths = []
    for iteration in range(3):
        set_global_iteration(iteration)
        for batch_idx in range(2):
            set_global_sample_idx(batch_idx)
            set_global_batch_idx(10 + batch_idx)
            set_global_sequence_idx(20 + batch_idx)
            paths.append(saver.save_tensor(X, "linear", "forward", "bf16", "output", 0, phase="post"))
    found = [metadata(path) for path in paths]
    assert [(m["iteration"], m["sample_idx"]) for m in found] == [(i, s) for i in range(3) for s in range(2)]
    assert [(m["batch_idx"], m["sequence_idx"]) for m in found[:2]] == [(10, 20), (11, 21)]
    assert len(set(paths)) == 6


def test_initializing_by_hand_sets_everything():
    initialize_tensor_collection(rank=3, sample_idx=4, iteration=5, batch_idx=6, sequence_idx=7)
    assert get_current_rank_and_sample() == (3, 4)
    found = metadata(output())
    assert [found[k] for k in ("rank", "sample_idx", "iteration", "batch_idx", "sequence_idx")] == [3, 4, 5, 6, 7]


def test_initializing_leaves_rank_and_sample_to_detection(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("CURRENT_SAMPLE_IDX", "9")
    initialize_tensor_collection()
    assert get_current_rank_and_sample() == (2, 9)
    assert isinstance(state.STATE, TensorCollectionState)


def test_example_in_the_docstring_runs():
    names = {"query": X, "key": X, "value": X, "x": X, "weight": X, "grad_output": X, "output": X}
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", tensor_saver.__doc__)
    assert len(blocks) == 2
    for block in blocks:
        exec("\n".join(line[4:] for line in block.splitlines()), names)
    assert len(list(Path("tensor_logs").glob("*.pt"))) == 7 + 3


# ---- settings from the environment ----------------------------------------------------------------


def test_bare_saver_takes_hifp8_and_tensor_logs_as_it_stands(tmp_path):
    path = output()
    assert Path(path).parent == tmp_path / "tensor_logs"
    assert metadata(path)["quant_type"] == "hifp8"


def test_environment_gives_type_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    monkeypatch.setenv("TENSOR_SAVE_DIR", "./logs/experiment_001")
    monkeypatch.setenv("TENSOR_SAVER_ITERATION", "12")
    monkeypatch.setenv("CURRENT_SAMPLE_IDX", "34")
    path = output()
    assert Path(path).parent == tmp_path / "logs" / "experiment_001"
    found = metadata(path)
    assert (found["quant_type"], found["iteration"], found["sample_idx"]) == ("mxfp4", 12, 34)
    assert metadata(output(quant_type="bf16"))["quant_type"] == "bf16"


def test_saving_switched_off_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    assert output() is None
    assert save_linear_tensors(X, X, "bf16") == {"input": None, "weight": None}
    assert save_attention_tensors(X, X, X, "bf16") == {"query": None, "key": None, "value": None}
    assert os.listdir(tmp_path) == []


def test_arguments_of_a_saver_come_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    saver = TensorSaver(save_dir=tmp_path / "mine", enabled=True, quant_type="bf16")
    path = saver.save_tensor(X, "linear", "forward")
    assert Path(path).parent == tmp_path / "mine"
    assert metadata(path)["quant_type"] == "bf16"
    assert TensorSaver(save_dir=tmp_path / "other", enabled=False).save_tensor(X, "linear", "forward") is None


def test_unknown_type_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "hifp9")
    with pytest.raises(FormatError, match="quant type 'hifp9' is not known; known: .*; did you mean 'hifp8'?"):
        TensorSaver()


# ---- rank ----------------------------------------------------------------------------------------


def test_rank_is_taken_by_hand_process_group_rank_local_rank_device_in_this_order(monkeypatch):
    on_card = SimpleNamespace(device=torch.device("cuda", 6))
    monkeypatch.setattr(tensor_saver, "detect_rank", lambda _: state.detect_rank(on_card))
    found = [metadata(output())["rank"]]
    monkeypatch.setenv("LOCAL_RANK", "5")
    found.append(metadata(output())["rank"])
    monkeypatch.setenv("RANK", "4")
    found.append(metadata(output())["rank"])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    found.append(metadata(output())["rank"])
    set_global_rank(2)
    found.append(metadata(output())["rank"])
    found.append(metadata(output(rank=1))["rank"])
    assert found == [6, 5, 4, 3, 2, 1]


def test_rank_set_by_hand_keeps_what_else_is_known(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    set_global_rank(5)
    found = metadata(output())
    assert (found["rank"], found["local_rank"], found["world_size"]) == (5, 1, 8)


def test_global_and_local_rank_differ_on_several_nodes(monkeypatch):
    for name, value in {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    path = output()
    found = metadata(path)
    assert (found["rank"], found["local_rank"], found["world_size"]) == (9, 1, 16)
    assert "_rank9_" in path
    assert Path("tensor_logs/.qcollect/manifest/rank00009.jsonl").exists()


def test_rank_0_by_default_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(state, "_warned_default_rank", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [metadata(output())["rank"] for _ in range(3)] == [0, 0, 0]
    assert len(caught) == 1


# ---- identity --------------------------------------------------------------------------------------


def test_two_calls_of_a_layer_are_two_captures():
    first, second = (save_linear_tensors(X + i, X, "bf16", layer_idx=0) for i in range(2))
    assert first["input"] != second["input"]
    assert torch.equal(load_capture(second["input"])["tensor"], X + 1)
    run = qcollect.open_run("tensor_logs")
    assert len({capture.key for capture in run}) == len(run) == 4
    assert [c.metadata["module"] for c in run.select(tensor_name="input")] == ["linear.L0#0", "linear.L0#1"]


def test_repeat_of_a_named_module_is_dropped_and_the_first_wins():
    """Activation recomputation calls the same save again."""
    named = {"metadata": {"module": "decoder.layers.0.mlp.linear_fc1"}, "layer_idx": 0}
    first = save_linear_tensors(X, X, "bf16", **named)
    again = save_linear_tensors(X + 1, X, "bf16", **named)
    assert again == first
    assert torch.equal(load_capture(first["input"])["tensor"], X)
    assert len(list(Path("tensor_logs").glob("*.pt"))) == 2
    other = save_linear_tensors(X, X, "bf16", layer_idx=0, metadata={"module": "decoder.layers.0.mlp.linear_fc2"})
    assert other["input"] != first["input"]


@pytest.mark.parametrize("field", ["iteration", "sample_idx", "rank", "micro_batch"])
def test_named_module_of_another_place_is_no_repeat(field):
    def save(value):
        own = {"module": "a"} | ({"micro_batch": value} if field == "micro_batch" else {})
        return output(metadata=own, **({} if field == "micro_batch" else {field: value}))

    assert save(0) != save(1)


def test_numbers_of_the_files_go_up():
    paths = [output() for _ in range(3)]
    assert [CaptureName.parse(Path(p).name).counter for p in paths] == [1, 2, 3]


# ---- what is in a file -----------------------------------------------------------------------------


def test_file_has_every_field_and_the_callers_own():
    own = {
        "shape": torch.Size([2, 3]),
        "pair": (1, (2, 3)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "path": Path("/a"),
        "scale": torch.tensor(0.5),
        "nan": float("nan"),
        "rank": "mine",
    }
    content = torch.load(output(layer_idx=2, metadata=own), weights_only=True)
    found = content["metadata"]
    assert {
        "schema", "rank", "local_rank", "world_size", "sample_idx", "num_samples", "batch_idx", "sequence_idx",
        "iteration", "micro_batch", "layer_type", "layer_idx", "operation", "phase", "component", "quant_type",
        "tensor_name", "module", "values", "consumers", "token_layout", "loss_scale", "token_hash", "save_time",
        "run_id", "sharding",
    } <= set(found)  # fmt: skip
    assert found["shape"] == [2, 3]
    assert found["pair"] == [1, [2, 3]]
    assert (found["dtype"], found["device"], found["path"]) == ("torch.bfloat16", "cpu", "/a")
    assert (found["scale"], found["nan"], found["rank"]) == (0.5, "nan", 0)
    assert (found["values"], found["consumers"], found["layer_idx"]) == ("original", [], 2)
    assert set(content["tensor_info"]) == {
        "shape", "dtype", "device", "requires_grad", "is_leaf", "min", "max", "mean", "std", "abs_max", "rms",
        "min_nonzero_abs", "num_nan", "num_inf", "num_zero",
    }  # fmt: skip


def test_own_metadata_is_not_changed():
    own = {"module": "a", "shape": (1,)}
    output(metadata=own)
    assert own == {"module": "a", "shape": (1,)}


def test_backward_attention_is_saved_as_gradients():
    results = save_attention_tensors(X, X, X, "bf16", operation="backward", layer_idx=0, phase="post")
    assert list(results) == ["grad_query", "grad_key", "grad_value"]
    assert metadata(results["grad_key"])["phase"] == "post"


def test_missing_tensor_is_skipped():
    assert save_tensor(None, "linear", "forward") is None
    assert list(save_linear_tensors(X, None, "bf16")) == ["input"]


def test_layer_type_of_ones_own_is_saved():
    path = save_tensor(X, "router", "forward", "bf16", "logits", 3)
    fields = CaptureName.parse(Path(path).name)
    assert (fields.layer_type, fields.component, fields.tensor, fields.layer_idx) == ("router", "unknown", "logits", 3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"operation": "fwd"}, "operation is 'fwd'; known: forward, backward"),
        ({"phase": "during"}, "phase is 'during'; known: pre, post, unknown"),
        ({"metadata": {"values": "fake"}}, "metadata['values'] is 'fake'; known: original, quantized"),
    ],
)
def test_word_that_no_name_can_hold_is_refused(settings, text, tmp_path):
    with pytest.raises(UsageError) as error:
        save_tensor(**({"tensor": X, "layer_type": "linear", "operation": "forward"} | settings))
    assert str(error.value) == text
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_written_is_an_error_with_the_path(tmp_path):
    (tmp_path / "tensor_logs").mkdir()
    saver = get_tensor_saver()
    (tmp_path / "tensor_logs").rmdir()
    (tmp_path / "tensor_logs").touch()
    with pytest.raises(CaptureError, match=f"^{tmp_path}/tensor_logs: cannot be written: File exists "):
        saver.save_tensor(X, "linear", "forward")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_dtype_and_bits_of_narrow_floats_are_kept(name):
    """numpy knows none of them."""
    bits = torch.arange(256, dtype=torch.uint8)
    x = bits.view(getattr(torch, name))
    loaded = torch.load(save_tensor(x, "linear", "forward", tensor_name="input"), weights_only=True)
    assert loaded["tensor"].dtype == x.dtype
    assert loaded["tensor_info"]["dtype"] == f"torch.{name}"
    assert torch.equal(loaded["tensor"].view(torch.uint8), bits)
