"""The frozen records of a recipe: what the rest of the program reads.

Every default of a recipe is written here and nowhere else (``schema`` takes them from here).
Paths are absolute. Sequences are tuples. ``Recipe.to_dict`` is JSON-ready and ``recipe_from_dict``
undoes it; neither needs more than the standard library.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from qcollect.errors import RecipeError
from qcollect.formats.custom import find_quant_type
from qcollect.formats.records import QuantType
from qcollect.vocab import Trigger

BYTES_TOKENIZER = "bytes"
STATISTICS = "stats"
DEFAULT_TARGET = 50

IndexSelector = tuple[int | str, ...] | str
"""Indices as the user gave them: numbers and ranges, ``"0-3"``, ``"every:2"``, ``"spread:4"``, ``"all"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which model: a checkpoint's weights, or seeded random weights in the shape of ``config``.

    Exactly one of ``checkpoint`` and ``config`` is set.

    Args:
        checkpoint: a model folder (config.json and weights).
        config: keyword arguments of transformers' LlamaConfig; JSON values only.
        architecture: the model family; ``llama``.
        seed: of the random weights.
        tokenizer: a tokenizer's folder, ``bytes`` (one token a UTF-8 byte), or None: the checkpoint's,
            and ``bytes`` without a checkpoint.
    """

    checkpoint: str | None = None
    config: dict[str, Any] | None = None
    architecture: str = "llama"
    seed: int = 0
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Which tokens.

    Args:
        path: prefixes of indexed ``.bin/.idx`` pairs, or ``.txt``/``.jsonl`` files tokenized at start.
        sequence_length: tokens a sample.
        tokenizer: of text files: a folder, ``bytes``, or None: the model's.
        layout: ``packed`` (documents one after the other, cut to length) or ``padded`` (one a sample).
        seed: of the order of the samples.
        append_eos: an end-of-text token after every document of a text file.
    """

    path: tuple[str, ...]
    sequence_length: int
    tokenizer: str | None = None
    layout: str = "packed"
    seed: int = 0
    append_eos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How it trains: AdamW on fp32 master weights.

    Args:
        iterations: optimizer steps at most; a run ends earlier once its target is captured.
        micro_batch_size: samples a micro-batch and rank.
        micro_batches: micro-batches an iteration and rank, their gradients accumulated.
        learning_rate: constant.
        grad_clip: largest global gradient norm, None: no clipping.
        compute: dtype of forward and backward, ``bf16`` or ``fp32``.
        loss_scale: a power of two the loss is multiplied with; divided out before the optimizer.
        deterministic: only deterministic kernels.
        seed: of everything random while training.
        activation_checkpointing: ``none``, ``reentrant`` or ``non_reentrant``.
    """

    iterations: int = 1000
    micro_batch_size: int = 1
    micro_batches: int = 1
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float | None = 1.0
    compute: str = "bf16"
    loss_scale: float = 1.0
    deterministic: bool = True
    seed: int = 0
    activation_checkpointing: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How operands are quantized.

    Args:
        type: name of a quant type, for a single run.
        types: names, for a sweep.
        scale_rule: ``floor``, ``ceil``, ``even``, ``rceil``, ``nearest``; None: the type's own.
        rounding: ``nearest_even``, ``half_away``, ``hybrid``, ``stochastic``; None: the type's own.
        grad_rounding: that of gradients; None: ``rounding``.
        block_size: elements that share a scale, or (rows, columns); None: the type's own.
        weight_block_size: that of weights; None: ``block_size``.
        attention: ``qkv`` (query, key and value are quantized) or ``none``.
        hifp8_scale: which operands get a power-of-two scale: ``per_tensor`` (all), ``grads``, ``none``.
        exclude: globs of module names that stay in high precision.
        compile: quantize large tensors on the CPU by torch's compiler, with the same bits; the first run on a
            machine compiles for a while before it trains.
        overrides: by gemm (``fprop``, ``dgrad``, ``wgrad``), those of ``type``, ``scale_rule``, ``rounding``,
            ``block_size`` and ``hadamard`` (size of a random Hadamard transform of a linear's operands) that differ
            there. An override of the type brings that type's own rules.
        formats: definitions of number formats that are not in the catalog, by name (``formats.custom``).
    """

    type: str = "mxfp8"
    types: tuple[str, ...] = ("mxfp8", "mxfp4", "hifp8")
    scale_rule: str | None = None
    rounding: str | None = None
    grad_rounding: str | None = None
    block_size: int | tuple[int, int] | None = None
    weight_block_size: int | tuple[int, int] | None = None
    attention: str = "qkv"
    hifp8_scale: str = "per_tensor"
    exclude: tuple[str, ...] = ()
    compile: bool = False
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    formats: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find_type(self, name: str) -> QuantType:
        """The quant type of this name, the recipe's own or the catalog's.

        Raises:
            FormatError: there is none.
        """
        return find_quant_type(name, self.formats)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerSpec:
    """What a run waits for before it captures (``vocab.Trigger``), and how much it captures then.

    Args:
        on: the triggers watched; the first that any rank sees counts, and it counts once.
        iterations: optimizer steps captured, from the one after that in which it was seen.
        window: how many of the last finite values a median is taken of.
        warmup: how many finite values there must have been before one is called a jump.
        loss_factor: times the median, above which a loss is a spike.
        grad_norm_factor: the same of the gradient norm, which varies more.
    """

    on: tuple[str, ...]
    iterations: int = 1
    window: int = 50
    warmup: int = 10
    loss_factor: float = 2.0
    grad_norm_factor: float = 4.0

    @property
    def first_possible(self) -> int:
        """The earliest iteration that can be captured, counted from the first of the training."""
        needs_values = all(name in (Trigger.LOSS_SPIKE, Trigger.GRAD_NORM_JUMP) for name in self.on)
        return 1 + (self.warmup if needs_values else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """What is captured. A selector that is None leaves everything in (iterations of mode ``tensors``: the first only).

    Args:
        target: captures summed over ranks, exact; None: 50. In mode ``stats`` there is none: everything is captured.
        layers: transformer layers, from 0.
        modules: globs of module names.
        layer_types, operations, phases, tensor_names: globs of the words of ``vocab``.
        iterations: optimizer steps, from 0.
        ranks: global ranks.
        samples: global sample indices.
        tokens: positions in each sequence, in whole groups of 64; what has no tokens is stored whole.
        values: ``original``, ``quantized`` or ``both``; None: ``original``, and ``both`` in mode ``stats``. There
            ``original`` means the statistics of tensors, ``quantized`` the errors of the operands of gemms.
        mode: ``tensors`` (files), or ``stats`` (statistics of every tensor, in the manifest only).
        shadow: with mode ``stats``, quant types whose errors are measured beside: on every operand of every gemm, by
            each type's own rules and what of the ``quant`` section applies to it. The training stays as it is.
        layout: ``flat`` (all files in one folder) or ``by_iteration``.
        host_memory_gb: for values that wait to be written, of all ranks of a host, in 10^9 bytes; None: what an
            iteration's captures need, at most a quarter of what is free.
        durability: what is synced to the disk itself: ``none``, every ``file``, or ``all`` (the manifests, too).
        on_error: what a capture that cannot be written does to the training: ``stop`` or ``continue``.
        storage: quantized copies as ``values``, or as ``codes`` and scales in the layout of their type.
        scales: the scales of blocks beside values, original and quantized.
        compress: ``none``, or ``zstd`` for what is stored as values.
        trigger: what to wait for; None: the captures begin with the training.
        dedupe: what several captures of an iteration have in common is stored once a rank; the others refer to it.
    """

    target: int | None = None
    layers: IndexSelector | None = None
    modules: tuple[str, ...] | None = None
    layer_types: tuple[str, ...] | None = None
    operations: tuple[str, ...] | None = None
    phases: tuple[str, ...] | None = None
    tensor_names: tuple[str, ...] | None = None
    iterations: IndexSelector | None = None
    ranks: IndexSelector | None = None
    samples: IndexSelector | None = None
    tokens: IndexSelector | None = None
    values: str | None = None
    mode: str = "tensors"
    shadow: tuple[str, ...] = ()
    layout: str = "flat"
    host_memory_gb: float | None = None
    durability: str = "none"
    on_error: str = "stop"
    storage: str = "values"
    scales: bool = False
    compress: str = "none"
    trigger: TriggerSpec | None = None
    dedupe: bool = False

    @property
    def leaves_files(self) -> bool:
        """Whether a capture is a tensor in a file; otherwise it is statistics in a line of the manifest."""
        return self.mode != STATISTICS

    @property
    def num_wanted(self) -> int | None:
        """How many captures are to be taken; None: all that the selectors leave."""
        if not self.leaves_files:
            return None
        return DEFAULT_TARGET if self.target is None else self.target

    @property
    def chosen_values(self) -> str:
        """``values`` with its default filled in."""
        return self.values or ("original" if self.leaves_files else "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Where and how the workers run.

    Args:
        nproc: worker processes on this node; None: one a visible device.
        gpu_ids: indices or UUIDs of the devices to use, as nvidia-smi names them; None: all visible.
        device: ``auto``, ``cpu`` or ``cuda``.
        omp_num_threads: threads a worker; None: the cores shared out.
        grace_s: seconds workers get to end by themselves before they are signalled.
        max_time: seconds after its start at which a run ends with the iteration it is in; None: no limit.
        max_bytes: a run ends before the iteration whose captures would exceed it; None: no limit.
        stall_timeout_s: seconds without progress of any rank after which a run is ended; None: never.
        show_ranks: whose output also reaches the console, prefixed: ranks, or ``all``; None: nobody's.
    """

    nproc: int | None = None
    gpu_ids: tuple[str, ...] | None = None
    device: str = "auto"
    omp_num_threads: int | None = None
    grace_s: float = 30.0
    max_time: float | None = None
    max_bytes: int | None = None
    stall_timeout_s: float | None = 600.0
    show_ranks: IndexSelector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe.

    Args:
        name: the file's name without suffix.
        path: the file it came from.
        script: the training script.
    """

    name: str
    path: str
    script: str
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    quant: QuantSpec
    capture: CaptureSpec
    launch: LaunchSpec

    def to_dict(self) -> dict[str, Any]:
        """Dicts, lists, str, int, float, bool and None only."""
        fields = _to_json(asdict(self))
        assert isinstance(fields, dict)
        return fields


def recipe_from_dict(fields: Mapping[str, Any]) -> Recipe:
    """The recipe ``Recipe.to_dict`` (or its JSON) came from. Keys that are absent take their default.

    Raises:
        RecipeError: keys this version does not know, or without a default and absent.
    """
    try:
        return Recipe(
            name=fields["name"],
            path=fields["path"],
            script=fields["script"],
            model=ModelSpec(**fields["model"]),
            data=DataSpec(**_to_tuples(fields["data"])),
            train=TrainSpec(**_to_tuples(fields["train"])),
            quant=QuantSpec(**_to_tuples(fields["quant"])),
            capture=capture_from_dict(fields["capture"]),
            launch=LaunchSpec(**_to_tuples(fields["launch"])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"a stored recipe cannot be read: {error}; it is damaged or of another version of qcollect"
        ) from error


def capture_from_dict(fields: Mapping[str, Any]) -> CaptureSpec:
    """The ``capture`` section of ``Recipe.to_dict``, or of a checked recipe, as its record."""
    trigger = fields.get("trigger")
    spec = None if trigger is None else TriggerSpec(**_to_tuples(trigger))
    return CaptureSpec(**_to_tuples({**fields, "trigger": spec}))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, tuple | list) else value


def _to_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
