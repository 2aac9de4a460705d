"""Quantization on the CPU by torch's compiler: the bits of ``eager``, in two sweeps over memory.

    prepare(choices, dtypes)          # before training; once for a machine it takes seconds, then milliseconds
    if supports(x, choices):
        run(x, out, choices, encode, with_tensor_scale=True)

Nothing is ever compiled but by ``prepare``: a variant is exported with its sizes left open, compiled ahead of time
into a library in the user's cache folder, and loaded from there by every later process. It has no guards, so neither
a new shape nor autocast, grad mode or a number of threads compiles anything again.

What inductor makes of a variant is three loop nests: the abs max of every block, the scales of all blocks, and the
rounding, which writes to ``out`` and to nothing else. A tensor goes through them part by part, so that the second sweep
finds in the processor's cache what the first one read. Scales and random numbers are computed by the functions that
``eager`` uses. Rounding is written anew, since inductor has no vector instruction for looking at a float's bits: the
power of two below a number comes from four float operations (``_leading_power``), and adding and subtracting a large
number rounds. Inductor compiles without contraction, reassociation and flushing to zero: every operation is rounded as
in ``eager``.
"""

import hashlib
import inspect
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, inf, prod
from pathlib import Path

import torch
from torch import Tensor, nn

from qcollect import paths
from qcollect.formats import blocks, elements, random, records, scales
from qcollect.formats.blocks import BlockSize, grouped
from qcollect.formats.eager import Choices
from qcollect.formats.elements import (
    MANTISSA_WIDTH,
    HybridSource,
    limit_,
    magnitude_bits,
    round_to_element_,
)
from qcollect.formats.random import random_fractions
from qcollect.formats.records import Element, QuantType, Rounding, ScaleRule
from qcollect.formats.scales import ROUND_TO, block_scales, tensor_decode

MIN_ELEMENTS = 1 << 12  # a call takes about 0.1 ms at least, the steps of plain torch about 0.3 ms
_PART_ELEMENTS = 1 << 20  # of one call: few enough for a cache
_ROWS_AHEAD = 8  # of a tensor, that a processor reads ahead of at a time
_LANES = 16  # float32 numbers in the widest vectors
_MAX_EXPONENT = 64  # numbers below 2^64 stay finite when they are multiplied with 2^24
_LARGEST = torch.finfo(torch.float32).max
# Sizes that a variant is exported with. They become variables; no two are equal.
_EXAMPLE_BLOCKS, _EXAMPLE_OUTER, _EXAMPLE_INNER, _EXAMPLE_TILES = 1031, 131, 517, 67

Kernel = Callable[..., object]


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


_kernels: dict[Variant, Kernel] = {}


# ---------------------------------------------------------------------------------------------
# What callers use
# ---------------------------------------------------------------------------------------------


def prepare(
    choices: Iterable[Choices],
    dtypes: Iterable[torch.dtype],
    *,
    has_encode: bool | None = None,
    cache_dir: Path | None = None,
) -> tuple[bool, str]:
    """Whether tensors quantized so can now be ``run``, and if not why; compiles what no cache holds.

    Every choice is made ready for its blocks along the last axis and along any other, whatever its own axis.
    What is already there is not made again. Processes that prepare the same at once wait for the first.

    Args:
        choices: those that no variant exists for are passed over.
        dtypes: of the tensors.
        has_encode: whether the whole tensor has a scale; None: as the type is by itself.
        cache_dir: None: ``qcollect`` in the user's cache folder.
    """
    folder = paths.cache_dir("compiled") if cache_dir is None else cache_dir
    wanted = dict.fromkeys(
        _variant(entry, dtype, is_last=is_last, has_encode=has_encode)
        for entry in choices
        if _has_variant(entry)
        for dtype in dtypes
        for is_last in ((True, False) if isinstance(entry.block_size, int) else (True,))
    )
    try:
        for variant in wanted:
            if variant not in _kernels:
                _kernels[variant] = _load_or_compile(variant, folder)
    except Exception as error:  # a compiler, its headers, the folder or torch itself: plain torch does without
        reason = str(error).strip().splitlines()
        return False, f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return True, ""


def supports(x: Tensor, choices: Choices, *, has_encode: bool | None = None) -> bool:
    """Whether ``run`` takes ``x`` and is worth it: on the CPU, not small, and its variant has been prepared."""
    if x.device.type != "cpu" or x.numel() < MIN_ELEMENTS or not _has_variant(choices):
        return False
    return _variant(choices, x.dtype, is_last=_inner(x, choices) == 1, has_encode=has_encode) in _kernels


