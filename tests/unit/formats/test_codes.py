"""Codes and scales as they are stored: shapes, dtypes, packing, and the way back."""

import pytest
import torch
from format_inputs import normal, seed_for

from qcollect.formats.catalog import E2M1, QUANT_TYPES, S1P2
from qcollect.formats.checks import DTYPES
from qcollect.formats.codes import decode, pack, unpack
from qcollect.formats.quantizer import Quantizer, fake_quantize, quantize

CODED = tuple(name for name, entry in QUANT_TYPES.items() if entry.element)
CODE_DTYPES = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "hif4": torch.uint8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", CODED)
def test_dequantized_codes_are_the_fake_quantized_values(quant_type: str, dtype: torch.dtype) -> None:
    """Equal as numbers: mxint8, whose integers have one zero, gives +0 for -0."""
    entry = QUANT_TYPES[quant_type]
    for shape in ((33, 50), (1, 64), (64, 1), (2, 3, 40), (40,)):
        x = (normal(*shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
        for axis in range(len(shape)):
            for rule in entry.scale_rules or (None,):
                for rounding in entry.roundings:
                    settings = {"scale_rule": rule, "rounding": rounding, **seed_for(rounding)}
                    expected = fake_quantize(x, quant_type, axis, **settings)
                    y = quantize(x, quant_type, axis, **settings).dequantize()
                    assert (y.dtype, y.shape) == (dtype, x.shape)
                    assert torch.equal(y, expected)
                    if quant_type != "mxint8":
                        assert torch.equal(y.signbit(), expected.signbit())


@pytest.mark.parametrize("quant_type", CODED)
def test_codes_lie_as_the_elements_do(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    assert entry.element is not None
    x = normal(33, 50)
    for axis, shape in ((0, (17, 50)), (1, (33, 25)), (-1, (33, 25))):
        quantized = quantize(x, quant_type, axis)
        assert quantized.shape == x.shape and quantized.dtype == x.dtype
        assert quantized.codes.shape == (shape if entry.element.bits == 4 else (33, 50))
        is_last = axis != 0
        four_bits = torch.float4_e2m1fn_x2 if is_last and entry.element is E2M1 else torch.uint8
        assert quantized.codes.dtype == CODE_DTYPES.get(quant_type, four_bits)
        if entry.block_size is None:
            assert quantized.scales is None
        else:
            assert quantized.scales is not None
            num_blocks = -(-x.shape[axis] // entry.block_size)
            assert quantized.scales.shape == ((num_blocks, 50) if axis == 0 else (33, num_blocks))
            assert quantized.scales.dtype == SCALE_DTYPES.get(quant_type, torch.float8_e8m0fnu)
        assert (quantized.tensor_scale is not None) is entry.has_tensor_scale


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_four_bit_codes_are_packed_first_in_the_lower_half(axis: int, length: int) -> None:
    codes = torch.randint(0, 16, (5, 6, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes = codes.narrow(axis, 0, min(length, codes.shape[axis]))
    packed = pack(codes, axis)
    along = codes.movedim(axis, -1)
    if along.shape[-1] % 2:
        along = torch.nn.functional.pad(along, (0, 1))
    assert torch.equal(packed.movedim(axis, -1), along[..., ::2] + 16 * along[..., 1::2])
    assert torch.equal(unpack(packed, axis, codes.shape[axis]), codes)


def test_four_bit_codes_of_a_block_read_from_left_to_right() -> None:
    x = torch.tensor([[0.5, -6.0, 1.0, -0.0, 4.0]])
    quantized = quantize(x, "mxfp4")
    assert quantized.codes.view(torch.uint8).tolist() == [[0xF1, 0x82, 0x06]]
    assert quantized.scales is not None and quantized.scales.view(torch.uint8).tolist() == [[127]]
    assert quantize(x.t(), "mxfp4", 0).codes.view(torch.uint8).tolist() == [[0xF1], [0x82], [0x06]]


def test_integer_codes_are_two_s_complement_of_64ths() -> None:
    x = torch.tensor([1.0, -1.0, 1.984375, -1.984375, 1 / 64, -1 / 64, 0.0, -0.0])
    quantized = quantize(x, "mxint8")
    assert quantized.codes.tolist() == [64, 192, 127, 129, 1, 255, 0, 0]
    assert torch.equal(quantized.codes.view(torch.int8).float() / 64, x)
    assert quantized.scales is not None and quantized.scales.view(torch.uint8).tolist() == [127]


def test_minus_two_is_never_written() -> None:
    x = torch.tensor([-1.9999999, 1.9999999])
    for rounding in QUANT_TYPES["mxint8"].roundings:
        assert quantize(x, "mxint8", rounding=rounding, **seed_for(rounding)).codes.tolist() == [129, 127]


@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp8_e5m2", "fp8_e4m3", "fp8_e5m2"])
def test_torch_reads_its_own_dtypes_as_the_same_values(quant_type: str) -> None:
    quantized = quantize(normal(33, 64), quant_type)
    ours = decode(quantized.codes.view(torch.uint8), QUANT_TYPES[quant_type].element)
    assert torch.equal(quantized.codes.float(), ours)
    if quantized.scales is not None:
        scales = quantized.scales.float().repeat_interleave(32, 1)
        assert torch.equal(quantized.codes.float() * scales, quantized.dequantize())


def test_nvfp4_is_element_times_block_scale_times_tensor_scale() -> None:
    x = normal(33, 64)
    quantized = quantize(x, "nvfp4")
    assert quantized.scales is not None and quantized.tensor_scale is not None
    elements = decode(unpack(quantized.codes.view(torch.uint8), 1, 64), E2M1)
    factors = quantized.scales.float() * quantized.tensor_scale
    assert torch.equal(elements * factors.repeat_interleave(16, 1), fake_quantize(x, "nvfp4"))


def test_hif4_is_element_times_scale_times_the_exponents_of_eight_and_of_four() -> None:
    x = normal(33, 128).bfloat16().float()
    quantized = quantize(x, "hif4")
    assert quantized.scales is not None
    eights, fours = quantized.micro
    assert (eights.shape, fours.shape) == ((33, 16), (33, 32))
    assert eights.dtype == fours.dtype == torch.uint8
    assert set(eights.flatten().tolist()) == set(fours.flatten().tolist()) == {0, 1}
    scales = quantized.scales.int()
    scale = 2.0 ** (scales // 4 - 48) * (1 + scales % 4 / 4)
    elements = decode(unpack(quantized.codes, 1, 128), S1P2)
    factors = scale.repeat_interleave(64, 1)
    factors = factors * 2.0 ** (eights.int().repeat_interleave(8, 1) + fours.int().repeat_interleave(4, 1))
    assert torch.equal(elements * factors, fake_quantize(x, "hif4"))


@pytest.mark.parametrize("quant_type", CODED)
def test_codes_are_copies_without_a_graph(quant_type: str) -> None:
    x = normal(4, 32).requires_grad_()
    quantized = quantize(x, quant_type)
    before = quantized.dequantize()
    with torch.no_grad():
        x.zero_()
    assert torch.equal(quantized.dequantize(), before)
    assert not quantized.codes.requires_grad


@pytest.mark.parametrize("quant_type", CODED)
def test_another_dtype_can_be_asked_for(quant_type: str) -> None:
    quantized = quantize(normal(4, 32).bfloat16(), quant_type)
    assert quantized.dequantize().dtype == torch.bfloat16
    in_float32 = quantized.dequantize(torch.float32)
    assert in_float32.dtype == torch.float32
    assert torch.equal(in_float32.bfloat16(), quantized.dequantize())


@pytest.mark.parametrize("quant_type", CODED)
def test_codes_can_be_moved_as_plain_bytes(quant_type: str) -> None:
    """What a file or another process would hold is all that is needed."""
    quantized = quantize(normal(5, 40), quant_type)
    size = quantized.codes.element_size()
    as_bytes = quantized.codes.contiguous().view(torch.uint8 if size == 1 else torch.int16).clone()
    assert torch.equal(as_bytes.view(quantized.codes.dtype).view(as_bytes.dtype), as_bytes)


def test_scaled_hifp8_has_codes_under_its_scale() -> None:
    x = normal(5, 40) * 1e-6
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    quantized = quantizer.quantize(x)
    assert torch.equal(quantized.dequantize(), quantizer.apply(x))
    assert quantized.tensor_scale is not None
    assert quantized.tensor_scale == quantizer.scale_of(quantizer.amax_of(x))
    fixed = quantize(x, "hifp8", scale=2.0**-20)
    assert torch.equal(fixed.dequantize(), fake_quantize(x, "hifp8", scale=2.0**-20))
    assert fixed.tensor_scale == 2.0**-20


@pytest.mark.parametrize("quant_type", ["bf16", "fp16"])
def test_plain_casts_have_codes_under_a_scale_too(quant_type: str) -> None:
    x = normal(5, 40) * 1e-6
    for scale in (2.0**-20, 2.0**10):
        expected = fake_quantize(x, quant_type, scale=scale)
        assert torch.equal(quantize(x, quant_type, scale=scale).dequantize(), expected)


def test_saturating_casts_have_saturated_codes() -> None:
    x = torch.tensor([1e6, -1e6, 3.4e38, float("inf"), 1.0])
    for quant_type in ("fp16", "bf16", "hifp8"):
        expected = fake_quantize(x, quant_type, saturate=True)
        assert expected.isfinite().all()
        assert torch.equal(quantize(x, quant_type, saturate=True).dequantize(), expected)
