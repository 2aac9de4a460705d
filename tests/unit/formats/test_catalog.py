"""The catalog: light to import, true to its numbers, and the tables made from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qcollect.formats import catalog
from qcollect.formats.catalog import (
    HEADERS,
    QUANT_TYPES,
    QuantType,
    describe,
    get_quant_type,
    markdown_table,
    rows,
)

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
        ("mxfp4", 4.25, 6.0, 1.0, 0.5, 2, 1.5),
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


def test_block_elements_have_a_binade_above_one() -> None:
    """Scales of subnormal blocks are exact only then (see ``scale_exponents``)."""
    blocked = [entry for entry in QUANT_TYPES.values() if entry.block_size is not None]
    assert blocked
    assert all(entry.element is not None and entry.element.max_exponent >= 1 for entry in blocked)


def test_defaults() -> None:
    assert (QUANT_TYPES["mxfp8"].scale_rule, QUANT_TYPES["mxfp8"].rounding) == ("floor", "nearest_even")
    assert (QUANT_TYPES["hifp8"].scale_rule, QUANT_TYPES["hifp8"].rounding) == (None, "half_away")
    assert [name for name, entry in QUANT_TYPES.items() if entry.has_tensor_scale] == ["hifp8"]
    assert [name for name, entry in QUANT_TYPES.items() if entry.can_saturate] == ["hifp8", "bf16", "fp16"]


@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=lambda entry: entry.name)
def test_description_is_plain_json(quant_type: QuantType) -> None:
    facts = describe(quant_type)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["name"] == quant_type.name


def test_table_has_a_cell_for_every_header() -> None:
    assert [line[0] for line in rows()] == list(QUANT_TYPES)
    assert {len(line) for line in rows()} == {len(HEADERS)}
    mxfp4 = dict(zip(HEADERS, rows()[2], strict=True))
    assert mxfp4["max"] == "6"
    assert mxfp4["min subnormal"] == "0.5"
    assert mxfp4["special values"] == "-0"
    assert dict(zip(HEADERS, rows()[0], strict=True))["min subnormal"] == "2^-9"


def test_readme_shows_the_table_of_the_catalog() -> None:
    text = README.read_text(encoding="utf-8")
    shown = text.split("<!-- formats:begin -->\n")[1].split("<!-- formats:end -->")[0]
    assert shown.strip() == markdown_table(), "put the output of catalog.markdown_table() between the markers"
