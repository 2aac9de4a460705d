"""What stays the same of a tensor or an operand that is measured again and again: its lines, and how it is counted."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from qcollect.formats.binding import prepare_both
from qcollect.formats.resolved import Quantizer
from qcollect.formats.scope import is_distributed
from qcollect.formats.triton_counts import PreparedCount, PreparedPair
from qcollect.plan.schedule import PlannedCapture
from qcollect.recipe.conflicts import of_type
from qcollect.recipe.records import QuantSpec
from qcollect.store.summary_cuda import supports as has_kernel
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.frame import Claim, want_key
from qcollect.worker.lines import NOT_STORED, LineTemplate, operand_text, tensor_text
from qcollect.worker.policy import QuantPolicy, Use
from qcollect.worker.saver import Saver, describe_capture
from qcollect.worker.sharding import describe_sharding
from qcollect.worker.sink import Observer

SHARED = frozenset({"input"})  # what several modules may read: q, k and v, gate and up
# the gemms of a linear that read one operand, along its last axis and, later, along its first
_READ_AGAIN = {
    ("input", Gemm.FPROP): Gemm.WGRAD,
    ("weight", Gemm.FPROP): Gemm.DGRAD,
    ("grad_output", Gemm.DGRAD): Gemm.WGRAD,
}

Shadows = Mapping[tuple[LayerType, str, Gemm], tuple[tuple[str, Quantizer], ...]]


def shadows_of(shadow: Sequence[str], quant: QuantSpec) -> Shadows:
    """The further types an operand of a gemm is measured under, by name.

    Raises:
        FormatError: a type, rule or rounding that does not exist together.
    """
    found: dict[tuple[LayerType, str, Gemm], tuple[tuple[str, Quantizer], ...]] = {}
    kept: dict[Quantizer, Quantizer] = {}
    for name in shadow:
        policy = QuantPolicy.from_spec(of_type(quant, name))
        for layer_type in LayerType:
            for (tensor_name, gemm), quantizer in policy.by_layer_type(layer_type).items():
                place = (layer_type, tensor_name, gemm)
                if _is_without_axis(quantizer):  # one for all gemms that read a tensor
                    quantizer = replace(quantizer, axis=-1)
                quantizer = kept.setdefault(quantizer, quantizer)
                found[place] = (*found.get(place, ()), (quantizer.quant_type.name, quantizer))
    return found


def _is_without_axis(quantizer: Quantizer) -> bool:
    """Whether it does the same to a tensor whatever axis a gemm contracts."""
    return quantizer.block_size is None and not quantizer.draws


class Shadow(NamedTuple):
    """A further type that an operand is measured under.

    Args:
        prepared: what counts it; None: nothing that could be found once.
        is_shared: whether somebody else may measure the same.
        other: of the gemm that reads the tensor later, along its first axis.
        with_other: what counts both at once; None: nothing does.
    """

    quantizer: Quantizer
    prepared: PreparedCount | None
    is_shared: bool
    other: Quantizer | None = None
    with_other: PreparedPair | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSite:
    """An operand of a gemm, of one shape: its lines, and the types it is measured under beside its own."""

    template: LineTemplate
    quantizer: Quantizer
    own: PreparedCount | None
    shadows: tuple[Shadow, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_known: bool  # whether nothing else has to be found: nothing is drawn, and no scale is left out

    def fits(self, x: torch.Tensor) -> bool:
        return self.shape == x.shape and self.dtype is x.dtype and self.device == x.device


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSite:
    """A tensor of one kind: its lines, and whether kernels count it as it is."""

    template: LineTemplate
    layout: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool
    has_kernel: bool

    def fits(self, tensor: torch.Tensor, layout: str) -> bool:
        return (
            self.shape == tensor.shape
            and self.dtype is tensor.dtype
            and self.requires_grad == tensor.requires_grad
            and self.is_leaf == tensor.is_leaf
            and self.device == tensor.device
            and self.layout == layout
        )


class MeasuredSites:
    """Finds them; the one that was found last for a planned capture, at once.

    Args:
        shadows: types beside the gemms' own.
        captures: those of a micro-batch.
    """

    def __init__(self, saver: Saver, observer: Observer, shadows: Shadows, captures: Sequence[PlannedCapture]) -> None:
        self._wants = frozenset(map(want_key, captures))
        self.templates: list[LineTemplate] = []
        self.device = torch.device("cpu")  # where numbers are measured into tables
        self._saver, self._observer, self._shadows = saver, observer, shadows
        # by all that they are of, and by the planned capture alone, which the schedule keeps
        self._tensors: dict[Hashable, TensorSite] = {}
        self._last_tensors: dict[int, TensorSite] = {}
        self._operands: dict[Hashable, OperandSite] = {}
        self._last_operands: dict[int, OperandSite] = {}

    def of_tensor(self, claim: Claim, tensor: torch.Tensor, local: torch.Tensor) -> TensorSite:
        """Of a tensor, or of this rank's part of it."""
        last = self._last_tensors.get(id(claim.planned))
        if last is not None and last.fits(local, claim.token_layout) and not is_distributed(tensor):
            return last
        sharding = describe_sharding(tensor) if is_distributed(tensor) else None
        key = (
            id(claim.planned), local.shape, local.dtype, local.device, local.requires_grad, local.is_leaf,
            claim.token_layout, None if sharding is None else str(sharding),
        )  # fmt: skip
        site = self._tensors.get(key)
        if site is None:
            metadata = self._metadata(claim, sharding)
            info = _describe(local, requires_grad=local.requires_grad, is_leaf=local.is_leaf)
            template = self._make_template(
                text=tensor_text(metadata, info), want=want_key(claim.planned), num_elements=local.numel()
            )
            site = self._tensors[key] = TensorSite(
                template=template,
                layout=claim.token_layout,
                shape=local.shape,
                dtype=local.dtype,
                device=local.device,
                requires_grad=local.requires_grad,
                is_leaf=local.is_leaf,
                has_kernel=local.numel() > 0 and local.device == self.device and has_kernel(local),
            )
        if sharding is None:
            self._last_tensors[id(claim.planned)] = site
        return site

    def _make_template(self, **fields: Any) -> LineTemplate:
        template = LineTemplate(number=len(self.templates), **fields)
        self.templates.append(template)
        return template

    def of_operand(self, claim: Claim, use: Use) -> OperandSite:
        """Of an operand as its gemm sees it."""
        x = use.binding.x
        is_plain = not is_distributed(use.original)
        last = self._last_operands.get(id(claim.planned)) if is_plain else None
        if last is not None and last.fits(x):
            return last
        sharding = describe_sharding(use.original) if is_distributed(use.original) else None
        key = (
            id(claim.planned), x.shape, x.dtype, x.device, claim.token_layout,
            None if sharding is None else str(sharding),
        )  # fmt: skip
        site = self._operands.get(key)
        if site is None:
            site = self._operands[key] = self._make_operand(claim, use, sharding)
        if is_plain:
            self._last_operands[id(claim.planned)] = site
        return site

    def known_operand(self, claim: Claim, x: torch.Tensor) -> OperandSite | None:
        """Of an operand of which nothing has to be found any more but what kernels count in it."""
        site = self._last_operands.get(id(claim.planned))
        is_known = site is not None and site.is_known and site.fits(x)
        return site if is_known and not is_distributed(x) else None

    def _make_operand(self, claim: Claim, use: Use, sharding: dict[str, Any] | None) -> OperandSite:
        x, planned, quantizer = use.binding.x, claim.planned, use.quantizer
        own = () if quantizer.is_identity else (quantizer.quant_type.name,)
        shadows = self._shadows.get((planned.layer_type, planned.tensor_name, use.gemm), ())
        others = [(name, shadow) for name, shadow in shadows if name not in own]
        names = (*own, *(name for name, _ in others))
        consumer = use.describe(torch.zeros((), dtype=torch.int64))
        metadata = self._metadata(claim, sharding)
        prepared: list[PreparedCount | None] = [None] * (1 + len(others))
        if x.device == self.device and sharding is None:
            prepared = [
                use.binding.prepare_count(with_values=True),
                *(use.under(shadow).prepare_count(with_values=False) for _, shadow in others),
            ]
        return OperandSite(
            quantizer=quantizer,
            is_known=prepared[0] is not None and not any(shadow.draws for _, shadow in others),
            shape=x.shape,
            dtype=x.dtype,
            device=x.device,
            template=self._make_template(
                text=operand_text(metadata, consumer, _describe(x, requires_grad=False, is_leaf=True), names),
                want=want_key(planned),
                num_elements=x.numel(),
                num_types=len(names),
                is_quantized=bool(own),
                quantizer=None if use.amax is None else quantizer,
            ),
            own=prepared[0],
            shadows=tuple(
                self._make_shadow(planned, use, name, shadow, each)
                for (name, shadow), each in zip(others, prepared[1:], strict=True)
            ),
        )

    def _make_shadow(
        self, planned: PlannedCapture, use: Use, name: str, shadow: Quantizer, prepared: PreparedCount | None
    ) -> Shadow:
        tensor_name = planned.tensor_name
        is_shared = tensor_name in SHARED or _is_without_axis(shadow)
        if prepared is None or planned.layer_type != LayerType.LINEAR:
            return Shadow(shadow, prepared, is_shared)
        gemm = _READ_AGAIN.get((tensor_name, use.gemm))
        if gemm is None:  # the gemm that read it before has measured it along this axis, too
            return Shadow(shadow, prepared, is_shared=True)
        is_wanted = (planned.module, tensor_name, gemm) in self._wants
        other = dict(self._shadows[planned.layer_type, tensor_name, gemm]).get(name) if is_wanted else None
        with_other = None
        if other is not None and other is not shadow:
            with_other = prepare_both(use.under(shadow), use.under(other), with_values=False)
        return Shadow(shadow, prepared, is_shared or with_other is not None, other, with_other)

    def _metadata(self, claim: Claim, sharding: dict[str, Any] | None) -> dict[str, Any]:
        """Without consumers: what is said of one may still be on a device."""
        seen = self._observer.observe(claim, sharding=sharding)
        return describe_capture(seen, self._saver.run_id, self._saver.device, self._saver.clock(), NOT_STORED)


def _describe(tensor: torch.Tensor, *, requires_grad: bool, is_leaf: bool) -> dict[str, Any]:
    """``tensor_info`` without its statistics."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        "requires_grad": requires_grad,
        "is_leaf": is_leaf,
    }
