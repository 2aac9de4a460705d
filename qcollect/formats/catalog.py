"""The number formats: one literal each, with its source. Imports no torch."""

import difflib
import os
from collections.abc import Iterable

from qcollect.errors import FormatError
from qcollect.formats.records import Element, QuantType, Rounding, ScaleFormat, ScaleRule, TensorScale

# ---------------------------------------------------------------------------------------------
# Elements
# ---------------------------------------------------------------------------------------------

E4M3 = Element(
    name="E4M3",
    bits=8,
    exponent_bits="4",
    mantissa_bits=3,
    min_exponent=-6,
    max_value=448.0,
    has_inf=False,
    has_nan=True,
    overflow="saturate",
    torch_dtype="float8_e4m3fn",
    source="OCP MX v1.0 section 5.3.1, arXiv 2209.05433 table 1",
)
E5M2 = Element(
    name="E5M2",
    bits=8,
    exponent_bits="5",
    mantissa_bits=2,
    min_exponent=-14,
    max_value=57344.0,
    has_inf=True,
    has_nan=True,
    overflow="saturate",  # OCP MX 6.3, although E5M2 has a code for Inf
    torch_dtype="float8_e5m2",
    source="OCP MX v1.0 section 5.3.1, arXiv 2209.05433 table 1",
)
E3M2 = Element(
    name="E3M2",
    bits=6,
    exponent_bits="3",
    mantissa_bits=2,
    min_exponent=-2,
    max_value=28.0,
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    source="OCP MX v1.0 section 5.3.2",
)
E2M3 = Element(
    name="E2M3",
    bits=6,
    exponent_bits="2",
    mantissa_bits=3,
    min_exponent=0,
    max_value=7.5,
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    source="OCP MX v1.0 section 5.3.2",
)
E2M1 = Element(
    name="E2M1",
    bits=4,
    exponent_bits="2",
    mantissa_bits=1,
    min_exponent=0,
    max_value=6.0,
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    torch_dtype="float4_e2m1fn_x2",
    source="OCP MX v1.0 section 5.3.3 table 5",
)
INT8 = Element(
    name="INT8",
    bits=8,
    exponent_bits="0",
    mantissa_bits=6,
    min_exponent=0,
    max_value=127 / 64,  # the same on both sides: -2 stays unused
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    encoding="twos_complement",
    source="OCP MX v1.0 section 5.3.4 table 6",
)
S1P2 = Element(
    name="S1P2",
    bits=4,
    exponent_bits="1",  # quarters from 0 to 1.75 are a float with one exponent bit
    mantissa_bits=2,
    min_exponent=0,
    max_value=1.75,
    has_inf=False,
    has_nan=False,
    overflow="saturate",
    source="arXiv 2602.11287",
)
HIF8 = Element(
    name="HiF8",
    bits=8,
    exponent_bits="0-4",
    mantissa_bits=3,
    min_exponent=-22,
    max_value=32768.0,
    taper=((3, 3), (7, 2), (15, 1), (22, 0)),
    min_normal_exponent=-15,
    has_inf=True,
    has_nan=True,
    signed_zero=False,
    overflow="infinity",
    encoding="prefix",
    prefixes=(("11", 4), ("10", 3), ("01", 2), ("001", 1), ("0001", 0)),
    source="arXiv 2409.16626 tables 1-4",
)
BF16 = Element(
    name="bf16",
    bits=16,
    exponent_bits="8",
    mantissa_bits=7,
    min_exponent=-126,
    max_value=(2.0 - 2.0**-7) * 2.0**127,
    has_inf=True,
    has_nan=True,
    overflow="infinity",
    torch_dtype="bfloat16",
    is_cast=True,
    source="the upper half of IEEE 754 binary32",
)
FP16 = Element(
    name="fp16",
    bits=16,
    exponent_bits="5",
    mantissa_bits=10,
    min_exponent=-14,
    max_value=65504.0,
    has_inf=True,
    has_nan=True,
    overflow="infinity",
    torch_dtype="float16",
    is_cast=True,
    source="IEEE 754 binary16",
)

# ---------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------

E8M0 = ScaleFormat(
    name="E8M0",
    bits=8,
    min_exponent=-127,
    max_value=2.0**127,
    min_value=2.0**-127,
    nan_code=255,
    torch_dtype="float8_e8m0fnu",
    source="OCP MX v1.0 section 5.4.1 table 7",
)
E4M3_SCALE = ScaleFormat(
    name="E4M3",
    bits=8,
    mantissa_bits=3,
    min_exponent=-6,
    max_value=448.0,
    min_value=0.0,
    nan_code=0x7F,
    torch_dtype="float8_e4m3fn",
    source="arXiv 2509.25149 appendix B",
)
E6M2_SCALE = ScaleFormat(
    name="E6M2",
    bits=8,
    mantissa_bits=2,
    min_exponent=-48,
    max_value=49152.0,
    min_value=2.0**-48,
    nan_code=0xFF,
    source="arXiv 2602.11287",
)
SCALE_FORMATS = {scale.name: scale for scale in (E8M0, E4M3_SCALE, E6M2_SCALE)}

