"""Shapes, strides, axes, dtypes and outputs: where the values go, whatever the values are."""

import pytest
import torch
from format_inputs import normal

from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.checks import DTYPES
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, quantize

ALL_TYPES = tuple(QUANT_TYPES)
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
BLOCK_TYPES = tuple(name for name, entry in QUANT_TYPES.items() if entry.block_size)


def test_blocks_do_not_straddle_rows() -> None:
    # DeepWok/mase PR 321: flattened first, the last 8 ones would share a scale with 1024.
    x = torch.ones(2, 40)
    x[1] = 1024
    assert torch.equal(fake_quantize(x, "mxfp4"), x)
    assert torch.equal(quantize(x, "mxfp4").dequantize(), x)


@pytest.mark.parametrize("length", [1, 3, 31, 33, 40, 65])
@pytest.mark.parametrize("quant_type", BLOCK_TYPES)
def test_a_row_is_as_if_it_were_alone(quant_type: str, length: int) -> None:
    x = normal(3, length) * torch.tensor([[1.0], [1024.0], [2.0**-10]])
    amax = Quantizer.create(quant_type).amax_of(x)
    y = fake_quantize(x, quant_type)
    assert y.shape == x.shape
    for row in range(3):
        assert torch.equal(y[row], fake_quantize(x[row], quant_type, amax=amax))
    assert torch.equal(quantize(x, quant_type).dequantize(), y)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_tail_block_uses_its_own_amax(quant_type: str, length: int) -> None:
    x = normal(3, length) * torch.logspace(0, 6, length)
    y = fake_quantize(x, quant_type)
    for row in range(3):
        for start in range(0, length, 32):
            alone = x[row, start : start + 32]
            assert torch.equal(y[row, start : start + 32], fake_quantize(alone, quant_type))
    padded = torch.nn.functional.pad(x, (0, -length % 32))
    assert torch.equal(fake_quantize(padded, quant_type)[:, :length], y)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 9, 15, 17, 63, 65, 70, 130])
@pytest.mark.parametrize("quant_type", ["nvfp4", "hif4"])
def test_short_end_of_a_block_in_a_block_equals_zero_padding(quant_type: str, length: int) -> None:
    entry = QUANT_TYPES[quant_type]
    assert entry.block_size is not None
    x = normal(3, length) * torch.logspace(0, 3, length)
    y = fake_quantize(x, quant_type)
    padded = torch.nn.functional.pad(x, (0, -length % entry.block_size))
    assert torch.equal(fake_quantize(padded, quant_type)[:, :length], y)
    assert torch.equal(quantize(x, quant_type).dequantize(), y)
    assert torch.equal(fake_quantize(x.t(), quant_type, 0).t(), y)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_block_size_can_be_chosen(block_size: int) -> None:
    x = normal(4, 70) * torch.logspace(0, 6, 70)
    y = fake_quantize(x, "mxfp4", block_size=block_size)
    for start in range(0, 70, block_size):
        part = slice(start, start + block_size)
        assert torch.equal(y[:, part], fake_quantize(x[:, part], "mxfp4", block_size=1000))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_an_axis_equals_the_last_one_moved_there(quant_type: str, axis: int) -> None:
    x = normal(33, 5, 70)
    expected = fake_quantize(x.movedim(axis, -1).contiguous(), quant_type).movedim(-1, axis)
    assert torch.equal(fake_quantize(x, quant_type, axis=axis), expected)


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_strides_do_not_matter(quant_type: str) -> None:
    base = normal(66, 6, 80)
    views = {
        "transposed": base.transpose(0, 2),
        "sliced": base[::2, :, 3:73:2],
        "expanded": base[:1, :, :1].expand(40, 6, 40),
        "one row expanded": base[0].expand(3, 6, 80),
        "offset": base[5:, 1:, 7:],
    }
    for name, view in views.items():
        for axis in range(3):
            y = fake_quantize(view, quant_type, axis=axis)
            assert torch.equal(y, fake_quantize(view.contiguous(), quant_type, axis=axis)), (name, axis)
            assert y.is_contiguous()


