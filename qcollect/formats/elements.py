"""Rounding numbers to the values of an element, and powers of two, by integer work on float32 bits.

Everything here runs in float32, whatever the tensor's own dtype: float32 holds every value of every
element exactly, and all steps but the rounding itself are exact. No float8 cast of torch takes part,
because its overflow differs between versions and devices.

Subnormals must be on (they are, unless ``torch.set_flush_denormal`` turned them off).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.formats.records import Element, Rounding

MAGNITUDE_MASK = 0x7FFFFFFF
EXPONENT_MASK = 0x7F800000
INF_BITS = 0x7F800000
MANTISSA_MASK = 0x007FFFFF
MANTISSA_WIDTH = 23
BIAS = 127

_ONE_EXPONENT = 1 << MANTISSA_WIDTH  # one step of the exponent field
_LARGEST_EXPONENT = 254 << MANTISSA_WIDTH  # of a finite float32
_SUBNORMAL_HALF_OF_MIN_NORMAL = 1 << (MANTISSA_WIDTH - 1)  # 2^-127
# The largest float32 below one half. Adding one half itself would carry 0.49999997 up to 1.
_JUST_BELOW_HALF = 0.5 - 2.0**-25


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSource:
    """What hybrid rounding compares with, by the dtype the numbers came from, as bits of their float32 form.

    A number is rounded up if the first ``num_bits`` of what it loses are not below ``(mantissa >> shift)``
    cut to ``num_bits - num_ones`` bits, followed by ``num_ones`` ones.

    **Source:** arXiv 2409.16626 section 3.2, equation 3.
    """

    num_bits: int
    shift: int
    num_ones: int


HYBRID_SOURCES: Mapping[torch.dtype, HybridSource] = {
    torch.float32: HybridSource(num_bits=14, shift=0, num_ones=0),
    torch.bfloat16: HybridSource(num_bits=2, shift=16, num_ones=1),
    torch.float16: HybridSource(num_bits=2, shift=13, num_ones=1),
}


def round_to_element_(
    values: Tensor,
    element: Element,
    rounding: Rounding,
    *,
    source: HybridSource | None = None,
    random: Tensor | None = None,
) -> Tensor:
    """Rounds float32 ``values`` in place to multiples of the element's spacing, without an upper end.

    NaN, Inf and the sign of zero stay. A result beyond ``element.max_value`` is left for
    ``limit_`` to deal with; it is the value the element's last spacing would have held.

    Args:
        values: any shape.
        source: needed by ``hybrid``.
        random: needed by ``stochastic``: float32 in [0, 1), multiples of 2^-24, of the shape of ``values``.

    **Source:** OCP MX v1.0 section 6.3 (nearest even); arXiv 2409.16626 section 3.1 (half away, TA) and 3.2 (hybrid).
    """
    if element.is_cast:
        assert element.torch_dtype is not None
        return values.copy_(values.to(getattr(torch, element.torch_dtype)))
    if rounding == "hybrid":
        assert source is not None
        return _hybrid_(values, element, source)
    spacing = _spacing(values, element)
    steps = values.div_(spacing)
    if rounding == "stochastic":
        assert random is not None
        return _stochastic_(steps, random).mul_(spacing)
    return _ROUND[rounding](steps).mul_(spacing)


def limit_(values: Tensor, element: Element, *, saturate: bool) -> Tensor:
    """Applies the element's upper end, in place, to what ``round_to_element_`` gave.

    Beyond the maximum (Inf included) a value becomes the maximum if ``saturate``, else Inf; NaN stays.
    An element with one zero gets +0 for -0.
    """
    top = element.max_value
    if saturate:
        values.clamp_(-top, top)
    elif not element.is_cast:
        values.masked_fill_(values > top, math.inf).masked_fill_(values < -top, -math.inf)
    if not element.signed_zero:
        values.add_(0.0)  # -0 + 0 is +0, all else stays
    return values


def magnitude_bits(values: Tensor) -> Tensor:
    """The float32 bits without the sign, int32: they order as the magnitudes do, Inf above all, NaN above Inf."""
    return values.view(torch.int32) & MAGNITUDE_MASK


def power_of_two(exponents: Tensor) -> Tensor:
    """``2^exponents``, exact, for int32 exponents in [-127, 127]; -127 gives a subnormal."""
    bits = (exponents + BIAS) << MANTISSA_WIDTH
    return bits.clamp_min_(_SUBNORMAL_HALF_OF_MIN_NORMAL).view(torch.float32)


def _spacing(values: Tensor, element: Element) -> Tensor:
    """Distance of neighbouring element values around each value: ``2^(e - mantissa bits)``, float32.

    The exponent field is taken no lower than the element's lowest binade and no higher than that of
    the largest float32, so that Inf and NaN get a finite spacing and stay themselves.
    """
    lowest = (element.min_exponent + BIAS) << MANTISSA_WIDTH
    exponents = (values.view(torch.int32) & EXPONENT_MASK).clamp_(lowest, _LARGEST_EXPONENT)
    spacing = exponents - (element.mantissa_bits << MANTISSA_WIDTH)
    if element.taper:
        distance = exponents.sub_(BIAS << MANTISSA_WIDTH).abs_()  # |e|, in steps of the exponent field
        is_beyond = torch.empty_like(distance)
        for (bound, bits), (_, next_bits) in zip(element.taper, element.taper[1:], strict=False):
            torch.sub(distance, bound << MANTISSA_WIDTH, out=is_beyond).clamp_(0, _ONE_EXPONENT)
            spacing.add_(is_beyond, alpha=bits - next_bits)
    return spacing.view(torch.float32)


def _half_away_(values: Tensor) -> Tensor:
    """Rounds to whole numbers, halves away from zero; torch's own ``round`` takes halves to even."""
    offset = torch.copysign(values.new_full((), _JUST_BELOW_HALF), values)
    return values.add_(offset).trunc_()


