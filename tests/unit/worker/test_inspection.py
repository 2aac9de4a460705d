import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qcollect.data.prepare import prepare
from qcollect.errors import CheckpointError
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import ModelSpec
from qcollect.worker.inspection import inspect_recipe
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
