import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.store.capture import describe_tensor

quick = settings(max_examples=150, deadline=None, derandomize=True)
STATISTICS = ("min", "max", "mean", "std", "abs_max", "rms", "min_nonzero_abs")


def reference(values: np.ndarray) -> dict[str, float | int | None]:
    """The same numbers by numpy in float64."""
    values = values.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    counts = {
        "num_nan": int(np.isnan(values).sum()),
        "num_inf": int(np.isinf(values).sum()),
        "num_zero": int((values == 0).sum()),
    }
    if not finite.size:
        return dict.fromkeys(STATISTICS) | counts
    nonzero = np.abs(finite[finite != 0])
    return counts | {
        "min": finite.min(),
        "max": finite.max(),
        "mean": finite.mean(),
        "std": finite.std(ddof=0),
        "abs_max": np.abs(finite).max(),
        "rms": np.sqrt(np.mean(finite**2)),
        "min_nonzero_abs": nonzero.min() if nonzero.size else None,
    }


def agree(found: dict, expected: dict) -> None:
    scale = expected["abs_max"] or 0.0
    for name, value in expected.items():
        if value is None or name.startswith("num_") or name in ("min", "max", "abs_max", "min_nonzero_abs"):
            assert found[name] == value, name
        else:
            assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-14 * scale), name


@quick
@given(st.lists(st.floats(width=32), max_size=60))
def test_statistics_agree_with_numpy_in_float64(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    agree(describe_tensor(tensor), reference(tensor.numpy()))
    json.dumps(describe_tensor(tensor), allow_nan=False)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, float("nan"), -2.0, float("inf"), -float("inf"), 0.0, -0.0]),
        torch.full((5,), float("nan")),
        torch.tensor([float("inf"), float("nan")]),
        torch.zeros(3),
        torch.zeros(0),
        torch.tensor(-3.0),
        torch.tensor([1e-45, 3e38, -3e38]),
        torch.arange(-5, 6),
        torch.tensor([[0, 255], [1, 2]], dtype=torch.uint8),
        torch.tensor([True, False, True]),
        torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).half(),
        torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).t(),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_special_values_and_other_dtypes(tensor):
    found = describe_tensor(tensor)
    agree(found, reference(tensor.to(torch.float64).numpy()))
    json.dumps(found, allow_nan=False)


def test_without_a_finite_value_every_statistic_is_none():
    for tensor in (torch.full((2,), math.nan), torch.zeros(0), torch.tensor([math.inf, -math.inf])):
        found = describe_tensor(tensor)
        assert [found[name] for name in STATISTICS] == [None] * 7


def test_a_million_values_are_added_in_float64():
    """In float32 the mean of so many stops growing; and a large offset leaves no bit for the spread."""
    tensor = torch.full((1_000_000,), 0.1)
    assert describe_tensor(tensor)["mean"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    offset = torch.tensor([1e8, 1e8 + 8, 1e8 - 8] * 1000)
    assert describe_tensor(offset)["std"] == pytest.approx(math.sqrt(128 / 3), rel=1e-12)


def test_standard_deviation_is_the_populations():
    assert describe_tensor(torch.tensor([1.0, 3.0]))["std"] == pytest.approx(1.0, rel=1e-14)
    assert describe_tensor(torch.tensor([5.0]))["std"] == 0.0


def test_zero_has_no_smallest_magnitude():
    assert describe_tensor(torch.zeros(4))["min_nonzero_abs"] is None
    assert describe_tensor(torch.tensor([0.0, -2.0, 3.0]))["min_nonzero_abs"] == 2.0


def test_what_overflows_float64_is_none_not_infinite():
    found = describe_tensor(torch.tensor([1e300, -1e300], dtype=torch.float64))
    assert (found["rms"], found["std"], found["abs_max"]) == (None, None, 1e300)


def test_complex_is_described_by_its_magnitude():
    found = describe_tensor(torch.tensor([3 + 4j, 0j]))
    assert (found["max"], found["min"], found["num_zero"], found["dtype"]) == (5.0, 0.0, 1, "torch.complex64")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_described(dtype):
    found = describe_tensor(torch.tensor([0.5, -2.0, 0.0, math.nan]).to(dtype))
    assert (found["min"], found["max"], found["num_nan"], found["num_zero"]) == (-2.0, 0.5, 1, 1)


def test_graph_facts_are_those_of_the_source():
    weight = torch.nn.Parameter(torch.ones(2))
    output = weight * 2
    assert {k: describe_tensor(output.detach(), source=output)[k] for k in ("requires_grad", "is_leaf", "device")} == {
        "requires_grad": True,
        "is_leaf": False,
        "device": "cpu",
    }
    assert describe_tensor(weight)["is_leaf"] is True
