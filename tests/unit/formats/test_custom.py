"""Users' own formats: a definition becomes a quant type, and what cannot be one is refused with its line."""

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qcollect
import qcollect.formats
from qcollect.errors import FormatError
from qcollect.formats.catalog import QUANT_TYPES, get_quant_type
from qcollect.formats.codes import decode_table
from qcollect.formats.custom import definition_of, find_quant_type, load_quant_type, quant_type_of, read_definition
from qcollect.formats.quantizer import fake_quantize, quantize
from qcollect.formats.records import Element, QuantType
from qcollect.formats.table import HEADERS, describe, row

FP6 = """\
name: my_fp6
description: six bits, a wider exponent
element:
  exponent_bits: 4
  mantissa_bits: 1
  bias: 7
block_size: 32
scale: E8M0
scale_rules: [rceil, floor]
roundings: [nearest_even, stochastic]
"""
README = Path(qcollect.formats.__file__).with_name("README.md")
Write = Callable[[str], str]


@pytest.fixture
def write_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes ``own.yaml`` into an empty current directory and gives back its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("own.yaml").write_text(text, encoding="utf-8")
        return "own.yaml"

    return write


def define(scale: Any = "E8M0", block_size: int | None = 32, **element: Any) -> dict[str, Any]:
    definition = {"element": {"exponent_bits": 2, "mantissa_bits": 1, **element}, "scale": scale}
    return definition if block_size is None else {**definition, "block_size": block_size}


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(torch.int32)


def wide_values(entry: QuantType, num: int = 512) -> torch.Tensor:
    """Numbers around every value of the element, below the smallest and above the largest."""
    assert entry.element is not None
    generator = torch.Generator().manual_seed(num)
    low, high = entry.element.min_exponent - entry.element.mantissa_bits - 2, entry.element.max_exponent + 3
    exponents = torch.randint(low, high, (num,), generator=generator)
    return torch.randn(num, generator=generator) * torch.exp2(exponents.to(torch.float32))


# ---- what a definition becomes ------------------------------------------------------------------


def test_file_becomes_a_record_like_the_catalogs(write_format: Write) -> None:
    entry = load_quant_type(write_format(FP6))
    assert (entry.name, entry.description) == ("my_fp6", "six bits, a wider exponent")
    assert (entry.block_size, entry.scale_rule, entry.rounding) == (32, "rceil", "nearest_even")
    assert entry.scale_format == QUANT_TYPES["mxfp8"].scale_format
    element = entry.element
    assert element is not None
    assert (element.name, element.bits, element.min_exponent, element.max_value) == ("E4M1", 6, -6, 384.0)
    assert (element.has_inf, element.has_nan, element.overflow) == (False, False, "saturate")


def test_keys_that_are_left_out_are_all_that_is_allowed() -> None:
    entry = quant_type_of("own", define())
    assert entry.scale_rules == ("floor", "ceil", "even", "rceil")
    assert entry.roundings == ("nearest_even", "half_away", "stochastic")
    assert quant_type_of("own", define(scale="E4M3")).scale_rules == ("nearest",)
    assert quant_type_of("own", define(scale="tensor", block_size=None)).scale_rules == ("nearest", "rceil")


@pytest.mark.parametrize(
    ("name", "definition"),
    [
        ("mxfp8", define(exponent_bits=4, mantissa_bits=3, nan=True)),
        ("mxfp8_e5m2", define(exponent_bits=5, mantissa_bits=2, nan=True, inf=True)),
        ("mxfp6_e3m2", define(exponent_bits=3, mantissa_bits=2)),
        ("mxfp6_e2m3", define(mantissa_bits=3, min_exponent=0)),
        ("mxfp4", define(bias=1, max_value=6)),
        ("fp8_e4m3", define("tensor", None, exponent_bits=4, mantissa_bits=3, nan=True)),
        ("fp8_e5m2", define("tensor", None, exponent_bits=5, mantissa_bits=2, nan=True, inf=True)),
    ],
)
def test_definition_of_a_catalog_type_is_that_type(name: str, definition: dict[str, Any]) -> None:
    known, own = QUANT_TYPES[name], quant_type_of("own", definition)
    assert known.element is not None
    assert own.element is not None
    labels = {"name": "", "source": "", "torch_dtype": None}
    plain = [
        replace(entry, name="", description="", source="", element=replace(element, **labels))
        for entry, element in ((known, known.element), (own, own.element))
    ]
    assert plain[0] == plain[1]