_ROUND: Mapping[Rounding, Callable[[Tensor], Tensor]] = {"nearest_even": torch.round_, "half_away": _half_away_}


def _stochastic_(steps: Tensor, random: Tensor) -> Tensor:
    """Rounds to one of the two whole numbers around, up in magnitude where ``random`` is below the fraction.

    Inf and NaN stay: their fraction is NaN, below which nothing is.
    """
    whole = steps.trunc()
    is_up = random < (steps - whole).abs_()
    away = torch.copysign(is_up.to(torch.float32), steps)
    sign = steps.clone()
    return steps.copy_(torch.copysign(whole.add_(away), sign))


def _hybrid_(values: Tensor, element: Element, source: HybridSource) -> Tensor:
    """Half away near 1, where the element is most precise; elsewhere by comparing bits with each other.

    Below half of the smallest value everything is zero, and what overflows half away overflows here.
    """
    bits = magnitude_bits(values)
    exponents = (bits >> MANTISSA_WIDTH) - BIAS
    is_tiny = exponents < element.min_exponent - 1
    rest = source.num_bits - source.num_ones
    threshold = (bits >> source.shift) & ((1 << rest) - 1)
    threshold = (threshold << source.num_ones) | ((1 << source.num_ones) - 1)
    spacing = _spacing(values, element)
    rounded = _half_away_(values / spacing)
    is_half_away = (exponents.abs() <= element.taper[0][0]) | ((rounded * spacing).abs_() > element.max_value)
    steps = values.div_(spacing)
    whole = steps.trunc()
    lost = ((steps - whole).abs_() * float(1 << source.num_bits)).nan_to_num_(0.0).to(torch.int32)
    away = torch.copysign(((lost >= threshold) & ~is_tiny).to(torch.float32), steps)
    steps.copy_(torch.where(is_half_away, rounded, torch.copysign(whole.add_(away), steps)))
    return steps.mul_(spacing)