POWER_OF_TWO_RULES: tuple[ScaleRule, ...] = ("floor", "ceil", "even", "rceil")
BLOCK_ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "half_away", "stochastic")

# ---------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------


def _mx(name: str, element: Element, description: str) -> QuantType:
    return QuantType(
        name=name,
        element=element,
        block_size=32,
        scale_format=E8M0,
        scale_rules=POWER_OF_TWO_RULES,
        roundings=BLOCK_ROUNDINGS,
        description=description,
        source=f"OCP MX v1.0 sections 5.2, 6.3; element: {element.source}",
    )


def _fp8(name: str, element: Element, description: str) -> QuantType:
    return QuantType(
        name=name,
        element=element,
        scale_rules=("nearest", "rceil"),
        roundings=BLOCK_ROUNDINGS,
        # torchao float8_utils.tensor_to_scale
        tensor_scale=TensorScale(bound=element.max_value, min_amax=1e-12, sees_nonfinite=True),
        description=description,
        source=f"{element.source}; scale: torchao float8_utils",
    )


def _cast(element: Element) -> QuantType:
    return QuantType(
        name=element.name,
        element=element,
        roundings=("nearest_even",),
        description="plain cast",
        source=element.source,
    )


_ALL = (
    _mx("mxfp8", E4M3, "blocks of 8-bit floats, three mantissa bits"),
    _mx("mxfp8_e5m2", E5M2, "blocks of 8-bit floats, more range and two mantissa bits"),
    _mx("mxfp6_e3m2", E3M2, "blocks of 6-bit floats, more range"),
    _mx("mxfp6_e2m3", E2M3, "blocks of 6-bit floats, more precision"),
    _mx("mxfp4", E2M1, "blocks of 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6"),
    _mx("mxint8", INT8, "blocks of 8-bit integers, six bits behind the point"),
    QuantType(
        name="nvfp4",
        element=E2M1,
        block_size=16,
        scale_format=E4M3_SCALE,
        scale_rules=("nearest",),
        roundings=BLOCK_ROUNDINGS,
        tensor_scale=TensorScale(bound=E4M3_SCALE.max_value * E2M1.max_value),
        keeps_minus_zero=False,  # as TransformerEngine's reference
        description="small blocks of 4-bit floats with an 8-bit float scale, and a scale for the tensor",
        source="arXiv 2509.25149 appendix B",
    ),
    QuantType(
        name="hifp8",
        element=HIF8,
        roundings=("half_away", "hybrid", "stochastic"),
        tensor_scale=TensorScale(target=3),  # [8, 16): the top of the binades with three mantissa bits
        description="HiFloat8: 8 bits whose mantissa shrinks as the exponent grows; no block scale",
        source="arXiv 2409.16626 sections 2-3 (rounding TA)",
    ),
    QuantType(
        name="hif4",
        element=S1P2,
        block_size=64,
        scale_format=E6M2_SCALE,
        scale_rules=("nearest",),
        roundings=("half_away", "nearest_even", "stochastic"),
        scale_arithmetic="bfloat16",
        micro_exponents=((8, 4.0), (4, 2.0)),
        keeps_minus_zero=False,  # as its authors' code
        description="HiFloat4: quarters up to 1.75, with one-bit exponents for 8 and for 4 of a block of 64",
        source="arXiv 2602.11287",
    ),
    _fp8("fp8_e4m3", E4M3, "8-bit floats with one scale for the tensor"),
    _fp8("fp8_e5m2", E5M2, "8-bit floats, more range, with one scale for the tensor"),
    _cast(BF16),
    _cast(FP16),
    QuantType(name="none", element=None, description="quantizes nothing", source="-"),
)
QUANT_TYPES: dict[str, QuantType] = {quant_type.name: quant_type for quant_type in _ALL}


def get_quant_type(name: str | os.PathLike[str] | QuantType) -> QuantType:
    """The quant type of this name, or of the YAML file at this path (``custom``); a record is given back as it is.

    Raises:
        FormatError: no type has this name, or the file defines none.
    """
    if isinstance(name, QuantType):
        return name
    from qcollect.formats.custom import is_format_file, load_quant_type

    if is_format_file(name):
        return load_quant_type(name)
    name = os.fspath(name)
    if name in QUANT_TYPES:
        return QUANT_TYPES[name]
    raise FormatError(f"quant type {unknown(name, sorted(QUANT_TYPES))} See 'qcollect formats'.")


def unknown(name: object, known: Iterable[str]) -> str:
    """``'mxfp9' is not known; known: ...; did you mean 'mxfp8'?`` The question only if a name is near."""
    names = list(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    question = f"; did you mean {near[0]!r}?" if near else "."
    return f"{name!r} is not known; known: {', '.join(names)}{question}"
