"""Quantization step by step in plain torch: what every other way of computing it must equal, bit for bit.

values -> blocks -> scales -> values / scale -> rounded -> limited -> values x scale
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from qcollect.formats.blocks import Blocks, grouped, split
from qcollect.formats.elements import HybridSource, limit_, magnitude_bits, power_of_two, round_to_element_
from qcollect.formats.random import random_fractions
from qcollect.formats.records import QuantType, Rounding, ScaleRule
from qcollect.formats.scales import BlockScales, block_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A quant type with every choice made: all that the values of a tensor follow from, but for its own scale.

    Args:
        axis: 0 or more.
        block_size: elements along the axis, or (rows, columns); None without blocks.
        source: what hybrid rounding takes its numbers for.
        seed: of stochastic rounding.
        key: of all but the seed, for dictionaries whose values keep ``quant_type`` and ``source`` alive: records by
            identity, since hashing one costs more than all else.
    """

    quant_type: QuantType
    axis: int
    scale_rule: ScaleRule | None
    rounding: Rounding
    block_size: int | tuple[int, int] | None
    saturate: bool
    source: HybridSource | None = None
    seed: int = 0
    key: tuple[object, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        key = (
            id(self.quant_type), self.axis, self.scale_rule, self.rounding, self.block_size, self.saturate,
            id(self.source),
        )  # fmt: skip
        object.__setattr__(self, "key", key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled without its key: a copy's records are others."""
        return _remake, ({each.name: getattr(self, each.name) for each in fields(self) if each.init},)


def _remake(values: dict[str, Any]) -> Choices:
    return Choices(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A tensor in units of its scales, and those scales; ``blocks.view`` is rounded in place.

    Args:
        scales: of the blocks, broadcast over ``blocks.view``; None without blocks.
        micro: exponents inside a block, 0 or 1, (dim of ``blocks.view``, group size, int32 over the grouped view).
        encode: 0-dim, what the tensor was multiplied with; None: nothing.
    """

    blocks: Blocks
    scales: BlockScales | None
    micro: tuple[tuple[int, int, Tensor], ...]
    encode: Tensor | None


def scale_values(x: Tensor, choices: Choices, encode: Tensor | None) -> Scaled:
    """``x`` divided by its scales.

    Args:
        x: not empty.
        encode: 0-dim float32, what the whole tensor is multiplied with; None: nothing.
    """
    entry = choices.quant_type
    source = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    if choices.block_size is None:
        values = source.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if encode is not None:
            values.mul_(encode)
        return Scaled(blocks=Blocks(values=values, view=values, dims=()), scales=None, micro=(), encode=encode)
    assert choices.scale_rule is not None
    multiple = max((size for size, _ in entry.micro_exponents), default=1)
    blocks = split(source, choices.axis, choices.block_size, multiple=multiple)
    if not entry.keeps_minus_zero:
        blocks.values.add_(0.0)
    scales = block_scales(
        magnitude_bits(blocks.view).amax(blocks.dims, keepdim=True), entry, choices.scale_rule, encode
    )
    blocks.view.mul_(scales.encode)
    micro = []
    for size, threshold in entry.micro_exponents:
        (dim,) = blocks.dims
        groups = grouped(blocks.view, dim, size)
        exponents = (groups.abs().amax(dim + 1, keepdim=True) >= threshold).to(torch.int32)
        groups.mul_(power_of_two(-exponents))
        micro.append((dim, size, exponents))
    return Scaled(blocks=blocks, scales=scales, micro=tuple(micro), encode=encode)


def round_values(scaled: Scaled, x: Tensor, choices: Choices) -> None:
    """Round ``scaled`` to the element's values, its upper end not yet applied."""
    element = choices.quant_type.element
    assert element is not None
    random = None
    if choices.rounding == "stochastic":
        # by place in x, not in its filled-up copy
        draws = random_fractions(choices.seed, x.numel(), device=x.device).view(x.shape if x.dim() else (1,))
        random = torch.zeros_like(scaled.blocks.values)
        random[tuple(slice(0, length) for length in draws.shape)] = draws
        random = random.view(scaled.blocks.view.shape)
    round_to_element_(scaled.blocks.view, element, choices.rounding, source=choices.source, random=random)


def restore_values(scaled: Scaled, *, with_tensor_scale: bool = True) -> None:
    """Multiply what was rounded with its scales, in place.

    A tensor's scale of a type without blocks is divided by instead: its reciprocal is what was rounded to float32.
    """
    for dim, size, exponents in reversed(scaled.micro):
        grouped(scaled.blocks.view, dim, size).mul_(power_of_two(exponents))
    if scaled.scales is not None:
        scaled.blocks.view.mul_(scaled.scales.decode if with_tensor_scale else scaled.scales.scale)
    elif scaled.encode is not None and with_tensor_scale:
        scaled.blocks.view.div_(scaled.encode)


def limit_values(scaled: Scaled, choices: Choices) -> None:
    """Apply the element's upper end to what was rounded."""
    element = choices.quant_type.element
    assert element is not None
    saturate = choices.saturate or element.overflow == "saturate"
    limit_(scaled.blocks.view, element, saturate=saturate)
