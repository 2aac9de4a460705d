"""What torch's compiler is given for quantization on the CPU: the graph of a variant, in the bits of ``eager``.

What inductor makes of one is three loop nests: the abs max of every block, the scales of all blocks, and the rounding,
which writes to ``out`` and to nothing else. Scales are computed by the functions that ``eager`` uses, random numbers
come from outside. Rounding is written anew, since inductor has no vector instruction for looking at a float's bits: the
power of two below a number comes from four float operations (``_leading_power``), and adding and subtracting a large
number rounds.
"""

from dataclasses import dataclass
from functools import reduce
from math import gcd, inf

import torch
from torch import Tensor, nn

from qcollect.formats.blocks import BlockSize, grouped
from qcollect.formats.elements import (
    MANTISSA_WIDTH,
    HybridSource,
    limit_,
    magnitude_bits,
    round_to_element_,
)
from qcollect.formats.records import Element, QuantType, Rounding, ScaleRule
from qcollect.formats.scales import ROUND_TO, block_scales

MAX_EXPONENT = 64  # numbers below 2^64 stay finite when they are multiplied with 2^24
_LARGEST = torch.finfo(torch.float32).max
LANES = 16  # float32 numbers in the widest vectors; side by side wherever nothing else says how many are
_ROWS_AHEAD = 8  # of a tensor, that a processor reads ahead of at a time
# Sizes that a variant is exported with. They become variables; no two are equal.
_EXAMPLE_BLOCKS, _EXAMPLE_OUTER, _EXAMPLE_INNER, _EXAMPLE_TILES = 1031, 131, 517, 67


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one library is made for; sizes, strides and the number of threads are open.

    Args:
        is_last: whether nothing lies inside of the axis of the blocks; True without blocks and for tiles.
        source: of hybrid rounding, else None.
        has_encode: whether the whole tensor has a scale.
    """

    quant_type: QuantType
    is_last: bool
    scale_rule: ScaleRule | None
    rounding: Rounding
    block_size: BlockSize | None
    saturate: bool
    source: HybridSource | None
    has_encode: bool
    dtype: torch.dtype

    @property
    def first_groups(self) -> int:
        """How many elements along the axis have an abs max in memory, from which that of a block is made; 1: none has.

        Those of the smallest exponents; across memory as many as a processor reads ahead of at a time, row by row.
        """
        if self.quant_type.micro_exponents:
            return self.quant_type.micro_exponents[-1][0]
        return 1 if self.is_last or not isinstance(self.block_size, int) else gcd(self.block_size, _ROWS_AHEAD)


def example(variant: Variant) -> tuple[tuple[Tensor | None, ...], tuple[dict[int, object] | None, ...]]:
    """Arguments of a variant's graph, and which of their sizes are open."""
    size = variant.block_size
    if size is None:
        shape: tuple[int, ...] = (_EXAMPLE_BLOCKS, LANES)
    elif isinstance(size, tuple):
        shape = (_EXAMPLE_OUTER, size[0], _EXAMPLE_TILES, size[1])
    else:
        shape = (_EXAMPLE_BLOCKS, size) if variant.is_last else (_EXAMPLE_OUTER, size, _EXAMPLE_INNER, LANES)
    # two of everything: one handed in twice would be taken for one argument
    x, out = torch.empty(shape, dtype=variant.dtype), torch.empty(shape, dtype=variant.dtype)
    encode, restore = (torch.ones(()), torch.ones(())) if variant.has_encode else (None, None)
    draws = torch.empty(shape) if variant.rounding == "stochastic" else None
    arguments = (x, out, encode, restore, draws)
    blocked: dict[int, object] = dict.fromkeys(range(0, len(shape), 2), torch.export.Dim.AUTO)
    sizes: tuple[dict[int, object], ...] = (blocked, blocked, {}, {}, blocked)
    return arguments, tuple(
        None if argument is None else found for argument, found in zip(arguments, sizes, strict=True)
    )


