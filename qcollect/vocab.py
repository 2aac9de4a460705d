"""The words of the field: what a capture is called, by key and by file name.

A capture is one tensor observed once. ``CaptureKey`` is its identity; the file name is only a
readable label, built and parsed here and nowhere else. ``GROUPS`` is the table of what is
captured of a linear and of an attention kernel, in the order a schedule takes them.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self


class LayerType(StrEnum):
    ATTENTION = "attention"
    LINEAR = "linear"


class Operation(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Phase(StrEnum):
    """Before (pre) or after (post) the operation."""

    PRE = "pre"
    POST = "post"


class Component(StrEnum):
    FA = "FA"
    LINEAR = "linear"


class Gemm(StrEnum):
    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Values(StrEnum):
    """What a capture holds: the operand as the network computed it, or as a gemm consumed it."""

    ORIGINAL = "original"
    QUANTIZED = "quantized"


class Trigger(StrEnum):
    """What can begin the captures of a run that waits (``capture.trigger``). Of one iteration, on any rank:

    ``loss_spike``: the loss is above ``loss_factor`` times the median of the losses before it.
    ``nan``: the loss or the gradient norm is NaN or infinite.
    ``grad_norm_jump``: the gradient norm is above ``grad_norm_factor`` times the median of those before it.
    ``signal``: SIGUSR1 came, to the launcher or to the process itself.
    """

    LOSS_SPIKE = "loss_spike"
    NAN = "nan"
    GRAD_NORM_JUMP = "grad_norm_jump"
    SIGNAL = "signal"


COMPONENTS = {LayerType.ATTENTION: Component.FA, LayerType.LINEAR: Component.LINEAR}

# Names a file name can carry as its quant type. The number formats themselves are in the
# formats catalog; a name may be known here before (or after) its format is.
QUANT_TYPES = (
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "hifp8",
    "hif4",
    "fp8_e4m3",
    "fp8_e5m2",
    "bf16",
    "fp16",
    "none",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One row of ``GROUPS``: a tensor of a module, and the gemms that consume it (none: a result)."""

    operation: Operation
    phase: Phase
    tensor_name: str
    consumers: tuple[Gemm, ...] = ()


def _slot(operation: Operation, phase: Phase, tensor_name: str, *consumers: Gemm) -> Slot:
    return Slot(operation=operation, phase=phase, tensor_name=tensor_name, consumers=consumers)


