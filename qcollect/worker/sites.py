"""Which modules of a model can be captured, and putting taps on them and taking them off again."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from qcollect.errors import UsageError
from qcollect.vocab import LayerType
from qcollect.worker.attention import PREFIX, TAP_ATTRIBUTE, is_attention, tapped_implementation
from qcollect.worker.frame import Frame, ModuleTap, Moment
from qcollect.worker.linear import quantized_linear
from qcollect.worker.policy import QuantPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModule:
    """A linear or an attention kernel of a model, by FQN. ``on_request``: the output head."""

    name: str
    module: nn.Module
    layer_type: LayerType
    layer_idx: int | None
    on_request: bool = False


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel, whose FQNs and forward are the ones meant."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def find_modules(model: nn.Module) -> list[FoundModule]:
    """The linears and attention kernels of ``model`` in its own order.

    A linear is an ``nn.Linear`` (or a subclass that keeps its forward). The layer index is the first
    number in the FQN: ``model.layers.3.self_attn.q_proj`` lies in layer 3.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            layer_type = LayerType.LINEAR
        elif is_attention(module):
            layer_type = LayerType.ATTENTION
        else:
            continue
        found.append(
            FoundModule(
                name=name,
                module=module,
                layer_type=layer_type,
                layer_idx=_layer_idx(name),
                on_request=module is head,
            )
        )
    return found


def find_excluded(model: nn.Module, policy: QuantPolicy) -> list[str]:
    """FQNs left in high precision: embeddings, norms, the output head, and what ``quant.exclude`` names."""
    heads = {f.name for f in find_modules(model) if f.on_request}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        or "Norm" in type(module).__name__
        or name in heads
        or (name and policy.excludes(name))
    ]


def _layer_idx(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def install(
    model: nn.Module,
    policy: QuantPolicy,
    current_frame: Callable[[], Frame | None],
    moment: Callable[[], Moment] = lambda: (0, 0),
) -> Callable[[], None]:
    """Tap every module of ``find_modules``: operands are quantized and offered to the current frame.

    ``moment`` gives iteration and micro-batch of the forward that runs.

    Returns:
        A function that takes all taps off and leaves the model as it was.

    Raises:
        UsageError: there are taps already.
    """
    undo: list[Callable[[], None]] = []
    modules = find_modules(model)
    if any(hasattr(owner, TAP_ATTRIBUTE) for f in modules for owner in (f.module, f.module.__dict__.get("forward"))):
        raise UsageError("the model is collected from already; leave that context first")
    for found in modules:
        policy_name = found.name if not found.on_request else None
        quantizers = policy.quantizers(found.layer_type, policy_name)
        tap = ModuleTap(
            module=found.name,
            layer_type=found.layer_type,
            layer_idx=found.layer_idx,
            quantizers=quantizers,
            seed=policy.seed,
            moment=moment,
        )
        if found.layer_type == LayerType.LINEAR:
            undo.append(_tap_linear(found.module, tap, current_frame))
        else:
            undo.append(_tap_attention(found.module, tap, current_frame))
    undo += [_use_twin(config) for config in _attention_configs(model)]

    def uninstall() -> None:
        while undo:
            undo.pop()()

    return uninstall


def _tap_linear(module: nn.Module, tap: ModuleTap, current_frame: Callable[[], Frame | None]) -> Callable[[], None]:
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        return quantized_linear(self, input, tap, current_frame())

    before = module.__dict__.get("forward")  # another tool's wrapper would be lost otherwise
    # a model that is compiled from now on leaves its graph here
    tapped = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    setattr(tapped, TAP_ATTRIBUTE, tap)
    module.forward = MethodType(tapped, module)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def _tap_attention(module: nn.Module, tap: ModuleTap, current_frame: Callable[[], Frame | None]) -> Callable[[], None]:
    setattr(module, TAP_ATTRIBUTE, (tap, current_frame))
    return lambda: delattr(module, TAP_ATTRIBUTE)


def _attention_configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for found in find_modules(model):
        config = getattr(found.module, "config", None)
        if found.layer_type == LayerType.ATTENTION and id(config) not in seen:
            seen.add(id(config))
            yield config


def _use_twin(config: Any) -> Callable[[], None]:
    original = config._attn_implementation
    if not original.startswith(PREFIX):
        config._attn_implementation = tapped_implementation(original)

    def undo() -> None:
        config._attn_implementation = original

    return undo
