"""A capture is the right tensor of the right micro-batch, at the moment it was seen."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qcollect


def test_value_is_the_one_before_it_is_changed_in_place(train_plain, read_first, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(5, 8)
    expected = F.linear(x, model[0].weight, model[0].bias).detach()
    train_plain(model, x, "none", tmp_path / "run", 11)
    output = read_first(tmp_path / "run")["0", "output", None]["tensor"]
    assert (output < 0).any()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8), (8,)], ids=str)
def test_in_place_after_a_linear_trains_as_without_capture(train_plain, tmp_path, shape):
    def gradients(attach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        x = torch.randn(shape, requires_grad=True)
        if attach:
            with qcollect.collect(model, "none", tmp_path / "run", 12):
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    for captured, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(captured, plain)


def test_kernel_output_may_be_changed_in_place(make_llama, tokens, tmp_path, read_first):
    outputs, grads = [], []
    for factor in (1.0, 4.0):
        model = make_llama(attention="eager")
        o_proj = model.model.layers[0].self_attn.o_proj
        o_proj.register_forward_pre_hook(lambda module, args, factor=factor: (args[0].mul_(factor),))
        with qcollect.collect(model, "none", tmp_path / str(factor), 50):
            model(input_ids=tokens(), labels=tokens()).loss.backward()
        files = read_first(tmp_path / str(factor))
        outputs.append(files["self_attn", "output", None]["tensor"])
        grads.append((files["self_attn", "grad_output", None], files["o_proj", "grad_input", None]))
    assert torch.equal(outputs[0], outputs[1])
    before, after = (content["tensor"] for content in grads[1])
    assert torch.equal(before.reshape(1, 5, 64), after * 4.0)


def test_grouped_heads_are_captured_before_they_are_repeated(make_llama, tokens, train_llama, read_first, tmp_path):
    train_llama(make_llama(), tokens(1, 5), "none", tmp_path / "run", 50)
    files = read_first(tmp_path / "run")

    def shape(module, name):
        return tuple(files[module, name, None]["tensor"].shape)

    for prefix in ("", "grad_"):
        assert shape("self_attn", f"{prefix}query") == (1, 8, 5, 8)
        assert shape("self_attn", f"{prefix}key") == shape("self_attn", f"{prefix}value") == (1, 2, 5, 8)
        assert shape("self_attn", f"{prefix}output") == (1, 5, 8, 8)
        assert shape("q_proj", f"{prefix}output") == (1, 5, 64)
        assert shape("k_proj", f"{prefix}output") == shape("v_proj", f"{prefix}output") == (1, 5, 16)
        assert shape("down_proj", f"{prefix}weight") == (64, 96)
        assert shape("down_proj", f"{prefix}input") == (1, 5, 96)
    layouts = {key[:2]: content["metadata"]["token_layout"] for key, content in files.items()}
    assert layouts["self_attn", "key"] == "batch,head,token,head_dim"
    assert layouts["self_attn", "output"] == "batch,token,head,head_dim"
    assert layouts["q_proj", "input"] == "batch,token,in_features"
    assert layouts["q_proj", "grad_output"] == "batch,token,out_features"
    assert layouts["q_proj", "weight"] == layouts["q_proj", "grad_weight"] == "out_features,in_features"


def test_captures_agree_with_what_plain_hooks_see(make_llama, tokens, train_llama, read_first, tmp_path):
    model, ids = make_llama(), tokens(2, 7)
    layer = model.model.layers[0]
    seen, handles = {}, []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            short = name.rsplit(".", 1)[-1]

            def forward(module, args, output, short=short):
                seen[short, "input"], seen[short, "output"] = args[0].detach().clone(), output.detach().clone()

            def backward(module, grads_in, grads_out, short=short):
                seen[short, "grad_input"], seen[short, "grad_output"] = grads_in[0].clone(), grads_out[0].clone()

            handles += [module.register_forward_hook(forward), module.register_full_backward_hook(backward)]
    model(input_ids=ids, labels=ids).loss.backward()
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            seen[name.rsplit(".", 1)[-1], "weight"] = module.weight.detach()
            seen[name.rsplit(".", 1)[-1], "grad_weight"] = module.weight.grad.clone()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    train_llama(model, ids, "none", tmp_path / "run", 50)
    files = read_first(tmp_path / "run")
    assert len(seen) == 42
    for (module, name), expected in seen.items():
        assert torch.equal(files[module, name, None]["tensor"], expected), (module, name)
    assert torch.equal(
        files["self_attn", "output", None]["tensor"].reshape(2, 7, 64), files["o_proj", "input", None]["tensor"]
    )
    assert torch.equal(
        files["self_attn", "grad_output", None]["tensor"].reshape(2, 7, 64),
        files["o_proj", "grad_input", None]["tensor"],
    )


def test_graph_facts_are_those_of_the_network(make_llama, tokens, train_llama, read_first, tmp_path):
    train_llama(make_llama(), tokens(), "mxfp8", tmp_path / "run", 50)
    files = read_first(tmp_path / "run")
    for name, expected in {
        "input": (True, False),
        "weight": (True, True),
        "output": (True, False),
        "grad_output": (False, True),
        "grad_weight": (False, True),
    }.items():
        info = files["q_proj", name, None]["tensor_info"]
        assert (info["requires_grad"], info["is_leaf"]) == expected, name
        assert files["q_proj", name, None]["tensor"].requires_grad is False
    assert files["self_attn", "output", None]["tensor_info"]["requires_grad"] is True


def test_weight_gradient_is_of_its_micro_batch_before_accumulation(make_llama, tokens, read_files, tmp_path):
    model = make_llama()
    weight = model.model.layers[0].mlp.down_proj.weight
    with qcollect.collect(model, "none", tmp_path / "run", 100, micro_batches=2, loss_scale=4.0) as run:
        for seed in range(2):
            ids = tokens(1, 5, seed)
            (model(input_ids=ids, labels=ids).loss * 4.0).backward()
        accumulated = weight.grad.clone()
        weight.grad.div_(1000)  # what comes afterwards, unscaling or clipping, is not in the file
        assert run.step()
    files = read_files(tmp_path / "run")
    parts = [files["model.layers.0.mlp.down_proj", "grad_weight", None, 0, m, 0] for m in range(2)]
    assert not torch.equal(parts[0]["tensor"], parts[1]["tensor"])
    torch.testing.assert_close(parts[0]["tensor"] + parts[1]["tensor"], accumulated, rtol=0, atol=0)
    assert [p["metadata"]["sample_idx"] for p in parts] == [0, 1]
    assert [p["metadata"]["loss_scale"] for p in parts] == [4.0, 4.0]
    assert parts[0]["metadata"]["token_hash"] != parts[1]["metadata"]["token_hash"]


def test_backward_after_the_next_forward_belongs_to_its_own_micro_batch(read_files, tmp_path):
    """Two forwards, then their backwards in the same order, as a pipeline runs them."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    inputs = [torch.full((1, 4), v, requires_grad=True) for v in (1.0, 2.0)]
    with qcollect.collect(model, "none", tmp_path / "run", 12, micro_batches=2) as run:
        outputs = [model(x) for x in inputs]
        for factor, output in zip((3.0, 5.0), outputs, strict=True):
            (output.sum() * factor).backward()
        assert run.step()
    files = read_files(tmp_path / "run")
    for micro_batch, (x, factor) in enumerate(zip((1.0, 2.0), (3.0, 5.0), strict=True)):
        assert files["0", "input", None, 0, micro_batch, 0]["tensor"].tolist() == [[x] * 4]
        assert files["0", "grad_output", None, 0, micro_batch, 0]["tensor"].tolist() == [[factor] * 4]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_recomputed_forwards_belong_to_the_micro_batch_of_their_backward(read_files, tmp_path, use_reentrant):
    """Two forwards, then their backwards, with an evaluation pass between: what runs again is of the first forward."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.seq = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

        def forward(self, x):
            return {"loss": checkpoint(self.seq, x, use_reentrant=use_reentrant).square().sum()}

    def train(name, num_in_flight):
        model = Checkpointed()
        inputs = [torch.full((2, 32), v, requires_grad=True) for v in (1.0, 2.0)]
        settings = {"rounding": "stochastic", "micro_batches": 2}
        with qcollect.collect(model, "mxfp8", tmp_path / name, 24, **settings) as run:
            losses = []
            for x in inputs:
                losses.append(model(x)["loss"])
                with torch.no_grad():
                    model(x * 3)
                if len(losses) == num_in_flight:
                    for loss in losses:
                        loss.backward()
                    losses.clear()
            assert run.step()
        return read_files(tmp_path / name), [p.grad for p in model.parameters()]

    one_by_one, expected = train("plain", 1)
    pipelined, grads = train("pipelined", 2)
    assert one_by_one.keys() == pipelined.keys()
    for key, content in pipelined.items():
        assert torch.equal(content["tensor"], one_by_one[key]["tensor"]), key
    for a, b in zip(grads, expected, strict=True):
        assert torch.equal(a, b)


def test_linears_with_one_weight_have_gradients_of_their_own(train_plain, read_first, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.randn(3, 4, requires_grad=True)
    model(x).square().sum().backward()
    total = model[0].weight.grad.clone()
    model.zero_grad()
    train_plain(model, x, "none", tmp_path / "run", 12)
    files = read_first(tmp_path / "run")
    assert torch.equal(files["0", "weight", None]["tensor"], files["2", "weight", None]["tensor"])
    first, second = (files[name, "grad_weight", None]["tensor"] for name in ("0", "2"))
    assert not torch.equal(first, second)
    assert torch.equal(second + first, total)


def test_evaluation_passes_are_not_recorded(make_llama, tokens, read_files, tmp_path):
    model, ids = make_llama(), tokens()
    with qcollect.collect(model, "none", tmp_path / "run", 50) as run:
        with torch.no_grad():
            model(input_ids=tokens(3, 4, seed=9))
        model.eval()
        model(input_ids=tokens(3, 4, seed=8))
        model.train()
        assert run.num_captured == 0
        loss = model(input_ids=ids, labels=ids).loss
        with torch.inference_mode():
            model(input_ids=tokens(3, 4, seed=7))
        loss.backward()
        assert run.step()
        with torch.no_grad():
            model(input_ids=ids)
    files = read_files(tmp_path / "run")
    assert len(files) == 50
    assert {content["metadata"]["micro_batch"] for content in files.values()} == {0}
    assert {content["metadata"]["sample_idx"] for content in files.values()} == {0}
    assert files["model.layers.0.self_attn.q_proj", "input", None, 0, 0, 0]["tensor"].shape == (1, 5, 64)


def test_frozen_weights_have_no_gradient_on_file(make_llama, tokens, train_llama, read_first, tmp_path):
    model = make_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" not in name)
    run = train_llama(model, tokens(), "mxfp8", tmp_path / "run", 49 + 3 + 7 * 6 - 2, values="both")
    assert run.iteration == 1
    files = read_first(tmp_path / "run")
    assert {key[1:] for key in files if key[0] == "q_proj"} == {
        ("input", None), ("input", "fprop"), ("weight", None), ("weight", "fprop"), ("weight", "dgrad"),
        ("output", None), ("grad_output", None), ("grad_output", "dgrad"), ("grad_input", None),
    }  # fmt: skip
    assert [c["gemm"] for c in files["q_proj", "input", None]["metadata"]["consumers"]] == ["fprop"]
    assert [c["gemm"] for c in files["q_proj", "grad_output", None]["metadata"]["consumers"]] == ["dgrad"]


def test_module_that_runs_twice_is_captured_in_its_first_call_there_and_back(train_plain, read_first, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.fc(self.fc(x) * 10)

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 4, requires_grad=True)
    train_plain(model, x, "none", tmp_path / "run", 6)
    files = read_first(tmp_path / "run")
    assert torch.equal(files["fc", "input", None]["tensor"], x.detach())
    # of the first call: what flows into x, not what flows between the calls
    grads, weight = files["fc", "grad_output", None]["tensor"], model.fc.weight.detach()
    assert torch.equal(files["fc", "grad_input", None]["tensor"], grads.mm(weight))
    assert torch.equal(files["fc", "grad_input", None]["tensor"], x.grad)
    assert torch.equal(files["fc", "grad_weight", None]["tensor"], grads.t().mm(x.detach()))


def test_graph_is_gone_after_the_step(make_llama, tokens, tmp_path):
    """Hooks that keep a graph alive: meta-pytorch/opacus issue 176."""
    model, ids = make_llama(), tokens()
    references = []
    handles = [
        module.register_forward_hook(lambda module, args, output: references.append(weakref.ref(output.grad_fn)))
        for module in model.model.layers[0].modules()
        if isinstance(module, nn.Linear)
    ]
    with qcollect.collect(model, "mxfp8", tmp_path / "run", 50, values="both", layers=[0]) as run:
        loss = model(input_ids=ids, labels=ids).loss
        assert all(reference() is not None for reference in references)
        loss.backward()
        del loss
        run.step()
        gc.collect()
        assert [reference() for reference in references] == [None] * 7
    for handle in handles:
        handle.remove()


def test_same_tokens_have_the_same_hash(make_llama, tokens, train_llama, read_files, tmp_path):
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_llama(make_llama(), tokens(1, 5, seed), "none", tmp_path / name, 5)
        (found,) = {content["metadata"]["token_hash"] for content in read_files(tmp_path / name).values()}
        hashes.append(found)
    assert hashes[0] == hashes[1] != hashes[2]


def test_empty_batch_is_captured(train_plain, read_first, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3))
    train_plain(model, torch.zeros(0, 4, requires_grad=True), "mxfp8", tmp_path / "run", 6)
    files = read_first(tmp_path / "run")
    assert files["0", "output", None]["tensor"].shape == (0, 3)
    assert torch.equal(files["0", "grad_weight", None]["tensor"], torch.zeros(3, 4))


def test_unsupported_dtype_is_refused_by_name(train_plain, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4).double())
    with pytest.raises(ValueError, match="mxfp8 takes dense tensors of float32, bfloat16, float16, not float64"):
        train_plain(model, torch.randn(2, 4).double(), "mxfp8", tmp_path / "run", 5)
