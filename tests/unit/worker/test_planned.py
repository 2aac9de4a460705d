"""Under the launcher: sites seen on the meta device, a schedule made from them, a run that must follow it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import qcollect
from qcollect.errors import CaptureError
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.records import CaptureSpec
from qcollect.vocab import LayerType
from qcollect.worker.inspection import meta_model, meta_sites


def test_sites_and_shapes_are_those_of_the_real_run(recipe, make_llama, tokens, train_llama, read_files, tmp_path):
    sites = meta_sites(meta_model(recipe), recipe)
    assert [s.module for s in sites[:8]] == [
        *("model.layers.0.self_attn", *(f"model.layers.0.self_attn.{p}_proj" for p in "qkvo")),
        *(f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")),
    ]
    assert len(sites) == 17
    head = sites[-1]
    assert (head.module, head.on_request, head.excluded, head.layer_idx) == ("lm_head", True, True, None)
    assert {s.module for s in sites if s.excluded and s is not head} == {
        "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj",
    }  # fmt: skip
    assert all(s.without_grad == () for s in sites)
    train_llama(make_llama(num_hidden_layers=2), tokens(2, 6), "none", tmp_path / "run", 106, modules="*")
    by_module = {s.module: s for s in sites}
    files = read_files(tmp_path / "run")
    assert len(files) == 106
    for (module, name, *_), content in files.items():
        assert by_module[module].shapes[name] == tuple(content["tensor"].shape), (module, name)
        assert by_module[module].element_bytes == content["tensor"].element_size()


def test_checkpointing_and_bf16_do_not_change_the_sites(recipe):
    other = replace(recipe, train=replace(recipe.train, compute="bf16", activation_checkpointing="reentrant"))
    sites, plain = (meta_sites(meta_model(r), r) for r in (other, recipe))
    assert [replace(s, element_bytes=4) for s in sites] == plain
    assert {s.element_bytes for s in sites} == {2}


def test_frozen_weights_and_inputs_without_grad_are_seen_on_the_meta_device(recipe):
    model = meta_model(recipe)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    by_module = {s.module: s.without_grad for s in meta_sites(model, recipe)}
    assert by_module["model.layers.0.self_attn.q_proj"] == ("grad_input",)
    assert by_module["model.layers.1.mlp.up_proj"] == ("grad_weight",)
    assert by_module["model.layers.1.self_attn.q_proj"] == by_module["model.layers.0.self_attn"] == ()


def test_everything_frozen_leaves_no_backward(recipe):
    model = meta_model(recipe)
    model.requires_grad_(False)
    by_module = {s.module: s.without_grad for s in meta_sites(model, recipe)}
    assert by_module["model.layers.0.mlp.up_proj"] == ("grad_input", "grad_weight", "grad_output")
    assert by_module["model.layers.0.self_attn"] == ("grad_query", "grad_key", "grad_value", "grad_output")


def test_run_follows_its_plan_and_ignores_other_arguments(plan, make_llama, tokens, read_files, tmp_path):
    planned = plan()
    model = make_llama(num_hidden_layers=2)
    with qcollect.collect(model, "hifp8", tmp_path / "elsewhere", 3, values="both") as run:
        model(input_ids=tokens(2, 6), labels=tokens(2, 6)).loss.backward()
        assert run.step(loss=1.0)
    files = read_files(planned.run_dir)
    assert len(files) == 100
    assert {c["metadata"]["quant_type"] for c in files.values()} == {"mxfp8"}
    assert {c["metadata"]["run_id"] for c in files.values()} == {"planned"}
    assert not (tmp_path / "elsewhere").exists()
    by_counter = {int(p.name.split("_")[2]): p.name.split("_sample0_")[1] for p in planned.run_dir.glob("*.pt")}
    assert by_counter == {i: f"{capture.tensor}.pt" for i, capture in enumerate(planned.schedule.captures, start=1)}


def test_capture_that_does_not_come_fails_the_run(plan, make_llama, tokens):
    plan()
    model = make_llama(num_hidden_layers=2)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)  # unlike the recipe's
    with pytest.raises(CaptureError) as error, qcollect.collect(model) as run:
        model(input_ids=tokens(2, 6), labels=tokens(2, 6)).loss.backward()
        run.step()
    assert str(error.value) == (
        "rank 0, iteration 0: did not see 1 captures, first number 44, model.layers.1.mlp.up_proj backward "
        "grad_weight; the script's model differs from the recipe's, the module did not run, or the micro-batch did "
        "not come"
    )


def test_micro_batch_that_does_not_come_fails_the_run(plan, recipe, make_llama, tokens):
    plan(replace(recipe, train=replace(recipe.train, micro_batches=2), capture=CaptureSpec(target=101)))
    model = make_llama(num_hidden_layers=2)
    text = "did not see 1 captures, first number 101,"
    with pytest.raises(CaptureError, match=text), qcollect.collect(model) as run:
        model(input_ids=tokens(2, 6), labels=tokens(2, 6)).loss.backward()
        run.step()


def test_model_that_never_runs_fails_the_run(plan):
    plan()
    text = "did not see 100 captures, first number 1, model.layers.1.self_attn forward query"
    with pytest.raises(CaptureError, match=text), qcollect.collect(nn.Linear(2, 2)) as run:
        run.step()


def test_values_both_follow_the_plan_as_well(plan, recipe, make_llama, tokens, read_files):
    spec = CaptureSpec(target=2 * (11 + 6 * 12 + 6), values="both")
    planned = plan(replace(recipe, capture=spec))
    model = make_llama(num_hidden_layers=2)
    with qcollect.collect(model) as run:
        model(input_ids=tokens(2, 6), labels=tokens(2, 6)).loss.backward()
        assert run.step()
    assert len(read_files(planned.run_dir)) == spec.target


def test_module_sites_go_through_json():
    site = ModuleSites(
        module="a.0",
        layer_type=LayerType.LINEAR,
        layer_idx=0,
        shapes={"input": (1, 2)},
        element_bytes=2,
        without_grad=("grad_input",),
        excluded=True,
    )
    assert ModuleSites.from_dict(json.loads(json.dumps(site.to_dict()))) == site


def test_meta_model_takes_no_memory(recipe):
    model = meta_model(recipe)
    assert {p.device for p in model.parameters()} == {torch.device("meta")}
