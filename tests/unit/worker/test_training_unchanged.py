"""Capture and identity quantizers change no bit of a training: losses and all weights, five steps long."""

import importlib.util
from pathlib import Path

import pytest
import torch

import qcollect
from qcollect.data.batches import Batches, TokenDocuments
from qcollect.recipe.records import (
    CaptureSpec,
    DataSpec,
    LaunchSpec,
    ModelSpec,
    QuantSpec,
    Recipe,
    TrainSpec,
)
from qcollect.worker.model import build_model

NUM_ITERATIONS = 5
TRAIN_SCRIPT = Path(__file__).parents[3] / "recipes" / "train.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recipes_train", TRAIN_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documents():
    """Documents of 3 to 20 tokens: cut and padded to 16 they leave holes in most batches."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 21, (40,), generator=generator).tolist()
    return TokenDocuments([torch.randint(0, 64, (n,), generator=generator) for n in lengths])


@pytest.fixture
def train(script, documents, llama_config):
    """(losses, weights, padding tokens seen) of five steps."""

    def run(attach=None, *, layout="packed", compute="bf16", checkpointing="none", loss_scale=1.0, micro_batches=1):
        recipe = Recipe(
            name="r",
            path="r.yaml",
            script=str(TRAIN_SCRIPT),
            model=ModelSpec(config=llama_config),
            data=DataSpec(path=(), sequence_length=16, layout=layout),
            train=TrainSpec(
                compute=compute,
                loss_scale=loss_scale,
                activation_checkpointing=checkpointing,
                micro_batches=micro_batches,
                learning_rate=1e-2,
            ),
            quant=QuantSpec(),
            capture=CaptureSpec(),
            launch=LaunchSpec(),
        )
        batches = Batches(
            documents, sequence_length=16, layout=layout, micro_batch_size=2, micro_batches=micro_batches, pad_id=1
        )
        model = build_model(recipe.model, device="cpu")
        arguments = {} if attach is None else {"attach": attach}
        losses = script.train(recipe, model, batches, num_iterations=NUM_ITERATIONS, **arguments)
        used = [batches.batch(i, m) for i in range(NUM_ITERATIONS) for m in range(micro_batches)]
        num_padding = sum(int((b.attention_mask == 0).sum()) for b in used if b.attention_mask is not None)
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, num_padding

    return run


def capture_everything(quant_type, out_dir, micro_batches=1):
    """All 50 captures of the layer in every micro-batch, so that the last step is the one that ends the run."""
    return lambda model: qcollect.collect(
        model,
        quant_type,
        out_dir,
        NUM_ITERATIONS * micro_batches * 50,
        iterations=f"0-{NUM_ITERATIONS - 1}",
        num_iterations=NUM_ITERATIONS,
        micro_batches=micro_batches,
        micro_batch_size=2,
    )


def same(a, b):
    assert len(a[0]) == len(b[0]) == NUM_ITERATIONS
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name, weight in a[1].items():
        assert torch.equal(weight, b[1][name]), name


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("compute", "quant_type"), [("bf16", "bf16"), ("fp32", "none")])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
def test_five_steps_are_the_same_bit_for_bit(train, tmp_path, layout, compute, quant_type, checkpointing):
    settings = {"layout": layout, "compute": compute}
    plain = train(**settings)
    captured = train(capture_everything(quant_type, tmp_path / "run"), checkpointing=checkpointing, **settings)
    same(plain, captured)
    assert len(list((tmp_path / "run").glob("*.pt"))) == NUM_ITERATIONS * 50
    assert plain[0][0] != plain[0][-1]  # it does learn
    if layout == "padded":
        assert plain[2] > 0


def test_accumulated_micro_batches_are_the_same_bit_for_bit(train, tmp_path):
    plain = train(layout="padded", micro_batches=2)
    captured = train(capture_everything("bf16", tmp_path / "run", 2), layout="padded", micro_batches=2)
    same(plain, captured)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_power_of_two_loss_scale_changes_no_bit(train, tmp_path, compute):
    plain = train(compute=compute)
    scaled = train(capture_everything("none", tmp_path / "run"), compute=compute, loss_scale=1024.0)
    same(plain, scaled)


def test_quantized_training_is_not_the_same(train, tmp_path):
    """The counter-proof: the comparison above does see a difference."""
    plain = train(compute="fp32")
    quantized = train(capture_everything("mxfp8", tmp_path / "run"), compute="fp32")
    assert plain[0] != quantized[0]


def test_rotary_frequencies_stay_in_float32_under_bf16_compute(script, llama_config):
    model = build_model(ModelSpec(config=llama_config), device="cpu")
    before = model.model.rotary_emb.inv_freq.clone()
    script.MasterWeights(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_ignored(make_llama, tokens, tmp_path, attention, side):
    """A tapped implementation without a mask function of its own would get no mask at all."""
    model = make_llama(attention=attention)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    if side == "right":
        mask = mask.flip(1)
    real = mask.bool()

    def logits(pad_id):
        ids = torch.where(real, tokens(2, 9), torch.full_like(mask, pad_id))
        return model(input_ids=ids, attention_mask=mask).logits[real]

    untapped = logits(3)
    with qcollect.collect(model, "none", tmp_path / "run", 50):
        assert model.config._attn_implementation == f"qcollect_{attention}"
        assert torch.equal(logits(3), untapped)
        assert torch.equal(logits(60), untapped)