@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_fresh_dense_and_has_a_storage_of_its_size(quant_type: str, dtype: torch.dtype) -> None:
    x = normal(33, 37).to(dtype)
    before = x.clone()
    for axis in (0, 1):
        y = fake_quantize(x.t(), quant_type, axis=axis)
        assert (y.shape, y.dtype, y.device) == (x.t().shape, dtype, x.device)
        assert y.is_contiguous()
        assert y.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert y.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0,), (3, 0, 5)])
def test_empty_gives_empty(quant_type: str, shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        assert fake_quantize(torch.empty(shape), quant_type, axis=axis).shape == shape
    assert count_saturated(torch.empty(shape), quant_type) == 0


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_a_scalar_is_a_block_of_one(quant_type: str) -> None:
    for axis in (-1, 0):
        y = fake_quantize(torch.tensor(1.7), quant_type, axis=axis)
        assert y.shape == ()
        assert torch.equal(y, fake_quantize(torch.tensor([1.7]), quant_type)[0])
        if quant_type != "none":
            dequantized = quantize(torch.tensor(1.7), quant_type, axis=axis).dequantize()
            assert dequantized.shape == ()
            assert torch.equal(dequantized, y)


@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_quantized_in_float32_and_rounded_back(quant_type: str, dtype: torch.dtype) -> None:
    x = (normal(8, 70) * 100).to(dtype)
    y = fake_quantize(x, quant_type)
    assert y.dtype == dtype
    assert torch.equal(y, fake_quantize(x.float(), quant_type).to(dtype))


def test_float16_results_beyond_its_range_become_inf() -> None:
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert fake_quantize(x, "mxfp8", scale_rule="rceil").tolist() == [float("inf"), 1.0]
    assert fake_quantize(x, "mxfp8").tolist() == [57344.0, 1.0]


@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_and_returned(quant_type: str, dtype: torch.dtype) -> None:
    x = normal(5, 40).to(dtype)
    for axis in (0, 1):
        expected = fake_quantize(x, quant_type, axis=axis)
        for out in (torch.empty_like(x), torch.empty(40, 5, dtype=dtype).t()):
            assert fake_quantize(x, quant_type, axis=axis, out=out) is out
            assert torch.equal(out, expected)
        inplace = x.clone()
        assert fake_quantize(inplace, quant_type, axis=axis, out=inplace) is inplace
        assert torch.equal(inplace, expected)


@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if name != "none"])
def test_out_may_be_a_view_of_the_input(quant_type: str) -> None:
    """Also one that overlaps it at other places: all is read before any is written."""
    memory = normal(7, 40)
    x, shifted = memory[:-1], memory[1:]
    expected = fake_quantize(x.clone(), quant_type)
    fake_quantize(x, quant_type, out=shifted)
    assert torch.equal(shifted, expected)
    memory = normal(40, 40)
    expected = fake_quantize(memory.clone(), quant_type, 0)
    fake_quantize(memory, quant_type, 0, out=memory.t())
    assert torch.equal(memory.t(), expected)


def test_out_may_be_a_scalar_or_empty() -> None:
    for x in (torch.tensor(1.7), torch.empty(0, 32)):
        out = torch.empty_like(x)
        assert fake_quantize(x, "mxfp8", out=out) is out
        assert torch.equal(out, fake_quantize(x, "mxfp8"))


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_no_graph_is_kept(quant_type: str) -> None:
    x = normal(4, 32).requires_grad_()
    assert not fake_quantize(x * 2, quant_type).requires_grad
    y, amax = Quantizer.create(quant_type)(torch.nn.Parameter(x.detach()))
    assert type(y) is torch.Tensor
    assert y.grad_fn is None and not y.requires_grad
    assert (amax is not None) is QUANT_TYPES[quant_type].has_tensor_scale
    assert amax is None or not amax.requires_grad
    if quant_type != "none":
        dequantized = quantize(torch.nn.Parameter(x.detach()), quant_type).dequantize()
        assert dequantized.grad_fn is None and not dequantized.requires_grad
    with torch.no_grad():
        fake_quantize(x, quant_type, out=x)
    with torch.inference_mode():
        fake_quantize(x * 2, quant_type)


def test_result_can_be_changed_in_place_under_autograd() -> None:
    for length in (32, 33):
        y = fake_quantize(normal(4, length), "mxfp8").requires_grad_()
        (y * 2).add_(1).sum().backward()
        assert y.grad is not None
