"""What a recipe file may hold: pydantic at the edge, one model a section.

Defaults come from ``records``. Unknown keys are errors everywhere, inside ``model.config`` too, where
transformers would take a misspelt size without a word and use its default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from qcollect.errors import SelectionError
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.custom import find_quant_type
from qcollect.formats.records import Rounding, ScaleRule
from qcollect.recipe import fields as f
from qcollect.recipe.conflicts import find_capture_conflicts, find_quant_conflicts, find_shadow_faults
from qcollect.recipe.formats import read_format_files, read_shadow_files
from qcollect.recipe.records import (
    CaptureSpec,
    DataSpec,
    LaunchSpec,
    ModelSpec,
    QuantSpec,
    TrainSpec,
    TriggerSpec,
)
from qcollect.recipe.selectors import expand_indices

_MODEL, _TRAIN, _QUANT, _CAPTURE, _LAUNCH = ModelSpec(), TrainSpec(), QuantSpec(), CaptureSpec(), LaunchSpec()
_DATA = DataSpec(path=(), sequence_length=1)
_TRIGGER = TriggerSpec(on=())


def _empty_section(value: Any) -> Any:
    """A section whose keys are all commented out is null in YAML."""
    return {} if value is None else value


_Empty = BeforeValidator(_empty_section)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RopeModel(Section):
    """transformers' ``rope_parameters``."""

    rope_type: Literal["default", "linear", "dynamic", "llama3"] = "default"
    rope_theta: f.Real = 10000.0
    factor: f.Real | None = None
    low_freq_factor: f.Real | None = None
    high_freq_factor: f.Real | None = None
    original_max_position_embeddings: f.Count | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        needs = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        missing = [name for name in needs[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise f.problem(f"model.config.rope_parameters: rope_type {self.rope_type} needs {', '.join(missing)} too")
        return self


class ConfigModel(Section):
    """transformers' LlamaConfig: the sizes must be there, the rest has its defaults."""

    vocab_size: f.Count
    hidden_size: f.Count
    intermediate_size: f.Count
    num_hidden_layers: f.Count
    num_attention_heads: f.Count
    num_key_value_heads: f.Count | None = None
    head_dim: f.Count | None = None
    hidden_act: str = "silu"
    max_position_embeddings: f.Count = 2048
    initializer_range: f.Real = 0.02
    rms_norm_eps: f.Real = 1e-6
    rope_parameters: RopeModel | None = None
    tie_word_embeddings: f.Flag = False
    attention_bias: f.Flag = False
    attention_dropout: f.Real = 0.0
    mlp_bias: f.Flag = False
    bos_token_id: f.Whole | None = None
    eos_token_id: f.Whole | None = None
    pad_token_id: f.Whole | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or self.num_attention_heads
        if self.hidden_size % heads:
            raise f.problem(
                f"model.config.hidden_size is {self.hidden_size}; must be a multiple of num_attention_heads ({heads})",
                "model.config.hidden_size",
            )
        if heads % kv_heads:
            raise f.problem(
                f"model.config.num_key_value_heads is {kv_heads}; must divide num_attention_heads ({heads})",
                "model.config.num_key_value_heads",
            )
        return self


class ModelModel(Section):
    checkpoint: f.PathText | None = _MODEL.checkpoint
    config: ConfigModel | None = None
    architecture: Literal["llama"] = "llama"
    seed: f.Seed = _MODEL.seed
    tokenizer: f.PathText | None = _MODEL.tokenizer

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.checkpoint is None and self.config is None:
            raise f.problem("model needs one of checkpoint (a model folder) and config (random weights of a shape)")
        if self.checkpoint is not None and self.config is not None:
            raise f.problem(
                "model has both checkpoint and config, and needs exactly one; "
                "take the other out (--set model.config=null or --set model.checkpoint=null)"
            )
        return self


class DataModel(Section):
    path: f.PathList
    sequence_length: f.Count
    tokenizer: f.PathText | None = _DATA.tokenizer
    layout: Literal["packed", "padded"] = "packed"
    seed: f.Seed = _DATA.seed
    append_eos: f.Flag = _DATA.append_eos


class TrainModel(Section):
    iterations: f.Count = _TRAIN.iterations
    micro_batch_size: f.Count = _TRAIN.micro_batch_size
    micro_batches: f.Count = _TRAIN.micro_batches
    learning_rate: Annotated[f.Real, Field(ge=0)] = _TRAIN.learning_rate
    weight_decay: Annotated[f.Real, Field(ge=0)] = _TRAIN.weight_decay
    betas: f.Betas = _TRAIN.betas
    grad_clip: Annotated[f.Real, Field(gt=0)] | None = _TRAIN.grad_clip
    compute: Literal["bf16", "fp32"] = "bf16"
    loss_scale: f.PowerOfTwo = _TRAIN.loss_scale
    deterministic: f.Flag = _TRAIN.deterministic
    seed: f.Seed = _TRAIN.seed
    activation_checkpointing: Literal["none", "reentrant", "non_reentrant"] = "none"


class GemmModel(Section):
    type: f.OverrideName | None = None
    scale_rule: ScaleRule | None = None
    rounding: Rounding | None = None
    block_size: f.BlockSize | None = None
    hadamard: f.HadamardSize | None = None


class OverridesModel(Section):
    fprop: GemmModel | None = None
    dgrad: GemmModel | None = None
    wgrad: GemmModel | None = None

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """By gemm, only what is set."""
        return self.model_dump(exclude_none=True)


class QuantModel(Section):
    formats: f.Formats = _QUANT.formats  # first: what follows may name one
    type: f.QuantName = _QUANT.type
    types: f.QuantNames = _QUANT.types
    scale_rule: ScaleRule | None = None
    rounding: Rounding | None = None
    grad_rounding: Rounding | None = None
    block_size: f.BlockSize | None = _QUANT.block_size
    weight_block_size: f.BlockSize | None = None
    attention: Literal["qkv", "none"] = "qkv"
    hifp8_scale: Literal["per_tensor", "grads", "none"] = "per_tensor"
    exclude: f.MaybeGlobs = _QUANT.exclude
    compile: f.Flag = _QUANT.compile
    overrides: Annotated[OverridesModel, _Empty] = OverridesModel()

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        quant, problems = read_format_files(value, (info.context or {}).get("resolve", Path.cwd().joinpath))
        if problems:
            raise f.several_problems(problems)
        return quant

    @field_validator("overrides")
    @classmethod
    def _override_types_exist(cls, overrides: OverridesModel, info: ValidationInfo) -> OverridesModel:
        names = sorted((*QUANT_TYPES, *info.data.get("formats", {})))
        for gemm, override in overrides.to_dict().items():
            name = override.get("type")
            if "formats" in info.data and name is not None and name not in names:
                key = f"quant.overrides.{gemm}.type"
                raise f.problem(f"{key} is {name!r}; {f.known(name, names)} See 'qcollect formats'.", key)
        return overrides

    @model_validator(mode="after")
    def _type_takes_its_rules(self) -> Self:
        names = ("scale_rule", "rounding", "grad_rounding", "block_size", "weight_block_size")
        settings = {name: getattr(self, name) for name in names}
        for key, text in find_quant_conflicts(
            self.type, settings, self.overrides.to_dict(), lambda name: find_quant_type(name, self.formats)
        ):
            raise f.problem(text, key)
        return self


class TriggerModel(Section):
    on: f.Triggers
    iterations: f.Count = _TRIGGER.iterations
    window: f.Count = _TRIGGER.window
    warmup: f.Count = _TRIGGER.warmup
    loss_factor: Annotated[f.Real, Field(gt=1)] = _TRIGGER.loss_factor
    grad_norm_factor: Annotated[f.Real, Field(gt=1)] = _TRIGGER.grad_norm_factor


def _trigger_by_name(value: Any) -> Any:
    """Names alone stand for a section with these in ``on``."""
    return {"on": value} if isinstance(value, str | list | tuple) else value


class CaptureModel(Section):
    target: f.Count | None = _CAPTURE.target
    layers: f.Selector | None = _CAPTURE.layers
    modules: f.Globs | None = _CAPTURE.modules
    layer_types: f.LayerTypes | None = _CAPTURE.layer_types
    operations: f.Operations | None = _CAPTURE.operations
    phases: f.Phases | None = _CAPTURE.phases
    tensor_names: f.TensorNames | None = _CAPTURE.tensor_names
    iterations: f.Selector | None = _CAPTURE.iterations
    ranks: f.Selector | None = _CAPTURE.ranks
    samples: f.Selector | None = _CAPTURE.samples
    tokens: f.Selector | None = _CAPTURE.tokens
    values: Literal["original", "quantized", "both"] | None = None
    mode: Literal["tensors", "stats"] = "tensors"
    shadow: f.MaybeNames = _CAPTURE.shadow
    layout: Literal["flat", "by_iteration"] = "flat"
    host_memory_gb: Annotated[f.Real, Field(gt=0)] | None = _CAPTURE.host_memory_gb
    durability: Literal["none", "file", "all"] = "none"
    on_error: Literal["stop", "continue"] = "stop"
    storage: Literal["values", "codes"] = "values"
    scales: f.Flag = _CAPTURE.scales
    compress: Literal["none", "zstd"] = "none"
    trigger: Annotated[TriggerModel | None, BeforeValidator(_trigger_by_name)] = None
    dedupe: f.Flag = _CAPTURE.dedupe

    @model_validator(mode="after")
    def _trigger_says_when(self) -> Self:
        if self.trigger is None:
            return self
        if self.iterations is not None:
            raise f.problem(
                "capture.iterations counts from the start of the training, and with capture.trigger nobody knows "
                "beforehand when captures begin; say how many iterations with capture.trigger.iterations, and take "
                "capture.iterations out (null)",
                "capture.iterations",
            )
        if self.samples is not None:
            raise f.problem(
                "capture.samples counts from the start of the training, and with capture.trigger nobody knows "
                "beforehand when captures begin; take one of them out (null)",
                "capture.samples",
            )
        return self

    @model_validator(mode="after")
    def _mode_has_its_settings(self) -> Self:
        found = find_capture_conflicts(self.model_dump())
        if found:
            raise f.several_problems(found)
        return self

    @model_validator(mode="after")
    def _codes_are_of_quantized_values(self) -> Self:
        if self.storage == "codes" and self.values in (None, "original"):
            raise f.problem(
                "capture.storage is 'codes', and with capture.values 'original' nothing that has codes is captured; "
                "set capture.values to quantized or both",
                "capture.storage",
            )
        return self


class LaunchModel(Section):
    nproc: f.Count | None = _LAUNCH.nproc
    gpu_ids: f.DeviceIds | None = _LAUNCH.gpu_ids
    device: Literal["auto", "cpu", "cuda"] = "auto"
    omp_num_threads: f.Count | None = _LAUNCH.omp_num_threads
    grace_s: Annotated[f.Real, Field(gt=0)] = _LAUNCH.grace_s
    max_time: f.Duration | None = _LAUNCH.max_time
    max_bytes: f.Size | None = _LAUNCH.max_bytes
    stall_timeout_s: Annotated[f.Real, Field(gt=0)] | None = _LAUNCH.stall_timeout_s
    show_ranks: f.Ranks | None = _LAUNCH.show_ranks


def read_shadows(value: Any, info: ValidationInfo) -> Any:
    """Raw sections in which every shadow type stands by name, those given by their files as well."""
    if not isinstance(value, Mapping):
        return value
    sections, problems = read_shadow_files(value, (info.context or {}).get("resolve", Path.cwd().joinpath))
    if problems:
        raise f.several_problems(problems)
    return sections


def check_shadows(quant: QuantModel, capture: CaptureModel) -> None:
    """Nothing, if all shadow types exist and quantize."""
    found = find_shadow_faults(capture.shadow, QuantSpec(formats=quant.formats))
    if found:
        raise f.several_problems(found)


class RecipeModel(Section):
    description: str = ""
    script: f.PathText | None = None
    model: Annotated[ModelModel, _Empty]
    data: Annotated[DataModel, _Empty]
    train: Annotated[TrainModel, _Empty] = TrainModel()
    quant: Annotated[QuantModel, _Empty] = QuantModel()
    capture: Annotated[CaptureModel, _Empty] = CaptureModel()
    launch: Annotated[LaunchModel, _Empty] = LaunchModel()

    _read_shadows = model_validator(mode="before")(read_shadows)

    @model_validator(mode="after")
    def _shadows_exist(self) -> Self:
        check_shadows(self.quant, self.capture)
        return self

    @model_validator(mode="after")
    def _iterations_exist(self) -> Self:
        if self.capture.iterations is not None:
            try:
                expand_indices(self.capture.iterations, self.train.iterations, key="capture.iterations")
            except SelectionError as error:
                raise f.problem(f"{error}; see train.iterations", "capture.iterations") from None
        return self

    @model_validator(mode="after")
    def _trigger_leaves_time(self) -> Self:
        if self.capture.trigger is not None:
            spec = TriggerSpec(**self.capture.trigger.model_dump())
            needed = spec.first_possible + spec.iterations
            if needed > self.train.iterations:
                raise f.problem(
                    f"capture.trigger can capture its {spec.iterations} iteration(s) from iteration "
                    f"{spec.first_possible} on, which takes {needed} in all, and train.iterations is "
                    f"{self.train.iterations}; train longer, or lower capture.trigger.iterations or warmup",
                    "capture.trigger",
                )
        return self

    @model_validator(mode="after")
    def _tokens_exist(self) -> Self:
        if self.capture.tokens is not None:
            try:
                expand_indices(self.capture.tokens, self.data.sequence_length, key="capture.tokens")
            except SelectionError as error:
                raise f.problem(f"{error}; see data.sequence_length", "capture.tokens") from None
        return self


def known_keys(section: tuple[str, ...] = ()) -> list[str] | None:
    """The keys of a section of the recipe (of the top: ``()``); None if it is not a section."""
    model: type[BaseModel] | None = RecipeModel
    for key in section:
        if model is None or key not in model.model_fields:
            return None
        model = _section_of(model.model_fields[key].annotation)
    return list(model.model_fields) if model else None


def all_keys(section: tuple[str, ...] = ()) -> list[str]:
    """Every key of the recipe, dotted, sections and what is in them."""
    keys = []
    for key in known_keys(section) or []:
        keys.append(".".join((*section, key)))
        keys += all_keys((*section, key))
    return keys


def keys_named(name: str) -> list[str]:
    """The dotted keys, outside ``model.config``, whose last part is ``name``: where a key given elsewhere belongs."""
    return [key for key in all_keys() if key.rpartition(".")[2] == name and not key.startswith("model.config.")]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, type(int | None)):
        return next((found for arg in get_args(annotation) if (found := _section_of(arg))), None)
    return None
