"""What the Triton kernels are compiled with: a choice of format as plain numbers, and how a tensor is cut into tiles.

Kernels know no format. They take a ``Rule``, whose fields are mostly float32 bits worked out here, and
a ``Tile``. Both are hashed and written out by Triton as keys of its cache. Imports no Triton.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcollect.formats.eager import Choices
from qcollect.formats.elements import BIAS, MANTISSA_WIDTH, HybridSource
from qcollect.formats.records import Element, QuantType, Rounding, ScaleFormat, TensorScale
from qcollect.formats.scales import CARRY

_MAX_FLOAT_EXPONENT = 127
_MIN_NORMAL_EXPONENT = -126
# Of the abs max of a block, twice that of an element: squares and 2^23 spacings are far from float32's ends.
_MAX_MODERATE_EXPONENT = 32
_MAX_PAIR_BITS = 6  # one less than bfloat16 has


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Choices as numbers; "bits" are those of a float32, "steps" those of its exponent field.

    Args:
        lowest_bits, highest_bits: ends of the exponents that have a spacing of their own.
        needs_top: whether values far beyond the maximum have to be kept out of the spacing: not those under a
            power of two from their own abs max, nor those that ``limit_from`` tells.
        has_short_mantissas: whether the numbers that are rounded are those of a 16-bit dtype, but for powers of two.
        mantissa_steps: from an exponent down to its spacing.
        taper_bounds, taper_steps: where the distance from exponent 0 is beyond a bound, the steps that hold instead.
        magic_factor, taper_factors, taper_growths: from an exponent, as a power of two, to 2^23 spacings; what a bound
            adds to the factor.
        max_value, limit: a magnitude that rounds beyond the first becomes the second.
        has_limit_from, limit_from: the least float32 that does, where the rounding alone decides.
        half_away_bound: largest distance from exponent 0 at which hybrid rounding is half away.
        tiny_exponent: below it hybrid rounding gives zero.
        has_blocks: whether blocks have scales.
        can_be_short: whether tiles can be quantized the short way.
        can_be_paired: and that in pairs of bfloat16.
        is_power_of_two: whether these are bare powers of two; from ``carry`` to ``scale_top_bits`` fields are theirs,
            those from ``factor`` to ``rounds_to_bfloat16`` of the others.
        carry: added to the bits of an abs max before its mantissa is cut off.
        offset_steps: taken from an abs max.
        lifts_subnormals, lifted_offset_steps: whether a subnormal abs max counts by its own exponent, and
            what is taken then.
        reaches_top, scale_top_bits: whether a scale may have to be held down, and to what.
        factor: what an abs max is multiplied with for a scale.
        scale_lowest_bits, scale_highest_bits, scale_mantissa_steps: as above, of the scale.
        rounds_to_bfloat16: whether every step of a scale is rounded to bfloat16.
        code_shift, code_offset, code_unit: from a scale's bits, or a subnormal scale, to its code.
        micro_sizes, micro_thresholds: of one-bit exponents inside a block.
        has_encode: whether the whole tensor has a factor.
        restores_encode: whether the result is divided by it again.
        is_exact: whether the numbers are the element's own, which no rounding alters.
    """

    lowest_bits: int
    highest_bits: int
    needs_top: bool
    has_short_mantissas: bool
    mantissa_steps: int
    num_tapers: int
    taper_bounds: tuple[int, ...]
    taper_steps: tuple[int, ...]
    magic_factor: float
    taper_factors: tuple[float, ...]
    taper_growths: tuple[float, ...]
    max_value: float
    limit: float
    has_limit_from: bool
    limit_from: float
    signed_zero: bool
    keeps_minus_zero: bool
    is_half_away: bool
    is_hybrid: bool
    is_stochastic: bool
    hybrid_num_bits: int
    hybrid_shift: int
    hybrid_num_ones: int
    half_away_bound: int
    tiny_exponent: int
    is_exact: bool
    has_blocks: bool
    can_be_short: bool
    can_be_paired: bool
    is_power_of_two: bool
    carry: int
    offset_steps: int
    lifted_offset_steps: int
    lifts_subnormals: bool
    reaches_top: bool
    scale_top_bits: int
    factor: float
    scale_lowest_bits: int
    scale_highest_bits: int
    scale_mantissa_steps: int
    scale_min_value: float
    scale_max_value: float
    rounds_to_bfloat16: bool
    nan_code: int
    code_shift: int
    code_offset: int
    code_unit: float
    has_scale_subnormals: bool
    scale_lowest_value: float
    num_micro: int
    micro_sizes: tuple[int, ...]
    micro_thresholds: tuple[float, ...]
    has_encode: bool
    restores_encode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one program works on: ``num_blocks`` blocks side by side, each ``rows`` x ``width`` elements.

    Args:
        padded_rows, padded_width: the next powers of two.
        wraps: whether the blocks of a tile may go on in the next band of blocks.
        has_one_band, has_one_outer: whether there is one band, and one outer index, only.
        is_full: whether every tile is whole, so that nothing is masked.
        is_large: whether an element's place needs 64 bits.
        is_paired: whether what counts as an element here is a pair of them.
        num_warps: of a program.
        fold_repeats, fold_lanes, fold_each: the tile as threads hold it.
    """

    rows: int
    width: int
    num_blocks: int
    padded_rows: int
    padded_width: int
    wraps: bool
    has_one_band: bool
    has_one_outer: bool
    is_full: bool
    is_large: bool
    is_paired: bool
    num_warps: int
    fold_repeats: int
    fold_lanes: int
    fold_each: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A dense tensor as (outer, rows, columns), cut into bands of blocks.

    Args:
        row_blocks, column_blocks: blocks along rows and along columns, short ones counted.
        num_bands: ``outer * row_blocks``.
        num_tiles: programs, or steps of programs, that cover everything.
    """

    rows: int
    columns: int
    row_blocks: int
    column_blocks: int
    num_bands: int
    num_tiles: int
    tile: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRule:
    """How a tensor's factor, if that is wanted and not the abs max, follows from it: by a ``bound`` or a ``target``."""

    sees_nonfinite: bool
    has_encode: bool
    is_bound: bool
    bound: float
    min_amax: float
    is_rceil: bool
    target: int


