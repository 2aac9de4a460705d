"""What a number format is made of, as data. Imports no torch.

A format is a literal in ``catalog`` (or a user's YAML file); rounding, blocks, scales, codes and
kernels are functions elsewhere that read the fields here and never a name.
"""

import math
from dataclasses import dataclass
from typing import Literal

Overflow = Literal["saturate", "infinity"]
ScaleRule = Literal["floor", "ceil", "even", "rceil", "nearest"]
Rounding = Literal["nearest_even", "half_away", "hybrid", "stochastic"]
Encoding = Literal["float", "twos_complement", "prefix"]
ScaleArithmetic = Literal["float32", "bfloat16"]

# Every rule and rounding that exists, whatever type takes it.
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "ceil", "even", "rceil", "nearest")
ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "half_away", "hybrid", "stochastic")
# A random Hadamard transform divides by the root of its size, which is exact for powers of four.
HADAMARD_SIZES = (4, 16, 64, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One number of a format: which values exist, and what becomes of the others.

    The spacing of values in the binade of exponent ``e`` is ``2^(e - mantissa bits)``; below
    ``min_exponent`` it stays what it is there, which is how subnormals come about.

    Args:
        min_exponent: lowest binade with a spacing of its own.
        mantissa_bits: explicit mantissa bits, the most any binade has.
        taper: for an element whose precision falls with the exponent, ``((n, bits), ...)``:
            binades with ``|e| <= n`` have ``bits``, first match; empty: ``mantissa_bits`` everywhere.
        min_normal_exponent: where it is not ``min_exponent`` (tapered elements).
        overflow: what a value that rounds beyond ``max_value`` becomes, and Inf with it.
        torch_dtype: name of the torch dtype with the same values and codes, if any.
        is_cast: whether that dtype's cast is exactly this element's rule.
        encoding: how codes are laid out (``codes``).
        prefixes: of a ``prefix`` encoding, ``((bits as text, exponent bits), ...)`` behind the sign.
    """

    name: str
    bits: int
    exponent_bits: str
    mantissa_bits: int
    min_exponent: int
    max_value: float
    taper: tuple[tuple[int, int], ...] = ()
    min_normal_exponent: int | None = None
    has_inf: bool
    has_nan: bool
    signed_zero: bool = True
    overflow: Overflow
    torch_dtype: str | None = None
    is_cast: bool = False
    encoding: Encoding = "float"
    prefixes: tuple[tuple[str, int], ...] = ()
    source: str

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two the element holds (``emax`` in the OCP text)."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def max_mantissa(self) -> float:
        """``max_value`` over the largest power of two, in [1, 2)."""
        return self.max_value / 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        exponent = self.min_exponent if self.min_normal_exponent is None else self.min_normal_exponent
        return 2.0**exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest value above zero."""
        lowest_bits = self.taper[-1][1] if self.taper else self.mantissa_bits
        return 2.0 ** (self.min_exponent - lowest_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFormat:
    """How the scale of a block is stored; it has no sign.

    Args:
        mantissa_bits: 0: a bare power of two, whose code is ``exponent - min_exponent``.
        min_exponent: of the lowest binade with a spacing of its own.
        min_value: what a smaller scale becomes: 0 for formats with subnormals and a zero.
        nan_code: the code of a block that holds a NaN or an Inf.
        torch_dtype: name of the torch dtype with the same codes, if any.
    """

    name: str
    bits: int
    mantissa_bits: int = 0
    min_exponent: int
    max_value: float
    min_value: float
    nan_code: int
    torch_dtype: str | None = None
    source: str

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max_value)[1] - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScale:
    """A scale for the whole tensor, from its abs max over finite values; value = scale x block scale x element.

    Either a power of two that a user may ask for (``target``), or an inherent part of the type
    (``bound``): then ``encode = float32(bound / amax)`` multiplies what is rounded, and the scale is
    its reciprocal.

    Args:
        target: the scale puts the abs max into ``[2^target, 2^(target + 1))``.
        bound: the largest value of element and block scale together.
        min_amax: what a smaller abs max counts as.
        sees_nonfinite: whether a NaN or an Inf enters the abs max, and so reaches the whole tensor.
    """

    target: int | None = None
    bound: float | None = None
    min_amax: float = 0.0
    sees_nonfinite: bool = False

    @property
    def is_inherent(self) -> bool:
        return self.bound is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantType:
    """What a user names: an element, the scales that go with it, and the rules one may choose.

    Args:
        element: None quantizes nothing.
        block_size: elements that share a scale along an axis; None: the type has no blocks.
        scale_rules: how the scale may be chosen from an abs max, default first.
        roundings: how an element may be rounded, default first.
        scale_arithmetic: what every step of the rule ``nearest`` is rounded to.
        micro_exponents: one-bit exponents inside a block, ``((size, threshold), ...)``, coarsest first: a group
            of ``size`` elements whose scaled abs max reaches the threshold has twice the scale.
        tensor_scale: None: the type has no per-tensor scale.
        keeps_minus_zero: whether -0 stays -0; False: it counts as 0. (A small negative number that rounds to zero
            keeps its sign as far as the element has one.)
    """

    name: str
    element: Element | None
    block_size: int | None = None
    scale_format: ScaleFormat | None = None
    scale_rules: tuple[ScaleRule, ...] = ()
    roundings: tuple[Rounding, ...] = ()
    scale_arithmetic: ScaleArithmetic = "float32"
    micro_exponents: tuple[tuple[int, float], ...] = ()
    tensor_scale: TensorScale | None = None
    keeps_minus_zero: bool = True
    description: str
    source: str

    @property
    def scale_rule(self) -> ScaleRule | None:
        return self.scale_rules[0] if self.scale_rules else None

    @property
    def rounding(self) -> Rounding | None:
        return self.roundings[0] if self.roundings else None

    @property
    def takes_tensor_scale(self) -> bool:
        """Whether a power-of-two scale for the whole tensor may be asked for."""
        return self.tensor_scale is not None and not self.tensor_scale.is_inherent

    @property
    def has_tensor_scale(self) -> bool:
        """Whether every tensor has a scale of its own."""
        return self.tensor_scale is not None and self.tensor_scale.is_inherent

    @property
    def max_element(self) -> float:
        """The largest value of an element with its micro exponents."""
        assert self.element is not None
        return self.element.max_value * 2.0 ** len(self.micro_exponents)

    @property
    def can_saturate(self) -> bool:
        """Whether overflow goes to Inf unless saturation is asked for."""
        return self.element is not None and self.element.overflow == "infinity"

    @property
    def bits_per_value(self) -> float | None:
        """Bits of an element and its share of the block's scales; None where nothing is quantized."""
        if self.element is None:
            return None
        if self.scale_format is None or self.block_size is None:
            return float(self.element.bits)
        micro = sum(1.0 / size for size, _ in self.micro_exponents)
        return self.element.bits + self.scale_format.bits / self.block_size + micro
