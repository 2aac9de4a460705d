"""Every stored reference vector, bit for bit: values by every path, by way of codes, codes, scales, decode tables.

The path stands in a test's name. Of those that are compiled a usual run takes only a few (``quantization_paths``).
"""

import json
from pathlib import Path

import pytest
import torch
from quantization_paths import PATHS

from qcollect.formats import catalog
from qcollect.formats.catalog import POWER_OF_TWO_RULES
from qcollect.formats.codes import decode, decode_scale, decode_table, encode, encode_scale
from qcollect.formats.elements import limit_, round_to_element_
from qcollect.formats.quantizer import quantize
from qcollect.formats.records import Element, QuantType

np = pytest.importorskip("numpy")
from bit_patterns import assert_bits, assert_values, tensor_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
VECTORS = Path(__file__).parent / "vectors"
ELEMENTS = {
    "e4m3": catalog.E4M3,
    "e5m2": catalog.E5M2,
    "e3m2": catalog.E3M2,
    "e2m3": catalog.E2M3,
    "e2m1": catalog.E2M1,
}
MX_TYPES = {
    "e4m3": "mxfp8",
    "e5m2": "mxfp8_e5m2",
    "e3m2": "mxfp6_e3m2",
    "e2m3": "mxfp6_e2m3",
    "e2m1": "mxfp4",
    "int8": "mxint8",
}
MX_FILES = [(name, rule) for name in ELEMENTS for rule in POWER_OF_TWO_RULES] + [("int8", "floor")]
every_path = pytest.mark.parametrize("fake_quantize", PATHS, indirect=True)
# The six-bit elements have 64 codes, in the lower bits of a byte.
TABLES = {**ELEMENTS, "mxint8": catalog.INT8, "hif8": catalog.HIF8}


def load(name: str) -> dict[str, "np.ndarray"]:
    with np.load(VECTORS / f"{name}.npz") as arrays:
        return dict(arrays)


def matrices(name: str) -> list[object]:
    """One case for each labelled tensor of a file."""
    labels = load(name)["labels"]
    return [pytest.param(name, index, id=f"{name}-{label}") for index, label in enumerate(labels)]


def table(name: str) -> "np.ndarray":
    stored = json.loads((VECTORS / "decode_tables.json").read_text(encoding="utf-8"))[name]
    bits = np.array([int(text, 16) for text in stored["float32_hex"]], dtype=np.uint32)
    assert len(bits) == 1 << stored["bits"]
    return bits


def along(axis: int, x: torch.Tensor, fake_quantize, quant_type: str, **settings: str) -> torch.Tensor:
    """``x`` with blocks along its rows: as it is, or turned and dense with blocks along axis 0, and turned back."""
    if axis == -1:
        return fake_quantize(x, quant_type, **settings)
    return fake_quantize(x.t().contiguous(), quant_type, 0, **settings).t().contiguous()


def assert_same(y: torch.Tensor, expected: "np.ndarray", quant_type: str) -> None:
    """An integer has one zero, so that its codes lose the sign of a zero that the values keep."""
    (assert_values if quant_type == "mxint8" else assert_bits)(y, expected)


# --- elements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_element_rounds_to_nearest_even_and_clamps(name: str) -> None:
    vectors, element = load(f"elem_{name}"), ELEMENTS[name]
    rounded = limit_(round_to_element_(tensor_of(vectors["x"]), element, "nearest_even"), element, saturate=True)
    assert_bits(rounded, vectors["y_sat"])
    is_number = ~rounded.isnan() if not element.has_nan else torch.ones_like(rounded, dtype=torch.bool)
    again = decode(encode(rounded, element), element)
    assert_bits(again[is_number], vectors["y_sat"][is_number.numpy()])


@every_path
@pytest.mark.parametrize("name", ELEMENTS)
def test_type_of_nothing_but_an_element(name: str, fake_quantize) -> None:
    vectors, element = load(f"elem_{name}"), ELEMENTS[name]
    entry = QuantType(name=name, element=element, roundings=("nearest_even",), description="-", source="-")
    assert_bits(fake_quantize(tensor_of(vectors["x"]), entry), vectors["y_sat"])


@every_path
@pytest.mark.parametrize("quant_type", ["bf16", "fp16"])
def test_plain_casts(quant_type: str, fake_quantize) -> None:
    vectors = load(f"elem_{quant_type}")
    assert_bits(fake_quantize(tensor_of(vectors["x"]), quant_type), vectors["y"])


@pytest.mark.parametrize("quant_type", ["bf16", "fp16"])
def test_codes_of_plain_casts(quant_type: str) -> None:
    vectors = load(f"elem_{quant_type}")
    assert_bits(quantize(tensor_of(vectors["x"]), quant_type).dequantize(), vectors["y"])