# ---------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------


def make_rule(choices: Choices, dtype: torch.dtype, *, has_encode: bool, with_tensor_scale: bool) -> Rule:
    """The numbers behind the choices.

    Args:
        has_encode: whether the tensor has a factor.
        with_tensor_scale: whether the result is to hold the scale that goes with it.
    """
    entry, element = choices.quant_type, choices.quant_type.element
    assert element is not None
    has_blocks = choices.block_size is not None
    carry = CARRY.get(choices.scale_rule) if choices.scale_rule else None
    is_power_of_two = carry is not None
    source = choices.source or HybridSource(num_bits=1, shift=0, num_ones=0)
    scale_format = entry.scale_format or _NO_SCALE
    has_encode = has_encode and not (has_blocks and is_power_of_two)
    limit = element.max_value if choices.saturate or element.overflow == "saturate" else math.inf
    has_limit_from = not has_blocks and choices.rounding in ("nearest_even", "half_away")
    width, lowest = scale_format.mantissa_bits, 2.0**scale_format.min_exponent
    has_subnormals = scale_format.min_value < lowest
    if has_blocks:
        can_be_short = (
            is_power_of_two
            and choices.rounding == "nearest_even"
            and limit == element.max_value
            and not (element.taper or entry.micro_exponents)
            and scale_format.min_exponent <= -3 * _MAX_MODERATE_EXPONENT
            and scale_format.max_exponent >= 3 * _MAX_MODERATE_EXPONENT
        )
    else:
        can_be_short = has_limit_from and not has_encode
    can_be_short = can_be_short and element.min_exponent >= -_MAX_MODERATE_EXPONENT
    can_be_short = can_be_short and element.max_exponent <= _MAX_MODERATE_EXPONENT
    return Rule(
        is_exact=element.is_cast and not has_encode and dtype == getattr(torch, element.torch_dtype or "", None),
        lowest_bits=_exponent_field(element.min_exponent),
        # one binade above the maximum: whatever is there is beyond it in any spacing
        highest_bits=_exponent_field(element.max_exponent + 1),
        needs_top=not (has_limit_from or (has_blocks and is_power_of_two)),
        has_short_mantissas=dtype != torch.float32 and (is_power_of_two if has_blocks else not has_encode),
        mantissa_steps=element.mantissa_bits << MANTISSA_WIDTH,
        num_tapers=max(len(element.taper) - 1, 0),
        taper_bounds=tuple(bound << MANTISSA_WIDTH for bound, _ in element.taper[:-1]),
        taper_steps=tuple(bits << MANTISSA_WIDTH for _, bits in element.taper[1:]),
        magic_factor=2.0 ** (MANTISSA_WIDTH - element.mantissa_bits),
        taper_factors=tuple(2.0 ** (MANTISSA_WIDTH - bits) for _, bits in element.taper[1:]),
        taper_growths=tuple(
            2.0 ** (MANTISSA_WIDTH - after) - 2.0 ** (MANTISSA_WIDTH - before)
            for (_, before), (_, after) in itertools.pairwise(element.taper)
        ),
        max_value=element.max_value,
        limit=limit,
        has_limit_from=has_limit_from,
        limit_from=_limit_from(element, choices.rounding) if has_limit_from else math.inf,
        signed_zero=element.signed_zero,
        keeps_minus_zero=entry.keeps_minus_zero or not has_blocks,
        is_half_away=choices.rounding == "half_away",
        is_hybrid=choices.rounding == "hybrid",
        is_stochastic=choices.rounding == "stochastic",
        hybrid_num_bits=source.num_bits,
        hybrid_shift=source.shift,
        hybrid_num_ones=source.num_ones,
        half_away_bound=element.taper[0][0] if element.taper else 0,
        tiny_exponent=element.min_exponent - 1,
        has_blocks=has_blocks,
        can_be_short=can_be_short,
        can_be_paired=can_be_short and dtype == torch.bfloat16 and _fits_pairs(element),
        is_power_of_two=is_power_of_two,
        carry=carry(element) if carry else 0,
        offset_steps=element.max_exponent << MANTISSA_WIDTH,
        lifted_offset_steps=(element.max_exponent + MANTISSA_WIDTH) << MANTISSA_WIDTH,
        lifts_subnormals=element.max_exponent < 1,
        # the abs max is below 2^128, or reaches it by the carry
        reaches_top=_MAX_FLOAT_EXPONENT + 1 - element.max_exponent
        >= min(scale_format.max_exponent, _MAX_FLOAT_EXPONENT),
        scale_top_bits=_exponent_field(scale_format.max_exponent),
        factor=_scale_factor(entry),
        scale_lowest_bits=_exponent_field(scale_format.min_exponent),
        scale_highest_bits=_exponent_field(scale_format.max_exponent + 1),
        scale_mantissa_steps=scale_format.mantissa_bits << MANTISSA_WIDTH,
        scale_min_value=scale_format.min_value,
        scale_max_value=scale_format.max_value,
        rounds_to_bfloat16=entry.scale_arithmetic == "bfloat16",
        nan_code=scale_format.nan_code,
        code_shift=MANTISSA_WIDTH - width,
        code_offset=((scale_format.min_exponent + BIAS) << width) - (1 << width if has_subnormals else 0),
        code_unit=2.0 ** min(width - scale_format.min_exponent, _MAX_FLOAT_EXPONENT),
        has_scale_subnormals=has_subnormals,
        scale_lowest_value=lowest,
        num_micro=len(entry.micro_exponents) if has_blocks else 0,
        micro_sizes=tuple(size for size, _ in entry.micro_exponents),
        micro_thresholds=tuple(threshold for _, threshold in entry.micro_exponents),
        has_encode=has_encode,
        restores_encode=has_encode and with_tensor_scale,
    )


