"""Quantization on the CPU by torch's compiler: the bits of ``eager``, in two sweeps over memory.

    prepare(choices, dtypes)          # before training; once for a machine it takes seconds, then milliseconds
    if supports(x, choices):
        run(x, out, choices, encode, with_tensor_scale=True)

Nothing is ever compiled but by ``prepare``: a variant is exported with its sizes left open, compiled ahead of time
into a library in the user's cache folder, and loaded from there by every later process. It has no guards, so neither
a new shape nor autocast, grad mode or a number of threads compiles anything again.

What inductor makes of a variant is three loop nests: the abs max of every block, the scales of all blocks, and the
rounding, which writes to ``out`` and to nothing else. Scales are computed by the functions that ``eager`` uses.
Rounding is written anew, since inductor has no vector instruction for looking at a float's bits: the power of two
below a number comes from four float operations (``_leading_power``), and adding and subtracting a large number rounds.
Inductor compiles without contraction, reassociation and flushing to zero: every operation is rounded as in ``eager``.
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
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor, nn

from qcollect.formats import elements, records, scales
from qcollect.formats.eager import Choices
from qcollect.formats.elements import MANTISSA_WIDTH, HybridSource, limit_, magnitude_bits, round_to_element_
from qcollect.formats.records import Element, QuantType, Rounding, ScaleRule
from qcollect.formats.scales import block_scales, tensor_decode

MIN_ELEMENTS = 1 << 12  # a call takes about 0.1 ms at least, the steps of plain torch about 0.3 ms
_ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "half_away", "hybrid")
_MAX_EXPONENT = 64  # of an element: its numbers times 2^24 stay finite
# Sizes that a variant is exported with. They become variables; no two are equal or a block size.
_EXAMPLE_BLOCKS, _EXAMPLE_INNER = 1031, 517

Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one library is made for; sizes, strides and the number of threads are open.

    Args:
        is_last: whether nothing lies inside of the axis of the blocks; True without blocks.
        source: of hybrid rounding, else None.
        has_encode: whether the whole tensor has a scale.
    """

    quant_type: QuantType
    is_last: bool
    scale_rule: ScaleRule | None
    rounding: Rounding
    block_size: int | None
    saturate: bool
    source: HybridSource | None
    has_encode: bool
    dtype: torch.dtype


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
        choices: those that no variant exists for (stochastic rounding, tiles, plain casts, ...) are passed over.
        dtypes: of the tensors.
        has_encode: whether the whole tensor has a scale; None: as the type is by itself.
        cache_dir: None: ``qcollect`` in the user's cache folder.
    """
    folder = _default_cache_dir() if cache_dir is None else cache_dir
    wanted = dict.fromkeys(
        _variant(entry, dtype, is_last=is_last, has_encode=has_encode)
        for entry in choices
        if _has_variant(entry)
        for dtype in dtypes
        for is_last in ((True, False) if entry.block_size is not None else (True,))
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
    restore = _restore(choices, encode, with_tensor_scale=with_tensor_scale)
    source = x.detach()
    if not source.is_contiguous():
        source = out.copy_(source)
    size = choices.block_size
    if not isinstance(size, int) or source.shape[choices.axis] % size == 0:
        kernel(_as_blocks(source, choices), _as_blocks(out, choices), encode, restore)
        return
    length = source.shape[choices.axis]
    filled = list(source.shape)
    filled[choices.axis] = -(-length // size) * size
    padded = source.new_zeros(filled)
    padded.narrow(choices.axis, 0, length).copy_(source)
    kernel(_as_blocks(padded, choices), _as_blocks(padded, choices), encode, restore)
    out.copy_(padded.narrow(choices.axis, 0, length))


def _restore(choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> Tensor | None:
    """What makes a result of the whole tensor's scale: a factor of the blocks' scales, or a divisor without blocks."""
    if encode is None:
        return None
    if not with_tensor_scale:
        return torch.ones_like(encode)
    return encode if choices.block_size is None else tensor_decode(encode)


def _inner(x: Tensor, choices: Choices) -> int:
    """How many elements of the dense ``x`` lie inside of its axis; 1 without blocks."""
    return 1 if choices.block_size is None else prod(x.shape[choices.axis + 1 :])


def _as_blocks(x: Tensor, choices: Choices) -> Tensor:
    """``x`` as (elements,) without blocks, (blocks, block size), or (blocks, block size, inner)."""
    if choices.block_size is None:
        return x.view(-1)
    assert isinstance(choices.block_size, int)
    inner = _inner(x, choices)
    return x.view(-1, choices.block_size) if inner == 1 else x.view(-1, choices.block_size, inner)


# ---------------------------------------------------------------------------------------------
# Variants
# ---------------------------------------------------------------------------------------------


def _has_variant(choices: Choices) -> bool:
    """Whether such a choice can be compiled.

    Not: tiles; random numbers, whose 64-bit products have no vector instruction; a plain cast, which is one operation
    anyway; and steps rounded to bfloat16 in between, which inductor is free to leave out.
    """
    entry, element = choices.quant_type, choices.quant_type.element
    return (
        element is not None
        and not element.is_cast
        and element.max_exponent <= _MAX_EXPONENT
        and not isinstance(choices.block_size, tuple)
        and choices.rounding in _ROUNDINGS
        and not entry.micro_exponents
        and entry.scale_arithmetic == "float32"
    )


def _variant(choices: Choices, dtype: torch.dtype, *, is_last: bool, has_encode: bool | None) -> Variant:
    assert not isinstance(choices.block_size, tuple)
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
    """The graph of a variant. It gives back the scales, which keeps inductor from computing them for every element."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant

    def forward(self, x: Tensor, out: Tensor, encode: Tensor | None, restore: Tensor | None) -> tuple[Tensor, ...]:
        entry, element = self.variant.quant_type, self.variant.quant_type.element
        assert element is not None
        values = x.to(torch.float32)
        if self.variant.block_size is None:
            values = self._round(values if encode is None else values * encode, element)
            out.copy_(values if restore is None else values / restore)
            return ()
        assert self.variant.scale_rule is not None
        if not entry.keeps_minus_zero:
            values = values + 0.0
        amax = values.abs().amax(1, keepdim=True)
        block = block_scales(magnitude_bits(amax), entry, self.variant.scale_rule, encode)
        decode = block.scale if restore is None else block.scale * restore
        out.copy_(self._round(values * block.encode, element) * decode)
        return block.encode, decode

    def _round(self, values: Tensor, element: Element) -> Tensor:
        variant = self.variant
        saturate = variant.saturate or element.overflow == "saturate"
        if variant.rounding == "hybrid":
            rounded = round_to_element_(values.clone(), element, variant.rounding, source=variant.source)
            return limit_(rounded, element, saturate=saturate)
        return _rounded(values, element, variant.rounding, saturate=saturate)