@every_path
def test_hifp8_rounds_half_away_and_overflows_to_inf(fake_quantize) -> None:
    vectors = load("elem_hif8_ta")
    assert_bits(fake_quantize(tensor_of(vectors["x"]), "hifp8"), vectors["y"])


def test_codes_of_hifp8() -> None:
    vectors = load("elem_hif8_ta")
    quantized = quantize(tensor_of(vectors["x"]), "hifp8")
    assert (quantized.codes.numpy() == vectors["code"]).all()
    assert_bits(quantized.dequantize(), vectors["y"])


@every_path
def test_hifp8_saturates_and_keeps_nan(fake_quantize) -> None:
    vectors = load("elem_hif8_ta")
    x = tensor_of(vectors["x"])
    is_nan = x.isnan()
    for y in (fake_quantize(x, "hifp8", saturate=True), quantize(x, "hifp8", saturate=True).dequantize()):
        assert y.isnan()[is_nan].all()
        assert_bits(y[~is_nan], vectors["y_sat"][~is_nan.numpy()])


@every_path
@pytest.mark.parametrize(
    ("inputs", "outputs", "settings", "dtype"),
    [
        ("x", "y_sr14", {}, torch.float32),
        ("x", "y_sr14", {"source_dtype": "float32"}, torch.float32),
        ("xb", "y_sr2", {"source_dtype": "bfloat16"}, torch.float32),
        ("xb", "y_sr2", {}, torch.bfloat16),
    ],
    ids=["float32", "named float32", "named bfloat16", "bfloat16"],
)
def test_hifp8_rounds_hybrid_by_where_its_numbers_come_from(
    inputs: str, outputs: str, settings: dict[str, str], dtype: torch.dtype, fake_quantize
) -> None:
    vectors = load("elem_hif8_hybrid")
    x = tensor_of(vectors[inputs]).to(dtype)
    assert_bits(fake_quantize(x, "hifp8", rounding="hybrid", **settings).float(), vectors[outputs])
    quantized = quantize(x, "hifp8", rounding="hybrid", **settings)
    assert_bits(quantized.dequantize(torch.float32), vectors[outputs])


# --- blocks -------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("name", "rule"), MX_FILES)
def test_blocks_under_every_scale_rule(name: str, rule: str, axis: int, fake_quantize) -> None:
    vectors, quant_type = load(f"mx_{name}_{rule}"), MX_TYPES[name]
    x = tensor_of(vectors["x"])
    assert x.shape == (160, 32)
    assert_bits(along(axis, x, fake_quantize, quant_type, scale_rule=rule), vectors["y"])


@pytest.mark.parametrize(("name", "rule"), MX_FILES)
def test_codes_and_scale_codes_under_every_scale_rule(name: str, rule: str) -> None:
    vectors, quant_type = load(f"mx_{name}_{rule}"), MX_TYPES[name]
    for axis, x in ((1, tensor_of(vectors["x"])), (0, tensor_of(vectors["x"]).t())):
        quantized = quantize(x, quant_type, axis, scale_rule=rule)
        assert quantized.scales is not None
        assert (quantized.scales.view(torch.uint8).squeeze(axis).numpy() == vectors["scale"]).all()
        y = quantized.dequantize()
        assert_same(y if axis else y.t().contiguous(), vectors["y"], quant_type)


@every_path
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_short_last_block_along_either_axis(name: str, axis: int, fake_quantize) -> None:
    vectors = load("mx_tail_axis")
    x, expected = tensor_of(vectors["x"]), vectors[f"y_{name}_axis{'last' if axis == -1 else axis}"]
    assert_bits(fake_quantize(x, MX_TYPES[name], axis=axis), expected)
    assert_bits(quantize(x, MX_TYPES[name], axis=axis).dequantize(), expected)


# --- a scale for the tensor -----------------------------------------------------------------------


@every_path
@pytest.mark.parametrize(("file", "index"), [*matrices("pertensor_e4m3"), *matrices("pertensor_e5m2")])
@pytest.mark.parametrize(("rule", "suffix"), [("nearest", ""), ("rceil", "_pow2")])
def test_fp8_has_one_scale_for_the_tensor(file: str, index: int, rule: str, suffix: str, fake_quantize) -> None:
    vectors = {name: array[index] for name, array in load(file).items()}
    x, quant_type = tensor_of(vectors["x"]), file.replace("pertensor", "fp8")
    assert_bits(fake_quantize(x, quant_type, scale_rule=rule), vectors[f"y{suffix}"])
    quantized = quantize(x, quant_type, scale_rule=rule)
    assert_bits(quantized.dequantize(), vectors[f"y{suffix}"])
    assert quantized.encode is not None
    assert_bits(quantized.encode.reshape(1), vectors[f"scale{suffix}"].reshape(1))


