"""A linear whose three gemms consume quantized operands.

    fprop   Y  = Xq Wq^T    X along in_features, W along in_features
    dgrad   dX = dYq Wq     dY along out_features, W along out_features
    wgrad   dW = dYq^T Xq   dY along tokens, X along tokens

Every operand is quantized from its original values, never from another quantized copy. With
identity quantizers the three gemms are the calls torch's own linear makes, bit for bit.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from qcollect.vocab import Gemm
from qcollect.worker.frame import Frame, ModuleTap
from qcollect.worker.gemm import Operand, multiply, project

WEIGHT_LAYOUT = "out_features,in_features"


def _layout(tensor: Tensor, features: str) -> str:
    leading = {1: "", 2: "token,", 3: "batch,token,"}.get(tensor.dim(), "...,token,")
    return f"{leading}{features}"


def _matrix(tensor: Tensor) -> Tensor:
    """(tokens, features): the module's own order of tokens, flattened row-major."""
    return tensor.reshape(-1, tensor.shape[-1])


class QuantizedLinearFunction(torch.autograd.Function):
    """Y = X W^T + b with every gemm operand through its quantizer.

    ``folds`` is of a module that hands torch's gemms the matrix W^T it keeps, with the input flattened (Conv1D).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tap: ModuleTap, frame: Frame | None, folds: bool
    ) -> Tensor:
        ctx.tap, ctx.frame, ctx.has_bias, ctx.folds = tap, frame, bias is not None, folds
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        # as torch does: what no gradient needs may be changed in place, and its memory be given back
        ctx.save_for_backward(x if needs_wgrad else None, weight if needs_dgrad else None)
        ctx.input_shape = x.shape
        ctx.moment = moment = tap.moment()
        xq = tap.operand(frame, "input", x, Gemm.FPROP, moment, token_layout="token,in_features", matrix=_matrix(x))
        wq = tap.operand(frame, "weight", weight, Gemm.FPROP, moment, token_layout=WEIGHT_LAYOUT)
        if tap.quantizers["input", Gemm.FPROP].is_identity and not folds:
            xq = Operand(values=x)  # by shape and strides torch chooses between calls that round differently
        # a quantized input comes flattened, which is what torch folds a 3-D one to
        output = project(xq, wq, bias)
        # no view: autograd lets nobody change a view in place that a function of ours returns (a ReLU behind it may)
        unfolded: Tensor = torch.ops.aten._unsafe_view(output, (*x.shape[:-1], weight.shape[0]))
        return unfolded

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        x, weight = ctx.saved_tensors
        tap, frame, moment = ctx.tap, ctx.frame, ctx.moment
        needs_dgrad, needs_wgrad, needs_bgrad = ctx.needs_input_grad[:3]
        grads = _matrix(grad_output)
        layout = _layout(grad_output, "out_features")
        gemms = [g for g, needed in ((Gemm.DGRAD, needs_dgrad), (Gemm.WGRAD, needs_wgrad)) if needed]
        tap.observe(frame, "grad_output", grad_output, token_layout=layout, matrices=dict.fromkeys(gemms, grads))
        grad_input = grad_weight = grad_bias = None
        along_features = along_tokens = None
        layout = "token,out_features"
        if needs_dgrad and needs_wgrad:
            along_features, along_tokens = tap.operands(
                frame, "grad_output", grads, (Gemm.DGRAD, Gemm.WGRAD), moment, token_layout=layout
            )
        if needs_dgrad:
            gq = along_features or tap.operand(frame, "grad_output", grads, Gemm.DGRAD, moment, token_layout=layout)
            wq = tap.operand(frame, "weight", weight, Gemm.DGRAD, moment, token_layout=WEIGHT_LAYOUT)
            grad_input = multiply(gq, wq).view(ctx.input_shape)
            tap.observe(frame, "grad_input", grad_input, token_layout=_layout(grad_input, "in_features"))
        if needs_wgrad:
            gq = along_tokens or tap.operand(frame, "grad_output", grads, Gemm.WGRAD, moment, token_layout=layout)
            xq = tap.operand(frame, "input", x, Gemm.WGRAD, moment, token_layout="token,in_features", matrix=_matrix(x))
            grad_weight = multiply(xq.t(), gq).t() if ctx.folds else multiply(gq.t(), xq)
            tap.observe(frame, "grad_weight", grad_weight, token_layout=WEIGHT_LAYOUT)
        if ctx.has_bias and needs_bgrad:
            grad_bias = grads.sum(0)
        return grad_input, grad_weight, grad_bias, None, None, None


def _expected_gemms(x: Tensor, weight: Tensor) -> frozenset[Gemm]:
    # without grad this is the first pass of reentrant checkpointing, where no input shows that it will need one
    needs_dgrad = x.requires_grad or not torch.is_grad_enabled()
    needed = {Gemm.FPROP: True, Gemm.DGRAD: needs_dgrad, Gemm.WGRAD: weight.requires_grad}
    return frozenset(gemm for gemm, is_needed in needed.items() if is_needed)


def _observe_operands(tap: ModuleTap, frame: Frame, x: Tensor, weight: Tensor, gemms: frozenset[Gemm]) -> None:
    for name, tensor, layout, consumers in (
        ("input", x, _layout(x, "in_features"), (Gemm.FPROP, Gemm.WGRAD)),
        ("weight", weight, WEIGHT_LAYOUT, (Gemm.FPROP, Gemm.DGRAD)),
    ):
        matrices = {gemm: _matrix(tensor) for gemm in consumers if gemm in gemms}
        tap.observe(frame, name, tensor, token_layout=layout, matrices=matrices)


def quantized_linear(module: nn.Module, x: Tensor, tap: ModuleTap, frame: Frame | None) -> Tensor:
    """``module(x)`` with quantized gemms. Under autocast the operands are cast first, as F.linear casts them.

    Args:
        module: an ``nn.Linear``, or transformers' Conv1D, a linear that keeps its weight transposed.
        x: its input.
        tap: the module's.
        frame: of the forward that runs; None when nothing is captured.
    """
    frame = None if frame is None else frame.of_call(tap.module)
    folds = is_conv1d(module)
    weight: Tensor = module.weight.t() if folds else module.weight  # type: ignore[operator,assignment]
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    gemms = _expected_gemms(x, weight)
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return _apply(x, weight, bias, tap, frame, gemms, folds)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        operands = _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)
        return _apply(*operands, tap, frame, gemms, folds)


def _cast(operand: Tensor, dtype: torch.dtype) -> Tensor:
    # autocast leaves float64 alone
    return operand if operand.dtype == torch.float64 else operand.to(dtype)


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tap: ModuleTap,
    frame: Frame | None,
    gemms: frozenset[Gemm],
    folds: bool,
) -> Tensor:
    if frame is not None:
        _observe_operands(tap, frame, x, weight, gemms)
    output: Tensor = QuantizedLinearFunction.apply(x, weight, bias, tap, frame, folds)  # type: ignore[no-untyped-call]
    tap.observe(frame, "output", output, token_layout=_layout(output, "out_features"))
    return output


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` or transformers' Conv1D (or a subclass) that keeps that class's forward."""
    is_kept = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_kept or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, with its weight as (in_features, out_features)."""
    conv1d: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return conv1d is not None and isinstance(module, conv1d) and type(module).forward is conv1d.forward
