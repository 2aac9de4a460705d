"""Tiles of rows and columns: a scale for each, as if it were cut out by hand."""

import pytest
import torch

from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.checks import DTYPES
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, quantize

TILED = tuple(name for name, entry in QUANT_TYPES.items() if entry.block_size and not entry.micro_exponents)
SIZES = [(16, 16), (32, 32), (1, 32), (32, 1), (3, 7), (100, 100)]
SHAPES = [(32, 64), (33, 50), (1, 70), (70, 1), (5, 5)]


def normal(*shape: int) -> torch.Tensor:
    rows = torch.logspace(-4, 4, shape[-2], base=2).view(-1, 1)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * rows * torch.logspace(-2, 2, shape[-1])


def by_hand(x: torch.Tensor, quant_type: str, size: tuple[int, int], **settings: object) -> torch.Tensor:
    """Each tile alone, as one block, under the abs max of the whole."""
    y = torch.empty_like(x)
    amax = Quantizer.create(quant_type).amax_of(x)
    for row in range(0, x.shape[0], size[0]):
        for column in range(0, x.shape[1], size[1]):
            tile = x[row : row + size[0], column : column + size[1]]
            flat = fake_quantize(tile.flatten(), quant_type, block_size=tile.numel(), amax=amax, **settings)
            y[row : row + size[0], column : column + size[1]] = flat.view(tile.shape)
    return y


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quant_type", TILED)
def test_tiles_equal_blocks_cut_by_hand(quant_type: str, size: tuple[int, int]) -> None:
    entry = QUANT_TYPES[quant_type]
    for shape in SHAPES:
        x = normal(*shape)
        for rule in entry.scale_rules:
            for rounding in ("nearest_even", "half_away"):
                settings = {"scale_rule": rule, "rounding": rounding}
                y = fake_quantize(x, quant_type, block_size=size, **settings)
                assert torch.equal(y, by_hand(x, quant_type, size, **settings))
                assert torch.equal(quantize(x, quant_type, block_size=size, **settings).dequantize(), y)


@pytest.mark.parametrize("quant_type", TILED)
def test_tiles_of_a_transposed_matrix_are_the_tiles_transposed(quant_type: str) -> None:
    x = normal(33, 50)
    y = fake_quantize(x, quant_type, block_size=(16, 16))
    assert torch.equal(fake_quantize(x.t(), quant_type, block_size=(16, 16)), y.t())
    assert torch.equal(
        fake_quantize(x.t(), quant_type, block_size=(7, 3)), fake_quantize(x, quant_type, block_size=(3, 7)).t()
    )


@pytest.mark.parametrize("quant_type", TILED)
def test_axis_is_of_no_consequence_to_tiles(quant_type: str) -> None:
    x = normal(33, 50)
    y = fake_quantize(x, quant_type, block_size=(16, 16))
    for axis in (0, 1, -1, None, 99):
        assert torch.equal(fake_quantize(x, quant_type, axis, block_size=(16, 16)), y)
    assert Quantizer.create(quant_type, axis=0, block_size=(16, 16)).axis is None


@pytest.mark.parametrize("quant_type", TILED)
def test_tiles_lie_in_the_last_two_dimensions(quant_type: str) -> None:
    x = normal(3, 2, 20, 37)
    amax = Quantizer.create(quant_type).amax_of(x)
    y = fake_quantize(x, quant_type, block_size=(16, 16))
    for first in range(3):
        for second in range(2):
            alone = fake_quantize(x[first, second], quant_type, block_size=(16, 16), amax=amax)
            assert torch.equal(y[first, second], alone)


@pytest.mark.parametrize("quant_type", TILED)
def test_tiles_one_row_high_are_blocks_along_the_last_axis(quant_type: str) -> None:
    x = normal(33, 50)
    assert torch.equal(fake_quantize(x, quant_type, block_size=(1, 16)), fake_quantize(x, quant_type, block_size=16))
    along_rows = fake_quantize(x, quant_type, 0, block_size=16)
    assert torch.equal(fake_quantize(x, quant_type, block_size=(16, 1)), along_rows)


@pytest.mark.parametrize("quant_type", TILED)
def test_scales_of_tiles_are_counted_in_both_dimensions(quant_type: str) -> None:
    scales = quantize(normal(33, 50), quant_type, block_size=(16, 16)).scales
    assert scales is not None and scales.shape == (3, 4)
    scales = quantize(normal(2, 5, 50), quant_type, block_size=(16, 16)).scales
    assert scales is not None and scales.shape == (2, 1, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", TILED)
def test_nan_spoils_its_tile_and_no_other(quant_type: str, dtype: torch.dtype) -> None:
    x = normal(33, 50).to(dtype)
    x[0, 49] = x.abs().max()  # a tensor's scale follows from this
    spoiled = x.clone()
    spoiled[20, 20] = torch.nan
    expected = fake_quantize(x, quant_type, block_size=(16, 16))
    expected[16:32, 16:32] = torch.nan
    y = fake_quantize(spoiled, quant_type, block_size=(16, 16))
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_largest_of_a_tile_is_clipped_by_floor() -> None:
    x = torch.zeros(64, 64)
    x[5, 5], x[5, 40], x[40, 5] = 957, 960, 1.0
    y = fake_quantize(x, "mxfp8", block_size=(32, 32))
    assert (y[5, 5].item(), y[5, 40].item(), y[40, 5].item()) == (896.0, 896.0, 1.0)
    assert count_saturated(x, "mxfp8", block_size=(32, 32)) == 2


def test_a_list_from_a_recipe_is_a_tile() -> None:
    x = normal(33, 50)
    assert torch.equal(
        fake_quantize(x, "nvfp4", block_size=[16, 16]),  # type: ignore[arg-type]
        fake_quantize(x, "nvfp4", block_size=(16, 16)),
    )
