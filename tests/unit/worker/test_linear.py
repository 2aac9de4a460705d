"""With identity quantizers a linear's three gemms are the calls torch's own linear makes, bit for bit."""

import pytest
import torch
from torch import nn

import qcollect

SHAPES = [(7, 48), (1, 48), (2, 7, 48), (1, 1, 48), (2, 3, 5, 48), (48,)]


def run(collect, dtype, shape, bias, *, transposed=False, frozen=False, out_dir=None):
    """Output and gradients of one linear inside a model, collected from or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 33, bias=bias)).to(dtype)
    model[0].weight.requires_grad_(not frozen)
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    fed = x.transpose(0, 1) if transposed else x

    def step():
        output = model(fed)
        output.backward(torch.randn(output.shape, dtype=dtype))
        return [output.detach(), x.grad, *(p.grad for p in model.parameters())]

    if not collect:
        return step()
    with qcollect.collect(model, "none", out_dir, 5):
        return step()


def same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_output_and_gradients_are_torchs_own(tmp_path, dtype, shape, bias):
    same(run(True, dtype, shape, bias, out_dir=tmp_path / "run"), run(False, dtype, shape, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [{"transposed": True}, {"frozen": True}], ids=["transposed", "frozen"])
def test_strided_inputs_and_frozen_weights_too(tmp_path, dtype, settings):
    same(
        run(True, dtype, (2, 7, 48), True, out_dir=tmp_path / "run", **settings),
        run(False, dtype, (2, 7, 48), True, **settings),
    )


def test_gradient_that_is_expanded_is_taken_as_it_is(tmp_path):
    """The gradient of a sum is one number, expanded: no strides to rely on."""
    model = nn.Sequential(nn.Linear(4, 3))
    x = torch.randn(2, 5, 4, requires_grad=True)
    with qcollect.collect(model, "mxfp8", tmp_path / "run", 6) as collector:
        model(x).sum().backward()
        assert collector.step()
    (grad,) = qcollect.open_run(tmp_path / "run").select(tensor_name="grad_output")
    assert torch.equal(grad.load(), torch.ones(2, 5, 3))
    assert model[0].bias.grad.tolist() == [10.0] * 3


def test_only_a_linear_that_keeps_torchs_forward_is_touched(tmp_path):
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Kept(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), Kept(4, 4))
    with qcollect.collect(model, "none", tmp_path / "run", 5) as collector:
        model(torch.randn(2, 4)).sum().backward()
        assert collector.step()
    assert {capture.metadata["module"] for capture in qcollect.open_run(tmp_path / "run")} == {"1"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 48), (2, 7, 48), (2, 3, 5, 48)], ids=str)
def test_conv1d_is_its_own_bit_for_bit(tmp_path, dtype, shape):
    from transformers.pytorch_utils import Conv1D

    def step(attach):
        torch.manual_seed(0)
        model = nn.Sequential(Conv1D(33, 48)).to(dtype)
        x = torch.randn(shape, dtype=dtype).requires_grad_()
        if not attach:
            output = model(x)
            output.backward(torch.randn(output.shape, dtype=dtype))
        else:
            with qcollect.collect(model, "none", tmp_path / "run", 5):
                output = model(x)
                output.backward(torch.randn(output.shape, dtype=dtype))
        return [output.detach(), x.grad, *(p.grad for p in model.parameters())]

    same(step(True), step(False))


def test_argument_may_be_given_by_name(tmp_path):
    from transformers.pytorch_utils import Conv1D

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.conv = nn.Linear(4, 4), Conv1D(4, 4)

        def forward(self, *, hidden):
            return self.conv(x=self.fc(input=hidden))

    model, x = Named(), torch.randn(2, 4, requires_grad=True)
    plain = model(hidden=x)
    with qcollect.collect(model, "none", tmp_path / "run", 12) as collector:
        output = model(hidden=x)
        output.sum().backward()
        assert collector.step()
    assert torch.equal(output, plain)
    (capture,) = qcollect.open_run(tmp_path / "run").select(module="fc", tensor_name="input")
    assert capture.metadata["token_hash"] is not None
    assert torch.equal(capture.load(), x.detach())


def test_what_no_gradient_needs_may_be_changed_in_place(tmp_path):
    """torch keeps the input for a weight that learns, and the weight for an input that does."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x):
            hidden = self.first(x) * 1
            output = self.frozen(hidden)
            with torch.no_grad():
                self.first.weight.zero_()  # x needs no gradient
            return output + hidden.add_(1)

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(2, 4)
    hidden = model.first(x).detach()
    with qcollect.collect(model, "mxfp8", tmp_path / "run", 10) as collector:
        model(x).sum().backward()
        collector.step()
        assert collector.num_captured == 5 + 4  # grad_input of the first, grad_weight of the other do not exist
        model(x).sum().backward()
        assert collector.step()
    (capture,) = qcollect.open_run(tmp_path / "run").select(module="frozen", tensor_name="input", iteration=0)
    torch.testing.assert_close(capture.load(), hidden, atol=0.2, rtol=0.1)
    assert not torch.allclose(capture.load(), hidden + 1, atol=0.2, rtol=0.1)


def test_autocast_leaves_float64_alone(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4).double()), torch.randn(2, 4).double()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with qcollect.collect(model, "none", tmp_path / "run", 3, operations="forward"):
            assert torch.equal(model(x), plain)
    assert plain.dtype == torch.float64
