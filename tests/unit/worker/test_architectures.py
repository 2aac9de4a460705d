"""Causal LMs of several kinds, small and random: what can be tapped is captured, and training is the model's own."""

import warnings

import pytest
import torch

import qcollect
from qcollect.vocab import LayerType
from qcollect.worker.inspection import meta_sites
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import find_modules
from qcollect.worker.unserved import find_uncalled, find_unserved

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
# what is tapped of a layer, and what is told not to be
MODELS = {
    "qwen3": (GROUPED | {"head_dim": 16}, 8, set()),
    "gemma2": (GROUPED | {"head_dim": 16}, 8, set()),
    "phi3": (GROUPED | {"pad_token_id": 0}, 5, set()),
    "gpt_neox": (SMALL, 5, set()),
    "gpt2": ({"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, 5, set()),
    "opt": (SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}, 7, set()),
    "bloom": ({"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 4, {"self_attention"}),
    "mixtral": (GROUPED | {"num_local_experts": 4}, 5, {"gate", "experts"}),
    "qwen2_moe": (
        GROUPED | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        9,
        {"gate", "experts"},
    ),
    "mamba": (
        {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        4,
        {"mixer", "conv1d", "dt_proj"},
    ),
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")


def build(name, device="cpu"):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **MODELS[name][0])
    config.use_cache = False
    for dropout in DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).train()


def step(model, ids):
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return [output.logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_everything_tapped_is_captured_and_the_rest_listed(name, recipe, tokens, read_files, tmp_path):
    model, ids = build(name), tokens(2, 6)
    _, num_a_layer, names_unserved = MODELS[name]
    sites = meta_sites(build(name, "meta"), recipe)
    called = {site.module for site in sites}
    found = [f for f in find_modules(model) if not f.on_request]
    assert len(found) == 2 * num_a_layer
    unserved = find_unserved(model, QuantPolicy.from_spec(recipe.quant)) + find_uncalled(model, called)
    assert {one.name.rsplit(".", 1)[-1] for one in unserved} == names_unserved

    plain = step(model, ids)
    tapped = [f for f in found if f.name in called]
    target = sum(8 if f.layer_type == LayerType.ATTENTION else 6 for f in tapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with qcollect.collect(model, "none", tmp_path / "run", target, modules=[f.name for f in tapped]) as run:
            captured = step(model, ids)
            assert run.step()
    for a, b in zip(plain, captured, strict=True):
        assert a is b is None or torch.equal(a, b)
    files = read_files(tmp_path / "run")
    assert {key[0] for key in files} == {f.name for f in tapped}
    shapes = {site.module: site.shapes for site in sites}
    assert all(list(shapes[key[0]][key[1]]) == c["tensor_info"]["shape"] for key, c in files.items())


def test_conv1d_of_gpt2_is_captured_as_the_linear_it_is(tokens, read_first, tmp_path):
    model, ids = build("gpt2"), tokens(2, 6)
    conv = model.transformer.h[1].mlp.c_fc
    with qcollect.collect(model, "mxfp8", tmp_path / "run", 6, modules=["transformer.h.1.mlp.c_fc"]) as run:
        step(model, ids)
        assert run.step()
    files = {name: content for (_, name, _), content in read_first(tmp_path / "run").items()}
    assert conv.weight.shape == (64, 256)
    assert torch.equal(files["weight"]["tensor"], conv.weight.detach().t())
    assert torch.equal(files["grad_weight"]["tensor"], conv.weight.grad.t())
    assert {files[n]["metadata"]["token_layout"] for n in ("weight", "grad_weight")} == {"out_features,in_features"}
    x, w = (qcollect.consumed(files[n]["tensor"], files[n]["metadata"]["consumers"][0]) for n in ("input", "weight"))
    assert [files[n]["metadata"]["consumers"][0]["axis"] for n in ("input", "weight")] == [1, 1]
    assert torch.equal(files["output"]["tensor"], torch.addmm(conv.bias, x, w.t()).detach().view(2, 6, 256))


def test_model_without_anything_to_tap_is_refused_and_says_what_it_has(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("falcon", vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning) as caught, pytest.raises(qcollect.errors.SelectionError):
        qcollect.collect(model, "none", tmp_path / "run", 5)
    (message,) = [str(w.message) for w in caught if "captured" in str(w.message)]
    assert message == (
        "qcollect: neither quantized nor captured: transformer.h.*.self_attention (2 FalconAttention: an attention "
        "kernel that is not called through transformers' attention interface); "
        "transformer.h.*.self_attention.query_key_value, transformer.h.*.self_attention.dense, "
        "transformer.h.*.mlp.dense_h_to_4h, transformer.h.*.mlp.dense_4h_to_h (8 FalconLinear: a linear whose class "
        "has a forward of its own)"
    )
