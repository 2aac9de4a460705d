"""Summaries on the CPU against numpy in float64: compiled where there is a compiler, by chunks where there is none, and
by the steps that other devices take.
"""

import importlib.util
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.store import summary as summary_module
from qcollect.store import summary_cpu
from qcollect.store.summary import FIELDS, describe, summarize

pytest.importorskip("numpy")
_PATH = Path(__file__).resolve().parents[2] / "gpu" / "summary.py"
_SPEC = importlib.util.spec_from_file_location("gpu_summary", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
gpu = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu)

quick = settings(max_examples=100, deadline=None, derandomize=True)
by_steps = summary_module._summarize_in_steps


def by_chunks(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(summary_cpu.summarize(summary_module._flat(x.detach())), dtype=torch.float64)


def described(numbers: Any) -> dict[str, Any]:
    facts = {"shape": (2, 3), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    return describe(numbers, **facts, requires_grad=True, is_leaf=False)


@pytest.mark.parametrize("kind", gpu.KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 31, 1000, 32704, 32705, 100_003])
@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
def test_summary_is_that_of_float64(dtype, size, kind):
    x = gpu.special(size, dtype, kind)
    for way in (summarize, by_chunks):
        first, second = way(x), way(x)
        gpu.check(first, x, way.__name__)
        assert torch.equal(first, second)
    gpu.check(by_steps(x), x, "by steps")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_bit_pattern_of_two_bytes(dtype):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    for part in (x, x[:1], x[1:2], x[32767:32769], x[100:300], x[40000:50000]):
        gpu.check(summarize(part), part, str(dtype))
        gpu.check(by_chunks(part), part, f"{dtype}, by chunks")


@quick
@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(gpu.DTYPES))
def test_any_values(values, dtype):
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    gpu.check(summarize(x), x, "summarize")
    gpu.check(by_chunks(x), x, "by chunks")
    gpu.check(by_steps(x), x, "by steps")


def test_layouts_and_other_dtypes():
    for what, x in gpu.layouts("cpu"):
        gpu.check(summarize(x), x, what)
        gpu.check(by_chunks(x), x, f"{what}, by chunks")
        gpu.check(by_steps(x.detach().resolve_neg().flatten()), x, f"{what}, by steps")


@pytest.mark.parametrize("summarize", [summarize, by_chunks])
def test_spread_around_a_large_mean_is_right(summarize):
    x = 1000.0 + 0.01 * torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    std = x.double().std(correction=0).item()
    assert described(summarize(x))["std"] == pytest.approx(std, rel=1e-10)
    offset = torch.tensor([1e8, 1e8 + 8, 1e8 - 8] * 30_000)
    assert described(summarize(offset))["std"] == pytest.approx(math.sqrt(128 / 3), rel=1e-12)


@pytest.mark.parametrize("summarize", [summarize, by_chunks])
def test_equal_values_have_no_spread(summarize):
    info = described(summarize(torch.full((100_000,), 0.1)))
    assert (info["std"], info["mean"], info["rms"]) == (0.0, info["max"], info["max"])


def test_squares_that_float16_and_float32_cannot_hold():
    assert described(summarize(torch.tensor([65504.0, -65504.0]).half()))["rms"] == 65504.0
    largest = torch.finfo(torch.float32).max
    assert described(summarize(torch.tensor([largest, -largest])))["std"] == pytest.approx(largest)


def test_every_number_and_fact_is_described():
    info = described([4.0, 1.0, 2.0, 1.0, -3.0, 2.0, -0.25, 12.75, 1.5])
    assert info == {
        "shape": [2, 3],
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "requires_grad": True,
        "is_leaf": False,
        "min": -3.0,
        "max": 2.0,
        "mean": -0.25,
        "std": pytest.approx(math.sqrt(12.75 / 4)),
        "abs_max": 3.0,
        "rms": pytest.approx(math.sqrt(12.75 / 4 + 0.0625)),
        "min_nonzero_abs": 1.5,
        "num_nan": 1,
        "num_inf": 2,
        "num_zero": 1,
    }
    assert all(type(info[name]) is int for name in ("num_nan", "num_inf", "num_zero"))


def test_zeros_have_no_sign():
    info = described(summarize(torch.tensor([-0.0, -0.0])))
    assert [math.copysign(1.0, info[name]) for name in ("min", "max", "mean", "abs_max")] == [1.0] * 4
    assert (info["num_zero"], info["min_nonzero_abs"]) == (2, None)


def test_summary_is_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        x = torch.ones(5, device="cpu")
        assert summarize(x).tolist()[:4] == [5.0, 0.0, 0.0, 0.0]
    assert tuple(summary_cpu.Share._fields[:4]) == FIELDS[:4] and len(summary_cpu.Share._fields) == len(FIELDS)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_team_of_threads_is_started():
    """A writer's own thread is to be all that it takes."""
    found: list[int] = []

    def work() -> None:
        for dtype in (*gpu.DTYPES, torch.float64):
            x = torch.empty(150_000, dtype=dtype)
            for part in x.split(10_000):
                part.copy_(torch.randn(10_000))
                part[::3] = 0.0
            x[7] = math.nan
            before = len(os.listdir("/proc/self/task"))
            summarize(x)
            by_chunks(x)
            found.append(len(os.listdir("/proc/self/task")) - before)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(num_threads)
    assert len(found) == 4 and max(found) <= 0, found


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed dtype")
def test_both_numbers_of_a_packed_element_count() -> None:
    # the lower half comes first: 0.5 and 6, -6 and 0, 1 and -1.5
    codes = torch.tensor([[0x71, 0x0F, 0xB2]], dtype=torch.uint8)
    info = described(summarize(codes.view(torch.float4_e2m1fn_x2)))
    assert (info["min"], info["max"], info["num_zero"], info["mean"]) == (-6.0, 6.0, 1, 0.0)