def test_two_levels_of_scales_quantize_as_nvfp4_does() -> None:
    own = quant_type_of("own", define(["E4M3", "tensor"], 16))
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert torch.equal(fake_quantize(x, own), fake_quantize(x, "nvfp4"))


def test_default_maximum_leaves_codes_for_inf_and_nan() -> None:
    sizes = {"exponent_bits": 4, "mantissa_bits": 3}
    tops = {
        flags: quant_type_of("own", define(**sizes, **dict.fromkeys(flags, True))).element
        for flags in ((), ("nan",), ("nan", "inf"))
    }
    assert [element.max_value for element in tops.values() if element] == [480.0, 448.0, 240.0]


def test_format_without_minus_zero_keeps_its_nan_there() -> None:
    """E4M3 of AMD's older cards: bias 8, the code of -0 is NaN, no code is lost at the top."""
    own = quant_type_of("own", define(exponent_bits=4, mantissa_bits=3, bias=8, nan=True, signed_zero=False))
    assert own.element is not None
    assert own.element.max_value == 240.0
    table = decode_table(own.element)
    assert math.isnan(table[0x80])
    assert not any(math.isnan(value) for value in table[:0x80])
    ours = fake_quantize(torch.linspace(-240, 240, 4001), replace(own, block_size=None, scale_format=None))
    theirs = torch.linspace(-240, 240, 4001).to(torch.float8_e4m3fnuz).float()
    assert torch.equal(bits(ours), bits(theirs))


# ---- what it does -------------------------------------------------------------------------------


def nearest_by_search(x: torch.Tensor, element: Element, *, ties_away: bool) -> torch.Tensor:
    """The nearest of all values the codes stand for, found by comparing in float64."""
    values = np.array(sorted({v for v in decode_table(element) if math.isfinite(v) and v >= 0}))
    top_step = 2.0 ** (element.max_exponent - element.mantissa_bits)
    values = np.append(values, values[-1] + top_step)
    magnitude = np.abs(x.double().numpy())
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(magnitude, 1e-300))), element.min_exponent))
    is_odd = (low / (step * 2.0**-element.mantissa_bits)) % 2 == 1
    is_tie = magnitude - low == high - magnitude
    result = np.where((magnitude - low > high - magnitude) | (is_tie & (ties_away | is_odd)), high, low)
    overflow = element.max_value if element.overflow == "saturate" else math.inf
    result = np.where((result > element.max_value) | (magnitude > values[-1]), overflow, result)
    signed = torch.tensor(np.copysign(result, x.double().numpy())).float()
    return signed if element.signed_zero else signed + 0.0


@pytest.mark.parametrize("exponent_bits", range(1, 8))
@pytest.mark.parametrize("is_whole", [True, False])
def test_every_element_rounds_to_the_nearest_of_its_codes(exponent_bits: int, is_whole: bool) -> None:
    for mantissa_bits, flags in itertools.product(
        range(8 - exponent_bits), ({"nan": True}, {"nan": True, "inf": True}, {"nan": True, "signed_zero": False})
    ):
        sizes = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
        saturate = {"saturate": is_whole} if "inf" in flags else {}
        entry, _ = read_definition("own", define("none", None, **sizes, **flags, **saturate))
        if entry is None or entry.element is None:  # too few codes for the flags
            continue
        x = wide_values(entry)
        finite = torch.tensor(sorted(v for v in decode_table(entry.element) if math.isfinite(v)))
        x = torch.cat((x, finite, (finite[1:] + finite[:-1]) / 2))
        for rounding in ("nearest_even", "half_away"):
            expected = nearest_by_search(x, entry.element, ties_away=rounding == "half_away")
            assert torch.equal(bits(fake_quantize(x, entry, rounding=rounding)), bits(expected)), (sizes, flags)


