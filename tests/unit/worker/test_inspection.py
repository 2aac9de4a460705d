import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from qcollect.data.prepare import prepare
from qcollect.errors import CheckpointError
from qcollect.plan.finding import Level
from qcollect.plan.inspection import Device, Inspection
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import ModelSpec
from qcollect.worker import inspection as inspecting
from qcollect.worker.inspection import find_devices, inspect_recipe
from qcollect.worker.model import load_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of 4,096 ids, far more than the byte tokenizer has."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text("words " * 200)
    prepare([tmp_path / "text.txt"], "bytes", tmp_path / "corpus")
    return tmp_path / "corpus"


def recipe_of(checkpoint, data, sequence_length=32):
    return load_recipe(
        "smollm2_135m_wikipedia",
        [f"model.checkpoint={checkpoint}", f"data.path={data}", f"data.sequence_length={sequence_length}"],
    )


def test_data_of_a_much_smaller_tokenizer_is_warned_of(checkpoint, data):
    inspection = inspect_recipe(recipe_of(checkpoint, data))
    assert inspection.problems == ()
    (warning,) = inspection.warnings
    assert warning == (
        f"{data} was prepared with the tokenizer bytes of 257 ids, and the model has 4,096; "
        f"prepare it again with --tokenizer {checkpoint}"
    )


def test_checkpoint_of_experts_is_compared_as_it_is_loaded(tmp_path, data):
    """Files name each expert's weights apart, the model has them in one tensor a layer."""
    config = MixtralConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    inspection = inspect_recipe(recipe_of(tmp_path / "model", data))
    assert inspection.problems == ()
    assert [w.split(":")[0] for w in inspection.warnings] == ["neither quantized nor captured"]
    assert {m.module.rsplit(".", 1)[-1] for m in inspection.modules if m.layer_idx == 0} == {
        "self_attn", "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    files = load_file(tmp_path / "model" / "model.safetensors")
    gates = {name: tensor for name, tensor in files.items() if name.endswith("gate.weight")}
    save_file({k: v for k, v in files.items() if k not in gates}, tmp_path / "model" / "model.safetensors")
    (problem,) = inspect_recipe(recipe_of(tmp_path / "model", data)).problems
    assert "the files hold no model.layers.0.mlp.gate.weight, model.layers.1.mlp.gate.weight, which" in problem


def test_sequence_beyond_the_positions_of_the_model_is_a_problem(checkpoint, data):
    inspection = inspect_recipe(recipe_of(checkpoint, data, sequence_length=128))
    assert inspection.problems == (
        "data.sequence_length is 128, and the model's max_position_embeddings 64; shorten the sequence",
    )


def test_sequence_longer_than_the_data_is_a_problem(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("few words")
    prepare([tmp_path / "text.txt"], "bytes", tmp_path / "corpus")
    (problem,) = inspect_recipe(recipe_of(checkpoint, tmp_path / "corpus", sequence_length=64)).problems
    assert "10 tokens" in problem and "64" in problem


def test_checkpoint_that_is_a_file_is_told_from_one_that_is_missing(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a file; a folder is wanted"):
        load_config(ModelSpec(checkpoint=str(file)))
    with pytest.raises(CheckpointError, match="does not exist"):
        load_config(ModelSpec(checkpoint=str(tmp_path / "gone")))


def test_what_is_whole_is_told_too_and_an_epoch_is_counted(checkpoint, data):
    inspection = inspect_recipe(recipe_of(checkpoint, data))
    told = {f.check: f.message for f in inspection.findings if f.level == Level.OK}
    assert list(told) == ["checkpoint", "data"]
    assert told["checkpoint"].startswith(
        f"{checkpoint}: LlamaForCausalLM with {inspection.num_parameters:,} parameters; 20 tensors in 1 file(s), "
    )
    assert inspection.num_samples == 1201 // 32
    assert Inspection.from_dict(inspection.to_dict()) == inspection


def test_random_weights_need_no_checkpoint():
    inspection = inspect_recipe(load_recipe("tiny"))
    told = {f.check: f.message for f in inspection.findings}
    assert told["checkpoint"] == (
        f"none is needed: LlamaForCausalLM with {inspection.num_parameters:,} parameters, random from seed 0"
    )


def test_data_are_looked_at_although_the_model_is_missing(tmp_path, data):
    inspection = inspect_recipe(recipe_of(tmp_path / "gone", data))
    assert [(f.check, f.level) for f in inspection.findings] == [("checkpoint", Level.PROBLEM), ("data", Level.OK)]
    assert (inspection.modules, inspection.num_parameters) == ((), 0)


class Card:
    """A backend of torch with one device that tells everything, and one that is taken by another process."""

    @staticmethod
    def get_device_name(index):
        return f"Card {index}"

    @staticmethod
    def mem_get_info(index):
        if index:
            raise RuntimeError("CUDA error: all devices are busy or unavailable")
        return 60, 80

    @staticmethod
    def get_device_properties(index):
        if index:
            raise RuntimeError("CUDA error: all devices are busy or unavailable")
        return type("Properties", (), {"major": 9, "minor": 0, "uuid": "8932f937-d72c-4106-c12f-20bd9faed9f6"})


def test_devices_tell_their_memory_and_one_that_does_not_keeps_its_name(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "cuda", Card)
    uuid = "8932f937-d72c-4106-c12f-20bd9faed9f6"
    assert find_devices() == (
        Device(name="Card 0", free_bytes=60, total_bytes=80, capability="9.0", uuid=uuid),
        Device(name="Card 1"),
    )


@pytest.mark.parametrize(
    ("cuda", "hip", "told"), [("13.0", None, "CUDA 13.0"), (None, "6.4", "ROCm 6.4"), (None, None, None)]
)
def test_what_torch_was_built_for(monkeypatch, cuda, hip, told):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert inspecting.torch_accelerator() == told
