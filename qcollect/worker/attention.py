"""The attention kernel between two taps, without touching model code.

transformers calls the function registered under ``config._attn_implementation``. For each
implementation a model uses (sdpa, eager, flash_attention_2, ...) a twin ``qcollect_<name>`` is
registered that calls it with quantized operands. The mask function must be registered under the
twin's name as well: a name without one gets no mask at all, and padding is silently ignored.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qcollect.vocab import Gemm
from qcollect.worker.frame import Frame, ModuleTap
from qcollect.worker.sharding import local_of, spread_heads

PREFIX = "qcollect_"
HEADS_LAYOUT = "batch,head,token,head_dim"
OUTPUT_LAYOUT = "batch,token,head,head_dim"

# on an attention module its tap and how it finds the current frame, on a linear's forward its tap; while installed
TAP_ATTRIBUTE = "_qcollect_attention"


class _OperandTap(torch.autograd.Function):
    """Query, key and value as the kernel consumes them; gradients pass straight through."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tap: ModuleTap, frame: Frame | None
    ) -> tuple[Tensor, ...]:
        ctx.tap, ctx.frame = tap, frame
        operands = {"query": query, "key": key, "value": value}
        for name, tensor in operands.items():
            tap.observe(frame, name, tensor, token_layout=HEADS_LAYOUT, matrices={Gemm.FPROP: tensor})
        moment = tap.moment()
        quantized = (
            tap.values(frame, n, t, Gemm.FPROP, moment, token_layout=HEADS_LAYOUT) for n, t in operands.items()
        )
        # a view where nothing was quantized: an input may not be returned as it is
        return tuple(q.view_as(q) if q is t else q for q, t in zip(quantized, operands.values(), strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        for name, grad in zip(("grad_query", "grad_key", "grad_value"), grads, strict=True):
            if grad is not None:
                ctx.tap.observe(ctx.frame, name, grad, token_layout=HEADS_LAYOUT)
        return (*grads, None, None)


def _observe_output(tap: ModuleTap, frame: Frame, output: Tensor, whole: Callable[[Tensor], Tensor]) -> None:
    """The kernel's output on the way out, its gradient on the way back; ``whole`` says of what they are parts."""
    tap.observe(frame, "output", whole(output), token_layout=OUTPUT_LAYOUT)

    def observe_grad(grad: Tensor) -> None:
        tap.observe(frame, "grad_output", whole(grad), token_layout=OUTPUT_LAYOUT)

    if output.requires_grad:
        output.register_hook(observe_grad)  # type: ignore[no-untyped-call]


def tapped_implementation(name: str) -> str:
    """The name of ``name``'s twin, registered with transformers for attention and for its mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    twin = PREFIX + name
    if twin not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(twin, _make_twin(name))
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(twin, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return twin


def _make_twin(name: str) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        kernel = _kernel(name, module)
        found: tuple[ModuleTap, Callable[[], Frame | None]] | None = getattr(module, TAP_ATTRIBUTE, None)
        if found is None:
            return kernel(module, query, key, value, mask, **kwargs)
        tap, current_frame = found
        frame = current_frame()
        frame = None if frame is None else frame.of_call(tap.module)
        spread = spread_heads(module)
        operands = [query, key, value] if spread is None else [spread(t, 1) for t in (query, key, value)]
        tapped = _OperandTap.apply(*operands, tap, frame)  # type: ignore[no-untyped-call]
        output, *rest = kernel(module, *(t if spread is None else local_of(t) for t in tapped), mask, **kwargs)
        if frame is not None:
            _observe_output(tap, frame, output, (lambda t: t) if spread is None else (lambda t: spread(t, 2)))
        return (output, *rest)

    twin: Callable[..., Any] = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    return twin


def _kernel(name: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # "eager" is each model file's own function, handed over as the default
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    kernel: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return kernel


def is_attention(module: nn.Module) -> bool:
    """Whether a module dispatches its kernel through transformers' attention interface."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    own_kernel = hasattr(sys.modules.get(type(module).__module__), "eager_attention_forward")
    return implementation is not None and own_kernel and hasattr(module, "layer_idx") and hasattr(module, "scaling")
