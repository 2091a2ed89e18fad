"""Addition, division, remainders, powers, clamping, interpolation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lazyxla import compat
from lazyxla.lowering import complex_functions
from lazyxla.lowering.functions import (
    clip,
    floor,
    log,
    maximum,
    minimum,
    rint,
    rsqrt,
    sqrt,
    trunc,
    where,
)
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands, pointwise
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _scaled(b: Builder, x: Operand, y: Operand, alpha: Operand) -> tuple[Value, Value]:
    """x and alpha * y, where alpha is 1 more often than not."""
    dtype = b.outputs[0].dtype
    if b.is_const(alpha, 1):
        if b.dtype(x) != dtype or b.dtype(y) != dtype:
            dtype = b.compute_dtype(dtype)
        left, right = operands(b, x, y, dtype=dtype)
        return left, complex_functions.times_one(right) if right.is_complex else right
    left, right, factor = operands(b, x, y, alpha)
    return left, right * factor


@rule("aten::add.Tensor", "aten::add.Scalar")
def add(b: Builder, x: Operand, y: Operand, alpha: Operand) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return left + right


@rule("aten::sub.Tensor", "aten::sub.Scalar")
def sub(b: Builder, x: Operand, y: Operand, alpha: Operand) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return left - right


@rule("aten::rsub.Tensor", "aten::rsub.Scalar")
def rsub(b: Builder, x: Operand, y: Operand, alpha: Operand) -> Value:
    left, right = _scaled(b, y, x, alpha)
    return left - right


@rule("aten::_add_relu.Tensor", "aten::_add_relu.Scalar")
def add_relu(b: Builder, x: Operand, y: Operand, alpha: Operand) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return maximum(left + right, 0)


# ---- division ----


@pointwise("aten::div.Tensor", "aten::div.Scalar", exact=True)
def div(x: Value, y: Value) -> Value:
    return x / y


@pointwise("aten::floor_divide", "aten::floor_divide.Scalar")
def floor_divide(x: Value, y: Value) -> Value:
    """The largest integer not above x / y; for floats from the remainder, which is exact."""
    if x.is_exact:
        if not x.dtype.is_signed:
            return x / y
        lower = (x % y != 0) & ((x < 0) != (y < 0))
        return x / y - lower.to(x.dtype)
    modulus = x % y
    quotient = (x - modulus) / y
    quotient = where((modulus != 0) & ((y < 0) != (modulus < 0)), quotient - 1, quotient)
    whole = floor(quotient)
    whole = where(quotient - whole > 0.5, whole + 1, whole)
    # A zero takes the sign of the true quotient.
    whole = where(quotient == 0, x / y * 0, whole)
    return where(y == 0, x / y, whole)


@pointwise("aten::div.Tensor_mode", "aten::div.Scalar_mode")
def div_mode(x: Value, y: Value, rounding_mode: str | None) -> Value:
    if rounding_mode == "floor":
        return floor_divide(x, y)
    quotient = x / y
    if rounding_mode != "trunc" or x.is_exact:
        return quotient
    # XLA may multiply by the reciprocal of a divisor, which lets 49 / 49 fall short of 1.
    return where(x % y == 0, rint(quotient), trunc(quotient))


@pointwise("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor")
def remainder(x: Value, y: Value) -> Value:
    modulus = x % y
    if x.is_exact and not x.dtype.is_signed:
        return modulus
    return where((modulus != 0) & ((modulus < 0) != (y < 0)), modulus + y, modulus)


# ---- powers ----


@pointwise("aten::pow.Tensor_Tensor")
def power(x: Value, y: Value) -> Value:
    if x.dtype == torch.bool:
        return x | ~y
    if x.is_complex:
        return complex_functions.power(x, y)
    return _whole_power(x, y) if x.is_exact else x**y


@pointwise("aten::pow.Scalar")
def power_of_scalar(x: Value, y: Value) -> Value:
    return where(x == 1, 1, power(x, y)) if x.is_complex else power(x, y)


_EXPONENT_BITS = 6
"""XLA's power of integers reads so many bits of an exponent."""


