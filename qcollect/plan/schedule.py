"""Which captures a run takes: fixed before the first iteration, exact to the file.

The unit is a module's group of tensors (``vocab.GROUPS``), so forward and backward, before and
after come together. Layers are completed one at a time in ``order_layers``; inside a layer the
attention kernel comes first, then the linears in model order. The list is cut to each rank's
share of the target, and the share is spread evenly over the iterations asked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Self

from qcollect.errors import ScheduleError, SelectionError
from qcollect.plan.sizes import stored_bytes
from qcollect.recipe.records import CaptureSpec, QuantSpec
from qcollect.recipe.selectors import expand_indices, match_names
from qcollect.vocab import COMPONENTS, GROUPS, Gemm, LayerType, Operation, Values

# A file is its tensor plus the zip archive, pickle and metadata around it (measured, 2.9 to 3.6 KB).
FILE_OVERHEAD_BYTES = 4096
# A line of the manifest with statistics: of a tensor, of an operand without its errors, and of the errors under each
# type (measured, within a tenth).
TENSOR_LINE_BYTES = 1150
OPERAND_LINE_BYTES = 1250
ERRORS_BYTES = 260


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSites:
    """A module that can be captured, as seen on the model.

    ``shapes`` maps each tensor name of its group to the shape one micro-batch gives; empty when
    not known. ``without_grad`` names the tensors known to have no gradient (a frozen weight's
    ``grad_weight``, the ``grad_input`` of an input that needs none). ``excluded`` modules are
    captured, not quantized; ``on_request`` ones (lm_head) are captured only when
    ``capture.modules`` names them.
    """

    module: str
    layer_type: LayerType
    layer_idx: int | None
    shapes: dict[str, tuple[int, ...]]
    element_bytes: int = 4
    without_grad: tuple[str, ...] = ()
    excluded: bool = False
    on_request: bool = False

    @property
    def projection(self) -> str | None:
        """The last part of a linear's FQN (``q_proj``); None for attention."""
        return self.module.rsplit(".", 1)[-1] if self.layer_type == LayerType.LINEAR else None

    @property
    def gemms(self) -> frozenset[Gemm]:
        """The gemms this module runs: no dgrad without ``grad_input``, no wgrad without ``grad_weight``."""
        results = {"grad_input": Gemm.DGRAD, "grad_weight": Gemm.WGRAD}
        return frozenset(Gemm) - {results[name] for name in self.without_grad if name in results}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            module=fields["module"],
            layer_type=LayerType(fields["layer_type"]),
            layer_idx=fields["layer_idx"],
            shapes={name: tuple(shape) for name, shape in fields["shapes"].items()},
            element_bytes=fields["element_bytes"],
            without_grad=tuple(fields["without_grad"]),
            excluded=fields["excluded"],
            on_request=fields["on_request"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCapture:
    """One capture of the schedule, before it has a rank, an iteration and a sample."""

    module: str
    layer_type: LayerType
    layer_idx: int | None
    operation: Operation
    phase: str
    tensor_name: str
    gemm: Gemm | None
    values: Values
    num_bytes: int

    @property
    def component(self) -> str:
        return COMPONENTS[self.layer_type]

    @property
    def tensor(self) -> str:
        """The last field of the file name: ``query``, ``q_proj_input``, ``q_proj_input_fprop``."""
        projection = self.module.rsplit(".", 1)[-1] if self.layer_type == LayerType.LINEAR else None
        return "_".join(part for part in (projection, self.tensor_name, self.gemm) if part)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            **{
                **fields,
                "layer_type": LayerType(fields["layer_type"]),
                "operation": Operation(fields["operation"]),
                "gemm": Gemm(fields["gemm"]) if fields["gemm"] else None,
                "values": Values(fields["values"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A rank takes the first ``count`` captures of the list in this micro-batch.

    ``start`` is the number of captures the rank has taken before, so the capture at position p
    of the list (from 0) has counter ``start + p + 1``.
    """

    iteration: int
    micro_batch: int
    count: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The list of one micro-batch's captures in order, and each rank's cuts of it.

    The iterations of a run with a trigger count from the first that it captures. Where captures are statistics
    (``leaves_files`` is False) their ``num_bytes`` are those of lines in the manifest.
    """

    captures: tuple[PlannedCapture, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    leaves_files: bool = True

    def share(self, rank: int) -> int:
        return sum(cut.count for cut in self.cuts[rank])

    @property
    def target(self) -> int:
        return sum(self.share(rank) for rank in range(len(self.cuts)))

    @property
    def num_files(self) -> int:
        return self.target if self.leaves_files else 0

    @property
    def sizes(self) -> list[int]:
        """Estimated bytes on disk, capture by capture."""
        overhead = FILE_OVERHEAD_BYTES if self.leaves_files else 0
        return [capture.num_bytes + overhead for capture in self.captures]

    def num_bytes(self, iteration: int | None = None) -> int:
        """Estimated size of all captures, or of those of one iteration."""
        sizes = self.sizes
        chosen = (cut for cuts in self.cuts for cut in cuts if iteration is None or cut.iteration == iteration)
        return sum(sum(sizes[: cut.count]) for cut in chosen)

    @property
    def first_iteration(self) -> int:
        """The first iteration that captures."""
        return min((cut.iteration for cuts in self.cuts for cut in cuts), default=0)

    def ranks_without_backward(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose share is cut before its first backward capture; none if the list has no such."""
        first = next((i for i, capture in enumerate(self.captures) if capture.operation == Operation.BACKWARD), None)
        return [] if first is None else [r for r in ranks if all(cut.count <= first for cut in self.cuts[r])]

    def to_dict(self) -> dict[str, Any]:
        return {
            "captures": [capture.to_dict() for capture in self.captures],
            "cuts": [[[c.iteration, c.micro_batch, c.count, c.start] for c in cuts] for cuts in self.cuts],
            "leaves_files": self.leaves_files,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            captures=tuple(PlannedCapture.from_dict(c) for c in fields["captures"]),
            cuts=tuple(
                tuple(Cut(iteration=i, micro_batch=m, count=n, start=s) for i, m, n, s in cuts)
                for cuts in fields["cuts"]
            ),
            leaves_files=fields.get("leaves_files", True),
        )


def order_layers(layers: Iterable[int]) -> list[int]:
    """``layers`` in the order they are completed: middle, first, last, then evenly between.

    "Evenly between" takes the middle of the widest gap left between those already taken, the
    lower one when gaps are equal: 16 layers give 8, 0, 15, 4, 11, 2, 6, ...
    """
    ordered = sorted(set(layers))
    if not ordered:
        return []
    last = len(ordered) - 1
    taken = list(dict.fromkeys((len(ordered) // 2, 0, last)))
    while len(taken) < len(ordered):
        marks = sorted(taken)
        gaps = [(high - low, -low) for low, high in pairwise(marks)]
        width, low = max(gaps)
        taken.append(-low + width // 2)
    return [ordered[position] for position in taken]


def choose_captures(modules: Sequence[ModuleSites], quant: QuantSpec, spec: CaptureSpec) -> list[PlannedCapture]:
    """The captures of one micro-batch that ``spec`` selects, in schedule order.

    Raises:
        SelectionError: a selector matches nothing.
    """
    chosen = select_modules(modules, spec)
    gemms = quantized_gemms(quant)
    if not spec.leaves_files:
        return _as_lines(select_captures(_list_statistics(chosen, gemms, spec), spec), gemms, spec)
    captures = select_captures(list_captures(chosen, values=spec.chosen_values, quantized=gemms), spec)
    sites = {module.module: module for module in chosen}
    return [_as_stored(capture, sites[capture.module], gemms, quant, spec) for capture in captures]


def _list_statistics(
    modules: Sequence[ModuleSites], quantized: Mapping[LayerType, Collection[Gemm]], spec: CaptureSpec
) -> list[PlannedCapture]:
    """As ``list_captures``; shadow types are measured on the operands of all gemms, also of those that quantize none.

    Raises:
        SelectionError: errors alone are asked for, and nothing is quantized.
    """
    if spec.shadow:
        modules = [replace(module, excluded=False) for module in modules]
        quantized = {layer_type: frozenset(Gemm) for layer_type in LayerType}
    values = spec.chosen_values
    captures = list_captures(modules, values=values, quantized=quantized)
    if values == Values.QUANTIZED:
        captures = [capture for capture in captures if capture.values == Values.QUANTIZED]
    if not captures:
        raise SelectionError(
            "capture.values is 'quantized', and nothing that is captured is quantized; set capture.values=both, or "
            "name types in capture.shadow"
        )
    return captures


def _as_lines(
    captures: Iterable[PlannedCapture], quantized: Mapping[LayerType, Collection[Gemm]], spec: CaptureSpec
) -> list[PlannedCapture]:
    """The captures with the bytes their lines take."""

    def num_bytes(capture: PlannedCapture) -> int:
        if capture.gemm is None:
            return TENSOR_LINE_BYTES
        return OPERAND_LINE_BYTES + ERRORS_BYTES * ((capture.gemm in quantized[capture.layer_type]) + len(spec.shadow))

    return [replace(capture, num_bytes=num_bytes(capture)) for capture in captures]


def _as_stored(
    capture: PlannedCapture,
    module: ModuleSites,
    quantized: Mapping[LayerType, Collection[Gemm]],
    quant: QuantSpec,
    spec: CaptureSpec,
) -> PlannedCapture:
    """The capture with the bytes it takes on disk."""
    if (spec.storage, spec.scales, spec.tokens) == ("values", False, None) or capture.tensor_name not in module.shapes:
        return capture
    slots = {slot.tensor_name: slot for slot in GROUPS[module.layer_type]}
    consumers = set() if module.excluded else module.gemms & set(quantized[module.layer_type])
    num_bytes = stored_bytes(
        module.shapes[capture.tensor_name],
        module.element_bytes,
        layer_type=module.layer_type,
        tensor_name=capture.tensor_name,
        copy_of=capture.gemm,
        consumers=[gemm for gemm in slots[capture.tensor_name].consumers if gemm in consumers],
        quant=quant,
        spec=spec,
    )
    return replace(capture, num_bytes=num_bytes)


def quantized_gemms(quant: QuantSpec) -> dict[LayerType, frozenset[Gemm]]:
    """The gemms that quantize their operands: those whose type is not ``none``."""
    types = {gemm: quant.overrides.get(gemm, {}).get("type") or quant.type for gemm in Gemm}
    gemms = frozenset(gemm for gemm, name in types.items() if quant.find_type(name).element is not None)
    return {LayerType.LINEAR: gemms, LayerType.ATTENTION: gemms if quant.attention == "qkv" else frozenset()}


def list_captures(
    modules: Sequence[ModuleSites], *, values: str, quantized: Mapping[LayerType, Collection[Gemm]]
) -> list[PlannedCapture]:
    """Every capture one micro-batch can give, in schedule order.

    Args:
        modules: in model order.
        values: ``original``, ``quantized`` or ``both``.
        quantized: the gemms that quantize their operands.
    """
    ordered = [m for idx in order_layers(_layer_indices(modules)) for m in modules if m.layer_idx == idx]
    ordered += [m for m in modules if m.layer_idx is None]
    # sorted is stable: attention first, then the linears of the layer as the model has them
    position = {idx: i for i, idx in enumerate(dict.fromkeys(m.layer_idx for m in ordered))}
    ordered.sort(key=lambda m: (position[m.layer_idx], m.layer_type != LayerType.ATTENTION))
    return [c for m in ordered for c in _group_captures(m, values, () if m.excluded else quantized[m.layer_type])]


def _layer_indices(modules: Sequence[ModuleSites]) -> list[int]:
    return [m.layer_idx for m in modules if m.layer_idx is not None]


def _group_captures(module: ModuleSites, values: str, quantized: Collection[Gemm]) -> list[PlannedCapture]:
    captures = []
    gemms = module.gemms
    for slot in GROUPS[module.layer_type]:
        if slot.tensor_name in module.without_grad:
            continue
        consumers = [gemm for gemm in slot.consumers if gemm in gemms]
        copies: list[tuple[Gemm | None, Values]] = []
        # what some gemm reads as it is, and what none reads, has its original only
        is_quantized_only = values == Values.QUANTIZED and consumers and all(gemm in quantized for gemm in consumers)
        if not is_quantized_only:
            copies.append((None, Values.ORIGINAL))
        if values != Values.ORIGINAL:
            copies += [(gemm, Values.QUANTIZED) for gemm in consumers if gemm in quantized]
        num_elements = 1
        for size in module.shapes.get(slot.tensor_name, (0,)):
            num_elements *= size
        captures += [
            PlannedCapture(
                module=module.module,
                layer_type=module.layer_type,
                layer_idx=module.layer_idx,
                operation=slot.operation,
                phase=slot.phase,
                tensor_name=slot.tensor_name,
                gemm=gemm,
                values=kind,
                num_bytes=num_elements * module.element_bytes,
            )
            for gemm, kind in copies
        ]
    return captures


def select_modules(modules: Sequence[ModuleSites], spec: CaptureSpec) -> list[ModuleSites]:
    """The modules ``capture.layers``, ``capture.modules`` and ``capture.layer_types`` leave.

    Raises:
        SelectionError: a selector matches nothing; the message names the alternatives.
    """
    chosen = [m for m in modules if spec.modules is not None or not m.on_request]
    if spec.layers is not None:
        num_layers = max(_layer_indices(modules), default=-1) + 1
        layers = set(expand_indices(spec.layers, num_layers, key="capture.layers"))
        chosen = [m for m in chosen if m.layer_idx in layers]
    if spec.modules is not None:
        names = set(match_names(spec.modules, [m.module for m in modules], key="capture.modules"))
        chosen = [m for m in chosen if m.module in names]
    if spec.layer_types is not None:
        names = set(match_names(spec.layer_types, list(LayerType), key="capture.layer_types"))
        chosen = [m for m in chosen if m.layer_type in names]
    if not chosen:
        raise SelectionError(
            "capture.layers, capture.modules and capture.layer_types together match none of the model's "
            f"{len(modules)} modules, from {modules[0].module if modules else '(none)'}; loosen one of them"
        )
    return chosen


def select_captures(captures: Sequence[PlannedCapture], spec: CaptureSpec) -> list[PlannedCapture]:
    """The captures ``capture.operations``, ``phases`` and ``tensor_names`` leave.

    Raises:
        SelectionError: a selector matches nothing.
    """
    chosen = list(captures)
    for key, attribute in (("operations", "operation"), ("phases", "phase"), ("tensor_names", "tensor_name")):
        patterns = getattr(spec, key)
        if patterns is not None:
            known = list(dict.fromkeys(str(getattr(c, attribute)) for c in captures))
            names = set(match_names(patterns, known, key=f"capture.{key}"))
            chosen = [c for c in chosen if getattr(c, attribute) in names]
    if not chosen:
        raise SelectionError("capture.operations, capture.phases and capture.tensor_names together match no tensor")
    return chosen


def split_evenly(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole shares; the first ``total % parts`` have one more."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def spread_evenly(total: int, capacities: Sequence[int]) -> list[int]:
    """``total`` in whole shares as even as ``capacities`` allow; what a full one cannot take goes to the others."""
    shares = [0] * len(capacities)
    while (rest := total - sum(shares)) > 0:
        free = [i for i, capacity in enumerate(capacities) if shares[i] < capacity]
        more = max(1, rest // len(free))
        for i in free[: rest // more]:
            shares[i] = min(shares[i] + more, capacities[i])
    return shares


def build_schedule(
    captures: Sequence[PlannedCapture],
    spec: CaptureSpec,
    *,
    world_size: int,
    num_iterations: int,
    micro_batches: int,
    micro_batch_size: int,
) -> Schedule:
    """Each rank's share of ``spec.num_wanted`` (None: of all there are), cut from ``captures``.

    Args:
        captures: one micro-batch's captures in order.
        spec: target, iterations, ranks and samples.
        num_iterations: iterations the training has; ``capture.iterations`` must lie inside.
        micro_batches: per iteration and rank.
        micro_batch_size: sequences a micro-batch.

    Raises:
        SelectionError: iterations, ranks or samples outside the run.
        ScheduleError: the target is more than the run can produce; the message has the number.
    """
    iterations = _captured_iterations(spec, num_iterations)
    ranks = range(world_size) if spec.ranks is None else expand_indices(spec.ranks, world_size, key="capture.ranks")
    samples = None
    if spec.samples is not None:
        num_samples = num_iterations * micro_batches * world_size * micro_batch_size
        samples = set(expand_indices(spec.samples, num_samples, key="capture.samples"))
    num_captures = len(captures)

    def takes(rank: int, iteration: int, micro_batch: int) -> bool:
        first = first_sample_idx(rank, iteration, micro_batch, world_size, micro_batches, micro_batch_size)
        return samples is None or not samples.isdisjoint(range(first, first + micro_batch_size))

    # by rank and iteration; a rank or iteration without a chosen sample takes no part
    slots = {rank: {i: [m for m in range(micro_batches) if takes(rank, i, m)] for i in iterations} for rank in ranks}
    slots = {rank: {i: m for i, m in by_iteration.items() if m} for rank, by_iteration in slots.items()}
    slots = {rank: by_iteration for rank, by_iteration in slots.items() if by_iteration}
    if not slots:
        raise SelectionError(
            "capture.samples names no sample of the iterations and ranks that are captured; loosen capture.samples, "
            "capture.iterations or capture.ranks"
        )
    capacities = [sum(map(len, by_iteration.values())) * num_captures for by_iteration in slots.values()]
    if spec.num_wanted is not None:
        _refuse_impossible(num_captures, spec, capacities, slots)
        capacities = split_evenly(spec.num_wanted, len(slots))
    shares = dict(zip(slots, capacities, strict=True))
    cuts = tuple(
        tuple(_cut_rank(num_captures, slots[rank], shares[rank])) if rank in slots else () for rank in range(world_size)
    )
    return Schedule(captures=tuple(captures), cuts=cuts, leaves_files=spec.leaves_files)


def _captured_iterations(spec: CaptureSpec, num_iterations: int) -> Sequence[int]:
    """Those of the training; with a trigger counted from the first after it."""
    if spec.trigger is not None:
        return range(spec.trigger.iterations)
    asked = spec.iterations if spec.leaves_files else spec.iterations or "all"
    return (0,) if asked is None else expand_indices(asked, num_iterations, key="capture.iterations")


def warn_of_small_target(schedule: Schedule, spec: CaptureSpec) -> str | None:
    """The warning for a target that reaches no backward capture on some rank, None if it does on all."""
    world_size = len(schedule.cuts)
    chosen = range(world_size) if spec.ranks is None else expand_indices(spec.ranks, world_size, key="capture.ranks")
    # a rank without cuts is one the samples leave out, unless there are more ranks than captures
    taking_part = [rank for rank in chosen if schedule.cuts[rank] or schedule.target < len(chosen)]
    ranks = schedule.ranks_without_backward(taking_part)
    if not ranks:
        return None
    named = ", ".join(str(r) for r in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return (
        f"the target {schedule.target} is too small to reach a backward capture on rank(s) {named}; "
        "raise --target, or choose with capture.operations"
    )


def first_sample_idx(
    rank: int, iteration: int, micro_batch: int, world_size: int, micro_batches: int, micro_batch_size: int
) -> int:
    """Global index of the first sequence of a micro-batch: ranks take turns, micro-batch by micro-batch."""
    return ((iteration * micro_batches + micro_batch) * world_size + rank) * micro_batch_size


def _refuse_impossible(
    num_captures: int, spec: CaptureSpec, capacities: Sequence[int], slots: dict[int, dict[int, list[int]]]
) -> None:
    # the first ranks take one more: the least capacity for all, and one for each before the first that is full
    possible = min(capacities) * len(capacities) + capacities.index(min(capacities))
    if spec.num_wanted is not None and spec.num_wanted > possible:
        more = "capture.iterations=spread:K" if spec.trigger is None else "capture.trigger.iterations=K"
        num_iterations = max(map(len, slots.values()))
        num_batches = max(len(batches) for by_iteration in slots.values() for batches in by_iteration.values())
        raise ScheduleError(
            f"target {spec.num_wanted} is more than this run can produce: {possible} files = {num_captures} captures a "
            f"micro-batch, {num_batches} micro-batch(es), {num_iterations} iteration(s), {len(slots)} rank(s); lower "
            f"--target, or capture more with --set {more} or capture.values=both"
        )


def _cut_rank(num_captures: int, by_iteration: dict[int, list[int]], share: int) -> Iterable[Cut]:
    start = 0
    capacities = [len(batches) * num_captures for batches in by_iteration.values()]
    for (iteration, batches), wanted in zip(by_iteration.items(), spread_evenly(share, capacities), strict=True):
        for micro_batch in batches:
            count = min(wanted, num_captures)
            if count:
                yield Cut(iteration=iteration, micro_batch=micro_batch, count=count, start=start)
            start += count
            wanted -= count
