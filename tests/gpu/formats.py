"""Quantization on a CUDA device against the CPU's, bit for bit: one command, about two minutes.

    python tests/gpu/formats.py                    everything
    python tests/gpu/formats.py --patterns 100000  fewer random bit patterns (10 million a type otherwise)

Every reference vector; every type under every rule and rounding on shapes with tails, odd sizes, inner axes, and tiles;
both orientations at once; error statistics against float64; random bit patterns of all three dtypes. Needs torch with
CUDA, Triton and numpy; runs from a checkout, installed or not.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

from qcollect.formats import triton_counts, triton_launch
from qcollect.formats.blocks import BlockSize
from qcollect.formats.catalog import E2M1, E2M3, E3M2, E4M3, E5M2, QUANT_TYPES
from qcollect.formats.codes import encode_scale
from qcollect.formats.eager import Choices, limit_values, restore_values, round_values, scale_values
from qcollect.formats.elements import HYBRID_SOURCES
from qcollect.formats.error_stats import NUM_TOTALS, TOTALS, Totals
from qcollect.formats.quantizer import Quantizer, apply_both, fake_quantize, quantize
from qcollect.formats.records import QuantType
from qcollect.formats.scales import power_of_two_scale, tensor_amax, tensor_encode

VECTORS = ROOT / "tests" / "oracle" / "vectors"
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}
MX_TYPES = {
    "e4m3": "mxfp8",
    "e5m2": "mxfp8_e5m2",
    "e3m2": "mxfp6_e3m2",
    "e2m3": "mxfp6_e2m3",
    "e2m1": "mxfp4",
    "int8": "mxint8",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# shape, axis, block size (None: the type's own)
CUTS: tuple[tuple[tuple[int, ...], int, BlockSize | None], ...] = (
    ((4, 64), 1, None),
    ((3, 70), 1, None),
    ((70, 6), 0, None),
    ((64, 256), 0, None),
    ((2, 40, 5), 1, None),
    ((7, 3, 33), 2, None),
    ((5, 48), 1, 24),
    ((33, 50), 1, (16, 16)),
    ((2, 37, 50), 2, (3, 5)),
    ((100,), 0, None),
    ((), 0, None),
)


# ---------------------------------------------------------------------------------------------
# Step by step
# ---------------------------------------------------------------------------------------------


def make_choices(entry: QuantType, x: Tensor, axis: int = -1, **settings: Any) -> Choices:
    """The type's defaults with ``settings`` in place of some."""
    choices = Choices(
        quant_type=entry,
        axis=axis % max(x.dim(), 1),
        scale_rule=entry.scale_rule,
        rounding=entry.rounding or "nearest_even",
        block_size=entry.block_size,
        saturate=False,
        source=HYBRID_SOURCES[x.dtype],
    )
    return dataclasses.replace(choices, **settings)


def encode_of(x: Tensor, choices: Choices) -> Tensor | None:
    """What ``x`` is multiplied with, computed step by step."""
    tensor_scale = choices.quant_type.tensor_scale
    if tensor_scale is None:
        return None
    amax = tensor_amax(x, tensor_scale)
    if tensor_scale.target is not None:
        return power_of_two_scale(amax, tensor_scale.target).reciprocal()
    assert choices.scale_rule is not None
    return tensor_encode(amax, tensor_scale, choices.scale_rule)


def reference(x: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool = True) -> Tensor:
    """``x`` quantized and dequantized step by step in plain torch."""
    scaled = scale_values(x, choices, encode)
    round_values(scaled, x, choices)
    limit_values(scaled, choices)
    restore_values(scaled, with_tensor_scale=with_tensor_scale)
    return scaled.blocks.cut(x.shape).to(x.dtype).view(x.shape)


