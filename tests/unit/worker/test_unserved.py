"""What no tap reaches is told, with the reason, before training."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qcollect
from qcollect.plan.finding import Level
from qcollect.recipe.records import QuantSpec
from qcollect.worker.inspection import examine_model
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.unserved import describe_unserved, find_unserved


class OwnLinear(nn.Linear):
    def forward(self, x):
        return x @ self.weight.t()


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.linear(x, self.kernel) * self.scale


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.zeros(2, 4, 4))


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))


def unserved(model, exclude=()):
    return find_unserved(model, QuantPolicy.from_spec(QuantSpec(type="mxfp8", exclude=exclude)))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnLinear(4, 4), "a linear whose class has a forward of its own"),
        (Functional(), "a forward of its own uses kernel"),
        (Experts(), "several experts' weights in one tensor, up_proj"),
        (CausalSelfAttention(), "an attention kernel that is not called through transformers' attention interface"),
        (nn.MultiheadAttention(4, 2), "torch's own attention, which takes all its weights into one call"),
        (nn.Conv2d(4, 4, 3), "a convolution"),
        (nn.LSTM(4, 4), "a forward of its own uses weight_ih_l0, weight_hh_l0"),
        (torch.jit.script(nn.Linear(4, 4)), "TorchScript, whose code cannot be changed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_module_is_told_with_the_reason(module, reason):
    (found,) = unserved(nn.ModuleDict({"layer": module, "fc": nn.Linear(4, 4)}))
    assert (found.name, found.class_name, found.reason) == ("layer", type(module).__name__, reason)


def test_what_is_served_or_high_precision_by_design_is_not_told(make_llama):
    parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.ModuleList([make_llama(), nn.Embedding(4, 4), nn.LayerNorm([4, 4]), nn.Linear(4, 4), parametrized])
    assert unserved(model) == []


def test_excluded_module_is_not_told():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert [one.name for one in unserved(model, exclude=("1",))] == ["0"]


def test_layers_are_told_together():
    model = nn.Sequential(*(nn.ModuleDict({"mlp": Experts(), "gate": OwnLinear(4, 2)}) for _ in range(3)))
    assert describe_unserved(unserved(model)) == (
        "neither quantized nor captured: *.mlp (3 Experts: several experts' weights in one tensor, up_proj); "
        "*.gate (3 OwnLinear: a linear whose class has a forward of its own)"
    )


def test_collect_warns_once_before_training(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), OwnLinear(4, 4))
    with pytest.warns(UserWarning) as caught:
        qcollect.collect(model, "mxfp8", tmp_path / "run", 5)
    assert [str(w.message) for w in caught] == [
        "qcollect: neither quantized nor captured: * (1 OwnLinear: a linear whose class has a forward of its own)"
    ]


def test_linear_whose_weight_alone_is_used_is_told_in_its_first_iteration(train_plain, tmp_path):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.called(F.linear(x, self.used.weight))

    with pytest.warns(UserWarning, match="rank 0: not called in iteration 0: used; ") as caught:
        train_plain(Direct(), torch.randn(2, 4), "none", tmp_path / "run", 12, iterations="0-1")
    assert len(caught) == 1


def test_inspection_warns_of_what_the_models_layers_hold(recipe, monkeypatch):
    def with_experts(spec):
        from transformers import MixtralConfig

        return MixtralConfig(**spec.config, num_local_experts=2)

    monkeypatch.setattr("qcollect.worker.model.load_config", with_experts)
    monkeypatch.setattr("qcollect.worker.inspection.load_config", with_experts)
    facts = examine_model(recipe)
    (warning,) = [f for f in facts.findings if f.level == Level.WARNING]
    assert warning.text == (
        "neither quantized nor captured: model.layers.*.mlp.gate (2 MixtralTopKRouter: a forward of its own uses "
        "weight); model.layers.*.mlp.experts (2 MixtralExperts: several experts' weights in one tensor, gate_up_proj, "
        "down_proj); what quant.exclude names is not told"
    )


def test_llama_is_collected_from_without_a_warning(make_llama, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qcollect.collect(make_llama(), "mxfp8", tmp_path / "run", 50)
