"""Statistics of tensors on a CUDA device against float64 on the CPU, and their time: one command, about a minute.

    python tests/gpu/summary.py             everything
    python tests/gpu/summary.py --no-large  without the tensor of more than 2^31 elements (5 GB)

Counts and extremes exactly, sums to a part in 10^10, the same bits a second time; no call may wait for the device.
Times are ratios to a device copy of the same tensor, and host times beside those of a launch of torch's. Needs torch
with CUDA, Triton and numpy; runs from a checkout, installed or not.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch import Tensor

from qcollect.store import summary_cuda
from qcollect.store.summary import FIELDS, describe, summarize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# around a tile, a vector of 16 bytes, what one program does alone, and all programs at once
SIZES = (1, 2, 7, 8, 31, 33, 511, 512, 513, 4096, 8191, 8193, 100_003, 2048 * 512, 2048 * 512 + 5, 5_000_011)
NUM_LAUNCHES, NUM_REPEATS = 20, 9


def special(num: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Values on the CPU that a kind of statistics could go wrong with."""
    x = torch.randn(num, generator=torch.Generator().manual_seed(num))
    place = torch.arange(num)
    if kind == "zeros":
        x[place % 3 == 0], x[place % 7 == 0] = 0.0, -0.0
    elif kind == "all zero":
        x = torch.where(place % 2 == 0, 0.0, -0.0)
    elif kind == "around 1000":
        x = 1000.0 + 0.01 * x if dtype == torch.float32 else 1000.0 + 8.0 * x
    elif kind == "constant":
        x = torch.full((num,), 0.1)
    elif kind == "negative":
        x = -x.abs() - 1.0
    elif kind == "not finite":
        x[place % 11 == 3], x[place % 13 == 5], x[place % 17 == 0] = math.nan, math.inf, -math.inf
    elif kind == "one Inf":
        x[num // 2] = -math.inf
    elif kind == "all NaN":
        x[:] = math.nan
    elif kind == "largest":
        x = torch.where(x > 0, 1.0, -0.5) * torch.finfo(dtype).max
    elif kind == "subnormal":
        x = torch.round(4.0 * x) * torch.finfo(dtype).smallest_normal / 4.0
    return x.to(dtype)


KINDS = (
    "normal", "zeros", "all zero", "around 1000", "constant", "negative", "not finite", "one Inf", "all NaN", "largest",
    "subnormal",
)  # fmt: skip


def reference(x: Tensor) -> dict[str, float]:
    """The summary by numpy in float64."""
    x = x.detach().abs() if x.is_complex() else x.detach()  # a device has its own last bit of a magnitude
    values = x.cpu().to(torch.float64).numpy().ravel()
    finite = values[np.isfinite(values)]
    nonzero = np.abs(finite[finite != 0])
    mean = finite.mean() if finite.size else 0.0
    if finite.size and finite.min() == finite.max():
        mean = finite[0]
    return {
        "num_finite": finite.size,
        "num_nan": np.isnan(values).sum(),
        "num_inf": np.isinf(values).sum(),
        "num_zero": (values == 0).sum(),
        "min": finite.min(initial=math.inf),
        "max": finite.max(initial=-math.inf),
        "mean": mean,
        "squared_deviations": np.square(finite - mean).sum(),
        "min_nonzero_abs": nonzero.min(initial=math.inf),
    }


def check(summary: Tensor, x: Tensor, what: str) -> None:
    """Raises if a summary is not that of ``x``."""
    found, expected = dict(zip(FIELDS, summary.tolist(), strict=True)), reference(x)
    for name in set(FIELDS) - {"mean", "squared_deviations"}:
        assert found[name] == expected[name], f"{what}: {name} is {found[name]}, not {expected[name]}"
    if not expected["num_finite"]:
        return
    # what the differences from the mean, and float64 numbers of the mean's size, leave uncertain
    deviation = math.sqrt(expected["squared_deviations"] / expected["num_finite"])
    uncertain = 1e-10 * deviation + 1e-15 * abs(expected["mean"])
    found_deviation = math.sqrt(found["squared_deviations"] / found["num_finite"])
    assert abs(found["mean"] - expected["mean"]) <= uncertain, f"{what}: mean {found['mean']}, not {expected['mean']}"
    assert abs(found_deviation - deviation) <= uncertain, f"{what}: deviation {found_deviation}, not {deviation}"
    info = describe(summary, shape=x.shape, dtype=x.dtype, device="cpu", requires_grad=False, is_leaf=True)
    assert info["abs_max"] == max(abs(expected["min"]), abs(expected["max"])), f"{what}: {info}"


def check_values(
    summarize: Callable[[Tensor], Tensor],
    device: str,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    num_times: int = 2,
) -> str:
    num = 0
    for dtype in dtypes:
        for size in sizes:
            for kind in kinds:
                x = special(size, dtype, kind).to(device)
                summaries = [summarize(x).cpu() for _ in range(num_times)]
                check(summaries[0], x, f"{size} {dtype} {kind}")
                assert all(torch.equal(summaries[0], summary) for summary in summaries), f"{size} {dtype}: {summaries}"
                num += 1
    return f"{num} tensors"


def check_copies(
    device: str, sizes: Sequence[int] = SIZES, kinds: Sequence[str] = KINDS, dtypes: Sequence[torch.dtype] = DTYPES
) -> str:
    """Copied on the way, and put together with others later: the same bits."""
    pending, waiting = summary_cuda.pending_summaries(torch.device(device), 3 * 9 * 2048), []
    for dtype, size, kind in itertools.product(dtypes, sizes, kinds):
        x = special(size, dtype, kind).to(device)
        memory = torch.zeros(64 + x.numel() * x.element_size(), dtype=torch.uint8, device=device)
        rows = torch.zeros(2, 10, dtype=torch.float64, device=device)
        room = summary_cuda.Room(memory, 64)
        assert summary_cuda.can_copy(x) or device == "cpu"
        summary_cuda.summarize(x, rows[0, :9], pending=pending, room=room)
        summary_cuda.summarize(x, rows[1, :9])
        assert torch.equal(room.view(x.numel(), dtype).view(torch.uint8), x.view(torch.uint8)), f"{size} {dtype} {kind}"
        assert not memory[:64].any()
        waiting.append((f"{size} {dtype} {kind}", rows))
    pending.finish()
    for what, rows in waiting:
        assert torch.equal(rows[0], rows[1]), f"{what}: {rows[0]}, not {rows[1]}"
    return f"{len(waiting)} tensors"


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def summarize_at_once(x: Tensor) -> Tensor:
    with never_waiting():
        return summarize(x)


def layouts(device: str) -> Iterator[tuple[str, Tensor]]:
    x = torch.randn(64, 48, 33, device=device)
    for dtype in DTYPES:
        y = x.to(dtype)
        yield f"transposed {dtype}", y.transpose(0, 2)
        yield f"part {dtype}", y[:, 3:17, ::2]
        yield f"one element further {dtype}", y.view(-1)[1:]
        yield f"expanded {dtype}", y[:, :1].expand(64, 48, 33)
        yield f"no dimension {dtype}", y[1, 2, 3]
        yield f"empty {dtype}", y[:0]
    yield "parameter", torch.nn.Parameter(x)
    yield "sign in a bit", torch.complex(x, x).conj().imag
    integers = torch.arange(-5, 1000, device=device)
    others = (x.double(), integers, integers % 5 == 0, integers.to(torch.uint8), torch.complex(x, -x), x[:0].double())
    for y in others:
        yield str(y.dtype), y
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield str(dtype), x.to(dtype)
    yield "float64, not finite", torch.where(x > 1.0, math.nan, torch.where(x < -2.0, math.inf, x.double()))
    yield "float64, all NaN", torch.full((5,), math.nan, dtype=torch.float64, device=device)


def check_layouts() -> str:
    num = 0
    for what, x in layouts("cuda"):
        check(summarize_at_once(x).cpu(), x, what)
        num += 1
    return f"{num} tensors"


def check_large() -> str:
    """More elements than an int32 has numbers."""
    num = (1 << 31) + 12_345
    x = torch.zeros(num, dtype=torch.bfloat16, device="cuda")
    x[-1], x[1 << 31], x[5] = 3.0, -4.0, math.nan
    found = dict(zip(FIELDS, summarize(x).tolist(), strict=True))
    num_finite = num - 1
    deviations = 25.0 - 1.0 / num_finite
    assert (found["num_finite"], found["num_nan"], found["num_zero"]) == (num_finite, 1, num_finite - 2), found
    assert (found["min"], found["max"], found["min_nonzero_abs"]) == (-4.0, 3.0, 3.0), found
    assert math.isclose(found["mean"], -1.0 / num_finite, rel_tol=1e-9), found
    assert math.isclose(found["squared_deviations"], deviations, rel_tol=1e-9), found
    return f"{num:,} elements"


def check_devices() -> str:
    """A tensor on another device than the current one."""
    x = torch.randn(100_000)
    for index in range(torch.cuda.device_count()):
        summary = summarize(x.to(f"cuda:{index}"))
        assert summary.device.index == index and torch.cuda.current_device() == 0
        check(summary.cpu(), x, f"device {index}")
    return f"{torch.cuda.device_count()} devices"


def device_us(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(NUM_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(NUM_LAUNCHES):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / NUM_LAUNCHES * 1e3)
    return statistics.median(times)


def host_us(work: Callable[[], object], num: int = 500) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num):
            work()
        times.append((time.perf_counter() - started) / num * 1e6)
    return statistics.median(times)


def measure_large(size: int = 8192) -> None:
    for dtype in DTYPES:
        for kind in ("normal", "zeros", "not finite"):
            x = special(size * size, dtype, kind).view(size, size).to("cuda")
            out = torch.empty_like(x)
            copy_us = device_us(lambda x=x, out=out: out.copy_(x))
            us = device_us(lambda x=x: summarize(x))
            rate = x.numel() * x.element_size() / us / 1e6
            print(
                f"        {size} x {size} {str(dtype)[6:]:8} {kind:10} {us:7.1f} us, {us / copy_us:.2f} x copy "
                f"({copy_us:.1f} us), {rate:.2f} TB/s read"
            )


def measure_small() -> None:
    for rows, columns in ((64, 64), (512, 1024)):
        for dtype in DTYPES:
            x = torch.randn(rows, columns, device="cuda").to(dtype)
            launch_us, us = host_us(lambda x=x: x.clone()), host_us(lambda x=x: summarize(x))
            on_device_us = device_us(lambda x=x: summarize(x))
            print(
                f"        {rows} x {columns} {str(dtype)[6:]:8} host {us:.1f} us (a clone {launch_us:.1f} us), "
                f"one after another {on_device_us:.1f} us"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-large", action="store_true", help="leave out the tensor of 5 GB")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("SKIP: needs a CUDA device")
        return 77
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; python {sys.version.split()[0]}")
    # compiled, and torch's own lazy parts made ready, before waiting is an error
    for dtype in DTYPES:
        for size in (100, 100_000):
            summarize(special(size, dtype, "normal").cuda())
    checks: list[tuple[str, Callable[[], str]]] = [
        ("values", lambda: check_values(summarize_at_once, "cuda")),
        ("copies", lambda: check_copies("cuda")),
        ("layouts and other dtypes", check_layouts),
        ("devices", check_devices),
    ]
    if not arguments.no_large:
        checks.append(("more than 2^31 elements", check_large))
    failed = 0
    for title, work in checks:
        started = time.monotonic()
        try:
            print(f"ok      {title}: {work()}, {time.monotonic() - started:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {title}: {type(error).__name__}: {error}", flush=True)
    measure_large()
    measure_small()
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
