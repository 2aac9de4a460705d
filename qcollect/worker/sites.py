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
from qcollect.worker.linear import is_linear, quantized_linear
from qcollect.worker.policy import Quantizers, QuantPolicy

WRAPPER_NAMES = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModule:
    """A linear or an attention kernel of a model, by FQN. ``on_request``: the output head."""

    name: str
    module: nn.Module
    layer_type: LayerType
    layer_idx: int | None
    on_request: bool = False


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside torch's data-parallel wrappers, whose FQNs and forward are the ones meant.

    Raises:
        UsageError: ``nn.DataParallel``.
    """
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "nn.DataParallel runs copies of the model, made anew in every forward, that nothing can be captured from; "
            "use torch.nn.parallel.DistributedDataParallel"
        )
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        inner: nn.Module = model.module  # type: ignore[assignment]
        return inner
    return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` by the names the user gave: without those torch's wrappers put in between."""
    for name, module in model.named_modules():
        yield ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES), module


def find_modules(model: nn.Module) -> list[FoundModule]:
    """The linears and attention kernels of ``model`` in its own order.

    A linear is what ``linear.is_linear`` says; the output projection of torch's own attention is none, since its
    weight is used and its forward never. The layer index is the first number in the FQN:
    ``model.layers.3.self_attn.q_proj`` lies in layer 3.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found = []
    never_called = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for name, module in named_modules(model):
        if module in never_called:
            continue
        if is_linear(module):
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


def linear_widths(model: nn.Module) -> list[int]:
    """How many features go into the linears of ``model`` and come out of them, each number once; not of its head."""
    linears = [f.module for f in find_modules(model) if f.layer_type == LayerType.LINEAR and not f.on_request]
    shapes = [weight.shape for module in linears if isinstance(weight := module.weight, torch.Tensor)]
    return sorted({size for shape in shapes if len(shape) == 2 for size in shape})  # FSDP flattens them


def find_excluded(model: nn.Module, policy: QuantPolicy) -> list[str]:
    """FQNs left in high precision: embeddings, norms, the output head, and what ``quant.exclude`` names."""
    heads = {f.name for f in find_modules(model) if f.on_request}
    return [
        name
        for name, module in named_modules(model)
        if isinstance(module, nn.Embedding)
        or "Norm" in type(module).__name__
        or name in heads
        or (name and policy.excludes(name))
    ]


def _layer_idx(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


class Taps:
    """Taps on a model's modules, as ``install`` puts them on."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._undo_idle: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None], *, is_idle: bool) -> None:
        """Keep what takes a tap off; an idle one quantizes nothing."""
        (self._undo_idle if is_idle else self._undo).append(undo)

    def remove_idle(self) -> None:
        """Take off the taps that only look: once nothing is captured any more they are of no use."""
        while self._undo_idle:
            self._undo_idle.pop()()

    def remove(self) -> None:
        """Take all taps off and leave the model as it was."""
        self.remove_idle()
        while self._undo:
            self._undo.pop()()


def install(
    model: nn.Module,
    policy: QuantPolicy,
    current_frame: Callable[[], Frame | None],
    moment: Callable[[], Moment] = lambda: (0, 0),
) -> Taps:
    """Tap every module of ``find_modules``: operands are quantized and offered to the current frame.

    ``moment`` gives iteration and micro-batch of the forward that runs.

    Raises:
        UsageError: there are taps already.
    """
    taps = Taps()
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
        put_on = _tap_linear if found.layer_type == LayerType.LINEAR else _tap_attention
        taps.add(put_on(found.module, tap, current_frame), is_idle=_is_idle(quantizers))
    for config in _attention_configs(model):
        taps.add(_use_twin(config), is_idle=_is_idle(policy.attention))
    return taps


def _is_idle(quantizers: Quantizers) -> bool:
    return all(quantizer.is_identity for quantizer in quantizers.values())


def _tap_linear(module: nn.Module, tap: ModuleTap, current_frame: Callable[[], Frame | None]) -> Callable[[], None]:
    def forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (x,) = (*args, *kwargs.values())  # a linear calls its argument input, Conv1D x
        return quantized_linear(self, x, tap, current_frame())

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
