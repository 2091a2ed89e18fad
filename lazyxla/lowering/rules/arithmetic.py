"""Addition, division, remainders, powers, clamping, interpolation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import maximum, minimum, sqrt, trunc, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import is_operand, operands, pointwise
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _scaled(b: Builder, x: Value, y: Value, alpha: Value) -> tuple[Value, Value]:
    """x and alpha * y, where alpha is 1 more often than not."""
    dtype = b.outputs[0].dtype
    if b.is_const(alpha, 1):
        if b.dtype(x) != dtype or b.dtype(y) != dtype:
            dtype = b.compute_dtype(dtype)
        x, y = operands(b, x, y, dtype=dtype)
        return x, y
    x, y, alpha = operands(b, x, y, alpha)
    return x, y * alpha


@rule("aten::add.Tensor", "aten::add.Scalar")
def add(b: Builder, x: Value, y: Value, alpha: Value) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return left + right


@rule("aten::sub.Tensor", "aten::sub.Scalar")
def sub(b: Builder, x: Value, y: Value, alpha: Value) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return left - right


@rule("aten::rsub.Tensor", "aten::rsub.Scalar")
def rsub(b: Builder, x: Value, y: Value, alpha: Value) -> Value:
    left, right = _scaled(b, y, x, alpha)
    return left - right


@rule("aten::_add_relu.Tensor", "aten::_add_relu.Scalar")
def add_relu(b: Builder, x: Value, y: Value, alpha: Value) -> Value:
    left, right = _scaled(b, x, y, alpha)
    return maximum(left + right, 0)


# ---- division ----


@pointwise("aten::div.Tensor", "aten::div.Scalar", exact=True)
def div(x: Value, y: Value) -> Value:
    return x / y


def _floor_division(x: Value, y: Value) -> Value:
    """The largest integer not above x / y; for floats by way of the remainder, which is exact."""
    if x.is_exact:
        if not x.dtype.is_signed:
            return x / y
        lower = (x % y != 0) & ((x < 0) != (y < 0))
        return x / y - lower.to(x.dtype)
    modulus = x % y
    quotient = (x - modulus) / y
    quotient = where((modulus != 0) & ((y < 0) != (modulus < 0)), quotient - 1, quotient)
    whole = quotient.call("floor")
    whole = where(quotient - whole > 0.5, whole + 1, whole)
    # A zero takes the sign of the true quotient.
    whole = where(quotient == 0, x / y * 0, whole)
    return where(y == 0, x / y, whole)


@pointwise("aten::div.Tensor_mode", "aten::div.Scalar_mode")
def div_mode(x: Value, y: Value, rounding_mode: str | None) -> Value:
    if rounding_mode == "floor":
        return _floor_division(x, y)
    quotient = x / y
    if rounding_mode != "trunc" or x.is_exact:
        return quotient
    # XLA may multiply by the reciprocal of a divisor, which lets 49 / 49 fall short of 1.
    nearest = quotient.call("round_nearest_even")
    return where(x % y == 0, nearest, trunc(quotient))


@pointwise("aten::floor_divide", "aten::floor_divide.Scalar")
def floor_divide(x: Value, y: Value) -> Value:
    return _floor_division(x, y)


@pointwise("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor")
def remainder(x: Value, y: Value) -> Value:
    modulus = x % y
    if x.is_exact and not x.dtype.is_signed:
        return modulus
    return where((modulus != 0) & ((modulus < 0) != (y < 0)), modulus + y, modulus)


# ---- powers ----


def _power(x: Value, y: Value) -> Value:
    if x.dtype == torch.bool:
        return x | ~y
    if x.is_exact and x.dtype.is_signed:
        return where((x == 0) & (y < 0), 0, x**y)
    return x**y


@pointwise("aten::pow.Tensor_Tensor", "aten::pow.Scalar")
def pow_tensor(x: Value, y: Value) -> Value:
    return _power(x, y)


# Exponents that need no power function; asked for without making the exponent static.
_SIMPLE_POWERS = {
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: sqrt,
    -0.5: lambda x: x.call("rsqrt"),
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}


@rule("aten::pow.Tensor_Scalar")
def pow_scalar(b: Builder, x: Value, y: Value) -> Value:
    base, exponent = operands(b, x, y)
    for known, formula in _SIMPLE_POWERS.items():
        if b.is_const(y, known) and (known in (1, 2, 3) or not base.is_exact):
            return formula(base)
    return _power(base, exponent)


# ---- clamping ----


@rule("aten::clamp", "aten::clamp.Tensor", "aten::hardtanh")
def clamp(b: Builder, x: Value, low: Value | None, high: Value | None) -> Value:
    # Rounding is monotone, so clamping in the result's dtype is what the wider one gives.
    x, low, high = operands(b, x, low, high, dtype=b.outputs[0].dtype)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


@pointwise("aten::clamp_min", "aten::clamp_min.Tensor", exact=True)
def clamp_min(x: Value, low: Value) -> Value:
    return maximum(x, low)


@pointwise("aten::clamp_max", "aten::clamp_max.Tensor", exact=True)
def clamp_max(x: Value, high: Value) -> Value:
    return minimum(x, high)


# ---- three operands ----


@rule("aten::addcmul")
def addcmul(b: Builder, x: Value, y: Value, z: Value, factor: Value) -> Value:
    known = b.is_const(factor, 1)
    x, y, z, factor = operands(b, x, y, z, factor)
    return x + (y if known else factor * y) * z


@rule("aten::addcdiv")
def addcdiv(b: Builder, x: Value, y: Value, z: Value, factor: Value) -> Value:
    known = b.is_const(factor, 1)
    x, y, z, factor = operands(b, x, y, z, factor)
    return x + (y if known else factor * y) / z


def _near(weight: Value) -> Value:
    """Whether |weight| < 0.5, where the interpolation starts from the first point."""
    if weight.is_complex:
        return weight.real * weight.real + weight.imag * weight.imag < 0.25
    return abs(weight) < 0.5


@rule("aten::lerp.Tensor", "aten::lerp.Scalar")
def lerp(b: Builder, x: Value, y: Value, weight: Value) -> Value:
    if is_operand(weight) and b.is_const(weight):
        number = weight.number  # known now; a weight that varies is lowered again
        x, y, weight = operands(b, x, y, weight)
        near = abs(number) < 0.5
        return x + weight * (y - x) if near else y - (y - x) * (1 - weight)
    x, y, weight = operands(b, x, y, weight)
    return where(_near(weight), x + weight * (y - x), y - (y - x) * (1 - weight))


@rule("aten::logit")
def logit(b: Builder, x: Value, eps: Value | None) -> Value:
    x, eps = operands(b, x, eps)
    if eps is not None:
        # In PyTorch's order of comparisons: nan passes through.
        x = where(x < eps, eps, where(x > 1 - eps, 1 - eps, x))
    return (x / (1 - x)).call("log")


@rule("aten::logit_backward")
def logit_backward(b: Builder, grad: Value, x: Value, eps: Value | None) -> Value:
    grad, x, eps = operands(b, grad, x, eps)
    inner = grad / (x * (1 - x))
    if eps is not None:
        return where((x < eps) | (x > 1 - eps), 0, inner)
    inner = where((x == 0) | (x == 1), grad * math.inf, inner)
    return where((x < 0) | (x > 1), math.nan, inner)
