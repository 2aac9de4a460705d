"""The recipe's model on the meta device: its sites, without weights, data or accelerator memory."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcollect.errors import CheckpointError, QcollectError
from qcollect.plan.finding import Finding, Level
from qcollect.plan.inspection import Device, Inspection
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.records import QuantSpec, Recipe
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.checkpoint import CHECK, CheckpointFiles, compare_tensors, read_checkpoint
from qcollect.worker.data_checks import CHECK as DATA_CHECK
from qcollect.worker.data_checks import check_data
from qcollect.worker.model import build_empty, build_model, load_config
from qcollect.worker.model_facts import ModelFacts, remember
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import FoundModule, find_excluded, find_modules, install
from qcollect.worker.unserved import describe_unserved, find_uncalled, find_unserved

MODEL_CHECK = "model"


def inspect_recipe(recipe: Recipe) -> Inspection:
    """What the launcher must know before it starts: sites, excluded modules, devices, findings about files.

    The model's forward runs once on the meta device; which tensors come by, in which shape and whether
    with a gradient, is seen there (or was, in an earlier launch). What is found is collected, not raised.
    """
    facts = remember(recipe, examine_model)
    data = check_data(recipe, facts.vocab_size)
    device, device_names = describe_devices()
    return Inspection(
        modules=facts.modules,
        excluded=facts.excluded,
        vocab_size=facts.vocab_size or 0,
        num_parameters=facts.num_parameters,
        device=device,
        device_names=device_names,
        devices=find_devices(),
        torch_accelerator=torch_accelerator(),
        num_samples=data.num_samples,
        findings=tuple(dict.fromkeys([*facts.findings, *data.findings])),
    )


def describe_devices() -> tuple[str, tuple[str, ...]]:
    """(device type, a name for each visible device); ("cpu", ()) without an accelerator."""
    if not torch.accelerator.is_available():
        return "cpu", ()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    backend = getattr(torch, device.type)
    return device.type, tuple(str(backend.get_device_name(i)) for i in range(torch.accelerator.device_count()))


def find_devices() -> tuple[Device, ...]:
    """Each visible device with its memory. A device that cannot be asked has only a name."""
    return tuple(_find_device(index, name) for index, name in enumerate(describe_devices()[1]))


def _find_device(index: int, name: str) -> Device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    backend = getattr(torch, device.type)
    free_bytes = total_bytes = capability = uuid = None
    with suppress(RuntimeError, AttributeError):  # in use by a process that has it alone, or a backend without
        free_bytes, total_bytes = backend.mem_get_info(index)
    with suppress(RuntimeError, AttributeError):
        properties = backend.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        uuid = str(properties.uuid)
    return Device(name=name, free_bytes=free_bytes, total_bytes=total_bytes, capability=capability, uuid=uuid)


def torch_accelerator() -> str | None:
    """What this torch was built for beside the CPU (``CUDA 13.0``, ``ROCm 6.4``); None: nothing."""
    named = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", getattr(torch.version, "xpu", None)))
    return next((f"{name} {version}" for name, version in named if version), None)


def meta_model(recipe: Recipe) -> nn.Module:
    """The model in compute dtype on the meta device; of a checkpoint its configuration is read, no weights.

    Raises:
        CheckpointError: there is no configuration, or none of a causal language model.
    """
    config: Any = load_config(recipe.model)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.train.compute]
    if recipe.model.config is not None:
        return build_model(recipe.model, device="meta", dtype=dtype)
    model = build_empty(config, dtype, recipe.model.checkpoint)
    config.use_cache = False
    return model.train()


def meta_sites(model: nn.Module, recipe: Recipe) -> list[ModuleSites]:
    """The sites one micro-batch of the recipe passes, in model order, with shapes and missing gradients."""
    seen: dict[str, _Sighting] = {}
    frame = _MetaFrame(seen)
    policy = QuantPolicy.from_spec(recipe.quant)
    observing = QuantPolicy.from_spec(QuantSpec(type="none"))
    taps = install(model, observing, lambda: frame)  # type: ignore[arg-type,return-value]
    try:
        batch, length = recipe.train.micro_batch_size, recipe.data.sequence_length
        _run_on_meta(model, batch, length)
    finally:
        taps.remove()
    return [_sites(found, seen[found.name], policy) for found in find_modules(model) if found.name in seen]


def _run_on_meta(model: nn.Module, batch: int, length: int) -> None:
    """One forward without values.

    Raises:
        CheckpointError: the model's code looks into values.
    """
    choose_experts = getattr(model, "set_experts_implementation", None)
    if choose_experts is not None and getattr(model.config, "_experts_implementation", None) is not None:
        choose_experts("batched_mm")  # the one whose shapes depend on no values, in any dtype
    tokens = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    # a ready-made mask: most models would look into the values of another to make one; some take no such
    ready_made = torch.zeros(batch, 1, length, length, dtype=torch.bool, device="meta")
    masks: tuple[dict[str, torch.Tensor], ...] = (
        {"attention_mask": ready_made},
        {},
        {"attention_mask": torch.ones(batch, length, dtype=torch.int64, device="meta")},
    )
    errors: list[Exception] = []
    for mask in masks:
        try:
            model(input_ids=tokens, **mask)
            return
        except (RuntimeError, ValueError, NotImplementedError) as error:
            errors.append(error)
    raise CheckpointError(
        f"{type(model).__name__} does not run on the meta device, where its sites are looked for: "
        f"{str(errors[0]).splitlines()[0]}; collect from it in a script of your own (qcollect.collect)"
    ) from errors[0]


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

    @property
    def taker(self) -> "_MetaFrame":
        return self

    describes_consumers = False

    def claim(
        self, module: str, tensor_name: str, gemm: Gemm | None = None, *, token_layout: str
    ) -> tuple[str, str] | None:
        is_new = gemm is None and tensor_name not in self._seen.setdefault(module, _Sighting()).shapes
        return (module, tensor_name) if is_new else None

    def take(self, claim: tuple[str, str], tensor: torch.Tensor, _: object) -> None:
        module, tensor_name = claim
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


def examine_model(recipe: Recipe) -> ModelFacts:
    """The model's sites, and what is wrong with its files or speaks against it."""
    checkpoint = None if recipe.model.checkpoint is None else Path(recipe.model.checkpoint)
    has_weights = checkpoint is not None and checkpoint.is_dir()
    files = read_checkpoint(checkpoint) if checkpoint is not None and has_weights else CheckpointFiles(findings=())
    findings = list(files.findings)
    try:
        model = meta_model(recipe)
        modules = meta_sites(model, recipe)
    except QcollectError as error:
        problem = Finding.of_error(CHECK, error)
        return ModelFacts(modules=(), excluded=(), vocab_size=None, num_parameters=0, findings=(problem, *findings))
    if checkpoint is not None and not findings:
        findings += _compare(checkpoint, files, model)
    findings += _check_length(recipe, model)
    findings += _check_served(recipe, model, modules)
    config: Any = model.config
    return ModelFacts(
        modules=tuple(modules),
        excluded=tuple(find_excluded(model, QuantPolicy.from_spec(recipe.quant))),
        vocab_size=int(config.vocab_size),
        num_parameters=sum(p.numel() for p in model.parameters()),
        findings=(*findings, *_describe_model(recipe, model, files, findings)),
    )


