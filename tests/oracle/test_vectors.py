"""Every stored reference vector, bit for bit."""

from pathlib import Path

import pytest
import torch

from qcollect.formats.blocks import scale_
from qcollect.formats.catalog import E2M1, E4M3, E5M2, E8M0, SCALE_RULES, Element
from qcollect.formats.elements import limit_, round_to_element_
from qcollect.formats.quantizer import fake_quantize

np = pytest.importorskip("numpy")

VECTORS = Path(__file__).parent / "vectors"
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
MX_TYPES = {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2", "e2m1": "mxfp4"}


def load(name: str) -> dict[str, "np.ndarray"]:
    with np.load(VECTORS / f"{name}.npz") as arrays:
        return dict(arrays)


def tensor(bits: "np.ndarray") -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32).copy())


def assert_bits(y: torch.Tensor, expected: "np.ndarray") -> None:
    got = y.numpy().view(np.uint32)
    both_nan = np.isnan(y.numpy()) & np.isnan(expected.view(np.float32))
    wrong = np.flatnonzero((got != expected) & ~both_nan)
    assert wrong.size == 0, f"{wrong.size} differ, first at {wrong[0]}"


@pytest.mark.parametrize("name", ELEMENTS)
def test_element_rounds_to_nearest_even_and_clamps(name: str) -> None:
    vectors, element = load(f"elem_{name}"), ELEMENTS[name]
    rounded = round_to_element_(tensor(vectors["x"]), element, "nearest_even")
    assert_bits(limit_(rounded, element, saturate=True), vectors["y_sat"])


@pytest.mark.parametrize("quant_type", ["bf16", "fp16"])
def test_plain_casts(quant_type: str) -> None:
    vectors = load(f"elem_{quant_type}")
    assert_bits(fake_quantize(tensor(vectors["x"]), quant_type), vectors["y"])


def test_hifp8_rounds_half_away_and_overflows_to_inf() -> None:
    vectors = load("elem_hif8_ta")
    assert_bits(fake_quantize(tensor(vectors["x"]), "hifp8"), vectors["y"])


def test_hifp8_saturates_and_keeps_nan() -> None:
    vectors = load("elem_hif8_ta")
    x = tensor(vectors["x"])
    y = fake_quantize(x, "hifp8", saturate=True)
    is_nan = x.isnan().numpy()
    assert y.isnan().numpy()[is_nan].all()
    assert_bits(y[torch.from_numpy(~is_nan)], vectors["y_sat"][~is_nan])


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", MX_TYPES)
def test_blocks_under_every_scale_rule(name: str, rule: str) -> None:
    vectors = load(f"mx_{name}_{rule}")
    assert vectors["x"].shape == (160, 32)
    assert_bits(fake_quantize(tensor(vectors["x"]), MX_TYPES[name], scale_rule=rule), vectors["y"])


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", MX_TYPES)
def test_scale_codes_under_every_scale_rule(name: str, rule: str) -> None:
    vectors = load(f"mx_{name}_{rule}")
    element: Element = ELEMENTS[name]
    scales = scale_(tensor(vectors["x"]), 1, element, E8M0, rule).squeeze(1)
    expected = torch.from_numpy(vectors["scale"]).to(torch.float32)
    expected = torch.where(expected == 255, torch.nan, torch.exp2(expected - 127))
    assert torch.equal(scales.nan_to_num(0), expected.nan_to_num(0))
    assert torch.equal(scales.isnan(), expected.isnan())


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_short_last_block_along_either_axis(name: str, axis: int) -> None:
    vectors = load("mx_tail_axis")
    expected = vectors[f"y_{name}_axis{'last' if axis == -1 else axis}"]
    assert_bits(fake_quantize(tensor(vectors["x"]), MX_TYPES[name], axis=axis), expected)