_F, _B = Operation.FORWARD, Operation.BACKWARD
GROUPS: dict[LayerType, tuple[Slot, ...]] = {
    LayerType.ATTENTION: (
        _slot(_F, Phase.PRE, "query", Gemm.FPROP),
        _slot(_F, Phase.PRE, "key", Gemm.FPROP),
        _slot(_F, Phase.PRE, "value", Gemm.FPROP),
        _slot(_F, Phase.POST, "output"),
        _slot(_B, Phase.PRE, "grad_output"),
        _slot(_B, Phase.POST, "grad_query"),
        _slot(_B, Phase.POST, "grad_key"),
        _slot(_B, Phase.POST, "grad_value"),
    ),
    LayerType.LINEAR: (
        _slot(_F, Phase.PRE, "input", Gemm.FPROP, Gemm.WGRAD),
        _slot(_F, Phase.PRE, "weight", Gemm.FPROP, Gemm.DGRAD),
        _slot(_F, Phase.POST, "output"),
        _slot(_B, Phase.PRE, "grad_output", Gemm.DGRAD, Gemm.WGRAD),
        _slot(_B, Phase.POST, "grad_input"),
        _slot(_B, Phase.POST, "grad_weight"),
    ),
}
TENSOR_NAMES = tuple(dict.fromkeys(s.tensor_name for group in GROUPS.values() for s in group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where captures are seen: a module, an operation, a phase."""

    module: str
    operation: Operation
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureKey:
    """A capture's identity. It pairs captures across runs, makes resume exact and drops repeats."""

    rank: int
    iteration: int
    micro_batch: int
    sample_idx: int
    module: str
    operation: str
    phase: str
    tensor_name: str
    gemm: str | None
    values: str

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self:
        """The key of a capture from its metadata (or its manifest line).

        ``gemm`` is that of the single consumer of a quantized copy, None for an original.
        """
        values = str(metadata.get("values", Values.ORIGINAL))
        consumers = metadata.get("consumers") or []
        gemm = consumers[0]["gemm"] if values == Values.QUANTIZED and consumers else None
        return cls(
            rank=int(metadata["rank"]),
            iteration=int(metadata["iteration"]),
            micro_batch=int(metadata.get("micro_batch", 0)),
            sample_idx=int(metadata.get("sample_idx", 0)),
            module=str(metadata.get("module") or ""),
            operation=str(metadata["operation"]),
            phase=str(metadata["phase"]),
            tensor_name=str(metadata["tensor_name"]),
            gemm=gemm,
            values=values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Who a process is. ``rank`` is global; ``local_rank`` counts inside the node and picks the device."""

    rank: int
    local_rank: int
    world_size: int
    source: str = "default"


# ---------------------------------------------------------------------------------------------
# File names
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureName:
    """The fields of a capture's file name; those an older form lacks are None.

    ``tensor`` is the last field as it stands: the tensor name, for linears behind the
    projection's name, for quantized copies followed by the gemm.
    """

    timestamp: str
    counter: int
    iteration: int | None = None
    layer_type: str
    layer_idx: int | None = None
    operation: str
    phase: str | None = None
    component: str | None = None
    quant_type: str
    rank: int | None = None
    sample_idx: int | None = None
    tensor: str

    def build(self) -> str:
        """The file name in the written form (``iteration``, ``phase``, ``component``, ``rank`` and
        ``sample_idx`` must be set). ``/`` and NUL, which no file name can hold, become ``%2F`` and ``%00``,
        and ``%`` itself ``%25``.
        """
        assert None not in (self.iteration, self.phase, self.component, self.rank, self.sample_idx)
        layer = "" if self.layer_idx is None else f"_L{self.layer_idx}"
        return (
            f"{self.timestamp}_{self.counter:04d}_iter{self.iteration:03d}_{_safe(self.layer_type)}{layer}"
            f"_{_safe(self.operation)}_{_safe(self.phase)}_{_safe(self.component)}_{_safe(self.quant_type)}"
            f"_rank{self.rank}_sample{self.sample_idx}_{_safe(self.tensor)}.pt"
        )

    @classmethod
    def parse(cls, name: str, quant_types: Collection[str] = QUANT_TYPES) -> Self:
        """The fields of a file name in the written form or one of the three older ones.

        Quant types are matched longest first against ``quant_types``; the forms with a rank also
        take a type that is not among them. A linear's backward ``input``, without a projection's name,
        comes from an older folder; it is the linear's ``grad_output`` and is given back as such.

        Raises:
            ValueError: the name has none of these forms.
        """
        for form in _compiled_forms(tuple(quant_types)):
            match = form.fullmatch(name)
            if match:
                return cls(**_fields(match.groupdict()))
        raise ValueError(f"{name!r} is not a capture's file name")

    def split_tensor(self) -> tuple[str | None, str, str | None]:
        """``tensor`` as (projection or None, tensor name, gemm or None)."""
        match = _TENSOR.fullmatch(self.tensor)
        if match is None:
            return None, self.tensor, None
        return match["projection"], match["tensor_name"], match["gemm"]


_HEAD = r"(?P<timestamp>\d{{8}}_\d{{6}})_(?P<counter>\d{{4,}})"
_LAYER = r"(?P<layer_type>attention|linear|(?!iter\d)[A-Za-z]\w*?)(?:_L(?P<layer_idx>\d+|None))?"
_OPERATION = r"(?P<operation>forward|backward)"
_PHASE = r"(?P<phase>pre|post|unknown)_(?P<component>FA|linear|unknown|[A-Za-z]\w*?)"
_RANKED = r"rank(?P<rank>\d+)_sample(?P<sample_idx>\d+)_(?P<tensor>.+)\.pt"
_FORMS = (
    rf"{_HEAD}_iter(?P<iteration>\d+)_{_LAYER}_{_OPERATION}_{_PHASE}_(?P<quant_type>{{known}})_{_RANKED}",
    rf"{_HEAD}_iter(?P<iteration>\d+)_{_LAYER}_{_OPERATION}_{_PHASE}_(?P<quant_type>\w+?)_{_RANKED}",
    rf"{_HEAD}_{_LAYER}_{_OPERATION}_{_PHASE}_(?P<quant_type>{{known}})_(?P<tensor>.+)\.pt",
    rf"{_HEAD}_{_LAYER}_{_OPERATION}_(?P<quant_type>{{known}})_(?P<tensor>.+)\.pt",
)
_TENSOR = re.compile(
    rf"(?:(?P<projection>.+?)_)??(?P<tensor_name>{'|'.join(sorted(TENSOR_NAMES, key=len, reverse=True))})"
    rf"(?:_(?P<gemm>{'|'.join(Gemm)}))?"
)


@lru_cache
def _compiled_forms(quant_types: tuple[str, ...]) -> list[re.Pattern[str]]:
    known = "|".join(re.escape(q) for q in sorted(quant_types, key=len, reverse=True))
    return [re.compile(form.format(known=known), re.DOTALL) for form in _FORMS]


_ESCAPES = (("%", "%25"), ("/", "%2F"), ("\0", "%00"))


@lru_cache(maxsize=4096)
def _safe(text: str | None) -> str:
    text = text or "unknown"
    for plain, escaped in _ESCAPES:
        text = text.replace(plain, escaped)
    return text


def _unsafe(text: str) -> str:
    for plain, escaped in reversed(_ESCAPES):
        text = text.replace(escaped, plain)
    return text


def _fields(groups: dict[str, str | None]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(groups)
    for key in ("counter", "iteration", "rank", "sample_idx", "layer_idx"):
        text = fields.get(key)
        fields[key] = None if text in (None, "None") else int(text)
    fields["tensor"] = _unsafe(fields["tensor"])
    if (fields["layer_type"], fields["operation"], fields["tensor"]) == ("linear", "backward", "input"):
        fields["tensor"] = "grad_output"
    return fields
