"""What a gemm consumed is on file, follows from the original on file, and is what the results were made from."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qcollect
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.quantizer import Quantizer, consumed, fake_quantize

LAYER = "model.layers.0."
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPERANDS = {
    ("input", "fprop"): 1, ("input", "wgrad"): 0, ("weight", "fprop"): 1, ("weight", "dgrad"): 0,
    ("grad_output", "dgrad"): 1, ("grad_output", "wgrad"): 0,
}  # fmt: skip
TYPES = tuple(name for name, entry in QUANT_TYPES.items() if entry.element is not None and not entry.element.is_cast)
WITH_TENSOR_SCALE = ("nvfp4", "fp8_e4m3", "fp8_e5m2")


def follow(tensor: torch.Tensor, consumer: dict) -> torch.Tensor:
    """The value a consumer read, from the original and what its entry says."""
    return consumed(tensor, consumer)


def exact_operand(content: dict, original: torch.Tensor) -> torch.Tensor:
    """What the gemm multiplied, in float32: without the tensor's own scale, and that scale."""
    (consumer,) = content["metadata"]["consumers"]
    quantizer = Quantizer.create(consumer["quant_type"], axis=consumer["axis"])
    operand = quantizer.operand(original.reshape(consumer["shape"]), amax=consumer["amax"])
    return operand.float(), torch.tensor(consumer["scale"])


@pytest.fixture(scope="module")
def runs(make_llama, tokens, train_llama, read_first, tmp_path_factory):
    """One iteration with everything on file, by quant type and dtype; taken once."""
    taken = {}

    def run(quant_type, dtype=torch.bfloat16, **settings):
        key = (quant_type, dtype, repr(settings))
        if key not in taken:
            out = tmp_path_factory.mktemp("run") / quant_type
            values = "original" if quant_type == "none" else "both"
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                target = settings.pop("target", None) or count(quant_type)
                model = make_llama(dtype)
                collector = train_llama(model, tokens(2, 13), quant_type, out, target, values=values, **settings)
            assert collector.iteration == 1
            taken[key] = read_first(out)
        return taken[key]

    def count(quant_type):
        return 50 if quant_type == "none" else 11 + 7 * 12

    return run


@pytest.fixture(params=TYPES)
def quant_type(request):
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def files(runs, quant_type, request):
    return runs(quant_type, request.param)


def quantized(files):
    return {key: content for key, content in files.items() if key[2] is not None}


def test_every_consuming_gemm_has_its_file(files):
    expected = {(name, *operand) for name in LINEARS for operand in OPERANDS}
    expected |= {("self_attn", name, "fprop") for name in ("query", "key", "value")}
    assert set(quantized(files)) == expected
    for content in quantized(files).values():
        assert content["metadata"]["values"] == "quantized"
        assert len(content["metadata"]["consumers"]) == 1


def test_quantized_file_is_a_fixed_point_of_its_own_consumer(files, quant_type):
    if quant_type in ("hif4",):
        pytest.skip("its block scale follows from the abs max by a quotient, which rounds another way the second time")
    for key, content in quantized(files).items():
        tensor, (consumer,) = content["tensor"], content["metadata"]["consumers"]
        assert list(tensor.shape) == consumer["shape"], key
        assert torch.equal(follow(tensor, consumer), tensor), key


def test_quantized_file_follows_bit_for_bit_from_the_original(files):
    for (module, name, gemm), content in quantized(files).items():
        original = files[module, name, None]
        (consumer,) = (c for c in original["metadata"]["consumers"] if c["gemm"] == gemm)
        assert torch.equal(follow(original["tensor"], consumer), content["tensor"]), (module, name, gemm)
        assert content["metadata"]["consumers"] == [consumer]
        assert not torch.equal(content["tensor"], original["tensor"].reshape(consumer["shape"]))


def test_originals_name_all_their_consumers_and_results_have_none(files):
    for (module, name, gemm), content in files.items():
        if gemm is None:
            attention = module == "self_attn"
            expected = [g for n, g in OPERANDS if n == name] if not attention else ["fprop"]
            if name in ("output", "grad_input", "grad_weight", "grad_query", "grad_key", "grad_value"):
                expected = []
            if attention and name == "grad_output":
                expected = []
            assert [c["gemm"] for c in content["metadata"]["consumers"]] == expected, (module, name)


