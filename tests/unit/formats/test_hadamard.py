"""The random Hadamard transform: orthogonal, its own along one axis, and gone from a product of two."""

import pytest
import torch
from format_inputs import normal, seed_for

from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.hadamard import rotate
from qcollect.formats.quantizer import Quantizer, fake_quantize, quantize
from qcollect.formats.random import random_signs
from qcollect.formats.records import HADAMARD_SIZES

ROTATED = tuple(name for name, entry in QUANT_TYPES.items() if entry.element)


def matrix(size: int) -> torch.Tensor:
    """Sylvester's: the sign is that of the parity of what two indices have in common."""
    parity = [[(row & column).bit_count() % 2 for column in range(size)] for row in range(size)]
    return (1 - 2 * torch.tensor(parity, dtype=torch.float64)) / size**0.5


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_it_is_signs_times_the_matrix(size: int) -> None:
    """Exactly, for small whole numbers: their sums are exact and the root of the size a power of two."""
    x = torch.randint(-100, 100, (5, 2 * size), generator=torch.Generator().manual_seed(0)).float()
    signs = random_signs(7, size, x.device)
    expected = (x.view(5, 2, size).double() * signs.double()) @ matrix(size)
    assert torch.equal(rotate(x, 1, size, 7).double(), expected.view(5, 2 * size))


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_it_is_orthogonal(size: int) -> None:
    turned = rotate(torch.eye(size), 1, size, 3)
    assert torch.equal(turned @ turned.t(), torch.eye(size))
    x = normal(9, 3 * size)
    torch.testing.assert_close(rotate(x, 1, size, 3).norm(dim=1), x.norm(dim=1))


@pytest.mark.parametrize("size", HADAMARD_SIZES)
def test_a_product_over_the_transformed_axis_stays(size: int) -> None:
    a, b = normal(9, 2 * size), normal(2 * size, 11, seed=1)
    exact = a.double() @ b.double()
    product = rotate(a, 1, size, 5).double() @ rotate(b, 0, size, 5).double()
    torch.testing.assert_close(product, exact, rtol=0, atol=1e-5 * size**0.5)
    other_signs = rotate(a, 1, size, 5).double() @ rotate(b, 0, size, 6).double()
    assert (other_signs - exact).abs().max() > 0.5


def test_an_outlier_is_spread_over_its_group_and_no_further() -> None:
    x = torch.zeros(1, 64)
    x[0, 20] = 8.0
    y = rotate(x, 1, 16, 0)
    assert y[0, 16:32].abs().tolist() == [2.0] * 16
    assert y[0, :16].tolist() == y[0, 32:48].tolist() == [0.0] * 16


def test_nan_and_inf_spoil_their_group_only() -> None:
    x = torch.ones(1, 64)
    x[0, 20], x[0, 40] = torch.nan, torch.inf
    y = rotate(x, 1, 16, 0)
    assert y[0, 16:32].isnan().all()
    assert not y[0, 32:48].isfinite().any()
    assert y[0, :16].isfinite().all() and y[0, 48:].isfinite().all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis_and_strides_give_the_same(axis: int) -> None:
    x = normal(16, 32, 48)
    moved = x.movedim(axis, -1).contiguous()
    expected = rotate(moved, 2, 16, 9).movedim(-1, axis)
    assert torch.equal(rotate(x, axis, 16, 9), expected)
    view = normal(48, 64, 32).transpose(0, 2)[::2, ::2]
    assert torch.equal(rotate(view, axis, 16, 9), rotate(view.contiguous(), axis, 16, 9))


@pytest.mark.parametrize("quant_type", ROTATED)
def test_a_quantizer_transforms_first(quant_type: str) -> None:
    x = normal(16, 64)
    for axis in (0, 1):
        turned = rotate(x, axis, 16, 4)
        for rounding in QUANT_TYPES[quant_type].roundings:
            settings = {"rounding": rounding, **seed_for(rounding)}
            expected = fake_quantize(turned, quant_type, axis, **settings)
            assert torch.equal(fake_quantize(x, quant_type, axis, hadamard=16, hadamard_seed=4, **settings), expected)
            dequantized = quantize(x, quant_type, axis, hadamard=16, hadamard_seed=4, **settings).dequantize()
            assert torch.equal(dequantized, expected)


@pytest.mark.parametrize("quant_type", ["nvfp4", "fp8_e4m3"])
def test_abs_max_is_that_of_the_transformed_tensor(quant_type: str) -> None:
    x = torch.zeros(4, 64)
    x[:, ::16] = 8.0
    quantizer = Quantizer.create(quant_type, hadamard=16)
    amax = quantizer.amax_of(x, hadamard_seed=4)
    assert amax == 2.0
    y = quantizer.apply(x, amax=amax, hadamard_seed=4)
    assert torch.equal(quantizer.apply(x, hadamard_seed=4), y)
    assert torch.equal(quantizer(x, hadamard_seed=4)[0], y)
    assert torch.equal(y, rotate(x, 1, 16, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_dtype(dtype: torch.dtype) -> None:
    x = normal(8, 64).to(dtype)
    y = fake_quantize(x, "mxfp8", hadamard=64)
    assert y.dtype == dtype
    assert torch.equal(y, fake_quantize(x.float(), "mxfp8", hadamard=64).to(dtype))


def test_tiles_are_transformed_along_the_axis_that_is_named() -> None:
    x = normal(32, 64)
    for axis in (0, 1):
        expected = fake_quantize(rotate(x, axis, 16, 0), "nvfp4", block_size=(16, 16))
        assert torch.equal(fake_quantize(x, "nvfp4", axis, block_size=(16, 16), hadamard=16), expected)


def test_empty_and_input_stay_as_they_are() -> None:
    assert fake_quantize(torch.empty(0, 32), "mxfp8", hadamard=16).shape == (0, 32)
    x = normal(4, 32)
    before = x.clone()
    fake_quantize(x, "mxfp8", hadamard=16)
    assert torch.equal(x, before)
    y = fake_quantize(before, "mxfp8", hadamard=16)
    assert torch.equal(fake_quantize(x, "mxfp8", hadamard=16, out=x), y)


def test_quantized_operands_of_a_gemm_give_nearly_the_same_product() -> None:
    """Outliers in one operand cost less once they are spread."""
    a, b = normal(32, 256), normal(256, 32, seed=1)
    a[:, ::37] *= 60
    exact = a.double() @ b.double()

    def error(**settings: object) -> float:
        left, right = fake_quantize(a, "mxfp4", 1, **settings), fake_quantize(b, "mxfp4", 0, **settings)
        return (left.double() @ right.double() - exact).norm().item() / exact.norm().item()

    assert error(hadamard=64, hadamard_seed=2) < 0.85 * error()