def _rounded(values: Tensor, element: Element, rounding: Rounding, *, saturate: bool) -> Tensor:
    """``round_to_element_`` and ``limit_`` in float operations only, for nearest even and half away."""
    # the maximum is itself a value; beyond it, a number that is rounded to something beyond it will do for all
    top = element.max_value if saturate else 2.0 ** (element.max_exponent + 2)
    magnitude = values.abs().clamp_max(top)
    spacing = _spacing(magnitude, element)
    large = spacing * 2.0**MANTISSA_WIDTH  # a sum with it has no room for less than the spacing
    rounded = (magnitude + large) - large
    if rounding == "half_away":
        is_down_from_half = (magnitude - rounded) == spacing * 0.5
        rounded = torch.where(is_down_from_half, rounded + spacing, rounded)
    if not saturate:
        rounded = torch.where(rounded > element.max_value, inf, rounded)
    rounded = torch.copysign(rounded, values)
    return rounded if element.signed_zero else rounded + 0.0


def _spacing(magnitude: Tensor, element: Element) -> Tensor:
    """Distance of neighbouring element values around each magnitude, NaN for NaN."""
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
    example = _example(variant)
    sizes = dict.fromkeys((0, 2) if example.dim() == 3 else (0,), torch.export.Dim.AUTO)
    # two tensors: one handed in twice would be taken for one argument
    encode, restore = (torch.ones(()), torch.ones(())) if variant.has_encode else (None, None)
    scalar_sizes: dict[int, object] | None = {} if variant.has_encode else None
    handle, name = tempfile.mkstemp(suffix=".pt2", dir=path.parent)
    os.close(handle)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(
                _Quantize(variant),
                (example, torch.empty_like(example), encode, restore),
                dynamic_shapes=(sizes, sizes, scalar_sizes, scalar_sizes),
            )
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=name,
                inductor_configs={
                    "cpp.dynamic_threads": True,
                    "cpp.enable_floating_point_contract_flag": "off",
                    "cpp.enable_unsafe_math_opt_flag": False,
                },
            )
        Path(name).replace(path)  # another process sees all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)


def _example(variant: Variant) -> Tensor:
    if variant.block_size is None:
        return torch.ones(_EXAMPLE_BLOCKS * _EXAMPLE_INNER, dtype=variant.dtype)
    if variant.is_last:
        return torch.ones(_EXAMPLE_BLOCKS, variant.block_size, dtype=variant.dtype)
    return torch.ones(_EXAMPLE_BLOCKS // 8, variant.block_size, _EXAMPLE_INNER, dtype=variant.dtype)


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
    code = (records, elements, scales, _Quantize, _rounded, _spacing, _leading_power, _example, _compile)
    parts = [repr(variant), torch.__version__, platform.machine(), _processor()]
    parts += [inspect.getsource(part) for part in code]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What code compiled for this processor may use: a home folder is often shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qcollect" / "compiled"