class Quantize(nn.Module):
    """The graph of a variant. What it gives back inductor keeps in memory; all else is computed for every element."""

    masks: Tensor  # (groups, LANES), 1 for the elements of each of the groups side by side, 0 for the others

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        size = variant.first_groups
        groups = torch.arange(LANES) // size
        self.register_buffer("masks", (groups == torch.arange(LANES // size)[:, None]).to(torch.float32))

    def forward(
        self,
        x: Tensor,
        out: Tensor,
        encode: Tensor | None,
        restore: Tensor | None,
        draws: Tensor | None,
    ) -> tuple[Tensor, ...]:
        entry, variant = self.variant.quant_type, self.variant
        values = x.to(torch.float32)
        if variant.block_size is None:
            values = self._round(values if encode is None else values * encode, draws)
            out.copy_(values if restore is None else values / restore)
            return ()
        assert variant.scale_rule is not None
        if not entry.keeps_minus_zero:
            values = values + 0.0
        dims = (1, 3) if isinstance(variant.block_size, tuple) else (1,)
        maxima, kept = values.abs(), []
        if variant.first_groups > 1:  # of whole numbers, which have no NaN to look for
            maxima = grouped(magnitude_bits(x.to(torch.float32)), 1, variant.first_groups).amax(2).view(torch.float32)
            kept = [maxima]
        block = block_scales(magnitude_bits(maxima.amax(dims, keepdim=True)), entry, variant.scale_rule, encode)
        decode = block.scale if restore is None else ROUND_TO[entry.scale_arithmetic](block.scale * restore)
        if not entry.micro_exponents:
            out.copy_(self._round(values * block.encode, draws) * decode)
            return block.encode, decode, *kept
        powers = _micro_powers(maxima * block.encode, entry)
        groups, factors = self._spread(values, powers)
        # in this order: then only products with a scale are rounded
        scaled = groups * block.encode.unsqueeze(1) / factors
        rounded = self._round(scaled, None if draws is None else draws.view(groups.shape))
        out.copy_((rounded * factors * decode.unsqueeze(1)).view(values.shape))
        return block.encode, decode, *kept, powers

    def _spread(self, values: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
        """``values`` as groups, and what each element is multiplied with: the power of its smallest group.

        Side by side in memory such powers would be looked up element by element, where a vector holds several groups;
        they are added up instead, each masked.
        """
        size = self.variant.first_groups
        if not self.variant.is_last or LANES % size or values.shape[1] % LANES:
            return grouped(values, 1, size), powers.unsqueeze(2)
        neighbours = grouped(powers, 1, LANES // size)
        masked = (neighbours[:, :, i : i + 1] * mask for i, mask in enumerate(self.masks))
        return grouped(values, 1, LANES), reduce(torch.add, masked)

    def _round(self, values: Tensor, draws: Tensor | None) -> Tensor:
        variant, element = self.variant, self.variant.quant_type.element
        assert element is not None
        saturate = variant.saturate or element.overflow == "saturate"
        if variant.rounding == "hybrid":
            rounded = round_to_element_(values.clone(), element, variant.rounding, source=variant.source)
            return limit_(rounded, element, saturate=saturate)
        return _rounded(values, element, variant.rounding, draws, saturate=saturate)


def _micro_powers(maxima: Tensor, entry: QuantType) -> Tensor:
    """What each smallest group inside a block is multiplied with for its exponents.

    Args:
        maxima: scaled abs max of the smallest groups, (blocks, groups) or (blocks, groups, inner).
    """
    powers, smallest = torch.ones_like(maxima), entry.micro_exponents[-1][0]
    for size, threshold in entry.micro_exponents:
        groups = grouped(maxima, 1, size // smallest)
        steps = torch.where(groups.amax(2, keepdim=True) >= threshold, 2.0, 1.0)
        maxima = (groups / steps).view(maxima.shape)
        powers = (grouped(powers, 1, size // smallest) * steps).view(maxima.shape)
    return powers


def _rounded(values: Tensor, element: Element, rounding: Rounding, draws: Tensor | None, *, saturate: bool) -> Tensor:
    """``round_to_element_`` and ``limit_`` in float operations only, but for hybrid rounding."""
    # the maximum is itself a value; beyond it, a number that is rounded to something beyond it will do for all
    top = element.max_value if saturate else min(2.0 ** (element.max_exponent + 2), _LARGEST)
    magnitude, is_large = _at_most(values.abs(), top), None
    if element.max_exponent > MAX_EXPONENT:  # the larger ones as if all exponents were less
        is_large = magnitude > 1.0
        magnitude = torch.where(is_large, magnitude * 2.0**-MAX_EXPONENT, magnitude)
    spacing = _spacing(magnitude, element)
    large = spacing * 2.0**MANTISSA_WIDTH  # a sum with it has no room for less than the spacing
    rounded = (magnitude + large) - large
    if rounding == "stochastic":
        assert draws is not None
        whole = torch.where(rounded > magnitude, rounded - spacing, rounded)
        # nothing is rounded: draws have 24 bits, and spacings of what has this rounding are at least 2^-100
        is_up = draws * spacing < magnitude - whole
        rounded = torch.where(is_up, whole + spacing, whole)
    if rounding == "half_away":
        is_down_from_half = (magnitude - rounded) == spacing * 0.5
        rounded = torch.where(is_down_from_half, rounded + spacing, rounded)
    if is_large is not None:
        rounded = torch.where(is_large, rounded * 2.0**MAX_EXPONENT, rounded)
    if not saturate:
        rounded = torch.where(rounded > element.max_value, inf, rounded)
    rounded = torch.where(values < 0.0, -rounded, rounded)  # copysign is a function's call for every vector
    return torch.where(values == 0.0, values, rounded) if element.signed_zero else rounded + 0.0


def _spacing(magnitude: Tensor, element: Element) -> Tensor:
    """Distance of neighbouring element values around each magnitude, NaN for NaN unless it is the same for all."""
    smallest = 2.0 ** (element.min_exponent - element.mantissa_bits)
    if element.max_exponent <= element.min_exponent:
        return torch.full_like(magnitude, smallest)
    if not element.taper:
        return _at_least(_leading_power(magnitude, factor=2.0**-element.mantissa_bits), smallest)
    power = _at_least(_leading_power(magnitude), 2.0**element.min_exponent)
    ratio = torch.full_like(power, 2.0 ** -element.taper[0][1])
    for (bound, _), (_, bits) in zip(element.taper, element.taper[1:], strict=False):
        is_beyond = (power > 2.0**bound) | (power < 2.0**-bound)
        ratio = torch.where(is_beyond, 2.0**-bits, ratio)
    return power * ratio


def _leading_power(magnitude: Tensor, *, factor: float = 1.0) -> Tensor:
    """``2^floor(log2 magnitude)`` times a power of two up to 1, for 0 <= magnitude < 2^100 (0 for 0); NaN for NaN.

    Exact; a result that float32 does not have, for it would be less than 2^-149, may be 0 or 2^-149.

    **Source:** Rump, Ogita, Oishi, "Accurate floating-point summation part I", SIAM J. Sci. Comput. 31 (2008),
    algorithm 3.6.
    """
    scaled = magnitude * ((2.0**MANTISSA_WIDTH + 1) * factor)
    return scaled - scaled * (1 - 2.0 ** -(MANTISSA_WIDTH + 1))


def _at_most(values: Tensor, bound: float) -> Tensor:
    """``clamp_max`` in fewer instructions; NaN for NaN."""
    return torch.where(values > bound, bound, values)


def _at_least(values: Tensor, bound: float) -> Tensor:
    """``clamp_min`` in fewer instructions; NaN for NaN."""
    return torch.where(values < bound, bound, values)
