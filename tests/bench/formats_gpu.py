# ruff: noqa: E402
"""Quantization on a CUDA device, in units of a device copy of the same tensor; ratios in one process, medians.

    python tests/bench/formats_gpu.py [--size 8192] [--json FILE]         this package, then libraries beside it
    python tests/bench/formats_gpu.py --only-peers --microxcaling DIR     only what libraries have too

Inputs and outputs rotate, so that no cache holds them. Prints the card's name; gates on nothing. Libraries do the job
of fake_quantize along the last axis, from a tensor to a fresh one: torchao (compiled) where it can be imported,
microxcaling from a checkout DIR, its CUDA code (compiled when it is first used, a minute) and its plain torch. What is
not there and what fails is named with the reason. How many values differ from ours is information: roundings of
scales and ties are not the same everywhere.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from qcollect.formats import triton_counts, triton_launch
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.eager import Choices
from qcollect.formats.elements import HYBRID_SOURCES
from qcollect.formats.quantizer import fake_quantize

NUM_LAUNCHES, NUM_REPEATS, NUM_BUFFERS = 12, 7, 4
PEER_TYPES = ("mxfp8", "mxfp4", "nvfp4")

Quantize = Callable[[Tensor], Tensor]


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
        return lambda i: triton_counts.run_with_stats(
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
            encode = triton_launch.encode(xs[i % num], tensor_scale, choices.scale_rule)
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


# ---------------------------------------------------------------------------------------------
# Libraries beside this package
# ---------------------------------------------------------------------------------------------


def find_peers(microxcaling_dir: Path | None) -> dict[str, dict[str, Quantize] | str]:
    """By library: its way of each type it has, or why there are none."""
    found: dict[str, dict[str, Quantize] | str] = {}
    if importlib.util.find_spec("torchao") is None:
        found["torchao, compiled"] = "not installed"
    else:
        found["torchao, compiled"] = ways_or_reason(torchao_ways)
    for name, custom_cuda in (("microxcaling, CUDA", True), ("microxcaling, torch", False)):
        if microxcaling_dir is None:
            found[name] = "not installed (--microxcaling DIR, a checkout of microsoft/microxcaling)"
        else:
            found[name] = ways_or_reason(partial(microxcaling_ways, microxcaling_dir, custom_cuda))
    return found


def ways_or_reason(load: Callable[[], dict[str, Quantize]]) -> dict[str, Quantize] | str:
    try:
        return load()
    except Exception as error:  # whatever is wrong there is the reason to go on without it
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """One line; of a compiler's output the first that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {line[:300]}"


def torchao_ways() -> dict[str, Quantize]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def mxfp8(x: Tensor) -> Tensor:
        return MXTensor.to_mx(x, torch.float8_e4m3fn, 32).dequantize(x.dtype)

    def mxfp4(x: Tensor) -> Tensor:
        return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(x.dtype)

    def nvfp4(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)

    return {"mxfp8": torch.compile(mxfp8), "mxfp4": torch.compile(mxfp4), "nvfp4": torch.compile(nvfp4)}


def microxcaling_ways(directory: Path, custom_cuda: bool) -> dict[str, Quantize]:
    if not (directory / "mx" / "mx_ops.py").is_file():
        raise FileNotFoundError(f"{directory} has no mx/mx_ops.py")
    sys.path.append(str(directory.resolve()))
    if custom_cuda:
        importlib.import_module("mx.custom_extensions")  # compiles
    quantize_mx = importlib.import_module("mx.mx_ops")._quantize_mx

    def way(element: str) -> Quantize:
        return lambda x: quantize_mx(x, 8, element, axes=[-1], block_size=32, round="even", custom_cuda=custom_cuda)

    return {"mxfp8": way("fp8_e4m3"), "mxfp4": way("fp4_e2m1")}


def count_different(values: Tensor, ours: Tensor) -> int:
    if (values.shape, values.dtype, values.device) != (ours.shape, ours.dtype, ours.device):
        raise ValueError(f"not the same job: {tuple(values.shape)} {values.dtype} on {values.device}")
    return int(((values != ours) & ~(values.isnan() & ours.isnan())).sum())