def test_operands_are_quantized_along_the_contraction(files):
    for (module, name, gemm), content in quantized(files).items():
        (consumer,) = content["metadata"]["consumers"]
        axes = {"query": 3, "key": 3, "value": 2} if module == "self_attn" else OPERANDS
        assert consumer["axis"] == (axes[name] if module == "self_attn" else axes[name, gemm])


def test_consumer_holds_type_rule_rounding_and_block(files, quant_type):
    expected = {
        "hifp8": ("hifp8", None, "half_away", None),
        "nvfp4": ("nvfp4", "nearest", "nearest_even", 16),
        "hif4": ("hif4", "nearest", "half_away", 64),
        "fp8_e4m3": ("fp8_e4m3", "nearest", "nearest_even", None),
        "fp8_e5m2": ("fp8_e5m2", "nearest", "nearest_even", None),
    }.get(quant_type, (quant_type, "floor", "nearest_even", 32))
    for content in quantized(files).values():
        (consumer,) = content["metadata"]["consumers"]
        assert tuple(consumer[k] for k in ("quant_type", "scale_rule", "rounding", "block_size")) == expected
        assert consumer["seed"] is None
        assert (
            (consumer["scale"] is None)
            == (consumer["amax"] is None)
            == (quant_type not in ("hifp8", *WITH_TENSOR_SCALE))
        )
        assert set(consumer) == {
            "gemm", "axis", "quant_type", "scale_rule", "rounding", "block_size", "scale", "seed",
            "saturate", "shape", "num_saturated", "amax", "amax_scope", "source_dtype", "hadamard", "hadamard_seed",
            "definition",
        }  # fmt: skip


def test_results_are_the_products_of_the_files(files, quant_type):
    if quant_type in WITH_TENSOR_SCALE:
        pytest.skip("the tensor's scale multiplies the result: see the next test")
    for name in LINEARS:

        def operand(tensor_name, gemm, name=name):
            return files[name, tensor_name, gemm]["tensor"]

        def result(tensor_name, name=name):
            tensor = files[name, tensor_name, None]["tensor"]
            return tensor.reshape(-1, tensor.shape[-1])

        assert torch.equal(result("output"), F.linear(operand("input", "fprop"), operand("weight", "fprop")))
        assert torch.equal(result("grad_input"), operand("grad_output", "dgrad").mm(operand("weight", "dgrad")))
        assert torch.equal(result("grad_weight"), operand("grad_output", "wgrad").t().mm(operand("input", "wgrad")))


@pytest.mark.parametrize("quant_type", WITH_TENSOR_SCALE)
def test_a_tensors_own_scale_multiplies_the_result_in_float32(runs, quant_type):
    files = runs(quant_type, torch.bfloat16)
    for name in LINEARS:
        for result, left, right in (
            ("output", ("input", "fprop"), ("weight", "fprop")),
            ("grad_input", ("grad_output", "dgrad"), ("weight", "dgrad")),
            ("grad_weight", ("grad_output", "wgrad"), ("input", "wgrad")),
        ):
            (a, a_scale), (b, b_scale) = (
                exact_operand(files[name, *operand], files[name, operand[0], None]["tensor"])
                for operand in (left, right)
            )
            a, b = (a, b.t()) if result == "output" else (a, b) if result == "grad_input" else (a.t(), b)
            expected = (a.mm(b) * (a_scale * b_scale)).bfloat16()
            tensor = files[name, result, None]["tensor"]
            assert torch.equal(tensor.reshape(expected.shape), expected), (name, result)


@pytest.mark.parametrize("rounding", ["stochastic"])
def test_stochastic_rounding_draws_anew_for_every_use_and_again_the_same(runs, rounding):
    files, again = (runs("mxfp4", rounding=rounding, seed=seed) for seed in (7, 7))
    other = runs("mxfp4", rounding=rounding, seed=8)
    seeds = [content["metadata"]["consumers"][0]["seed"] for content in quantized(files).values()]
    assert len(set(seeds)) == len(seeds)
    for key, content in quantized(files).items():
        original = files[key[0], key[1], None]["tensor"]
        assert torch.equal(follow(original, content["metadata"]["consumers"][0]), content["tensor"]), key
        assert torch.equal(again[key]["tensor"], content["tensor"]), key
    assert not torch.equal(other["q_proj", "input", "fprop"]["tensor"], files["q_proj", "input", "fprop"]["tensor"])