def _compare(checkpoint: Path, files: CheckpointFiles, model: Any) -> list[Finding]:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return compare_tensors(
        checkpoint,
        _as_loaded(files.shapes, model, wanted),
        wanted,
        tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
        prefix=str(getattr(model, "base_model_prefix", "")),
        config=model.config.to_dict(),
    )


def _as_loaded(
    held: Mapping[str, tuple[int, ...]], model: Any, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The files' tensors by the names transformers loads them under.

    What it makes of several tensors (a layer's experts) counts with the shape the model wants: loading judges that.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    loaded = {}
    for name, shape in held.items():
        renamed, pattern = (name, None) if name in wanted else rename_source_key(name, renamings, converters)
        if pattern is None:
            loaded[renamed] = shape
            continue
        (converter,) = [c for c in converters if pattern in c.source_patterns]
        first, *others = converter.target_patterns
        for target in (renamed, *(renamed.replace(first, other) for other in others)):
            loaded[target] = wanted.get(target, shape)
    return loaded


def _check_length(recipe: Recipe, model: nn.Module) -> list[Finding]:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is None or recipe.data.sequence_length <= longest:
        return []
    return [
        Finding.problem(
            DATA_CHECK,
            f"data.sequence_length is {recipe.data.sequence_length}, and the model's max_position_embeddings {longest}",
            "shorten the sequence",
        )
    ]


def _check_served(recipe: Recipe, model: nn.Module, modules: Sequence[ModuleSites]) -> list[Finding]:
    unserved = find_unserved(model, QuantPolicy.from_spec(recipe.quant))
    unserved += find_uncalled(model, {sites.module for sites in modules})
    advice = "what quant.exclude names is not told"
    return [Finding.warning(MODEL_CHECK, describe_unserved(unserved), advice)] if unserved else []


def _describe_model(
    recipe: Recipe, model: nn.Module, files: CheckpointFiles, findings: Sequence[Finding]
) -> list[Finding]:
    if any(f.check == CHECK and f.level == Level.PROBLEM for f in findings):
        return []
    what = f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters"
    if recipe.model.checkpoint is None:
        return [Finding.ok(CHECK, f"none is needed: {what}, random from seed {recipe.model.seed}")]
    tensors = f"{len(files.shapes)} tensors in {files.num_files} file(s), {files.num_bytes:,} bytes"
    return [Finding.ok(CHECK, f"{recipe.model.checkpoint}: {what}; {tensors}")]
