"""Functions of complex values, where XLA's own operation is wrong.

Its sine and cosine, and their hyperbolic forms, subtract two exponentials to get the hyperbolic
sine of a part: a small part is lost, sin(1e-8j) is 0. Its roots and inverse functions compare parts
with zero to find out on which side of a branch cut they are, and so lose the sign of -0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lazyxla.lowering import hyperbolic
from lazyxla.lowering.value import Value


def exp(x: Value) -> Value:
    """Where the real part is infinite, no cosine or sine may be nan times 0 or infinity: the real
    part of the result is its size, the imaginary one nan or 0.
    """
    result, size = x.call("exponential"), x.real.call("exponential")
    turns = x.imag.call("is_finite") | (abs(x.real) < math.inf) | x.real.is_nan()
    real = x.b.select(turns, result.real, size)
    imag = x.b.select(turns, result.imag, x.b.select(size == 0, size, math.nan))
    return x.b.complex(real, imag)


def sin(x: Value) -> Value:
    turned = sinh(x.b.complex(x.imag, x.real))
    return x.b.complex(turned.imag, turned.real)


def cos(x: Value) -> Value:
    return cosh(x.b.complex(-x.imag, x.real))


def sinh(x: Value) -> Value:
    sine, cosine = x.imag.call("sine"), x.imag.call("cosine")
    return x.b.complex(
        _times(cosine, hyperbolic.sinh(x.real)), _times(sine, hyperbolic.cosh(x.real))
    )


def cosh(x: Value) -> Value:
    sine, cosine = x.imag.call("sine"), x.imag.call("cosine")
    return x.b.complex(
        _times(cosine, hyperbolic.cosh(x.real)), _times(sine, hyperbolic.sinh(x.real))
    )


def power(x: Value, y: Value) -> Value:
    """XLA multiplies powers of the size and of the angle. One may be 0 or infinity although their
    product is neither: then their exponents are added, and the power is taken in two halves.
    Where an exponent is not finite, as of 0, the power is exp(y log(x)) with whatever that is.
    """
    result, log = x**y, x.call("log")
    exponent = y.real * log.real - y.imag * log.imag
    turn = y.imag * log.real + y.real * log.imag
    parts = (result.real, result.imag)
    is_lost = ~(parts[0].call("is_finite") & parts[1].call("is_finite")) | (result == 0)
    is_known = exponent.call("is_finite") & turn.call("is_finite")
    half = (exponent / 2).call("exponential")
    turns = (turn.call("cosine"), turn.call("sine"))
    added = (_times(_times(direction, half), half) for direction in turns)
    result = x.b.select(is_lost, x.b.complex(*added), result)
    return x.b.select(is_known, result, exp(x.b.complex(exponent, turn)))


def times_one(x: Value) -> Value:
    """x * (1 + 0j), which is nan in part where a part of x is infinite or nan."""
    return x.b.complex(x.real - x.imag * 0, x.imag + x.real * 0)


def scaled(x: Value, factor: float) -> Value:
    """A complex value times a real number; an infinite part leaves the other one as it is."""
    return x.b.complex(x.real * factor, x.imag * factor)


def sign(x: Value) -> Value:
    """The value of absolute value 1 in the same direction; 0 of 0."""
    size = abs(x)
    parts = (x.b.select(size == 0, 0, part / size) for part in (x.real, x.imag))
    return x.b.complex(*parts)


def _times(circular: Value, hyperbolic: Value) -> Value:
    """The product. A zero of a sine or cosine is exact: 0 even times infinity."""
    zero = _turned(circular, hyperbolic)
    return circular.b.select(circular == 0, zero, circular * hyperbolic)


def _turned(x: Value, y: Value) -> Value:
    """x, or -x where y has its sign bit set."""
    return x.b.select(x.b.sign_bit(y), -x, x)


def with_cut_on_real_axis(operation: str, opposite: bool = False) -> Callable[[Value], Value]:
    """The operation as a function that goes by the sign of the operand's imaginary part: that of
    the result has the same sign, or the opposite one."""

    def function(x: Value) -> Value:
        result = x.call(operation)
        if not x.is_complex:
            return result
        side = -x.imag if opposite else x.imag
        return x.b.complex(result.real, _turned(abs(result.imag), side))

    return function


def with_cut_on_imaginary_axis(operation: str) -> Callable[[Value], Value]:
    """The operation as a function that goes by the sign of the operand's real part, which is that
    of the result's."""

    def function(x: Value) -> Value:
        result = x.call(operation)
        if not x.is_complex:
            return result
        return x.b.complex(_turned(abs(result.real), x.real), result.imag)

    return function
