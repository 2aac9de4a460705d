"""A captured value -> what its file holds, by a recipe's ``capture.storage``, ``scales``, ``compress`` and ``tokens``.

``pack`` needs nothing but the value on the CPU and what was said of it when it was seen: a writer's thread calls it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch

from qcollect.formats.eager import Choices
from qcollect.formats.quantized import ScaleCodes
from qcollect.formats.quantizer import bind_consumer
from qcollect.recipe.records import CaptureSpec, IndexSelector
from qcollect.recipe.selectors import expand_tokens
from qcollect.store.compact import (
    Entries,
    check_compression,
    code_entries,
    scale_entries,
    value_entries,
    zstd_entries,
)
from qcollect.vocab import Values

Consumer = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How captures are stored, the fields of ``CaptureSpec`` by their names."""

    storage: str = "values"
    scales: bool = False
    compress: str = "none"
    tokens: IndexSelector | None = None
    dedupe: bool = False

    @classmethod
    def from_spec(cls, spec: CaptureSpec) -> Self:
        """What a recipe asks for.

        Raises:
            MissingExtraError: it asks for zstd, and that is not installed.
        """
        if spec.compress == "zstd":
            check_compression()
        return cls(
            storage=spec.storage, scales=spec.scales, compress=spec.compress, tokens=spec.tokens, dedupe=spec.dedupe
        )

    @property
    def needs_scales(self) -> bool:
        """Whether the scales of a quantized copy's blocks are needed, which do not follow from its values."""
        return self.scales or self.storage == "codes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What a file holds beside ``tensor_info`` and ``metadata``, and what the metadata say of it.

    ``metadata`` has ``storage`` (``values``, ``codes`` or ``zstd``), ``storage_note`` (why not as codes, where those
    were asked for), ``stored_rows`` (None, or axis, number and number in all), ``stored_in`` (of what another file
    stores, that file; a saver knows) and ``consumers``.
    """

    entries: Entries
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a tensor that are stored: ``indices`` along ``axis``, ``of`` how many."""

    axis: int
    indices: torch.Tensor
    of: int

    def of_operand(self, shape: torch.Size, operand: Sequence[int]) -> "Rows | None":
        """The same rows of a tensor of ``shape`` in the shape a gemm sees; None where that is not its rows."""
        if list(operand) == list(shape):
            return self
        leading = prod(shape[: self.axis])
        if list(operand) != [leading * self.of, *shape[self.axis + 1 :]]:
            return None
        first = torch.arange(leading).mul_(self.of).unsqueeze(1)
        return Rows(axis=0, indices=(first + self.indices).flatten(), of=leading * self.of)

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(self.axis, self.indices)

    def blocks(self, size: int) -> torch.Tensor:
        """The blocks of ``size`` rows these lie in."""
        blocks: torch.Tensor = torch.unique(self.indices // size)
        return blocks

    def cut_blocks_of(self, consumer: Consumer, shape: torch.Size, *, with_hadamard: bool = False) -> int | None:
        """The size along these rows of a consumer's blocks that they cut; None where they leave all whole.

        Args:
            consumer: whose operand these are the rows of.
            shape: of the operand.
            with_hadamard: also those of its transform.
        """
        sizes = [_size_along(consumer["block_size"], consumer["axis"], len(shape), self.axis)]
        if with_hadamard and consumer["axis"] == self.axis:
            sizes.append(consumer.get("hadamard"))
        return next((size for size in sizes if size is not None and not self._are_whole(size)), None)

    def _are_whole(self, size: int) -> bool:
        blocks = self.blocks(size)
        num_rows = (self.of - blocks * size).clamp_max(size).sum()
        return int(num_rows) == self.indices.numel()


def pack(
    value: torch.Tensor,
    packing: Packing,
    *,
    values: str = Values.ORIGINAL,
    consumers: Sequence[Consumer] = (),
    token_layout: str | None = None,
    num_samples: int = 1,
    block_scales: ScaleCodes | None = None,
) -> Packed:
    """What the file of a captured value holds.

    Args:
        value: dense CPU tensor that owns its storage, all of it.
        packing: what is asked for.
        values: ``original`` or ``quantized``.
        consumers: of the capture, see ``metadata["consumers"]``.
        token_layout: the names of its dimensions.
        num_samples: sequences in the micro-batch.
        block_scales: of a quantized copy's blocks (``Packing.needs_scales``), on any device.

    Raises:
        SelectionError: ``capture.tokens`` names positions that the sequences do not have.
    """
    rows = _choose_rows(value.shape, token_layout, num_samples, packing.tokens)
    stored = value if rows is None else rows.select(value)
    kept = [consumer if rows is None else _of_rows(consumer, value.shape, rows) for consumer in consumers]
    entries: Entries | None = None
    scales: dict[str, tuple[ScaleCodes, int]] = {}
    note = None
    if values == Values.QUANTIZED and packing.needs_scales and consumers:
        (consumer,) = consumers
        scales = _given_scales(value, consumer, block_scales, rows)
        if packing.storage == "codes" and rows is not None and rows.cut_blocks_of(consumer, value.shape):
            note = "capture.tokens cuts its blocks"
        elif packing.storage == "codes":
            entries, note = code_entries(stored, kept[0], next((codes for codes, _ in scales.values()), None))
    elif packing.scales:
        scales = _computed_scales(value, consumers, rows)
    form = "values" if entries is None else "codes"
    if entries is None and packing.compress == "zstd":
        entries = zstd_entries(stored)
        form = "values" if entries is None else "zstd"
    entries = value_entries(stored) if entries is None else entries
    if packing.scales:
        entries |= scale_entries(scales)
    if rows is not None:
        entries |= {"rows": rows.indices}
    described = None if rows is None else {"axis": rows.axis, "num": rows.indices.numel(), "of": rows.of}
    return Packed(
        entries=entries,
        metadata={
            "storage": form,
            "storage_note": note,
            "stored_rows": described,
            "stored_in": None,
            "consumers": kept,
        },
    )


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


def _choose_rows(
    shape: torch.Size, token_layout: str | None, num_samples: int, tokens: IndexSelector | None
) -> Rows | None:
    """The rows ``capture.tokens`` leaves of a tensor; None where it has no tokens, or all of them stay."""
    names = (token_layout or "").split(",")
    if tokens is None or "token" not in names:
        return None
    axis = len(shape) - len(names) + names.index("token")
    num_rows = shape[axis]
    # sequences flattened into one axis are taken from alike
    is_flat = axis == 0 and 0 < num_samples < num_rows and num_rows % num_samples == 0
    num_sequences = num_samples if is_flat else 1
    length = num_rows // num_sequences
    if length == 0:
        return None
    positions = torch.tensor(expand_tokens(tokens, length, key="capture.tokens"))
    indices = (torch.arange(num_sequences).mul_(length).unsqueeze(1) + positions).flatten()
    return None if indices.numel() == num_rows else Rows(axis=axis, indices=indices, of=num_rows)


def _of_rows(consumer: Consumer, shape: torch.Size, rows: Rows) -> Consumer:
    """A consumer's entry for the rows that are stored: the shape they have for it, and whether their values follow.

    ``not_from_rows`` is None where ``consumed`` gives the rows of what the gemm consumed, else why it cannot.
    """
    operand = rows.of_operand(shape, consumer["shape"])
    if operand is None:
        return {**consumer, "not_from_rows": "the gemm sees the tensor in a shape without these rows"}
    kept = list(consumer["shape"])
    kept[operand.axis] = operand.indices.numel()
    reason = None
    if consumer["rounding"] == "stochastic":
        reason = "stochastic rounding draws by an element's place in the whole tensor"
    elif size := operand.cut_blocks_of(consumer, torch.Size(consumer["shape"]), with_hadamard=True):
        reason = f"capture.tokens cuts blocks of {size} tokens"
    return {**consumer, "shape": kept, "not_from_rows": reason}


# ---------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------


def _given_scales(
    value: torch.Tensor, consumer: Consumer, block_scales: ScaleCodes | None, rows: Rows | None
) -> dict[str, tuple[ScaleCodes, int]]:
    """The scales that came with a quantized copy, by its gemm."""
    if block_scales is None:
        return {}
    on_cpu = ScaleCodes(scales=block_scales.scales.cpu(), micro=tuple(bits.cpu() for bits in block_scales.micro))
    choices = bind_consumer(value, consumer, is_quantized=True).choices
    return {str(consumer["gemm"]): (_scales_of_rows(on_cpu, choices, rows), choices.axis)}


def _computed_scales(
    value: torch.Tensor, consumers: Sequence[Consumer], rows: Rows | None
) -> dict[str, tuple[ScaleCodes, int]]:
    """The scales that an original has for each of its consumers, by gemm; those without blocks are left out."""
    found = {}
    for consumer in consumers:
        binding = bind_consumer(value.reshape(consumer["shape"]), consumer)
        scales = binding.scales()
        operand = None if rows is None else rows.of_operand(value.shape, consumer["shape"])
        if scales is not None:
            found[str(consumer["gemm"])] = (_scales_of_rows(scales, binding.choices, operand), binding.choices.axis)
    return found


def _scales_of_rows(scales: ScaleCodes, choices: Choices, rows: Rows | None) -> ScaleCodes:
    """The scales of the blocks that stored rows lie in, in order."""
    if rows is None:
        return scales
    size = _size_along(choices.block_size, choices.axis, scales.scales.dim(), rows.axis)

    def choose(codes: torch.Tensor, size: int | None) -> torch.Tensor:
        return codes.view(torch.uint8).index_select(rows.axis, rows.blocks(size or 1)).view(codes.dtype)

    sizes = [group if size else None for group, _ in choices.quant_type.micro_exponents]
    micro = tuple(choose(bits, group) for bits, group in zip(scales.micro, sizes, strict=True))
    return ScaleCodes(scales=choose(scales.scales, size), micro=micro)


def _size_along(block_size: Any, block_axis: int, num_dims: int, axis: int) -> int | None:
    """How many elements share a scale along an axis; None where that is no matter of blocks."""
    if isinstance(block_size, list | tuple):
        rows, columns = block_size
        return {num_dims - 2: int(rows), num_dims - 1: int(columns)}.get(axis)
    return block_size if block_axis == axis else None