def test_gradients_alone_are_rounded_stochastically(runs):
    for (_, name, _), content in quantized(runs("mxfp4", grad_rounding="stochastic")).items():
        expected = "stochastic" if name == "grad_output" else "nearest_even"
        assert content["metadata"]["consumers"][0]["rounding"] == expected


def test_weights_alone_are_quantized_in_tiles(runs):
    files = runs("mxfp8", weight_block_size=[32, 32])
    for (_, name, _), content in quantized(files).items():
        (consumer,) = content["metadata"]["consumers"]
        assert consumer["block_size"] == ([32, 32] if name == "weight" else 32)
    fprop, dgrad = (files["q_proj", "weight", gemm]["tensor"] for gemm in ("fprop", "dgrad"))
    assert torch.equal(fprop, dgrad)  # a tile is the same along both axes


def test_hadamard_transform_of_one_gemms_operands(runs):
    size = 2  # of 26 tokens; the catalog knows powers of four
    with pytest.raises(qcollect.errors.UsageError, match="hadamard"):
        runs("mxfp4", overrides={"wgrad": {"hadamard": size}})
    files = runs("mxfp4", overrides={"fprop": {"hadamard": 16}})
    a, b = (files["q_proj", name, "fprop"] for name in ("input", "weight"))
    assert a["metadata"]["consumers"][0]["hadamard"] == 16
    assert a["metadata"]["consumers"][0]["hadamard_seed"] == b["metadata"]["consumers"][0]["hadamard_seed"]
    x, weight = (files["q_proj", name, None]["tensor"].float() for name in ("input", "weight"))
    exact = x.reshape(26, 64) @ weight.t()
    product = a["tensor"].float() @ b["tensor"].float().t()
    assert ((product - exact).norm() / exact.norm()) < 0.3
    output = files["q_proj", "output", None]["tensor"]
    torch.testing.assert_close(output.reshape(product.shape).float(), product, rtol=1e-2, atol=1e-2)


def test_attention_output_is_made_from_the_quantized_query_key_and_value(runs, quant_type):
    files = runs(quant_type, torch.float32)
    query, key, value = (files["self_attn", name, "fprop"]["tensor"] for name in ("query", "key", "value"))
    key, value = key.repeat_interleave(4, dim=1), value.repeat_interleave(4, dim=1)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    output = files["self_attn", "output", None]["tensor"]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    for name in ("query", "key", "value"):
        assert (
            files["self_attn", f"grad_{name}", None]["tensor"].shape == files["self_attn", name, None]["tensor"].shape
        )


def test_same_input_gives_another_output_than_without_quantization(runs, quant_type):
    files, plain = runs(quant_type), runs("none")
    assert torch.equal(files["q_proj", "input", None]["tensor"], plain["q_proj", "input", None]["tensor"])
    for name in ("output", "grad_input", "grad_weight"):
        assert not torch.equal(files["q_proj", name, None]["tensor"], plain["q_proj", name, None]["tensor"])


def test_hifp8_scale_puts_the_largest_magnitude_into_8_to_16(runs):
    files = runs("hifp8")
    for (module, name, gemm), content in quantized(files).items():
        (consumer,) = content["metadata"]["consumers"]
        largest = files[module, name, None]["tensor_info"]["abs_max"]
        assert 8 <= largest / consumer["scale"] < 16, (module, name, gemm)
        assert consumer["saturate"] is True
        assert consumer["num_saturated"] == 0


def test_unscaled_gradients_vanish_in_hifp8(runs):
    scaled, unscaled = (runs("hifp8", **s)["q_proj", "grad_output", "dgrad"] for s in ({}, {"hifp8_scale": "none"}))
    assert unscaled["metadata"]["consumers"][0]["scale"] is None
    assert unscaled["tensor_info"]["num_zero"] > scaled["tensor_info"]["num_zero"]