def run(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> None:
    """Writes ``x`` quantized and dequantized to ``out``, the bits of ``eager``.

    A tensor that is not dense is copied to ``out`` first; one with a short last block is filled up with zeros in a
    copy, which changes no scale.

    Args:
        x: what ``supports`` says yes to, any strides.
        out: of the shape and dtype of ``x``, contiguous; may be ``x`` itself.
        encode: 0-dim float32, what the whole tensor is multiplied with; None: nothing.
        with_tensor_scale: whether the result is in units of ``x``, or of the tensor's scale.
    """
    has_encode = encode is not None
    kernel = _kernels[_variant(choices, x.dtype, is_last=_inner(x, choices) == 1, has_encode=has_encode)]
    scales = (encode, _restore(choices, encode, with_tensor_scale=with_tensor_scale))
    places = _places(x, choices) if choices.rounding == "stochastic" else (None, None, None)
    source = x.detach()
    if not source.is_contiguous():
        source = out.copy_(source)
    sizes = _sizes(source, choices)
    filled = [-(-length // sizes.get(dim, 1)) * sizes.get(dim, 1) for dim, length in enumerate(source.shape)]
    if filled == list(source.shape):
        _run_parts(kernel, _as_blocks(source, choices), _as_blocks(out, choices), scales, places)
        return
    padded = source.new_zeros(filled)
    part = padded[tuple(slice(0, length) for length in source.shape)]
    part.copy_(source)
    _run_parts(kernel, _as_blocks(padded, choices), _as_blocks(padded, choices), scales, places)
    out.copy_(part)


def _run_parts(
    kernel: Kernel,
    x: Tensor,
    out: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    places: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """One call for each part of the blocks; one for all without blocks, where memory is read once."""
    seed, starts, stride = places
    length = x.shape[0]
    step = length if x.dim() == 1 else max(1, _PART_ELEMENTS * length // x.numel())
    for first in range(0, length, step):
        part = slice(first, first + step)
        kernel(x[part], out[part], *scales, seed, None if starts is None else starts[part], stride)


def _restore(choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> Tensor | None:
    """What makes a result of the whole tensor's scale: a factor of the blocks' scales, or a divisor without blocks."""
    if encode is None:
        return None
    if not with_tensor_scale:
        return torch.ones_like(encode)
    return encode if choices.block_size is None else tensor_decode(encode)


def _places(x: Tensor, choices: Choices) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What draws follow from: the seed; where in ``x`` each part along the first dimension of ``_as_blocks`` begins,
    and how many places the second dimension steps on (None without blocks).
    """
    seed = torch.tensor(choices.seed)
    sizes = _sizes(x, choices)
    if not sizes:
        return seed, None, None
    axis = min(sizes)
    outer, length, inner = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    starts = torch.arange(outer).mul_(length)[:, None] + torch.arange(0, length, sizes[axis])
    return seed, starts.mul_(inner).view(-1), torch.tensor(inner)


def _sizes(x: Tensor, choices: Choices) -> dict[int, int]:
    """How many elements a block has along which dimension; empty without blocks."""
    size = choices.block_size
    if size is None:
        return {}
    return {choices.axis: size} if isinstance(size, int) else {x.dim() - 2: size[0], x.dim() - 1: size[1]}


def _inner(x: Tensor, choices: Choices) -> int:
    """How many elements of the dense ``x`` lie inside of the axis of its blocks; 1 without blocks and for tiles."""
    return prod(x.shape[choices.axis + 1 :]) if isinstance(choices.block_size, int) else 1


def _as_blocks(x: Tensor, choices: Choices) -> Tensor:
    """``x`` as (elements,) without blocks, (blocks, block size), (blocks, block size, inner), or for tiles
    (tiles above each other, rows of a tile, tiles side by side, columns of a tile).
    """
    size = choices.block_size
    if size is None:
        return x.view(-1)
    if not isinstance(size, int):
        return x.view(-1, size[0], x.shape[-1] // size[1], size[1])
    inner = _inner(x, choices)
    return x.view(-1, size) if inner == 1 else x.view(-1, size, inner)


# ---------------------------------------------------------------------------------------------
# Variants
# ---------------------------------------------------------------------------------------------


def _has_variant(choices: Choices) -> bool:
    """Whether such a choice can be compiled: all of the catalog, and records in whose arithmetic nothing overflows."""
    entry, element = choices.quant_type, choices.quant_type.element
    if element is None:
        return False
    is_wide = element.max_exponent > _MAX_EXPONENT
    sizes = [size for size, _ in entry.micro_exponents]
    is_nested = all(size % inside == 0 for size, inside in pairwise(sizes))
    return is_nested and not (is_wide and (element.taper or element.min_exponent > -_MAX_EXPONENT))


def _variant(choices: Choices, dtype: torch.dtype, *, is_last: bool, has_encode: bool | None) -> Variant:
    return Variant(
        quant_type=choices.quant_type,
        is_last=is_last,
        scale_rule=None if choices.block_size is None else choices.scale_rule,
        rounding=choices.rounding,
        block_size=choices.block_size,
        saturate=choices.saturate,
        source=choices.source if choices.rounding == "hybrid" else None,
        has_encode=choices.quant_type.has_tensor_scale if has_encode is None else has_encode,
        dtype=dtype,
    )


class _Quantize(nn.Module):
    """The graph of a variant. What it gives back inductor keeps in memory; all else is computed for every element."""

    masks: Tensor  # (groups, _LANES), 1 for the elements of each of the groups side by side, 0 for the others

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        smallest = variant.quant_type.micro_exponents[-1][0] if variant.quant_type.micro_exponents else _LANES
        groups = torch.arange(_LANES) // smallest
        self.register_buffer("masks", (groups == torch.arange(_LANES // smallest)[:, None]).to(torch.float32))

    def forward(
        self,
        x: Tensor,
        out: Tensor,
        encode: Tensor | None,
        restore: Tensor | None,
        seed: Tensor | None,
        starts: Tensor | None,
        stride: Tensor | None,
    ) -> tuple[Tensor, ...]:
        entry, variant = self.variant.quant_type, self.variant
        values = x.to(torch.float32)
        draws = None if seed is None else random_fractions(seed, _places_of(x, starts, stride))
        if variant.block_size is None:
            values = self._round(values if encode is None else values * encode, draws)
            out.copy_(values if restore is None else values / restore)
            return ()
        assert variant.scale_rule is not None
        if not entry.keeps_minus_zero:
            values = values + 0.0
        maxima, dims = values.abs(), (1, 3) if isinstance(variant.block_size, tuple) else (1,)
        kept = []
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
        smallest = self.variant.quant_type.micro_exponents[-1][0]
        if not self.variant.is_last or _LANES % smallest or values.shape[1] % _LANES:
            return grouped(values, 1, smallest), powers.unsqueeze(2)
        neighbours = grouped(powers, 1, _LANES // smallest)
        factors = neighbours[:, :, :1] * self.masks[0]
        for i in range(1, _LANES // smallest):
            factors = factors + neighbours[:, :, i : i + 1] * self.masks[i]
        return grouped(values, 1, _LANES), factors

    def _round(self, values: Tensor, draws: Tensor | None) -> Tensor:
        variant, element = self.variant, self.variant.quant_type.element
        assert element is not None
        saturate = variant.saturate or element.overflow == "saturate"
        if variant.rounding == "hybrid":
            rounded = round_to_element_(values.clone(), element, variant.rounding, source=variant.source)
            return limit_(rounded, element, saturate=saturate)
        return _rounded(values, element, variant.rounding, draws, saturate=saturate)


def _places_of(x: Tensor, starts: Tensor | None, stride: Tensor | None) -> Tensor:
    """The place of every element in the tensor that was cut into blocks, int64 (see ``_places``)."""
    if starts is None or stride is None:
        return torch.arange(x.numel())
    inside = torch.arange(prod(x.shape[2:])).view(x.shape[2:])
    steps = (torch.arange(x.shape[1]) * stride).view(-1, *(1 for _ in inside.shape))
    return starts.view(-1, *(1 for _ in steps.shape)) + steps + inside


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
    magnitude, is_large = values.abs().clamp_max(top), None
    if element.max_exponent > _MAX_EXPONENT:  # the larger ones as if all exponents were less
        is_large = magnitude > 1.0
        magnitude = torch.where(is_large, magnitude * 2.0**-_MAX_EXPONENT, magnitude)
    spacing = _spacing(magnitude, element)
    if rounding == "stochastic":
        assert draws is not None
        steps = magnitude / spacing
        whole = steps.floor()
        rounded = torch.where(draws < steps - whole, whole + 1.0, whole) * spacing
    else:
        large = spacing * 2.0**MANTISSA_WIDTH  # a sum with it has no room for less than the spacing
        rounded = (magnitude + large) - large
    if rounding == "half_away":
        is_down_from_half = (magnitude - rounded) == spacing * 0.5
        rounded = torch.where(is_down_from_half, rounded + spacing, rounded)
    if is_large is not None:
        rounded = torch.where(is_large, rounded * 2.0**_MAX_EXPONENT, rounded)
    if not saturate:
        rounded = torch.where(rounded > element.max_value, inf, rounded)
    rounded = torch.where(values < 0.0, -rounded, rounded)  # copysign is a function's call for every vector
    return torch.where(values == 0.0, values, rounded) if element.signed_zero else rounded + 0.0


def _spacing(magnitude: Tensor, element: Element) -> Tensor:
    """Distance of neighbouring element values around each magnitude, NaN for NaN unless it is the same for all."""
    if element.max_exponent <= element.min_exponent:
        return torch.full_like(magnitude, 2.0 ** (element.min_exponent - element.mantissa_bits))
    power = _leading_power(magnitude).clamp_min(2.0**element.min_exponent)
    if not element.taper:
        return power * 2.0**-element.mantissa_bits
    ratio = torch.full_like(power, 2.0 ** -element.taper[0][1])
    for (bound, _), (_, bits) in zip(element.taper, element.taper[1:], strict=False):
        is_beyond = (power > 2.0**bound) | (power < 2.0**-bound)
        ratio = torch.where(is_beyond, 2.0**-bits, ratio)
    return power * ratio


def _leading_power(magnitude: Tensor) -> Tensor:
    """``2^floor(log2 magnitude)``, exact for 0 <= magnitude < 2^100 (0 for 0), NaN for NaN.

    **Source:** Rump, Ogita, Oishi, "Accurate floating-point summation part I", SIAM J. Sci. Comput. 31 (2008),
    algorithm 3.6.
    """
    scaled = magnitude * (2.0**MANTISSA_WIDTH + 1)
    return scaled - scaled * (1 - 2.0 ** -(MANTISSA_WIDTH + 1))


# ---------------------------------------------------------------------------------------------
# Libraries and their cache
# ---------------------------------------------------------------------------------------------


def _load_or_compile(variant: Variant, folder: Path) -> Kernel:
    path = folder / f"{_digest(variant)}.pt2"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile(variant, path)
    return _load(path)


def _load(path: Path) -> Kernel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        kernel: Kernel = torch._inductor.aoti_load_package(str(path))
    return kernel


def _compile(variant: Variant, path: Path) -> None:
    arguments, open_sizes = _example(variant)
    handle, name = tempfile.mkstemp(suffix=".pt2", dir=path.parent)
    os.close(handle)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(_Quantize(variant), arguments, dynamic_shapes=open_sizes)
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=name,
                inductor_configs={
                    "cpp.dynamic_threads": True,
                    "cpp.enable_floating_point_contract_flag": "off",
                    "cpp.enable_unsafe_math_opt_flag": False,
                    "cpp.enable_tiling_heuristics": False,  # they give vectors up for a few broadcast factors
                    # nothing is kept in memory but what the graph gives back
                    "realize_reads_threshold": 1 << 20,
                    "realize_opcount_threshold": 1 << 20,
                },
            )
        Path(name).replace(path)  # another process sees all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)


def _example(variant: Variant) -> tuple[tuple[Tensor | None, ...], tuple[dict[int, object] | None, ...]]:
    """Arguments of a variant's graph, and which of their sizes are open."""
    size = variant.block_size
    if size is None:
        shape: tuple[int, ...] = (_EXAMPLE_BLOCKS * _EXAMPLE_INNER,)
    elif isinstance(size, tuple):
        shape = (_EXAMPLE_OUTER, size[0], _EXAMPLE_TILES, size[1])
    else:
        shape = (_EXAMPLE_BLOCKS, size) if variant.is_last else (_EXAMPLE_OUTER, size, _EXAMPLE_INNER)
    # two of everything: one handed in twice would be taken for one argument
    x, out = torch.empty(shape, dtype=variant.dtype), torch.empty(shape, dtype=variant.dtype)
    encode, restore = (torch.ones(()), torch.ones(())) if variant.has_encode else (None, None)
    seed = starts = stride = None
    if variant.rounding == "stochastic":
        seed = torch.tensor(0)
        if size is not None:
            starts, stride = torch.zeros(shape[:1], dtype=torch.int64), torch.tensor(1)
    arguments = (x, out, encode, restore, seed, starts, stride)
    blocked: dict[int, object] = dict.fromkeys(range(0, len(shape), 2), torch.export.Dim.AUTO)
    sizes: tuple[dict[int, object], ...] = (blocked, blocked, {}, {}, {}, {0: torch.export.Dim.AUTO}, {})
    return arguments, tuple(
        None if argument is None else found for argument, found in zip(arguments, sizes, strict=True)
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Take turns with other processes, where there are such locks; without, each compiles for itself."""
    with path.open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl  # POSIX only

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(variant: Variant) -> str:
    """Names all that a library follows from: the variant, the code it was traced from, torch, and the processor."""
    modules = (blocks, elements, random, records, scales)
    functions = (_places_of, _micro_powers, _rounded, _spacing, _leading_power, _example, _compile)
    parts = [repr(variant), torch.__version__, platform.machine(), processor()]
    parts += [inspect.getsource(part) for part in (*modules, Variant, _Quantize, *functions)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def processor() -> str:
    """What code compiled for this processor may use: a home folder is often shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