@pytest.mark.parametrize("scale", ["E8M0", "E4M3", "E6M2", "tensor", "none", ["E4M3", "tensor"], ["E6M2", "tensor"]])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_codes_stand_for_the_values(scale: Any, bad: float | None) -> None:
    has_blocks = scale not in ("tensor", "none")
    for exponent_bits, mantissa_bits, has_inf in ((2, 1, False), (4, 1, True), (3, 2, False), (5, 2, True)):
        sizes = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits, "nan": True, "inf": has_inf}
        entry = quant_type_of("own", define(scale, 16 if has_blocks else None, **sizes, saturate=not has_inf))
        x = wide_values(entry).view(8, 64)[:, :40].contiguous()
        x[0, 0] = -0.0
        if bad is not None:
            x[2, 3] = bad
        for rule in entry.scale_rules or (None,):
            values = fake_quantize(x, entry, scale_rule=rule)
            assert torch.equal(bits(quantize(x, entry, scale_rule=rule).dequantize()), bits(values)), (sizes, rule)


def test_file_is_taken_where_a_name_is(write_format: Write) -> None:
    file = write_format(FP6)
    entry = load_quant_type(file)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert get_quant_type(file) == get_quant_type(Path(file)) == entry
    assert torch.equal(qcollect.fake_quantize(x, file), fake_quantize(x, entry))


def test_table_and_facts_show_it_as_the_catalogs() -> None:
    entry = quant_type_of("own", define(["E4M3", "tensor"], 16, exponent_bits=3, mantissa_bits=2))
    cells = dict(zip(HEADERS, row(entry), strict=True))
    assert (cells["type"], cells["sign/exponent/mantissa"], cells["bits per value"]) == ("own", "1/3/2", "6.5")
    assert cells["scale"] == "E4M3 + float32 per tensor"
    assert json.loads(json.dumps(describe(entry))) == describe(entry)


def test_reading_needs_no_torch(write_format: Write) -> None:
    code = (
        f"import sys; from qcollect.formats.custom import load_quant_type; load_quant_type({write_format(FP6)!r}); "
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "definition",
    [
        define(),
        define(["E6M2", "tensor"], 64, exponent_bits=3, mantissa_bits=0),
        define("none", None, exponent_bits=5, mantissa_bits=1, nan=True, inf=True, saturate=False),
        define("tensor", None, exponent_bits=4, mantissa_bits=3, bias=8, nan=True, signed_zero=False),
    ],
)
def test_definition_survives_json(definition: dict[str, Any]) -> None:
    entry = quant_type_of("own", definition)
    stored = definition_of(entry)
    assert stored is not None
    assert quant_type_of("own", json.loads(json.dumps(stored))) == entry
    assert definition_of(quant_type_of("own", stored)) == stored


def test_catalog_needs_no_definition() -> None:
    assert [definition_of(entry) for entry in QUANT_TYPES.values()] == [None] * len(QUANT_TYPES)


def test_changed_catalog_type_has_a_definition() -> None:
    own = replace(QUANT_TYPES["mxfp4"], name="mxfp4_b16", block_size=16)
    stored = definition_of(own)
    assert stored is not None
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantize(x, quant_type_of("mxfp4_b16", stored)), fake_quantize(x, own))


@pytest.mark.parametrize("name", ["hif4", "mxint8", "nvfp4", "hifp8", "bf16", "none"])
def test_type_that_no_definition_can_say_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"^mine is not the catalog's and cannot be written down as a definition: "):
        definition_of(replace(QUANT_TYPES[name], name="mine"))


def test_name_is_looked_up_among_definitions_first() -> None:
    stored = definition_of(quant_type_of("own", define()))
    assert stored is not None
    assert find_quant_type("own", {"own": stored}).name == "own"
    assert find_quant_type("mxfp8", {"own": stored}) is QUANT_TYPES["mxfp8"]
    with pytest.raises(FormatError, match="'other' is not known"):
        find_quant_type("other", {"own": stored})


def test_examples_of_the_readme_are_formats(write_format: Write) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [load_quant_type(write_format(block)).name for block in blocks] == ["my_fp6", "nv_fp6"]


# ---- refusals -----------------------------------------------------------------------------------


def refusals(write: Write, text: str) -> list[str]:
    with pytest.raises(FormatError) as caught:
        load_quant_type(write(text))
    return str(caught.value).splitlines()


