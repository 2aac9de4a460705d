"""Quantization on the CPU by torch's compiler: the bits of ``eager``, in two sweeps over memory.

    prepare(choices, dtypes)          # before training; once for a machine it takes seconds, then milliseconds
    if supports(x, choices):
        run(x, out, choices, encode, with_tensor_scale=True)

Nothing is ever compiled but by ``prepare``: a variant is exported with its sizes left open, compiled ahead of time
into a library in the user's cache folder, and loaded from there by every later process. It has no guards, so neither
a new shape nor autocast, grad mode or a number of threads compiles anything again.

Inductor compiles the graph (``compiled_graph``) without contraction, reassociation and flushing to zero: every
operation is rounded as in ``eager``. A tensor goes through part by part, so that the second sweep finds in the
processor's cache what the first one read. What is drawn for stochastic rounding is made beside, part by part
(``random_compiled``).
"""

import hashlib
import inspect
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from qcollect import paths
from qcollect.formats import blocks, compiled_graph, elements, random_compiled, records, scales
from qcollect.formats.c_function import processor
from qcollect.formats.compiled_graph import LANES, MAX_EXPONENT, Quantize, Variant, example
from qcollect.formats.eager import Choices
from qcollect.formats.random_compiled import fill_fractions
from qcollect.formats.scales import tensor_decode

_LOADING_TIMEOUT_S = 120
_PART_ELEMENTS = 1 << 20  # of one call: few enough for a cache

Kernel = Callable[[list[Tensor]], object]  # takes the tensors out of the list

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
    if any(variant.rounding == "stochastic" for variant in wanted):
        random_compiled.prepare()
    try:
        for variant in wanted:
            if variant not in _kernels:
                _kernels[variant] = _load_or_compile(variant, folder)
    except Exception as error:  # a compiler, its headers, the folder or torch itself: plain torch does without
        reason = str(error).strip().splitlines()
        return False, f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return True, ""


def supports(x: Tensor, choices: Choices, *, has_encode: bool | None = None) -> bool:
    """Whether ``run`` takes ``x`` and is worth it: on the CPU, not empty, and its variant has been prepared."""
    if x.device.type != "cpu" or x.numel() == 0 or not _has_variant(choices):
        return False
    inner = _inner(x, choices)
    if 1 < inner < LANES:  # most of a copy would be what it is filled up with
        return False
    return _variant(choices, x.dtype, is_last=inner == 1, has_encode=has_encode) in _kernels


