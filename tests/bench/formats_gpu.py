# ruff: noqa: E402
"""Quantization on a CUDA device, in units of a device copy of the same tensor; ratios in one process, medians.

    python tests/bench/formats_gpu.py [--size 8192] [--json]

Inputs and outputs rotate, so that no cache holds them. Prints the card's name; gates on nothing. torchao
(compiled) runs beside it where it can be imported.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from qcollect.formats import triton_launch
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.eager import Choices
from qcollect.formats.elements import HYBRID_SOURCES

NUM_LAUNCHES, NUM_REPEATS, NUM_BUFFERS = 12, 7, 4


def choices_of(name: str, dtype: torch.dtype, axis: int) -> Choices:
    entry = QUANT_TYPES[name]
    return Choices(
        quant_type=entry,
        axis=axis,
        scale_rule=entry.scale_rule,
        rounding=entry.rounding or "nearest_even",
        block_size=entry.block_size,
        saturate=False,
        source=HYBRID_SOURCES[dtype],
    )


def median_us(work: Callable[[int], object]) -> float:
    """Device time of a launch; ``work`` takes its number."""
    for i in range(3):
        work(i)
    times = []
    for _ in range(NUM_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for i in range(NUM_LAUNCHES):
            work(i)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / NUM_LAUNCHES * 1e3)
    return statistics.median(times)


def host_us(work: Callable[[], object], num: int = 1000) -> float:
    for _ in range(20):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num):
        work()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / num * 1e6


def cases(
    xs: list[Tensor], outs: list[Tensor], seconds: list[Tensor]
) -> Iterator[tuple[str, float, Callable[[int], object]]]:
    """What is measured, the most it may take in units of a copy, and the work."""
    dtype, num = xs[0].dtype, len(xs)

    def plain(name: str, axis: int) -> Callable[[int], object]:
        choices = choices_of(name, dtype, axis)
        return lambda i: triton_launch.run(xs[i % num], outs[i % num], choices, None, with_tensor_scale=True)

    def counted(name: str, axis: int, histograms: bool) -> Callable[[int], object]:
        choices = choices_of(name, dtype, axis)
        return lambda i: triton_launch.run_with_stats(
            xs[i % num], outs[i % num], choices, None, with_tensor_scale=True, histograms=histograms
        )

    def both(name: str) -> Callable[[int], object]:
        last, first = choices_of(name, dtype, 1), choices_of(name, dtype, 0)
        return lambda i: triton_launch.run_both(
            xs[i % num], outs[i % num], seconds[i % num], last, first, None, None, with_tensor_scale=True
        )

    def with_amax(name: str, axis: int) -> Callable[[int], object]:
        choices = choices_of(name, dtype, axis)
        tensor_scale = choices.quant_type.tensor_scale
        assert tensor_scale is not None

        def work(i: int) -> None:
            _, encode = triton_launch.amax_and_encode(xs[i % num], tensor_scale, choices.scale_rule)
            triton_launch.run(xs[i % num], outs[i % num], choices, encode, with_tensor_scale=True)

        return work

    for name in ("mxfp8", "mxfp4", "hifp8"):
        yield f"{name} last axis", 1.1, plain(name, 1)
        if name != "hifp8":
            yield f"{name} axis 0", 1.2, plain(name, 0)
            yield f"{name} both at once", 1.6, both(name)
        yield f"{name} statistics", 1.25, counted(name, 1, False)
        yield f"{name} histograms", 2.0, counted(name, 1, True)
    yield "mxfp8 statistics axis 0", 1.25, counted("mxfp8", 0, False)
    yield "mxfp8 histograms axis 0", 2.0, counted("mxfp8", 0, True)
    yield "nvfp4 last axis", 2.2, with_amax("nvfp4", 1)
    yield "nvfp4 axis 0", 2.2, with_amax("nvfp4", 0)
    yield "fp8_e4m3", 2.2, with_amax("fp8_e4m3", 1)


def peers(xs: list[Tensor]) -> Iterator[tuple[str, Callable[[int], object]]]:
    if importlib.util.find_spec("torchao") is not None:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        def mxfp8(x: Tensor) -> Tensor:
            return MXTensor.to_mx(x, torch.float8_e4m3fn, 32).dequantize(x.dtype)

        compiled = torch.compile(mxfp8)
        yield "mxfp8 last axis", lambda i: compiled(xs[i % len(xs)])


def small_tensor_us(name: str) -> float:
    x = torch.randn(64, 64, device="cuda")
    out, choices = torch.empty_like(x), choices_of(name, x.dtype, 1)
    tensor_scale = choices.quant_type.tensor_scale
    if tensor_scale is None or not tensor_scale.is_inherent:
        return host_us(lambda: triton_launch.run(x, out, choices, None, with_tensor_scale=True))

    def work() -> None:
        _, encode = triton_launch.amax_and_encode(x, tensor_scale, choices.scale_rule)
        triton_launch.run(x, out, choices, encode, with_tensor_scale=True)

    return host_us(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for dtype in (torch.bfloat16, torch.float32):
        xs = [torch.randn(arguments.size, arguments.size, device="cuda").to(dtype) for _ in range(NUM_BUFFERS)]
        outs, seconds = [torch.empty_like(x) for x in xs], [torch.empty_like(x) for x in xs]

        def copy(i: int, xs: list[Tensor] = xs, outs: list[Tensor] = outs) -> None:
            outs[i % NUM_BUFFERS].copy_(xs[i % NUM_BUFFERS])

        name = str(dtype).removeprefix("torch.")
        for label, bound, work in cases(xs, outs, seconds):
            before = median_us(copy)
            us = median_us(work)
            base = (before + median_us(copy)) / 2
            rows.append({"dtype": name, "what": label, "us": us, "copy_us": base, "ratio": us / base, "bound": bound})
        for label, peer in peers(xs):
            rows.append(
                {"dtype": name, "what": f"torchao {label}", "us": median_us(peer), "copy_us": base, "bound": None}
            )
    small = {name: small_tensor_us(name) for name in ("mxfp8", "hifp8", "nvfp4")}
    if arguments.json:
        print(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows, "small_host_us": small}))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.size} x {arguments.size}")
    for row in rows:
        ratio = float(row["us"]) / float(row["copy_us"])  # type: ignore[arg-type]
        print(f"{row['dtype']:9} {row['what']:26} {row['us']:8.1f} us  {ratio:5.2f} x copy  (at most {row['bound']})")
    for name, us in small.items():
        print(f"64 x 64 {name}: {us:.1f} us of host time")


if __name__ == "__main__":
    main()