def _whole_power(x: Value, y: Value) -> Value:
    """x ** y of integers. Only large exponents enter the loop."""
    small = 1 << _EXPONENT_BITS

    def more(high: Value, power: Value, rest: Value) -> Value:
        return x.b.reduce(rest > 0, range(x.rank), "or")

    def next_bits(high: Value, power: Value, rest: Value) -> list[Value]:
        root = high ** (small // 2)
        high = root * root
        return [high, power * high ** (rest & (small - 1)), rest >> _EXPONENT_BITS]

    is_large = y >= small
    power = x ** where(is_large, y & (small - 1), y)
    rest = where(is_large, y >> _EXPONENT_BITS, 0)
    power = x.b.while_loop(more, next_bits, x, power, rest)[1]
    return where((x == 0) & (y < 0), 0, power) if x.dtype.is_signed else power


# Exponents that need no power function; compared without making the exponent static.
_SIMPLE_POWERS: dict[float, Callable[[Value], Value]] = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: sqrt,
    -0.5: rsqrt,
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


@rule("aten::pow.Tensor_Scalar")
def pow_scalar(b: Builder, x: Value, y: Operand) -> Value:
    base, exponent = operands(b, x, y)
    for known, formula in _SIMPLE_POWERS.items():
        if b.is_const(y, known) and (known in (1, 2, 3) or not base.is_exact):
            return formula(base)
    if base.is_exact and b.known(y) in range(1 << _EXPONENT_BITS):
        return base**exponent
    result = power(base, exponent)
    if base.is_complex:  # as a number, 0 and 1 are exponents of what is not finite, too
        result = where(exponent == 0, 1, where(exponent == 1, base, result))
    return result


# ---- clamping ----

_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


@rule("aten::clamp", "aten::clamp.Tensor", "aten::hardtanh")
def clamp(b: Builder, x: Value, low: Operand | None, high: Operand | None) -> Value:
    # Rounding is monotone, so clamping in the result's dtype gives the same as in a wider one.
    dtype = b.outputs[0].dtype
    low, high = _within_range(b, low, dtype), _within_range(b, high, dtype)
    x, low, high = operands(b, x, low, high, dtype=dtype)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


@rule("aten::clamp_min", "aten::clamp_min.Tensor")
def clamp_min(b: Builder, x: Value, low: Operand) -> Value:
    return clamp(b, x, low, None)


@rule("aten::clamp_max", "aten::clamp_max.Tensor")
def clamp_max(b: Builder, x: Value, high: Operand) -> Value:
    return clamp(b, x, None, high)


def _within_range(b: Builder, bound: Operand | None, dtype: torch.dtype) -> Operand | None:
    """A number as a bound of integers: beyond their range the end of the range does as well. One of
    complex type has no imaginary part, or the call was refused."""
    if isinstance(bound, Scalar) and bound.parts is not None and not dtype.is_complex:
        bound = b.value(bound, torch.complex128).real
    if not compat.CLAMP_SATURATES or not isinstance(bound, Scalar) or dtype not in _NARROW_INTEGERS:
        return bound
    ends = torch.iinfo(dtype)
    return clip(b.value(bound, torch.int64), ends.min, ends.max).to(dtype)


# ---- three operands ----


@rule("aten::addcmul")
def addcmul(b: Builder, x: Value, y: Value, z: Value, factor: Operand) -> Value:
    x, y, z, scale = operands(b, x, y, z, factor)
    return x + (y if b.is_const(factor, 1) else scale * y) * z


@rule("aten::addcdiv")
def addcdiv(b: Builder, x: Value, y: Value, z: Value, factor: Operand) -> Value:
    x, y, z, scale = operands(b, x, y, z, factor)
    return x + (y if b.is_const(factor, 1) else scale * y) / z


def _near(weight: Value) -> Value:
    """Whether |weight| < 0.5, where the interpolation starts from the first point."""
    if weight.is_complex:
        return weight.real * weight.real + weight.imag * weight.imag < 0.25
    return abs(weight) < 0.5


@rule("aten::lerp.Tensor", "aten::lerp.Scalar")
def lerp(b: Builder, x: Value, y: Value, weight: Operand) -> Value:
    x, y, w = operands(b, x, y, weight)
    known = b.known(weight)  # does not make it static: a weight that varies is lowered again
    if known is not None:
        return x + w * (y - x) if abs(known) < 0.5 else y - (y - x) * (1 - w)
    return where(_near(w), x + w * (y - x), y - (y - x) * (1 - w))


@rule("aten::logit")
def logit(b: Builder, x: Value, eps: Operand | None) -> Value:
    x, low = operands(b, x, eps)
    if low is not None:
        # In PyTorch's order of comparisons: nan passes through.
        x = where(x < low, low, where(x > 1 - low, 1 - low, x))
    return log(x / (1 - x))


@rule("aten::logit_backward")
def logit_backward(b: Builder, grad: Value, x: Value, eps: Operand | None) -> Value:
    grad, x, low = operands(b, grad, x, eps)
    inner = grad / (x * (1 - x))
    if low is not None:
        return where((x < low) | (x > 1 - low), 0, inner)
    inner = where((x == 0) | (x == 1), grad * math.inf, inner)
    return where((x < 0) | (x > 1), math.nan, inner)