def test_everything_wrong_is_listed_in_the_order_of_the_file(write_format: Write) -> None:
    text = (
        "name: mxfp8\n"
        "elemnt: 3\n"
        "element:\n"
        "  exponent_bits: 4\n"
        "  mantissa_bits: 1.5\n"
        "  inf: yes\n"
        "block_size: 0\n"
        "block_size: 32\n"
        "scale: E8M0\n"
        "scale_rules: [nearest]\n"
        "roundings: hybrid\n"
    )
    assert refusals(write_format, text) == [
        "own.yaml:1: name is 'mxfp8'; the catalog has mxfp8 already; choose another name",
        "own.yaml:2: unknown key 'elemnt'; known: name, description, element, block_size, scale, scale_rules, "
        "roundings. Did you mean 'element'?",
        "own.yaml:5: element.mantissa_bits is 1.5; must be a whole number from 0 to 6",
        "own.yaml:6: element.inf is 'yes'; must be true or false",
        "own.yaml:8: duplicate key 'block_size', first on line 7",
        "own.yaml:10: scale_rules is ['nearest']; known: floor, ceil, even, rceil",
        "own.yaml:11: roundings is 'hybrid'; known: nearest_even, half_away, stochastic",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: my_fp6\n", "", "1: name is missing; it names the run's folder and its files"),
        ("my_fp6", "my-fp6", "1: name is 'my-fp6'; must be a letter, then letters, digits and underscores, 64 at most"),
        ("my_fp6", "MXFP8", "1: name is 'MXFP8'; the catalog has mxfp8 already; choose another name"),
        ("my_fp6", "my_mxfp4",
         "1: name is 'my_mxfp4'; a file's name with it would be read as one of another type; choose another name"),
        ("my_fp6", "a_rank0_sample0_b", "1: name is 'a_rank0_sample0_b'; a file's name with it would be read as one of "
         "another type; choose another name"),
        ("bias: 7", "bias: 7\n  min_exponent: -6",
         "7: element.min_exponent is -6; says what bias says (1 - bias); leave one of them out"),
        ("bias: 7", "bias: 150", "6: element.bias is 150; the element reaches from 2^-150 to 2^-135, and the "
         "arithmetic holds 2^-100 to 2^100; move it"),
        ("bias: 7", "min_exponent: 90", "6: element.min_exponent is 90; the element reaches from 2^89 to 2^104, and "
         "the arithmetic holds 2^-100 to 2^100; move it"),
        ("bias: 7", "bias: 1000", "6: element.bias is 1000; must be a whole number from -256 to 256"),
        ("bias: 7", "max_value: 300",
         "6: element.max_value is 300; is no value of the element; the nearest are 256 and 384"),
        ("bias: 7", "max_value: 384\n  nan: true",
         "6: element.max_value is 384; leaves no code for NaN, which takes the largest"),
        ("bias: 7", "max_value: 0", "6: element.max_value is 0; leaves 0 as the largest value, below the smallest "
         "normal number 0.015625"),
        ("bias: 7", "inf: true", "3: element.nan must be true with inf: the codes behind Inf"),
        ("bias: 7", "saturate: false",
         "6: element.saturate is false; must be true without inf: there is no code for Inf"),
        ("mantissa_bits: 1", "mantissa_bits: 4", "5: element.mantissa_bits is 4; with the sign and exponent_bits: 4 it "
         "makes 9 bits; 8 are the most"),
        ("  exponent_bits: 4\n", "", "3: element.exponent_bits is missing; it is a whole number from 1 to 7"),
        ("block_size: 32\n", "", "1: block_size is missing; it is a whole number from 1 to 1073741824"),
        ("block_size: 32", "block_size: 0", "7: block_size is 0; must be a whole number from 1 to 1073741824"),
        ("scale: E8M0\n", "", "1: scale is missing; known: E8M0, E4M3, E6M2, tensor, none, [E4M3, tensor], "
         "[E6M2, tensor]"),
        ("scale: E8M0", "scale: [E8M0, tensor]", "8: scale is ['E8M0', 'tensor']; known: E8M0, E4M3, E6M2, tensor, "
         "none, [E4M3, tensor], [E6M2, tensor]"),
        ("[rceil, floor]", "[rceil, rceil]", "9: scale_rules is ['rceil', 'rceil']; one is named twice"),
        ("[rceil, floor]", "[]", "9: scale_rules is []; known: floor, ceil, even, rceil"),
        ("description: six bits, a wider exponent", "description: 6", "2: description is 6; must be text"),
        ("scale: E8M0", "scale: !!python/name:os.system E8M0", "8: the tag '!!python/name:os.system' is not allowed; "
         "write the plain value"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_line_key_and_what_to_do(
    old: str, new: str, message: str, write_format: Write
) -> None:
    assert old in FP6
    assert refusals(write_format, FP6.replace(old, new, 1))[0] == f"own.yaml:{message}"


def test_value_that_bfloat16_rounds_is_refused(write_format: Write) -> None:
    text = FP6.replace("E8M0", "[E4M3, tensor]").replace("[rceil, floor]", "nearest")
    text = text.replace("exponent_bits: 4", "exponent_bits: 3")
    load_quant_type(write_format(text.replace("mantissa_bits: 1", "mantissa_bits: 3")))
    assert refusals(write_format, text.replace("mantissa_bits: 1", "mantissa_bits: 4")) == [
        "own.yaml:8: scale is ['E4M3', 'tensor']; a value would have 9 significant bits, and bfloat16 holds 8; "
        "use E8M0, or an element with fewer mantissa bits than 4"
    ]


def test_tensor_scale_that_would_underflow_is_refused(write_format: Write) -> None:
    text = FP6.replace("E8M0", "tensor").replace("block_size: 32\n", "").replace("[rceil, floor]", "nearest")
    x = torch.tensor([3.4e38, -1.7e38, 0.0])
    assert fake_quantize(x, load_quant_type(write_format(text.replace("bias: 7", "bias: 15")))).isfinite().all()
    assert refusals(write_format, text.replace("bias: 7", "bias: 16")) == [
        "own.yaml:7: scale is 'tensor'; the largest value is 0.75, and what a float32 scale brings a tensor's maximum "
        "to must be 1 or more; raise element.min_exponent"
    ]


@pytest.mark.parametrize("scale", ["E8M0", "E4M3", "E6M2"])
def test_values_are_bfloat16_numbers(scale: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for mantissa_bits in range(7):
        entry, _ = read_definition("own", define(scale, exponent_bits=7 - mantissa_bits, mantissa_bits=mantissa_bits))
        if entry is not None:
            y = fake_quantize(x, entry)
            assert torch.equal(y.bfloat16().float(), y)


def test_scale_of_a_tensor_takes_no_blocks_and_none_takes_no_rule(write_format: Write) -> None:
    assert refusals(write_format, FP6.replace("E8M0", "tensor")) == [
        "own.yaml:7: block_size is 32; this scale belongs to no block; leave it out, or name the scale of a block",
        "own.yaml:9: scale_rules is ['rceil', 'floor']; known: nearest, rceil",
    ]
    assert refusals(write_format, FP6.replace("E8M0", "none")) == [
        "own.yaml:3: element.nan must be true with scale: none, where nothing else holds a NaN",
        "own.yaml:7: block_size is 32; this scale belongs to no block; leave it out, or name the scale of a block",
        "own.yaml:9: scale_rules is ['rceil', 'floor']; there is none to choose; leave it out",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.yaml:1: must be a mapping (name: ..., element: ..., scale: ...)"),
        ("- 1\n", "own.yaml:1: must be a mapping (name: ..., element: ..., scale: ...)"),
        ("name: [", "own.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("name: own\nelement: 5\nscale: none\n", "own.yaml:2: element is 5; must be a section with keys of: "
         "exponent_bits, mantissa_bits, bias, min_exponent, max_value, inf, nan, signed_zero, saturate"),
    ],
)  # fmt: skip
def test_file_that_is_no_definition_is_refused(text: str, message: str, write_format: Write) -> None:
    assert refusals(write_format, text) == [message]


def test_file_that_is_not_there_is_named_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError) as caught:
        load_quant_type("gone.yaml")
    assert str(caught.value) == (
        f"no number format file gone.yaml (in {tmp_path}); the types that need none: 'qcollect formats'"
    )
    Path("folder.yaml").mkdir()
    with pytest.raises(FormatError, match=r"^folder.yaml: cannot be read: Is a directory$"):
        load_quant_type("folder.yaml")
