"""Rounding numbers to the values of an element, and powers of two, by integer work on float32 bits.

Everything here runs in float32, whatever the tensor's own dtype: float32 holds every value of every
element exactly, and all steps but the rounding itself are exact. No float8 cast of torch takes part,
because its overflow differs between versions and devices.

Subnormals must be on (they are, unless ``torch.set_flush_denormal`` turned them off).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qcollect.formats.catalog import Element, Rounding

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


def round_to_element_(values: Tensor, element: Element, rounding: Rounding) -> Tensor:
    """Rounds float32 ``values`` in place to multiples of the element's spacing, without an upper end.

    NaN, Inf and the sign of zero stay. A result beyond ``element.max_value`` is left for
    ``limit_`` to deal with; it is the value the element's last spacing would have held.

    **Source:** OCP MX v1.0 section 6.3 (nearest even); arXiv 2409.16626 section 3.1 (half away, TA).
    """
    if element.torch_dtype is not None:
        return values.copy_(values.to(getattr(torch, element.torch_dtype)))
    spacing = _spacing(values, element)
    return _ROUND[rounding](values.div_(spacing)).mul_(spacing)


def limit_(values: Tensor, element: Element, *, saturate: bool) -> Tensor:
    """Applies the element's upper end, in place, to what ``round_to_element_`` gave.

    Beyond the maximum (Inf included) a value becomes the maximum if ``saturate``, else Inf; NaN stays.
    An element with one zero gets +0 for -0.
    """
    top = element.max_value
    if saturate:
        values.clamp_(-top, top)
    elif element.torch_dtype is None:
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
