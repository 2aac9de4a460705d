"""What a model multiplies that no tap reaches: named before training, never left out in silence."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qcollect.vocab import LayerType
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import find_modules, named_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A module that runs as it does without qcollect, and why."""

    name: str
    class_name: str
    reason: str


def find_unserved(model: nn.Module, policy: QuantPolicy) -> list[Unserved]:
    """The modules with products that are neither quantized nor captured, in the model's own order.

    Embeddings and norms, which stay in high precision by design, are not among them, nor is what ``quant.exclude``
    names. A product of tensors that are no module's parameters is not seen here.
    """
    found = find_modules(model)
    linears = {f.module for f in found if f.layer_type == LayerType.LINEAR}
    kernels = {f.module for f in found if f.layer_type == LayerType.ATTENTION}
    left = []
    for name, module in named_modules(model):
        if module in linears or _stays_in_high_precision(module) or policy.excludes(name):
            continue
        reason = _reason(module, kernels)
        if reason is not None:
            left.append((module, Unserved(name=name, class_name=type(module).__name__, reason=reason)))
    # what a linear or a module named as a whole is made of goes with it
    parts = _parts(linears) | _parts(m for m, _ in left if _is_whole(m))
    return [unserved for module, unserved in left if module not in parts]


def describe_unserved(unserved: Sequence[Unserved]) -> str:
    """One line: by reason and class the names, and how many modules these are."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in unserved:
        groups.setdefault((one.reason, one.class_name), []).append(one.name or "the model itself")
    listed = (
        f"{summarize(names)} ({len(names)} {class_name}: {reason})" for (reason, class_name), names in groups.items()
    )
    return f"neither quantized nor captured: {'; '.join(listed)}"


def summarize(names: Iterable[str]) -> str:
    """Names with their layer index as ``*``, each once."""
    starred = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join(dict.fromkeys(starred))


def find_uncalled(model: nn.Module, called: Collection[str]) -> list[Unserved]:
    """The modules that could be tapped and that a forward, which called ``called``, did not call."""
    return [
        Unserved(name=f.name, class_name=type(f.module).__name__, reason="never called, its weight used otherwise")
        for f in find_modules(model)
        if f.name not in called
    ]


def _stays_in_high_precision(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or "Norm" in type(module).__name__


def _reason(module: nn.Module, kernels: set[nn.Module]) -> str | None:
    if module in kernels:
        return _own_weights(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript, whose code cannot be changed"
    if isinstance(module, nn.MultiheadAttention):
        return "torch's own attention, which takes all its weights into one call"
    if isinstance(module, nn.Linear):
        return "a linear whose class has a forward of its own"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "a convolution"
    if _is_kernel(module) and not any(part in kernels or _is_kernel(part) for part in _parts([module])):
        return "an attention kernel that is not called through transformers' attention interface"
    return _own_weights(module)


def _is_kernel(module: nn.Module) -> bool:
    """Whether a module is attention, by its class's name: nothing else tells those that call a kernel directly."""
    is_named = "attention" in type(module).__name__.lower()
    return is_named and next(module.parameters(), None) is not None


def _own_weights(module: nn.Module) -> str | None:
    matrices = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() > 1}
    if not matrices:
        return None
    if any(p.dim() > 2 for p in matrices.values()):
        return f"several experts' weights in one tensor, {', '.join(matrices)}"
    return f"a forward of its own uses {', '.join(matrices)}"


def _is_whole(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention | nn.Linear | torch.jit.ScriptModule)


def _parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for module in modules for part in module.modules() if part is not module}