def reference_stats(x: Tensor, choices: Choices, encode: Tensor | None) -> dict[str, Any]:
    """The fields of ``ErrorStats``, slowly, in float64 on the CPU."""
    y = reference(x, choices, encode).to(torch.float64)
    scaled = scale_values(x, choices, encode)
    round_values(scaled, x, choices)
    assert choices.quant_type.element is not None
    clamped = scaled.blocks.view.abs() > choices.quant_type.element.max_value
    blocks = clamped.sum(scaled.blocks.dims) if scaled.blocks.dims else clamped.any().to(torch.int64)
    wide = x.to(torch.float64)
    both = wide.isfinite() & y.isfinite()
    error = torch.where(both, y - wide, 0.0)
    exponents = (x.to(torch.float32).view(torch.int32) >> 23) & 255
    codes = None
    if scaled.scales is not None:
        assert choices.quant_type.scale_format is not None
        codes = encode_scale(scaled.scales.scale, choices.quant_type.scale_format)
    return {
        "num_elements": x.numel(),
        "sum_squares": float(torch.where(both, wide, 0.0).square().sum()),
        "sum_squared_error": float(error.square().sum()),
        "max_error": float(error.abs().max().to(torch.float32)),
        "num_zeroed": int(((wide != 0) & (y == 0)).sum()),
        "num_clamped": int(clamped.sum()),
        "num_clamped_blocks": int((blocks > 0).sum()),
        "num_nan": int(wide.isnan().sum()),
        "num_inf": int(wide.isinf().sum()),
        "exponent_counts": torch.bincount(exponents.flatten(), minlength=256).tolist(),
        "scale_counts": None if codes is None else torch.bincount(codes.flatten(), minlength=256).tolist(),
    }


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, kind: str, generator: torch.Generator) -> Tensor:
    """``bits`` (few NaN and Inf), ``wide``, ``steep``, ``subnormal``, ``ties`` or ``normal``; zeros of both signs."""
    num = torch.Size(shape).numel()
    if kind == "bits":
        words = torch.randint(-(1 << 31), 1 << 31, (num,), generator=generator)
        x = words.to(torch.int32).view(torch.float32)
        x = torch.where(x.isfinite() | (torch.rand(num, generator=generator) < 0.02), x, 1.0)
    elif kind == "wide":
        exponents = torch.randint(-30, 18, (num,), generator=generator).to(torch.float32)
        x = torch.randn(num, generator=generator) * torch.exp2(exponents)
    elif kind == "subnormal":
        x = torch.randint(0, 1 << 24, (num,), generator=generator).to(torch.int32).view(torch.float32)
        x = torch.where(torch.rand(num, generator=generator) < 0.5, -x, x)
    elif kind == "ties":
        x = torch.randint(-64, 65, (num,), generator=generator) * 0.0625
    elif kind == "steep":
        # from row to row, and from column to column, out of what is near 1
        steps = torch.arange(num).view(shape) // shape[-1] + torch.arange(num).view(shape) % shape[-1]
        x = torch.randn(num, generator=generator) * torch.exp2(steps.flatten() * 0.75 - 50.0)
    else:
        x = torch.randn(num, generator=generator)
    x = torch.where(torch.rand(num, generator=generator) < 0.03, 0.0, x)
    return torch.where(torch.rand(num, generator=generator) < 0.03, -0.0, x).view(shape).to(dtype)