def run(x: Tensor, out: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> None:
    """Writes ``x`` quantized and dequantized to ``out``, the bits of ``eager``.

    A tensor that is not dense is copied to ``out`` first; one with a short last block, or that no whole number of
    vectors lies side by side in, is filled up with zeros in a copy, which changes no scale.

    Args:
        x: what ``supports`` says yes to, any strides.
        out: of the shape and dtype of ``x``, contiguous; may be ``x`` itself.
        encode: 0-dim float32, what the whole tensor is multiplied with; None: nothing.
        with_tensor_scale: whether the result is in units of ``x``, or of the tensor's scale.
    """
    has_encode = encode is not None
    kernel = _kernels[_variant(choices, x.dtype, is_last=_inner(x, choices) == 1, has_encode=has_encode)]
    scales = (encode, _restore(choices, encode, with_tensor_scale=with_tensor_scale))
    source = x.detach()
    if not source.is_contiguous():
        source = out.copy_(source)
    shape, units = _dense_shape(source, choices)
    filled = [-(-length // unit) * unit for length, unit in zip(shape, units, strict=True)]
    source, target = source.view(shape), out.view(shape)
    draws = _Draws(choices.seed) if choices.rounding == "stochastic" else None
    if filled != shape:
        inside = tuple(slice(0, length) for length in shape)
        target = source.new_zeros(filled)
        target[inside].copy_(source)
        if draws is not None:  # by place in the tensor, not in its filled-up copy
            drawn = target.new_zeros(filled, dtype=torch.float32)
            drawn[inside] = fill_fractions(torch.empty(shape, device="cpu"), choices.seed, 0)
            draws.of_all = _as_blocks(drawn, choices)
        source = target
    _run_parts(kernel, _as_blocks(source, choices), _as_blocks(target, choices), scales, draws)
    if filled != shape:
        out.view(shape).copy_(target[inside])


def _run_parts(
    kernel: Kernel,
    x: Tensor,
    out: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    draws: "_Draws | None",
) -> None:
    """One call for each part of the blocks."""
    length = x.shape[0]
    step = max(1, _PART_ELEMENTS * length // x.numel())
    for first in range(0, length, step):
        part = slice(first, min(first + step, length))
        arguments = (x[part], out[part], *scales, None if draws is None else draws.of(part, x.shape))
        kernel([argument for argument in arguments if argument is not None])


class _Draws:
    """What the blocks of a tensor draw, part by part.

    ``of_all`` has it where elements' places are not those in the memory of the blocks.
    """

    def __init__(self, seed: int) -> None:
        self.of_all: Tensor | None = None
        self._seed = seed
        self._memory: Tensor | None = None  # of the first part, which is the largest

    def of(self, part: slice, shape: torch.Size) -> Tensor:
        """Of the part of all blocks, which have that shape; until the next is asked for."""
        if self.of_all is not None:
            return self.of_all[part]
        num = part.stop - part.start
        if self._memory is None:
            self._memory = torch.empty((num, *shape[1:]), device="cpu")
        return fill_fractions(self._memory[:num], self._seed, part.start * prod(shape[1:]))


def _restore(choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool) -> Tensor | None:
    """What makes a result of the whole tensor's scale: a factor of the blocks' scales, or a divisor without blocks."""
    if encode is None:
        return None
    if not with_tensor_scale:
        return torch.ones_like(encode)
    return encode if choices.block_size is None else tensor_decode(encode)


def _inner(x: Tensor, choices: Choices) -> int:
    """How many elements of the dense ``x`` lie inside of the axis of its blocks; 1 without blocks and for tiles."""
    return prod(x.shape[choices.axis + 1 :]) if isinstance(choices.block_size, int) else 1


def _dense_shape(x: Tensor, choices: Choices) -> tuple[list[int], list[int]]:
    """The dense ``x`` as (elements,) without blocks, (outer, along the axis, inner), or for tiles (matrices, rows,
    columns); and of how many elements along each of them there are only whole numbers in what is compiled.
    """
    size = choices.block_size
    if size is None:
        return [x.numel()], [LANES]
    if not isinstance(size, int):
        return [prod(x.shape[:-2]), *x.shape[-2:]], [1, *size]
    inner = _inner(x, choices)
    return [prod(x.shape[: choices.axis]), x.shape[choices.axis], inner], [1, size, 1 if inner == 1 else LANES]


def _as_blocks(x: Tensor, choices: Choices) -> Tensor:
    """What has a ``_dense_shape``, filled up, as (vectors, lanes) without blocks, (blocks, block size),
    (blocks, block size, vectors side by side, lanes), or for tiles (tiles above each other, rows of a tile, tiles side
    by side, columns of a tile).
    """
    size = choices.block_size
    if size is None:
        return x.view(-1, LANES)
    if not isinstance(size, int):
        return x.view(-1, size[0], x.shape[-1] // size[1], size[1])
    inner = x.shape[-1]
    return x.view(-1, size) if inner == 1 else x.view(-1, size, inner // LANES, LANES)


# ---------------------------------------------------------------------------------------------
# Variants
# ---------------------------------------------------------------------------------------------


def _has_variant(choices: Choices) -> bool:
    """Whether such a choice can be compiled: all of the catalog, and records in whose arithmetic nothing overflows."""
    entry, element = choices.quant_type, choices.quant_type.element
    if element is None:
        return False
    is_wide = element.max_exponent > MAX_EXPONENT
    sizes = [size for size, _ in entry.micro_exponents]
    is_nested = all(size % inside == 0 for size, inside in pairwise(sizes))
    return is_nested and not (is_wide and (element.taper or element.min_exponent > -MAX_EXPONENT))


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
        package = torch._inductor.aoti_load_package(str(path))
    kernel: Kernel = package.loader.boxed_run  # past what looks anew, at every call, how arguments are nested
    return kernel


def _compile(variant: Variant, path: Path) -> None:
    arguments, open_sizes = example(variant)
    handle, name = tempfile.mkstemp(suffix=".pt2", dir=path.parent)
    os.close(handle)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(Quantize(variant), arguments, dynamic_shapes=open_sizes)
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
        if not _kernels:
            _prove_that_it_loads(name)
        Path(name).replace(path)  # another process sees all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)


def _prove_that_it_loads(package: str) -> None:
    """Loads it in another process: where torch and the compiler do not fit each other, that may be the end of one."""
    code = f"import torch; torch._inductor.aoti_load_package({package!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LOADING_TIMEOUT_S,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(
            f"what torch compiled cannot be loaded (exit code {done.returncode}) {' '.join(said)}".strip()
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
    traced = (blocks, compiled_graph, elements, records, scales)
    parts = [repr(variant), torch.__version__, platform.machine(), processor()]
    parts += [inspect.getsource(part) for part in (*traced, _compile)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
