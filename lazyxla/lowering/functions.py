"""Element-wise functions of values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from lazyxla.lowering import complex_functions, hyperbolic
from lazyxla.lowering.complex_functions import with_cut_on_imaginary_axis, with_cut_on_real_axis
from lazyxla.lowering.value import Operand, Value


def where(condition: Value, x: Operand, y: Operand) -> Value:
    """Element-wise choice; a number takes the other one's dtype."""
    return condition.b.select(condition, x, y)


def total(values: Iterable[Value]) -> Value:
    """The sum of some values, at least one."""
    return functools.reduce(operator.add, values)


def maximum(x: Value, y: Operand) -> Value:
    """The greater one; nan if one of both is nan."""
    return x.b.maximum(*x.aligned(y)) if isinstance(y, Value) else x.call("maximum", y)


def minimum(x: Value, y: Operand) -> Value:
    """The smaller one; nan if one of both is nan."""
    return x.b.minimum(*x.aligned(y)) if isinstance(y, Value) else x.call("minimum", y)


def clip(x: Value, low: Operand, high: Operand) -> Value:
    return minimum(maximum(x, low), high)


def exp(x: Value) -> Value:
    return complex_functions.exp(x) if x.is_complex else x.call("exponential")


def expm1(x: Value) -> Value:
    return x.call("exponential_minus_one")


def log(x: Value) -> Value:
    return x.call("log")


def log1p(x: Value) -> Value:
    """log(1 + x), exact for small x."""
    return x.b.log1p(x)


sqrt = with_cut_on_real_axis("sqrt")


def rsqrt(x: Value) -> Value:
    """1 / sqrt(x)."""
    return x.call("rsqrt")


def conj(x: Value) -> Value:
    """The complex conjugate; a real value is its own."""
    return x.b.complex(x.real, -x.imag) if x.is_complex else x


def is_finite(x: Value) -> Value:
    return x.call("is_finite")


def sin(x: Value) -> Value:
    return complex_functions.sin(x) if x.is_complex else x.call("sine")


def cos(x: Value) -> Value:
    return complex_functions.cos(x) if x.is_complex else x.call("cosine")


def tan(x: Value) -> Value:
    return x.call("tan")


def sinh(x: Value) -> Value:
    return (complex_functions if x.is_complex else hyperbolic).sinh(x)


def cosh(x: Value) -> Value:
    return (complex_functions if x.is_complex else hyperbolic).cosh(x)


def tanh(x: Value) -> Value:
    return x.call("tanh")


acos = with_cut_on_real_axis("chlo.acos", opposite=True)
acosh = with_cut_on_real_axis("chlo.acosh")
asin = with_cut_on_real_axis("chlo.asin")
asinh = with_cut_on_imaginary_axis("chlo.asinh")
atan = with_cut_on_imaginary_axis("chlo.atan")
atanh = with_cut_on_real_axis("chlo.atanh")


def sigmoid(x: Value) -> Value:
    return x.call("logistic")


def erf(x: Value) -> Value:
    return x.call("chlo.erf")


def erfc(x: Value) -> Value:
    return x.call("chlo.erfc")


def erfinv(x: Value) -> Value:
    return x.call("chlo.erf_inv")


def lgamma(x: Value) -> Value:
    """log |Gamma(x)|."""
    return x.call("chlo.lgamma")


def floor(x: Value) -> Value:
    return x.call("floor")


def ceil(x: Value) -> Value:
    return x.call("ceil")


def rint(x: Value) -> Value:
    """Rounds to the nearest whole number, halves to the even one."""
    return x.call("round_nearest_even")


def trunc(x: Value) -> Value:
    """Rounds towards zero and keeps the sign of a zero."""
    return where(x < 0, ceil(x), floor(x))


def sign_bit(x: Value) -> Value:
    """Whether the sign bit is set, for a zero and a nan as well (not for a nan on a TPU in
    float64).
    """
    return x.b.sign_bit(x) if x.is_float else x < 0