def _fits_pairs(element: Element) -> bool:
    """Whether what the short way does with this element is exact in bfloat16, too."""
    bits = [element.mantissa_bits, *(bits for _, bits in element.taper)]
    return max(bits) <= _MAX_PAIR_BITS and min(bits) >= 0 and element.max_exponent >= 0


def is_expressible(element: Element, scale_format: ScaleFormat | None) -> bool:
    """Whether all that the kernels round with is normal: spacings, their halves, and 2^23 of them."""
    bits = [element.mantissa_bits, *(bits for _, bits in element.taper)]
    ends = [(element.min_exponent - max(bits), element.max_exponent + 1 - min(bits))]
    if scale_format is not None and scale_format.mantissa_bits:
        ends.append(
            (
                scale_format.min_exponent - scale_format.mantissa_bits,
                scale_format.max_exponent + 1 - scale_format.mantissa_bits,
            )
        )
    return (
        all(low - 1 >= _MIN_NORMAL_EXPONENT and high + MANTISSA_WIDTH <= _MAX_FLOAT_EXPONENT for low, high in ends)
        and max(bits) < MANTISSA_WIDTH - 1
    )


def make_encode_rule(tensor_scale: TensorScale | None, *, sees_nonfinite: bool, is_rceil: bool) -> EncodeRule:
    """How the factor follows from the abs max; None: it is not wanted."""
    bound = tensor_scale.bound if tensor_scale else None
    return EncodeRule(
        sees_nonfinite=sees_nonfinite,
        has_encode=tensor_scale is not None,
        is_bound=bound is not None,
        bound=bound or 0.0,
        min_amax=tensor_scale.min_amax if tensor_scale else 0.0,
        is_rceil=is_rceil,
        target=(tensor_scale.target if tensor_scale else None) or 0,
    )


def _exponent_field(exponent: int) -> int:
    return max(exponent + BIAS, 0) << MANTISSA_WIDTH


def _limit_from(element: Element, rounding: Rounding) -> float:
    """The least float32 that rounds beyond the maximum: half a spacing further, or the next where that rounds down."""
    bits = next((bits for bound, bits in element.taper if abs(element.max_exponent) <= bound), element.mantissa_bits)
    spacing = 2.0 ** (element.max_exponent - bits)
    half_way = torch.tensor(element.max_value + spacing / 2, dtype=torch.float32)
    is_up = rounding == "half_away" or element.max_value / spacing % 2 == 1
    return float(half_way if is_up else torch.nextafter(half_way, torch.tensor(math.inf)))


