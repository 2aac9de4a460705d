"""The catalog: light to import, true to its numbers, and the tables made from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qcollect.formats import catalog
from qcollect.formats.catalog import QUANT_TYPES, get_quant_type
from qcollect.formats.codes import decode_table
from qcollect.formats.records import QuantType
from qcollect.formats.table import HEADERS, describe, markdown_table, rows

README = Path(catalog.__file__).with_name("README.md")
HEAVY = ("torch", "numpy", "transformers")


def test_importing_the_catalog_imports_no_torch() -> None:
    code = f"import sys, qcollect.formats.catalog; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_found_and_records_pass_through() -> None:
    for name, quant_type in QUANT_TYPES.items():
        assert get_quant_type(name) is quant_type
        assert get_quant_type(quant_type) is quant_type
        assert quant_type.name == name


def test_names_are_words_a_file_name_can_carry() -> None:
    vocab = pytest.importorskip("qcollect.vocab")
    assert set(QUANT_TYPES) <= set(vocab.QUANT_TYPES)


@pytest.mark.parametrize(
    ("name", "bits", "top", "min_normal", "min_subnormal", "max_exponent", "max_mantissa"),
    [
        ("mxfp8", 8.25, 448.0, 2.0**-6, 2.0**-9, 8, 1.75),
        ("mxfp8_e5m2", 8.25, 57344.0, 2.0**-14, 2.0**-16, 15, 1.75),
        ("mxfp6_e3m2", 6.25, 28.0, 0.25, 0.0625, 4, 1.75),
        ("mxfp6_e2m3", 6.25, 7.5, 1.0, 0.125, 2, 1.875),
        ("mxfp4", 4.25, 6.0, 1.0, 0.5, 2, 1.5),
        ("mxint8", 8.25, 127 / 64, 1.0, 1 / 64, 0, 127 / 64),
        ("nvfp4", 4.5, 6.0, 1.0, 0.5, 2, 1.5),
        ("hif4", 4.5, 1.75, 1.0, 0.25, 0, 1.75),
        ("fp8_e4m3", 8.0, 448.0, 2.0**-6, 2.0**-9, 8, 1.75),
        ("fp8_e5m2", 8.0, 57344.0, 2.0**-14, 2.0**-16, 15, 1.75),
        ("hifp8", 8.0, 32768.0, 2.0**-15, 2.0**-22, 15, 1.0),
        ("bf16", 16.0, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 127, 2 - 2.0**-7),
        ("fp16", 16.0, 65504.0, 2.0**-14, 2.0**-24, 15, 2 - 2.0**-10),
    ],
)
def test_numbers_of_the_elements(
    name: str, bits: float, top: float, min_normal: float, min_subnormal: float, max_exponent: int, max_mantissa: float
) -> None:
    entry = QUANT_TYPES[name]
    assert entry.element is not None
    assert entry.bits_per_value == bits
    assert entry.element.max_value == top
    assert entry.element.min_normal == min_normal
    assert entry.element.min_subnormal == min_subnormal
    assert entry.element.max_exponent == max_exponent
    assert entry.element.max_mantissa == max_mantissa


def test_bits_of_a_value_count_its_share_of_every_scale() -> None:
    """Of the block's scale and of the exponents inside a block; the tensor's own is shared by too many to count."""
    assert QUANT_TYPES["hif4"].bits_per_value == 4 + 8 / 64 + 1 / 8 + 1 / 4
    assert QUANT_TYPES["nvfp4"].bits_per_value == 4 + 8 / 16
    assert QUANT_TYPES["none"].bits_per_value is None


def test_every_element_value_is_a_bfloat16_number() -> None:
    """Its codes are looked up by the upper half of a float32, and a gemm may take it as bfloat16."""
    elements = {entry.element for entry in QUANT_TYPES.values() if entry.element and not entry.element.is_cast}
    assert len(elements) == 8
    for element in elements:
        values = torch.tensor(decode_table(element))
        finite = values[values.isfinite()]
        assert torch.equal(finite.bfloat16().float(), finite)
        assert finite.max().item() == element.max_value
        assert finite[finite > 0].min().item() == element.min_subnormal


def test_defaults() -> None:
    defaults = {name: (entry.scale_rule, entry.rounding) for name, entry in QUANT_TYPES.items()}
    assert defaults == {
        "mxfp8": ("floor", "nearest_even"),
        "mxfp8_e5m2": ("floor", "nearest_even"),
        "mxfp6_e3m2": ("floor", "nearest_even"),
        "mxfp6_e2m3": ("floor", "nearest_even"),
        "mxfp4": ("floor", "nearest_even"),
        "mxint8": ("floor", "nearest_even"),
        "nvfp4": ("nearest", "nearest_even"),
        "hifp8": (None, "half_away"),
        "hif4": ("nearest", "half_away"),
        "fp8_e4m3": ("nearest", "nearest_even"),
        "fp8_e5m2": ("nearest", "nearest_even"),
        "bf16": (None, "nearest_even"),
        "fp16": (None, "nearest_even"),
        "none": (None, None),
    }
    assert [name for name, entry in QUANT_TYPES.items() if entry.takes_tensor_scale] == ["hifp8"]
    assert [name for name, entry in QUANT_TYPES.items() if entry.has_tensor_scale] == ["nvfp4", "fp8_e4m3", "fp8_e5m2"]
    assert [name for name, entry in QUANT_TYPES.items() if entry.can_saturate] == ["hifp8", "bf16", "fp16"]


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda entry: entry.name)
def test_description_is_plain_json(quant_type: QuantType) -> None:
    facts = describe(quant_type)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["name"] == quant_type.name


def test_table_has_a_cell_for_every_header() -> None:
    assert [line[0] for line in rows()] == list(QUANT_TYPES)
    assert {len(line) for line in rows()} == {len(HEADERS)}
    table = {cells[0]: dict(zip(HEADERS, cells, strict=True)) for cells in rows()}
    assert table["mxfp4"]["max"] == "6"
    assert table["mxfp4"]["min subnormal"] == "0.5"
    assert table["mxfp4"]["special values"] == "-0"
    assert table["mxfp8"]["min subnormal"] == "2^-9"
    assert table["mxfp8"]["special values"] == "NaN, -0"
    assert table["mxfp8_e5m2"]["special values"] == "Inf, NaN, -0"
    assert table["hifp8"]["special values"] == "Inf, NaN"
    assert table["hifp8"]["sign/exponent/mantissa"] == "1/0-4/0-3"
    scales = {name: cells["scale"] for name, cells in table.items()}
    assert scales["mxint8"] == "E8M0"
    assert scales["nvfp4"] == "E4M3 + float32 per tensor"
    assert scales["hif4"] == "E6M2 + 8 x 1 bit + 4 x 1 bit"
    assert scales["fp8_e4m3"] == "float32 per tensor"
    assert scales["hifp8"] == "per tensor, optional"
    assert scales["bf16"] == scales["none"] == "-"


def test_readme_shows_the_table_of_the_catalog() -> None:
    text = README.read_text(encoding="utf-8")
    shown = text.split("<!-- formats:begin -->\n")[1].split("<!-- formats:end -->")[0]
    assert shown.strip() == markdown_table(), "put the output of catalog.markdown_table() between the markers"