def rotating(quantize: Quantize, xs: list[Tensor]) -> Callable[[int], object]:
    kept = list(xs)

    def work(i: int) -> None:
        kept[i % len(xs)] = quantize(xs[i % len(xs)])

    return work


def peer_rows(
    xs: list[Tensor], copy: Callable[[int], object], peers: dict[str, dict[str, Quantize]]
) -> Iterator[dict[str, object]]:
    for quant_type in PEER_TYPES:
        ours = partial(fake_quantize, quant_type=quant_type)
        expected = ours(xs[0])
        for name, ways in ({"qcollect": {quant_type: ours}} | peers).items():
            row: dict[str, object] = {"what": f"{quant_type} {name}"}
            if quant_type not in ways:
                yield row | {"reason": "has no such type"}
                continue
            try:
                row["differ"] = count_different(ways[quant_type](xs[0]), expected)
                row |= in_copies(rotating(ways[quant_type], xs), copy)
            except Exception as error:  # of one library; the others go on
                row["reason"] = reason_of(error)
            yield row


def small_tensor_us(name: str) -> float:
    x = torch.randn(64, 64, device="cuda")
    out, choices = torch.empty_like(x), choices_of(name, x.dtype, 1)
    tensor_scale = choices.quant_type.tensor_scale
    if tensor_scale is None or not tensor_scale.is_inherent:
        return host_us(lambda: triton_launch.run(x, out, choices, None, with_tensor_scale=True))

    def work() -> None:
        encode = triton_launch.encode(x, tensor_scale, choices.scale_rule)
        triton_launch.run(x, out, choices, encode, with_tensor_scale=True)

    return host_us(work)


def in_copies(work: Callable[[int], object], copy: Callable[[int], object]) -> dict[str, float]:
    before = median_us(copy)
    us = median_us(work)
    base = (before + median_us(copy)) / 2
    return {"us": us, "copy_us": base, "ratio": us / base}


def print_row(row: dict[str, object]) -> None:
    head = f"{row['dtype']:9} {row['what']:26}"
    if "reason" in row:
        print(f"{head} {row['reason']}", flush=True)
        return
    notes = [f"at most {row['bound']}"] if "bound" in row else []
    notes += [f"{row['differ']} values differ"] if "differ" in row else []
    print(f"{head} {row['us']:8.1f} us  {row['ratio']:5.2f} x copy  ({', '.join(notes)})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--microxcaling", type=Path, metavar="DIR", help="a checkout of microsoft/microxcaling")
    parser.add_argument("--only-peers", action="store_true", help="only the types that libraries have too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, {arguments.size} x {arguments.size}", flush=True)
    found = find_peers(arguments.microxcaling)
    peers = {name: ways for name, ways in found.items() if not isinstance(ways, str)}
    missing = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    for name, reason in missing.items():
        print(f"{name}: {reason}", flush=True)
    rows: list[dict[str, object]] = []

    def keep(row: dict[str, object], dtype: torch.dtype) -> None:
        rows.append({"dtype": str(dtype).removeprefix("torch."), **row})
        print_row(rows[-1])

    for dtype in (torch.bfloat16, torch.float32):
        xs = [torch.randn(arguments.size, arguments.size, device="cuda").to(dtype) for _ in range(NUM_BUFFERS)]
        outs, seconds = [torch.empty_like(x) for x in xs], [torch.empty_like(x) for x in xs]

        def copy(i: int, xs: list[Tensor] = xs, outs: list[Tensor] = outs) -> None:
            outs[i % NUM_BUFFERS].copy_(xs[i % NUM_BUFFERS])

        for label, bound, work in () if arguments.only_peers else cases(xs, outs, seconds):
            keep({"what": label, "bound": bound, **in_copies(work, copy)}, dtype)
        for row in peer_rows(xs, copy, peers):
            keep(row, dtype)
    small = {} if arguments.only_peers else {name: small_tensor_us(name) for name in ("mxfp8", "hifp8", "nvfp4")}
    for name, us in small.items():
        print(f"64 x 64 {name}: {us:.1f} us of host time")
    if arguments.json:
        facts = {
            "card": card,
            "torch": torch.__version__,
            "size": arguments.size,
            "rows": rows,
            "missing": missing,
            "small_host_us": small,
        }
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
