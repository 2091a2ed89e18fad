"""Logarithms to the bases 2 and 10, exact at powers of the base.

XLA has only the natural logarithm, whose multiples miss whole numbers by a rounding error. So the
exponent of the number, which contributes a known multiple, is added apart to the logarithm of a
fraction around 1.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import NamedTuple

import torch

from lazyxla.lowering.functions import log, where
from lazyxla.lowering.rules.formula import pointwise
from lazyxla.lowering.value import Value


class _Format(NamedTuple):
    """The bits of a floating-point type: the integer of its width, bits after the point, bias."""

    whole: torch.dtype
    digits: int
    bias: int


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 127),
    torch.float64: _Format(torch.int64, 52, 1023),
}


def _bits(x: Value) -> Value:
    return x.b.bitcast(x, _FORMATS[x.dtype].whole)


def _split(x: Value) -> tuple[Value, Value]:
    """A fraction between sqrt(1/2) and sqrt(2) and the exponent of 2 of a positive number, both in
    its dtype; undefined for others.

    A subnormal number has no exponent of its own, on any platform: it gets that of its bits as an
    integer. (To multiply it first would not do: not all backends keep subnormals.)
    """
    b, form = x.b, _FORMATS[x.dtype]
    bits = _bits(x)
    small = bits < (1 << form.digits)
    bits = where(small, _bits(bits.to(x.dtype)), bits)
    less = where(small, bits.full(form.bias + form.digits - 1), 0)
    exponent = bits.call("shift_right_logical", form.digits) - form.bias - less
    fraction = (bits & ((1 << form.digits) - 1)) | (form.bias << form.digits)
    fraction = b.bitcast(fraction, x.dtype)
    great = fraction > math.sqrt(2)
    return where(great, fraction * 0.5, fraction), (exponent + great.to(form.whole)).to(x.dtype)


def _is_split(x: Value) -> bool:
    return x.dtype in _FORMATS and x.b.has_bits(x.dtype)


def _positive_or(x: Value, result: Value) -> Value:
    """`result` for positive finite numbers, and what any logarithm gives for others."""
    bits, infinite = _bits(x), _bits(x.full(math.inf))
    return where((bits > 0) & (bits < infinite), result, log(x))


def _divided(x: Value, number: float) -> Value:
    """By parts: a complex quotient would make nan of an infinite one."""
    return x.b.complex(x.real / number, x.imag / number) if x.is_complex else x / number


@pointwise("aten::log2")
def log2(x: Value) -> Value:
    if not _is_split(x):
        return _divided(log(x), math.log(2))
    fraction, exponent = _split(x)
    return _positive_or(x, exponent + log(fraction) / math.log(2))


def _log10_of_2(digits: int) -> tuple[float, float]:
    """log10(2) as a number with this many fraction bits, whose multiples are exact, and the
    rest."""
    with localcontext() as context:
        context.prec = 50
        exact = Decimal(2).log10()
        high = round(exact * 2**digits) / Decimal(2) ** digits
        return float(high), float(exact - high)


@pointwise("aten::log10")
def log10(x: Value) -> Value:
    if not _is_split(x):
        return _divided(log(x), math.log(10))
    fraction, exponent = _split(x)
    # The exponent takes eight or eleven bits of the product.
    high, low = _log10_of_2(16 if x.dtype == torch.float32 else 42)
    return _positive_or(x, exponent * high + (exponent * low + log(fraction) / math.log(10)))