def num_different(y: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; any NaN equals any other."""
    y, expected = y.cpu(), expected.cpu()
    words = torch.int32 if y.dtype == torch.float32 else torch.int16
    return int(((y.view(words) != expected.view(words)) & ~(y.isnan() & expected.isnan())).sum())


# ---------------------------------------------------------------------------------------------
# By the kernels
# ---------------------------------------------------------------------------------------------


def by_kernels(x: Tensor, choices: Choices, encode: Tensor | None, *, with_tensor_scale: bool = True) -> Tensor:
    """What ``run`` writes; ``out`` is filled with something else before."""
    assert triton_launch.supports(x, choices), choices
    out = torch.full(x.shape, 777.0, dtype=x.dtype, device=x.device)
    triton_launch.run(x, out, choices, encode, with_tensor_scale=with_tensor_scale)
    return out


def kernel_encode(x: Tensor, choices: Choices) -> Tensor | None:
    tensor_scale = choices.quant_type.tensor_scale
    return None if tensor_scale is None else triton_launch.encode(x, tensor_scale, choices.scale_rule)


def vectors() -> Iterator[tuple[str, Tensor, Tensor, Choices, bool]]:
    """Name, input, expected output, choices, and whether the tensor has a scale from its abs max."""

    def load(name: str) -> dict[str, Tensor]:
        with np.load(VECTORS / f"{name}.npz") as arrays:
            return {
                key: torch.from_numpy(value.view(np.float32).copy())
                for key, value in arrays.items()
                if value.dtype == np.uint32
            }

    for name, element in ELEMENTS.items():
        found = load(f"elem_{name}")
        entry = QuantType(name=name, element=element, roundings=("nearest_even",), description="-", source="-")
        yield f"elem_{name}", found["x"], found["y_sat"], make_choices(entry, found["x"]), False
    hifp8 = QUANT_TYPES["hifp8"]
    found = load("elem_hif8_ta")
    yield "hif8_ta", found["x"], found["y"], make_choices(hifp8, found["x"]), False
    known = ~found["x"].isnan()
    yield (
        "hif8_ta saturated",
        found["x"][known],
        found["y_sat"][known],
        make_choices(hifp8, found["x"], saturate=True),
        False,
    )
    found = load("elem_hif8_hybrid")
    hybrid = make_choices(hifp8, found["x"], rounding="hybrid")
    yield "hif8 hybrid", found["x"], found["y_sr14"], hybrid, False
    hybrid = dataclasses.replace(hybrid, source=HYBRID_SOURCES[torch.bfloat16])
    yield "hif8 hybrid bf16", found["xb"], found["y_sr2"], hybrid, False
    for name, rule in itertools.product(MX_TYPES, ("floor", "ceil", "even", "rceil")):
        if name == "int8" and rule != "floor":
            continue
        found = load(f"mx_{name}_{rule}")
        choices = make_choices(QUANT_TYPES[MX_TYPES[name]], found["x"], scale_rule=rule)
        yield f"mx_{name}_{rule}", found["x"], found["y"], choices, False
    found = load("mx_tail_axis")
    for name, axis in itertools.product(("e4m3", "e2m1"), (0, 1)):
        expected = found[f"y_{name}_axis{'last' if axis else 0}"]
        yield (
            f"tail {name} {axis}",
            found["x"],
            expected,
            make_choices(QUANT_TYPES[MX_TYPES[name]], found["x"], axis),
            False,
        )
    for name in ("nvfp4", "hif4"):
        found = load(name)
        for i, x in enumerate(found["x"]):
            yield f"{name} {i}", x, found["y"][i], make_choices(QUANT_TYPES[name], x), name == "nvfp4"
    for name in ("e4m3", "e5m2"):
        found, entry = load(f"pertensor_{name}"), QUANT_TYPES[f"fp8_{name}"]
        for i, x in enumerate(found["x"]):
            yield f"fp8_{name} {i}", x, found["y"][i], make_choices(entry, x), True
            yield f"fp8_{name} {i} rceil", x, found["y_pow2"][i], make_choices(entry, x, scale_rule="rceil"), True


def combinations() -> Iterator[tuple[QuantType, dict[str, Any]]]:
    """Every type the kernels know under every rule and rounding."""
    for entry in QUANT_TYPES.values():
        if entry.element is None or entry.element.is_cast:
            continue
        for rule, rounding, saturate in itertools.product(
            entry.scale_rules or (None,), entry.roundings, (False, True) if entry.can_saturate else (False,)
        ):
            yield entry, {"scale_rule": rule, "rounding": rounding, "saturate": saturate}


def cuts_of(entry: QuantType) -> Iterator[tuple[tuple[int, ...], int, BlockSize | None]]:
    for shape, axis, size in CUTS:
        if size is None or (entry.block_size is not None and not entry.micro_exponents):
            yield shape, axis, size or entry.block_size


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def check_vectors(device: str) -> str:
    num = 0
    for name, x, expected, choices, has_scale in vectors():
        x = x.to(device)
        differs = num_different(by_kernels(x, choices, kernel_encode(x, choices) if has_scale else None), expected)
        assert differs == 0, f"{name}: {differs} elements differ"
        num += x.numel()
    return f"{num:,} elements of reference vectors"


def cases() -> Iterator[tuple[QuantType, dict[str, Any], tuple[tuple[int, ...], int, BlockSize | None]]]:
    """Every way of cutting under a type's defaults, three in turn under every other rule and rounding."""
    turn = 0
    for entry, group in itertools.groupby(combinations(), key=lambda found: found[0]):
        cuts = list(cuts_of(entry))
        for i, (_, settings) in enumerate(group):
            for k in range(len(cuts) if i == 0 else 3):
                yield entry, settings, cuts[(turn + k) % len(cuts)]
            turn += 3


def check_combinations(device: str, part: int = 0, num_parts: int = 1) -> str:
    """One part of ``cases``: inputs follow from a case's number, whatever the parts are."""
    num = 0
    for number, (entry, settings, (shape, axis, size)) in enumerate(cases()):
        if number % num_parts != part:
            continue
        generator = torch.Generator().manual_seed(number)
        kind, dtype = ("bits", "wide", "subnormal", "normal")[number % 4], DTYPES[number % 3]
        x = random_tensor(shape, dtype, kind, generator)
        seed = int(torch.randint(0, (1 << 63) - 1, (), generator=generator))
        choices = make_choices(entry, x, axis, block_size=size, seed=seed, **settings)
        encode = encode_of(x, choices)
        found = kernel_encode(x.to(device), choices)
        if encode is not None and found is not None:
            assert num_different(found, encode) == 0, f"{entry.name} {kind}: factor {found} instead of {encode}"
        for with_scale in (True, False) if entry.tensor_scale else (True,):
            expected = reference(x, choices, encode, with_tensor_scale=with_scale)
            differs = num_different(by_kernels(x.to(device), choices, found, with_tensor_scale=with_scale), expected)
            assert differs == 0, (
                f"{entry.name} {settings} {shape} axis {axis} size {size} {dtype} {kind}: {differs} differ"
            )
            num += 1
    return f"{num} combinations"


def check_both(device: str, part: int = 0, num_parts: int = 1) -> str:
    done = 0
    pairs = [
        ("mxfp8", "mxfp8"),
        ("mxfp4", "mxfp8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("mxint8", "mxfp4"),
        ("nvfp4", "mxfp6_e2m3"),
    ]
    every = itertools.product(pairs, ((64, 96), (70, 70), (5, 300), (33, 17)), ("bits", "wide"))
    for num, ((last_name, first_name), shape, kind) in enumerate(every):
        if num % num_parts != part:
            continue
        x = random_tensor(shape, DTYPES[num % 3], kind, torch.Generator().manual_seed(num))
        roundings = (("nearest_even", "half_away", "stochastic")[num % 3], ("nearest_even", "stochastic")[num % 2])
        last = make_choices(QUANT_TYPES[last_name], x, 1, rounding=roundings[0], seed=5)
        first = make_choices(QUANT_TYPES[first_name], x, 0, rounding=roundings[1], seed=(1 << 62) + 3)
        assert triton_launch.supports_both(x.to(device), last, first)
        y_last, y_first = (torch.full(shape, 777.0, dtype=x.dtype, device=device) for _ in range(2))
        triton_launch.run_both(
            x.to(device), y_last, y_first, last, first,
            kernel_encode(x.to(device), last), kernel_encode(x.to(device), first), with_tensor_scale=True,
        )  # fmt: skip
        for y, choices in ((y_last, last), (y_first, first)):
            differs = num_different(y, reference(x, choices, encode_of(x, choices)))
            assert differs == 0, f"{choices.quant_type.name} axis {choices.axis} of {shape} {kind}: {differs} differ"
        done += 1
    return f"{done} pairs"


def counted_tensors(device: str) -> Iterator[tuple[str, tuple[int, ...], int, torch.dtype, str]]:
    # in the interpreter a program takes 0.1 s, so two of them: then there is something to put together
    shapes = ((33, 70), (70, 33)) if device == "cpu" else ((70, 70), (512, 768), (3000, 1024))
    names = ("mxfp8", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3", "hif4", "mxint8")
    for num, (name, shape, axis) in enumerate(itertools.product(names, shapes, (0, 1))):
        yield name, shape, axis, DTYPES[num % 3], ("wide", "bits", "normal", "subnormal")[num % 4]
    # whole tiles, most of them without anything extreme
    names = ("mxfp8", "mxfp4", "mxint8", "mxfp6_e2m3", "mxfp8_e5m2", "hifp8")
    for name, dtype, axis in itertools.product(names, (torch.bfloat16, torch.float32), (0, 1)):
        yield name, (64, 96), axis, dtype, "normal"
        yield name, (32, 128), axis, dtype, "ties"
        yield name, (32, 64), axis, dtype, "steep"


def check_stats(device: str, part: int = 0, num_parts: int = 1) -> str:
    """Counts exactly, sums to a part in a million; the same bits a second time, and put together with others' later."""
    done = 0
    pending = triton_counts.pending_stats(torch.device(device))
    waiting: list[tuple[str, Tensor, list[float]]] = []
    kept = []
    for num, (name, shape, axis, dtype, kind) in enumerate(counted_tensors(device)):
        if num % num_parts != part:
            continue
        what = f"{name} {shape} axis {axis} {dtype} {kind}"
        x = random_tensor(shape, dtype, kind, torch.Generator().manual_seed(num))
        choices = make_choices(QUANT_TYPES[name], x, axis)
        encode = encode_of(x, choices)
        found_encode = None if encode is None else encode.to(device)
        expected, first, alone = reference_stats(x, choices, encode), None, {}
        values = reference(x, choices, encode)
        for histograms in (True, False, True) if device == "cuda" else (True, False):
            out = torch.full(shape, 777.0, dtype=dtype, device=device)
            found = triton_counts.run_with_stats(
                x.to(device), out, choices, found_encode, with_tensor_scale=True, histograms=histograms
            ).to_dict()
            assert_values(out, values, what)
            if first is not None and histograms:
                assert found == first, f"{what}: {found} the second time, not {first}"
            first = first or found
            alone = alone if histograms else found
            for key, value in expected.items():
                if found[key] is None and not histograms:
                    continue
                is_right = abs(found[key] - value) <= 1e-6 * value if isinstance(value, float) else found[key] == value
                assert is_right, f"{key} of {what}: {found[key]} instead of {value}"
        done += 1
        if device == "cpu" and num // 8 % 4:  # by the interpreter it all takes long
            continue
        count = int(triton_counts.count_limited(x.to(device), choices, found_encode))
        assert count == expected["num_clamped"], f"{what}: {count} are clamped"
        expected_totals = [alone[key] for key in TOTALS]
        out = torch.full(shape, 777.0, dtype=dtype, device=device)
        for with_values in (True, False):
            totals = torch.empty(NUM_TOTALS, dtype=torch.float64, device=device)
            if with_values:
                triton_counts.run_and_count(x.to(device), out, choices, found_encode, Totals(totals, pending))
            else:
                triton_counts.count(x.to(device), choices, found_encode, Totals(totals, pending))
            waiting.append((f"{what}, values {with_values}", totals, expected_totals))
        assert_values(out, values, f"{what}, counted")
        there = x.to(device).contiguous()
        tensor_scale = None if encode is None else QUANT_TYPES[name].tensor_scale
        for with_values in (True, False):
            prepared = triton_counts.PreparedCount(there, choices, with_values=with_values, tensor_scale=tensor_scale)
            for time_ in ("compiled", "found"):
                totals = torch.empty(NUM_TOTALS, dtype=torch.float64, device=device)
                out = torch.full(shape, 777.0, dtype=dtype, device=device)
                prepared(there, out if with_values else there, totals, pending)
                waiting.append((f"{what}, prepared, values {with_values}, {time_}", totals, expected_totals))
            if with_values:
                assert_values(out, values, f"{what}, prepared")
        # large kernels, hence not for every tensor
        if num // 8 % 4 == 0 and x.dim() == 2:
            first_choices, last_choices = (make_choices(QUANT_TYPES[name], x, along) for along in (0, 1))
            if not triton_counts.supports_both_stats(there, last_choices, first_choices):
                continue
            outs = (torch.full_like(out, 777.0), torch.full_like(out, 777.0))
            found_totals = [torch.empty(NUM_TOTALS, dtype=torch.float64, device=device) for _ in range(2)]
            triton_counts.run_both_and_count(
                there, outs, (last_choices, first_choices), (found_encode, found_encode),
                (Totals(found_totals[0], pending), Totals(found_totals[1], pending)),
            )  # fmt: skip
            kept.append(found_totals)
            waiting.append((f"{what}, of both", found_totals[1 - axis], expected_totals))
            if encode is None:
                pair = triton_counts.PreparedPair(there, last_choices, first_choices, with_values=False)
                for time_ in ("compiled", "found"):
                    counted = [torch.empty(NUM_TOTALS, dtype=torch.float64, device=device) for _ in range(2)]
                    pair(there, (there, there), (counted[0], counted[1]), pending)
                    kept.append(counted)
                    waiting.append((f"{what}, of both without values, {time_}", counted[1 - axis], expected_totals))
            for y, other in zip(outs, (last_choices, first_choices), strict=True):
                assert_values(y, reference(x, other, encode), f"{what}, along {other.axis} of both")
    pending.finish()
    for what, totals, expected_totals in waiting:
        assert totals.tolist() == expected_totals, f"{what}: {totals.tolist()} instead of {expected_totals}"
    return f"{done} tensors counted"


def assert_values(y: Tensor, expected: Tensor, what: str) -> None:
    differs = num_different(y, expected)
    assert differs == 0, f"values of {what}: {differs} differ"


def check_patterns(device: str, num_patterns: int) -> str:
    """Random bit patterns, all NaN and Inf included, in every dtype: the first rule and rounding, and stochastic."""
    generator = torch.Generator().manual_seed(3)
    rows = -(-num_patterns // 1024)
    words = torch.randint(-(1 << 31), 1 << 31, (rows * 1024,), generator=generator).to(torch.int32)
    # exponents around each other, so that not all of a block but one is zero
    near = (words & ~0x7C000000 | 0x3C000000).view(torch.float32).view(rows, 1024)
    words = torch.where((words & 0x7F800000) == 0x7F800000, words & ~0x40000000, words)
    words[::4099] = torch.randint(-(1 << 31), 1 << 31, words[::4099].shape, generator=generator).to(torch.int32)
    any_bits, num = words.view(torch.float32).view(rows, 1024), 0
    for entry in QUANT_TYPES.values():
        if entry.element is None or entry.element.is_cast:
            continue
        for i, (x, axis) in enumerate(((any_bits, 1), (near, 0))):
            dtype = DTYPES[num % 3] if i else torch.float32
            x = x.to(dtype)
            choices = make_choices(entry, x, axis, seed=99, **({"rounding": "stochastic"} if i else {}))
            encode = None if entry.tensor_scale is None or entry.takes_tensor_scale else encode_of(x, choices)
            found = None if encode is None else kernel_encode(x.to(device), choices)
            differs = num_different(by_kernels(x.to(device), choices, found), reference(x, choices, encode))
            assert differs == 0, f"{entry.name} {dtype} axis {axis} {choices.rounding}: {differs} differ"
            num += 1
    return f"{num} times {rows * 1024:,} bit patterns"


def in_parts(check: Callable[[str, int, int], str], num_parts: int) -> str:
    """A check by several processes, since most of its time is compilation."""
    with ProcessPoolExecutor(num_parts, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(check, "cuda", part, num_parts) for part in range(num_parts)]
        found = [part.result().split(" ", 1) for part in parts]
        return f"{sum(int(num) for num, _ in found)} {found[0][1]}"


def check_public_calls(device: str, part: int = 0, num_parts: int = 1) -> str:
    """What users call, on the device against the CPU: values, codes, two orientations, statistics, any strides."""
    generator = torch.Generator().manual_seed(5)
    names = [name for name, entry in QUANT_TYPES.items() if entry.element is not None]
    num_calls = 0
    for number, (name, dtype) in enumerate(itertools.product(names, (torch.float32, torch.bfloat16))):
        x = (torch.randn(96, 160, generator=generator) * 3).to(dtype)
        if number % num_parts == part:
            compare_calls(x, name, device)
            num_calls += 1
    return f"{num_calls} types and dtypes"


def compare_calls(x: Tensor, name: str, device: str) -> None:
    for view in (x, x.t(), x[5:, ::3], x[0], x.view(4, 24, 160)):
        for axis in (0, -1):
            assert_same(fake_quantize(view.to(device), name, axis), fake_quantize(view, name, axis), name)
            codes = quantize(view.to(device), name, axis)
            assert_same(codes.dequantize(), quantize(view, name, axis).dequantize(), name)
    quantizers = [Quantizer.create(name, axis=axis) for axis in (1, 0)]
    for y, quantizer in zip(apply_both(x.to(device), *quantizers), quantizers, strict=True):
        assert_same(y, quantizer.apply(x), name)
    spoiled = x.clone()
    spoiled[3, 5], spoiled[40, 7], spoiled[41, 8], spoiled[50:60] = float("nan"), float("inf"), -float("inf"), 1e30
    for quantizer in quantizers:
        assert int(quantizer.num_saturated(spoiled.to(device))) == int(quantizer.num_saturated(spoiled)), name
    y, stats = quantizers[0].apply_with_stats(x.to(device), histograms=True)
    expected, expected_stats = quantizers[0].apply_with_stats(x, histograms=True)
    assert_same(y, expected, name)
    for key, value in expected_stats.to_dict().items():
        found = stats.to_dict()[key]
        is_close = isinstance(value, float) and abs(found - value) <= 1e-6 * abs(value)
        assert found == value or is_close, (name, key, found, value)


def assert_same(y: Tensor, expected: Tensor, name: str) -> None:
    y = y.cpu()
    same = (y == expected) & (y.signbit() == expected.signbit()) | (y.isnan() & expected.isnan())
    assert y.dtype == expected.dtype and y.shape == expected.shape and bool(same.all()), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 1) - 2, 1), help="that compile kernels")
    parser.add_argument("--only", action="append", help="the name of a check, as it is printed; may be repeated")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    num_failed = 0
    for name, check in (
        ("public calls", lambda: in_parts(check_public_calls, arguments.processes)),
        ("vectors", lambda: check_vectors("cuda")),
        ("combinations", lambda: in_parts(check_combinations, arguments.processes)),
        ("both orientations", lambda: in_parts(check_both, arguments.processes)),
        ("statistics", lambda: in_parts(check_stats, arguments.processes)),
        ("random bits", lambda: check_patterns("cuda", arguments.patterns)),
    ):
        if arguments.only and name not in arguments.only:
            continue
        started = time.monotonic()
        try:
            print(f"ok      {name}: {check()}, {time.monotonic() - started:.1f} s", flush=True)
        except AssertionError as error:
            print(f"FAILED  {name}: {error}", flush=True)
            num_failed += 1
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
