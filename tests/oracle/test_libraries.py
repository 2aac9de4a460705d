"""Random inputs, bit for bit against implementations that share no code with ours.

``ml_dtypes`` and ``en_dtypes`` give the elements, ``gfloat`` whole blocks. Inputs: all float32 bit patterns alike
(so NaN and Inf are among them), and log-uniform draws over the range of the element with its ties.
"""

import pytest
import torch

from qcollect.formats import catalog
from qcollect.formats.catalog import get_quant_type
from qcollect.formats.elements import limit_, round_to_element_
from qcollect.formats.records import Element

np = pytest.importorskip("numpy")
from bit_patterns import around, assert_bits, random_bits, random_blocks  # noqa: E402

NUM_ELEMENTS = 10_000_000
CHUNK = 1_000_000
NUM_BLOCKS = 4096
ML_DTYPES = {
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "E3M2": "float6_e3m2fn",
    "E2M3": "float6_e2m3fn",
    "E2M1": "float4_e2m1fn",
}
EN_DTYPES = {"E3M2": "float6_e3m2", "E2M3": "float6_e2m3", "E2M1": "float4_e2m1"}
FLOAT_ELEMENTS = [catalog.E4M3, catalog.E5M2, catalog.E3M2, catalog.E2M3, catalog.E2M1]
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4")


def inputs(element: Element, seed: int):
    """Parts that make up ten million random bit patterns, and one million numbers around the element's range."""
    for part in range(NUM_ELEMENTS // CHUNK):
        yield random_bits(seed + part, CHUNK)
    lowest = max(element.min_exponent - element.mantissa_bits - 3, -149)
    yield around(seed - 1, CHUNK, lowest, min(element.max_exponent + 3, 127))


def clipped_cast(x: "np.ndarray", element: Element, dtype: type) -> "np.ndarray":
    """A library's cast of clipped values; types of 4 and 6 bits have no NaN, which is put back."""
    with np.errstate(invalid="ignore"):
        y = np.clip(x, -element.max_value, element.max_value).astype(dtype).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), y)


def rounded(x: "np.ndarray", element: Element) -> torch.Tensor:
    values = torch.from_numpy(x.copy())
    return limit_(round_to_element_(values, element, "nearest_even"), element, saturate=True)


@pytest.mark.parametrize("element", FLOAT_ELEMENTS, ids=lambda element: element.name)
def test_elements_equal_ml_dtypes(element: Element) -> None:
    dtype = getattr(pytest.importorskip("ml_dtypes"), ML_DTYPES[element.name])
    for x in inputs(element, 100):
        assert_bits(rounded(x, element), clipped_cast(x, element, dtype))


@pytest.mark.parametrize("element", FLOAT_ELEMENTS[2:], ids=lambda element: element.name)
def test_narrow_elements_equal_en_dtypes(element: Element) -> None:
    dtype = getattr(pytest.importorskip("en_dtypes"), EN_DTYPES[element.name])
    x = around(1, CHUNK, element.min_exponent - element.mantissa_bits - 3, element.max_exponent + 3)
    assert_bits(rounded(x, element), clipped_cast(x, element, dtype))


@pytest.mark.parametrize(("quant_type", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_casts_equal_ml_dtypes_and_numpy(quant_type: str, dtype: str, fake_quantize) -> None:
    library = getattr(pytest.importorskip("ml_dtypes"), dtype, None) or getattr(np, dtype)
    element = get_quant_type(quant_type).element
    assert element is not None
    for x in inputs(element, 300):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(library).astype(np.float32)
        assert_bits(fake_quantize(torch.from_numpy(x), quant_type), expected)


def test_hifp8_equals_en_dtypes(fake_quantize) -> None:
    dtype = pytest.importorskip("en_dtypes").hifloat8
    for x in inputs(catalog.HIF8, 500):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(dtype).astype(np.float32)
        assert_bits(fake_quantize(torch.from_numpy(x), "hifp8"), expected)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_floor_blocks_equal_gfloat(quant_type: str, fake_quantize) -> None:
    """Without the blocks that hold a NaN or an Inf: gfloat raises on the one and zeroes the rest for the other."""
    gfloat = pytest.importorskip("gfloat")
    element = get_quant_type(quant_type).element
    assert element is not None
    name = f"format_info_{quant_type.split('_')[0]}_{element.name.lower()}"
    block_format = getattr(pytest.importorskip("gfloat.formats"), name, None)
    if block_format is None:  # 4-bit blocks of one kind only
        block_format = getattr(pytest.importorskip("gfloat.formats"), f"format_info_{quant_type}")
    x = np.concatenate([random_blocks(9, NUM_BLOCKS), random_bits(10, NUM_BLOCKS, 32)])
    x = x[np.isfinite(x).all(axis=1)]
    assert len(x) > NUM_BLOCKS
    exact = x.astype(np.float64)
    emax = block_format.etype.emax
    scale = np.array([[gfloat.compute_scale_amax(emax, row)] for row in exact])
    expected = gfloat.round_ndarray(block_format.etype, exact / scale, sat=True) * scale
    y = fake_quantize(torch.from_numpy(x), quant_type)
    assert_bits(y, expected.astype(np.float32))
    for row in range(0, len(x), 200):  # its whole path through codes, which is slow
        whole = gfloat.quantize_block(block_format, exact[row], gfloat.compute_scale_amax)
        assert_bits(y[row], whole.astype(np.float32))
