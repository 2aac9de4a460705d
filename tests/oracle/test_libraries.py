"""Random inputs, bit for bit against implementations that share no code with ours.

``ml_dtypes`` and ``en_dtypes`` give the elements, ``gfloat`` whole blocks; the scale rules are written a
second time here, in float64 and from their definitions. Inputs: all float32 bit patterns alike (so NaN
and Inf are among them), and normal draws at every magnitude float32 has.
"""

import pytest
import torch

from qcollect.formats.catalog import E2M1, E4M3, E5M2, SCALE_RULES, Element, get_quant_type
from qcollect.formats.elements import limit_, round_to_element_
from qcollect.formats.quantizer import fake_quantize

np = pytest.importorskip("numpy")

NUM_ELEMENTS = 400_000
NUM_BLOCKS = 4096
ELEMENT_DTYPES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E2M1": "float4_e2m1fn"}
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp4")


def random_bits(seed: int, size: int) -> "np.ndarray":
    return np.random.default_rng(seed).integers(0, 1 << 32, size, dtype=np.uint32).view(np.float32)


def around(seed: int, size: int, low: int, high: int) -> "np.ndarray":
    """Log-uniform magnitudes from 2^low to 2^high, half of them cut to 10 bits so that ties are met."""
    rng = np.random.default_rng(seed)
    x = (np.exp2(rng.uniform(low, high, size)) * rng.choice([-1, 1], size)).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return x


def random_blocks(seed: int) -> "np.ndarray":
    """Normal draws, each block at its own power of two from 2^-150 to 2^126, one in four with an outlier."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((NUM_BLOCKS, 32))
    blocks[::4, 5] *= 1e4
    with np.errstate(over="ignore"):
        x = (blocks * np.exp2(rng.integers(-150, 127, (NUM_BLOCKS, 1)).astype(np.float64))).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # bfloat16-valued: ties
    return x


def assert_bits(y: torch.Tensor, expected: "np.ndarray") -> None:
    got = y.numpy()
    assert expected.dtype == np.float32
    both_nan = np.isnan(got) & np.isnan(expected)
    wrong = np.flatnonzero((got.view(np.uint32) != expected.view(np.uint32)) & ~both_nan)
    assert wrong.size == 0, f"{wrong.size} differ, first {got.ravel()[wrong[0]]} for {expected.ravel()[wrong[0]]}"


def library_cast(x: "np.ndarray", element: Element) -> "np.ndarray":
    """ml_dtypes' cast of clipped values; its 4-bit type has no NaN, which is put back."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    clipped = np.clip(x, -element.max_value, element.max_value)
    with np.errstate(invalid="ignore"):
        y = clipped.astype(getattr(ml_dtypes, ELEMENT_DTYPES[element.name])).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), y)


def library_blocks(x: "np.ndarray", element: Element, rule: str) -> "np.ndarray":
    """Blocks (rows) from ml_dtypes' cast and a scale found in float64; any NaN or Inf makes the row NaN."""
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    amax = np.abs(exact).max(axis=1, keepdims=True)
    is_bad = ~np.isfinite(amax)
    half, exponent = np.frexp(np.where(is_bad | (amax == 0), 1.0, amax))
    mantissa, exponent = 2 * half, exponent - 1
    steps_up = {
        "floor": np.zeros_like(mantissa, bool),
        "ceil": mantissa > 1,
        "even": mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1),
        "rceil": mantissa > element.max_value / 2.0**element.max_exponent,
    }[rule]
    scale = np.exp2(np.clip(exponent + steps_up - element.max_exponent, -127, 127).astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = (library_cast((exact / scale).astype(np.float32), element).astype(np.float64) * scale).astype(np.float32)
    return np.where(is_bad, np.float32(np.nan), y)


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda element: element.name)
def test_elements_equal_ml_dtypes(element: Element) -> None:
    span = around(1, NUM_ELEMENTS, element.min_exponent - 8, element.max_exponent + 3)
    for x in (random_bits(2, NUM_ELEMENTS), span):
        y = limit_(round_to_element_(torch.from_numpy(x.copy()), element, "nearest_even"), element, saturate=True)
        assert_bits(y, library_cast(x, element))


@pytest.mark.parametrize(("quant_type", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_casts_equal_ml_dtypes_and_numpy(quant_type: str, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    library = getattr(ml_dtypes, dtype, None) or getattr(np, dtype)
    for x in (random_bits(3, NUM_ELEMENTS), around(4, NUM_ELEMENTS, -30, 18)):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(library).astype(np.float32)
        assert_bits(fake_quantize(torch.from_numpy(x), quant_type), expected)


def test_hifp8_equals_en_dtypes() -> None:
    en_dtypes = pytest.importorskip("en_dtypes")
    for x in (random_bits(5, NUM_ELEMENTS), around(6, NUM_ELEMENTS, -26, 18)):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(en_dtypes.hifloat8).astype(np.float32)
        assert_bits(fake_quantize(torch.from_numpy(x), "hifp8"), expected)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_blocks_equal_ml_dtypes_under_an_exact_scale(quant_type: str, rule: str) -> None:
    element = get_quant_type(quant_type).element
    assert element is not None
    for x in (random_bits(7, NUM_BLOCKS * 32).reshape(-1, 32), random_blocks(8)):
        y = fake_quantize(torch.from_numpy(x), quant_type, scale_rule=rule)
        assert_bits(y, library_blocks(x, element, rule))


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_floor_blocks_equal_gfloat(quant_type: str) -> None:
    """Without the blocks that hold a NaN or an Inf: gfloat raises on the one and zeroes the rest for the other."""
    gfloat = pytest.importorskip("gfloat")
    entry = get_quant_type(quant_type)
    assert entry.element is not None
    name = f"format_info_{quant_type.removesuffix('_e5m2')}_{entry.element.name.lower()}"
    block_format = getattr(pytest.importorskip("gfloat.formats"), name)
    x = np.concatenate([random_blocks(9), random_bits(10, NUM_BLOCKS * 32).reshape(-1, 32)])
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