def _scale_factor(entry: QuantType) -> float:
    dtype = getattr(torch, entry.scale_arithmetic)
    return float(torch.tensor(1.0 / entry.max_element, dtype=torch.float32).to(dtype))


_NO_SCALE = ScaleFormat(name="-", bits=8, min_exponent=-126, max_value=1.0, min_value=1.0, nan_code=255, source="-")

# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSize:
    """How many elements a program takes at a time, with how many warps and at most how many registers a thread."""

    elements: int
    num_warps: int
    max_registers: int | None = None


def cut(
    shape: tuple[int, int, int], rows: int, width: int, size: TileSize, element_size: int, *, in_pairs: bool = False
) -> Geometry:
    """How a dense tensor of this shape is cut into blocks of ``rows`` x ``width`` and those into tiles.

    Args:
        in_pairs: elements side by side are taken together where everything divides.
    """
    if in_pairs:
        geometry = _cut_pairs(shape, rows, width, size, element_size)
        if geometry is not None:
            return geometry
    return _cut(shape, rows, width, size, element_size)


def _cut_pairs(
    shape: tuple[int, int, int], rows: int, width: int, size: TileSize, element_size: int
) -> Geometry | None:
    outer, num_rows, columns = shape
    # a single pair would pass for a block along another axis
    if columns % 2 or (width > 1 and (width % 2 or width < 4)):
        return None
    half = TileSize(elements=size.elements // 2, num_warps=size.num_warps)
    geometry = _cut((outer, num_rows, columns // 2), rows, max(width // 2, 1), half, 2 * element_size)
    if not geometry.tile.is_full:
        return None
    return replace(geometry, tile=replace(geometry.tile, is_paired=True))


def _cut(shape: tuple[int, int, int], rows: int, width: int, size: TileSize, element_size: int) -> Geometry:
    outer, num_rows, columns = shape
    row_blocks, column_blocks = -(-num_rows // rows), -(-columns // width)
    num_bands = outer * row_blocks
    padded = power_of_two_above(rows), power_of_two_above(width)
    at_most = min(size.elements // (padded[0] * padded[1]), power_of_two_above(num_bands * column_blocks))
    num_blocks = max(at_most, 1)
    wraps = num_bands > 1 and column_blocks % num_blocks != 0 and column_blocks < 8 * num_blocks
    if wraps:
        num_tiles = -(-num_bands * column_blocks // num_blocks)
        is_whole = num_bands * column_blocks % num_blocks == 0
    else:
        num_tiles = num_bands * -(-column_blocks // num_blocks)
        is_whole = column_blocks % num_blocks == 0
    is_full = is_whole and padded == (rows, width) and num_rows % rows == 0 and columns % width == 0
    num_elements = padded[0] * padded[1] * num_blocks
    each = min(16 // element_size, num_elements)
    lanes = min(32 * size.num_warps, num_elements // each)
    tile = Tile(
        rows=rows,
        width=width,
        num_blocks=num_blocks,
        padded_rows=padded[0],
        padded_width=padded[1],
        wraps=wraps,
        has_one_band=num_bands == 1,
        has_one_outer=outer == 1,
        is_full=is_full,
        is_large=outer * (num_rows + padded[0]) * (columns + num_blocks * padded[1]) >= 1 << 31,
        is_paired=False,
        num_warps=size.num_warps,
        fold_repeats=num_elements // (each * lanes),
        fold_lanes=lanes,
        fold_each=each,
    )
    return Geometry(
        rows=num_rows,
        columns=columns,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        num_bands=num_bands,
        num_tiles=num_tiles,
        tile=tile,
    )


def as_outer_rows_columns(x: Tensor, choices: Choices, *, group: int = 1) -> tuple[tuple[int, int, int], int, int]:
    """The shape that blocks are cut from, and the rows and columns of a block.

    Args:
        group: elements that count as a block where there are none.
    """
    shape, size = tuple(x.shape) or (1,), choices.block_size
    if size is None:
        return (1, 1, x.numel()), 1, min(group, x.numel())
    if isinstance(size, tuple):
        return (math.prod(shape[:-2]), shape[-2], shape[-1]), min(size[0], shape[-2]), min(size[1], shape[-1])
    length, inner = shape[choices.axis], math.prod(shape[choices.axis + 1 :])
    multiple = max((group for group, _ in choices.quant_type.micro_exponents), default=1)
    size = min(size, -(-length // multiple) * multiple)
    if inner > 1:
        return (math.prod(shape[: choices.axis]), length, inner), size, 1
    if length % size == 0:
        return (1, 1, x.numel()), 1, size
    return (1, x.numel() // length, length), 1, size


def power_of_two_above(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