@every_path
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("file", "index"), matrices("nvfp4"))
def test_nvfp4_has_a_scale_for_the_block_and_one_for_the_tensor(
    file: str, index: int, axis: int, fake_quantize
) -> None:
    vectors = {name: array[index] for name, array in load(file).items()}
    assert_bits(along(axis, tensor_of(vectors["x"]), fake_quantize, "nvfp4"), vectors["y"])


@pytest.mark.parametrize(("file", "index"), matrices("nvfp4"))
def test_codes_of_nvfp4(file: str, index: int) -> None:
    vectors = {name: array[index] for name, array in load(file).items()}
    quantized = quantize(tensor_of(vectors["x"]), "nvfp4")
    assert quantized.scales is not None and quantized.tensor_scale is not None
    assert (quantized.scales.view(torch.uint8).numpy() == vectors["scale"]).all()
    assert_bits(quantized.tensor_scale.reshape(1), vectors["global_scale"].reshape(1))
    assert_bits(quantized.dequantize(), vectors["y"])


@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("file", "index"), matrices("hif4"))
def test_hif4_has_exponents_inside_the_block(
    file: str, index: int, axis: int, dtype: torch.dtype, fake_quantize
) -> None:
    vectors = {name: array[index] for name, array in load(file).items()}
    x = tensor_of(vectors["x"])
    assert torch.equal(x.bfloat16().float(), x)
    assert_bits(along(axis, x.to(dtype), fake_quantize, "hif4").float(), vectors["y"])


@pytest.mark.parametrize(("file", "index"), matrices("hif4"))
def test_codes_of_hif4(file: str, index: int) -> None:
    vectors = {name: array[index] for name, array in load(file).items()}
    assert_bits(quantize(tensor_of(vectors["x"]), "hif4").dequantize(), vectors["y"])


# --- decode tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_code_stands_for_its_value_and_is_made_from_it(name: str) -> None:
    expected, element = table(name), TABLES[name]
    assert element.bits == {64: 6, 16: 4}.get(len(expected), 8)
    assert_bits(torch.tensor(decode_table(element), dtype=torch.float32), expected)
    codes = torch.arange(len(expected), dtype=torch.uint8)
    values = decode(codes, element)
    assert_bits(values, expected)
    is_number = ~values.isnan()
    assert torch.equal(encode(values, element)[is_number], codes[is_number])


@pytest.mark.parametrize("element", [catalog.E4M3, catalog.E5M2, catalog.HIF8], ids=lambda element: element.name)
def test_nan_has_a_code_of_nan(element: Element) -> None:
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert decode(encode(nans, element), element).isnan().all()


@pytest.mark.parametrize("quant_type", ["hifp8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4", "bf16", "fp16"])
def test_a_signalling_nan_is_no_inf_and_no_zero_in_codes(quant_type: str) -> None:
    """Its upper half alone is the pattern of Inf."""
    x = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert quantize(x, quant_type).dequantize().isnan().all()


@pytest.mark.parametrize("element", [catalog.E3M2, catalog.E2M3, catalog.E2M1, catalog.INT8, catalog.S1P2])
def test_nan_is_code_zero_where_only_the_scale_says_nan(element: Element) -> None:
    assert encode(torch.tensor([torch.nan, -torch.nan]), element).tolist() == [0, 0]


def test_every_power_of_two_scale_has_its_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = decode_scale(codes, catalog.E8M0)
    assert_bits(scales, table("e8m0"))
    assert torch.equal(encode_scale(scales, catalog.E8M0), codes)
    assert encode_scale(torch.tensor([torch.nan, 2.0**-127, 1.0]), catalog.E8M0).tolist() == [255, 0, 127]


def test_an_e4m3_scale_has_the_codes_of_the_element_without_a_sign() -> None:
    codes = torch.arange(128, dtype=torch.uint8)
    scales = decode_scale(codes, catalog.E4M3_SCALE)
    assert_bits(scales, table("e4m3")[:128])
    assert torch.equal(encode_scale(scales, catalog.E4M3_SCALE), codes)
    assert encode_scale(torch.tensor([torch.nan]), catalog.E4M3_SCALE).item() == 0x7F


def test_an_e6m2_scale_has_no_zero_and_ends_before_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = decode_scale(codes, catalog.E6M2_SCALE)
    expected = [2.0 ** (code // 4 - 48) * (1 + code % 4 / 4) for code in range(255)]
    assert scales[:-1].tolist() == expected
    assert scales[-1].isnan()
    assert torch.equal(encode_scale(scales, catalog.E6M2_SCALE), codes)