def test_hifp8_clamps_in_training_and_says_how_often(train_plain, read_first, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
    x = torch.tensor([[70000.0, 1.0, -1e9, float("inf")]])
    train_plain(model, x, "hifp8", tmp_path / "run", 3, values="quantized", hifp8_scale="grads", phases="pre",
                operations="forward", tensor_names="input,weight")  # fmt: skip
    files = read_first(tmp_path / "run")
    content = files["0", "input", "fprop"]
    assert content["tensor"].tolist() == [[32768.0, 1.0, -32768.0, 32768.0]]
    assert content["metadata"]["consumers"][0]["num_saturated"] == 3


def test_hifp8_scale_of_gradients_only(runs):
    files = runs("hifp8", hifp8_scale="grads")
    scales = {key: content["metadata"]["consumers"][0]["scale"] for key, content in quantized(files).items()}
    assert {key[1] for key, scale in scales.items() if scale is not None} == {"grad_output"}


def test_tail_blocks_of_tokens_have_their_own_scale(runs):
    """26 tokens and head_dim 8 are shorter than a block of 32: the quantizer must not run into the next row."""
    files = runs("mxfp8")
    tensor = files["q_proj", "input", None]["tensor"].reshape(26, 64)
    by_column = torch.cat([fake_quantize(tensor[:, [i]], "mxfp8", axis=0) for i in range(64)], dim=1)
    assert torch.equal(files["q_proj", "input", "wgrad"]["tensor"], by_column)


def test_bf16_run_consumes_plain_casts(runs):
    files = runs("bf16", torch.float32)
    for (module, name, _), content in quantized(files).items():
        original = files[module, name, None]["tensor"]
        assert torch.equal(content["tensor"], original.reshape(content["tensor"].shape).bfloat16().float())


# ---- settings ------------------------------------------------------------------------------------


def test_excluded_modules_are_captured_and_not_quantized(runs, make_llama, tokens, train_llama, read_first, tmp_path):
    target = 11 + 6 * 12 + 6
    train_llama(
        make_llama(), tokens(2, 13), "mxfp8", tmp_path / "run", target, values="both", exclude="*.o_proj"
    )  # fmt: skip
    files = read_first(tmp_path / "run")
    assert {key[1:] for key in files if key[0] == "o_proj"} == {
        (name, None) for name in ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
    }
    o_proj = {name: files["o_proj", name, None] for name in ("input", "weight", "output", "grad_output", "grad_weight")}
    assert all(content["metadata"]["consumers"] == [] for content in o_proj.values())
    assert torch.equal(o_proj["output"]["tensor"], F.linear(o_proj["input"]["tensor"], o_proj["weight"]["tensor"]))
    grads = o_proj["grad_output"]["tensor"].reshape(-1, 64)
    assert torch.equal(o_proj["grad_weight"]["tensor"], grads.t().mm(o_proj["input"]["tensor"].reshape(-1, 64)))
    assert quantized({k: v for k, v in files.items() if k[0] == "q_proj"})


def test_lm_head_is_captured_on_request_and_not_quantized(make_llama, tokens, train_llama, read_files, tmp_path):
    model = make_llama(tie_word_embeddings=False)
    train_llama(model, tokens(), "mxfp4", tmp_path / "run", 6, modules="lm_head", values="both")
    files = {key[:3]: content for key, content in read_files(tmp_path / "run").items()}
    assert {key[0] for key in files} == {"lm_head"}
    assert len(files) == 6
    info = files["lm_head", "output", None]
    assert info["metadata"]["layer_idx"] is None
    assert torch.equal(
        info["tensor"],
        F.linear(files["lm_head", "input", None]["tensor"], files["lm_head", "weight", None]["tensor"]),
    )


def test_overrides_hold_for_their_gemm_alone(runs):
    files = runs("mxfp8", torch.float32, overrides={"wgrad": {"type": "bf16"}, "dgrad": {"scale_rule": "ceil"}})
    for (module, name, gemm), content in quantized(files).items():
        (consumer,) = content["metadata"]["consumers"]
        expected = {
            "fprop": ("mxfp8", "floor", 32),
            "dgrad": ("mxfp8", "ceil", 32),
            "wgrad": ("bf16", None, None),
        }[gemm]
        assert (consumer["quant_type"], consumer["scale_rule"], consumer["block_size"]) == expected
        original = files[module, name, None]["tensor"].reshape(content["tensor"].shape)
        if gemm == "wgrad":
            assert torch.equal(content["tensor"], original.bfloat16().float())
    wgrad = files["q_proj", "grad_output", "wgrad"]["tensor"].t().mm(files["q_proj", "input", "wgrad"]["tensor"])
    assert torch.equal(files["q_proj", "grad_weight", None]["tensor"], wgrad)


def test_gemm_overridden_with_none_reads_originals(runs):
    files = runs("mxfp8", target=11 + 7 * 10, overrides={"wgrad": {"type": "none"}})
    assert {key[2] for key in files} == {None, "fprop", "dgrad"}
    content = files["q_proj", "input", None]
    assert [c["gemm"] for c in content["metadata"]["consumers"]] == ["fprop"]
    grads = files["q_proj", "grad_output", None]["tensor"].reshape(26, 64)
    assert torch.equal(files["q_proj", "grad_weight", None]["tensor"], grads.t().mm(content["tensor"].reshape(26, 64)))


@pytest.mark.parametrize(("values", "target"), [("both", 8 + 7 * 12), ("quantized", 8 + 7 * 9)])
def test_attention_is_left_alone_on_request(make_llama, tokens, train_llama, read_first, tmp_path, values, target):
    train_llama(make_llama(), tokens(), "mxfp8", tmp_path / "run", target, values=values, attention="none")
    files = read_first(tmp_path / "run")
    attention = {key: content for key, content in files.items() if key[0] == "self_attn"}
    assert {key[2] for key in attention} == {None}
    assert len(attention) == 8
    assert all(content["metadata"]["consumers"] == [] for content in attention.values())


def test_scale_rule_rounding_and_block_size_are_the_runs_own(make_llama, tokens, train_llama, read_first, tmp_path):
    train_llama(
        make_llama(), tokens(), "mxfp4", tmp_path / "run", 95, values="both",
        scale_rule="even", rounding="half_away", block_size=16,
    )  # fmt: skip
    for content in quantized(read_first(tmp_path / "run")).values():
        (consumer,) = content["metadata"]["consumers"]
        assert (consumer["scale_rule"], consumer["rounding"], consumer["block_size"]) == ("even", "half_away", 16)
        assert torch.equal(follow(content["tensor"], consumer), content["tensor"])


def test_quantized_only_leaves_results_as_originals(make_llama, tokens, train_llama, read_first, tmp_path):
    train_llama(make_llama(), tokens(), "mxfp8", tmp_path / "run", 8 + 7 * 9, values="quantized")
    files = read_first(tmp_path / "run")
    assert {key[1] for key in files if key[2] is None} == {
        "output", "grad_output", "grad_input", "grad_weight", "grad_query", "grad_key", "grad_value",
    }  # fmt: skip
    assert ("q_proj", "grad_output", None) not in files


def test_autocast_operands_are_what_the_gemm_reads(train_plain, read_first, tmp_path):
    """Under autocast F.linear casts its operands; so it is the cast ones that are captured and quantized."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(32, 8)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.fc(x).float()

    model, x = Model(), torch.randn(3, 32, requires_grad=True)
    reference = model(x)
    reference.square().sum().backward()
    grad, grad_x = model.fc.weight.grad.clone(), x.grad.clone()
    model.zero_grad()
    x.grad = None
    with qcollect.collect(model, "none", tmp_path / "run", 6) as run:
        output = model(x)
        output.square().sum().backward()
        assert run.step()
    assert torch.equal(output, reference)
    assert torch.equal(model.fc.weight.grad, grad)
    assert torch.equal(x.grad, grad_x)
    files = read_first(tmp_path / "run")
    assert files["fc", "input", None]["tensor_info"]["dtype"] == "torch.bfloat16"
    assert torch.equal(files["fc", "weight", None]["tensor"], model.fc.weight.detach().bfloat16())


def test_quantized_gemms_under_autocast_read_and_give_its_dtype(train_plain, read_first, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(64, 8)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.fc(x)

    model, x = Model(), torch.randn(3, 64, requires_grad=True)
    train_plain(model, x, "mxfp8", tmp_path / "run", 6)
    files = {name: content for (_, name, _), content in read_first(tmp_path / "run").items()}
    assert {content["tensor"].dtype for content in files.values()} == {torch.bfloat16}
    assert torch.equal(files["input"]["tensor"], x.detach().bfloat16())

    def operand(name, gemm):
        (entry,) = [c for c in files[name]["metadata"]["consumers"] if c["gemm"] == gemm]
        assert entry["source_dtype"] in (None, "bfloat16")
        return qcollect.consumed(files[name]["tensor"], entry)

    expected = F.linear(operand("input", "fprop"), operand("weight", "fprop"), model.fc.bias.detach().bfloat16())
    assert torch.equal(files["output"]["tensor"], expected)
    grads = operand("grad_output", "dgrad").mm(operand("weight", "dgrad"))
    assert torch.equal(files["grad_input"]["tensor"], grads)
    assert torch.equal(x.grad, grads.float())
    grads = operand("grad_output", "wgrad").t().mm(operand("input", "wgrad"))
    assert torch.equal(files["grad_weight"]["tensor"], grads)
