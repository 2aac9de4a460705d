"""One use of an operand: what its entry in ``consumers`` says, and what it costs to say it."""

from functools import cache

import pytest
import torch
from torch import nn

import qcollect
from qcollect.formats.binding import Binding
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.quantizer import Quantizer
from qcollect.recipe.records import QuantSpec
from qcollect.store.capture import plain
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.frame import Frame
from qcollect.worker.policy import QuantPolicy, Use
from qcollect.worker.sites import linear_widths

TYPES = tuple(name for name, entry in QUANT_TYPES.items() if entry.element is not None)


make_quantizer = cache(Quantizer.create)  # a policy has one object of each


def use_of(x, quant_type, **settings):
    return Use.of(
        x,
        make_quantizer(quant_type, axis=1, **settings),
        layer_type=LayerType.LINEAR,
        tensor_name="input",
        gemm=Gemm.FPROP,
        seeds=(0, 0, 0, "fc"),
    )


@pytest.fixture
def counts(monkeypatch):
    """One entry for each time that elements are counted."""
    taken = []
    count = Binding.num_saturated

    def counted(binding):
        taken.append(tuple(binding.x.shape))
        return count(binding)

    monkeypatch.setattr(Binding, "num_saturated", counted)
    return taken


@pytest.mark.parametrize("hadamard", [None, 16])
@pytest.mark.parametrize("quant_type", TYPES)
def test_describing_a_use_waits_for_no_value(quant_type, hadamard):
    """On the meta device there is none to be had."""
    scaled = {"tensor_scale": True, "saturate": True} if QUANT_TYPES[quant_type].takes_tensor_scale else {}
    use = use_of(torch.empty(26, 64, device="meta"), quant_type, hadamard=hadamard, **scaled)
    entry = use.describe(use.num_saturated())
    for name in ("num_saturated", "amax", "scale"):
        if entry[name] is not None:
            assert (entry[name].device.type, entry[name].dim()) == ("meta", 0)


def test_written_down_an_entry_holds_numbers():
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([957.0, 960.0, 43.6966])
    use = use_of(x, "mxfp8")
    assert plain(use.describe(use.num_saturated()))["num_saturated"] == 2
    use = use_of(x, "fp8_e4m3")
    entry = plain(use.describe(use.num_saturated()))
    assert (entry["amax"], entry["num_saturated"]) == (960.0, 0)
    assert entry["scale"] == pytest.approx(960 / 448)


@pytest.mark.parametrize(("quant_type", "num"), [("mxfp8", 6), ("hifp8", 3)])
@pytest.mark.parametrize("values", ["original", "quantized", "both"])
def test_elements_are_counted_once_for_an_original_and_its_copies(
    train_plain, read_first, tmp_path, counts, quant_type, num, values
):
    """Of a type without blocks once for both gemms, too: they consume the same values."""
    x = torch.randn(26, 64, requires_grad=True)
    target = {"original": 6, "quantized": 6 + 3, "both": 6 + 6}[values]
    train_plain(nn.Sequential(nn.Linear(64, 8, bias=False)), x, quant_type, tmp_path / "run", target, values=values)
    assert len(counts) == num
    files = read_first(tmp_path / "run")
    for (_, name, gemm), content in files.items():
        if gemm is not None and values == "both":
            entries = files["0", name, None]["metadata"]["consumers"]
            assert content["metadata"]["consumers"] == [entry for entry in entries if entry["gemm"] == gemm]


def test_what_prepares_counts_is_as_wide_as_the_operands_of_linears(counts, make_llama):
    model = make_llama(num_hidden_layers=1)
    config = model.config
    kv_width = config.num_key_value_heads * config.head_dim
    widths = linear_widths(model)
    assert widths == sorted({config.hidden_size, config.intermediate_size, kv_width})
    policy = QuantPolicy.from_spec(QuantSpec(type="mxfp4", grad_rounding="stochastic"))
    state = torch.get_rng_state()
    policy.prepare_counts(torch.device("cpu"), [torch.bfloat16, torch.float32], widths)
    assert torch.equal(torch.get_rng_state(), state)
    # two axes, two roundings along either
    assert len(counts) == 2 * (4 * len(widths) + 2)


def test_modules_that_read_one_tensor_have_it_counted_once(make_llama, tokens, tmp_path, counts):
    ids = tokens(1, 6)
    model = make_llama(num_hidden_layers=1)
    names = {"modules": ["*q_proj", "*k_proj", "*v_proj"], "tensor_names": ["input"]}
    with qcollect.collect(model, "mxfp4", tmp_path / "run", 3, **names) as run:
        model(input_ids=ids, labels=ids).loss.backward()
        run.step()
    assert len(counts) == 2  # along either axis
    entries = [capture.metadata["consumers"] for capture in qcollect.open_run(tmp_path / "run")]
    assert len(entries) == 3 and all(entry == entries[0] for entry in entries)


def test_a_count_is_of_one_content_of_memory(counts):
    frame = Frame(iteration=0, micro_batch=0, sample_idx=0, num_samples=1, wanted={}, taker=None)

    def counted(x, **settings):
        counts.clear()
        frame.describe(use_of(x, "mxfp8", **settings))
        return bool(counts)

    memory = bytearray(4 * 64)
    x = torch.frombuffer(memory, dtype=torch.float32).view(2, 32)
    assert [counted(x), counted(x), counted(x.view(2, 32))] == [True, False, False]
    assert counted(x, scale_rule="rceil")
    assert counted(x.clone()) and not counted(x)
    x.mul_(2)
    assert counted(x) and not counted(x)
    assert counted(torch.frombuffer(memory, dtype=torch.float32).view(2, 32))  # another tensor's memory by now
