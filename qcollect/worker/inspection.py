"""The recipe's model on the meta device: its sites, without weights, data or accelerator memory."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcollect.data.pairs import resolve_prefix
from qcollect.errors import QcollectError
from qcollect.plan.inspection import Inspection
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.records import QuantSpec, Recipe
from qcollect.store.files import read_json
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.dataset import is_text, make_batches
from qcollect.worker.model import build_model, checkpoint_keys, load_config, refuse_missing
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import FoundModule, find_excluded, find_modules, install

# a model's vocabulary may be padded a little beyond its tokenizer's
SMALL_VOCABULARY_FRAC = 0.9


def inspect_recipe(recipe: Recipe) -> Inspection:
    """What the launcher must know before it starts: sites, excluded modules, devices, problems.

    The model's forward runs once on the meta device; which tensors come by, in which shape and whether
    with a gradient, is seen there. Findings about files are collected, not raised.
    """
    problems = _find_problems(recipe)
    device, device_names = describe_devices()
    model, modules = None, []
    try:
        model = meta_model(recipe)
        modules = meta_sites(model, recipe)
    except QcollectError as error:
        problems.insert(0, str(error))
    policy = QuantPolicy.from_spec(recipe.quant)
    config: Any = None if model is None else model.config
    return Inspection(
        modules=tuple(modules),
        excluded=tuple(find_excluded(model, policy)) if model is not None else (),
        vocab_size=config.vocab_size if config is not None else 0,
        num_parameters=sum(p.numel() for p in model.parameters()) if model is not None else 0,
        device=device,
        device_names=device_names,
        problems=tuple(dict.fromkeys(problems)),
        warnings=tuple(find_warnings(recipe, config.vocab_size)) if config is not None else (),
    )


def describe_devices() -> tuple[str, tuple[str, ...]]:
    """(device type, a name for each visible device); ("cpu", ()) without an accelerator."""
    if not torch.accelerator.is_available():
        return "cpu", ()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    backend = getattr(torch, device.type)
    return device.type, tuple(str(backend.get_device_name(i)) for i in range(torch.accelerator.device_count()))


def meta_model(recipe: Recipe) -> nn.Module:
    """The model in compute dtype on the meta device; a checkpoint's weights are checked by name only."""
    import transformers

    config = load_config(recipe.model)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.train.compute]
    if recipe.model.config is not None:
        return build_model(recipe.model, device="meta", dtype=dtype)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)} - tied
    missing = wanted - checkpoint_keys(Path(str(recipe.model.checkpoint)))
    refuse_missing(str(recipe.model.checkpoint), sorted(missing))
    config.use_cache = False
    return model.train()


def meta_sites(model: nn.Module, recipe: Recipe) -> list[ModuleSites]:
    """The sites one micro-batch of the recipe passes, in model order, with shapes and missing gradients."""
    seen: dict[str, _Sighting] = {}
    frame = _MetaFrame(seen)
    policy = QuantPolicy.from_spec(recipe.quant)
    observing = QuantPolicy.from_spec(QuantSpec(type="none"))
    uninstall = install(model, observing, lambda: frame)  # type: ignore[arg-type,return-value]
    try:
        batch, length = recipe.train.micro_batch_size, recipe.data.sequence_length
        tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        # a ready-made mask: transformers would look into the values to make one
        mask = torch.zeros(batch, 1, length, length, dtype=torch.bool, device="meta")
        model(input_ids=tokens, attention_mask=mask)
    finally:
        uninstall()
    return [_sites(found, seen[found.name], policy) for found in find_modules(model) if found.name in seen]


@dataclass(slots=True)
class _Sighting:
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    needs_grad: dict[str, bool] = field(default_factory=dict)
    element_bytes: int = 4


class _MetaFrame:
    """Stands where a ``Frame`` does and notes what it is offered."""

    def __init__(self, seen: dict[str, _Sighting]) -> None:
        self._seen = seen

    def of_call(self, module: str) -> "_MetaFrame":
        return self

    def wants(self, module: str, tensor_name: str, gemm: Gemm | None = None) -> bool:
        return gemm is None and tensor_name not in self._seen.setdefault(module, _Sighting()).shapes

    def take(self, module: str, tensor_name: str, tensor: torch.Tensor, **_: object) -> None:
        sighting = self._seen[module]
        sighting.shapes[tensor_name] = tuple(tensor.shape)
        sighting.needs_grad[tensor_name] = tensor.requires_grad
        sighting.element_bytes = tensor.element_size()


def _sites(found: FoundModule, sighting: _Sighting, policy: QuantPolicy) -> ModuleSites:
    # a gradient has the shape of what it is the gradient of
    operands = ("input", "weight") if found.layer_type == LayerType.LINEAR else ("query", "key", "value")
    shapes = dict(sighting.shapes)
    without_grad = []
    for name in (*operands, "output"):
        shapes[f"grad_{name}"] = sighting.shapes[name]
        if name in operands and not sighting.needs_grad[name]:
            without_grad.append(f"grad_{name}")
    if len(without_grad) == len(operands):
        without_grad.append("grad_output")  # nothing asks for a gradient: no backward at all
    return ModuleSites(
        module=found.name,
        layer_type=found.layer_type,
        layer_idx=found.layer_idx,
        shapes=shapes,
        element_bytes=sighting.element_bytes,
        without_grad=tuple(without_grad),
        excluded=found.on_request or policy.excludes(found.name),
        on_request=found.on_request,
    )


def _find_problems(recipe: Recipe) -> list[str]:
    """What is wrong with the model's and the data's files; a sample of the data is read."""
    problems = []
    vocab_size = None
    try:
        config = load_config(recipe.model)
        vocab_size = int(config.vocab_size)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and recipe.data.sequence_length > longest:
            problems.append(
                f"data.sequence_length is {recipe.data.sequence_length}, and the model's max_position_embeddings "
                f"{longest}; shorten the sequence"
            )
    except QcollectError as error:
        problems.append(str(error))
    try:
        make_batches(recipe, rank=0, world_size=1, vocab_size=vocab_size)
    except QcollectError as error:
        problems.append(str(error))
    return problems


def find_warnings(recipe: Recipe, vocab_size: int) -> list[str]:
    """What is allowed and most likely not meant: data that another model's tokenizer made."""
    if recipe.model.checkpoint is None:
        return []
    warnings = []
    for path in recipe.data.path:
        prepared = {} if is_text(path) else read_json(Path(f"{_prefix(path)}.json")) or {}
        size = prepared.get("vocab_size")
        if isinstance(size, int) and size < SMALL_VOCABULARY_FRAC * vocab_size:
            warnings.append(
                f"{path} was prepared with the tokenizer {prepared.get('tokenizer')} of {size:,} ids, and the model "
                f"has {vocab_size:,}; prepare it again with --tokenizer {recipe.model.checkpoint}"
            )
    return warnings


def _prefix(path: str) -> Path:
    try:
        return resolve_prefix(path)
    except QcollectError:
        return Path(path)
