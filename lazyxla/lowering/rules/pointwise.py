"""Element-wise operators: mathematical functions, comparisons, logic and bits."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering import complex_functions, functions
from lazyxla.lowering.functions import (
    exp,
    log,
    log1p,
    maximum,
    minimum,
    rint,
    sign_bit,
    sin,
    sqrt,
    trunc,
    where,
)
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import pointwise, predicate
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# Operator -> StableHLO (or CHLO) operation, computed in the dtype PyTorch computes in.
_UNARY = {
    "aten::erf": "chlo.erf",
    "aten::erfc": "chlo.erfc",
    "aten::erfinv": "chlo.erf_inv",
    "aten::expm1": "exponential_minus_one",
    "aten::lgamma": "chlo.lgamma",
    "aten::log": "log",
    "aten::rsqrt": "rsqrt",
    "aten::sigmoid": "logistic",
    "aten::tan": "tan",
    "aten::tanh": "tanh",
}

# Operators that leave integers alone.
_ROUNDING = {
    "aten::ceil": "ceil",
    "aten::floor": "floor",
    "aten::round": "round_nearest_even",
}

_BINARY = {
    "aten::mul.Tensor": "multiply",
    "aten::mul.Scalar": "multiply",
    "aten::fmod.Tensor": "remainder",
    "aten::fmod.Scalar": "remainder",
    "aten::atan2": "atan2",
    "aten::nextafter": "chlo.next_after",
    "aten::bitwise_and": "and_",
    "aten::bitwise_or": "or_",
    "aten::bitwise_xor": "xor",
}

_COMPARISON = {
    "aten::eq": "EQ",
    "aten::ne": "NE",
    "aten::lt": "LT",
    "aten::le": "LE",
    "aten::gt": "GT",
    "aten::ge": "GE",
}

_LOGICAL = {
    "aten::logical_and": "and_",
    "aten::logical_or": "or_",
    "aten::logical_xor": "xor",
}


def _round(operation: str, x: Value) -> Value:
    return x if x.is_exact else x.call(operation)


def _logical(operation: str, x: Value, y: Value) -> Value:
    return x.to(torch.bool).call(operation, y.to(torch.bool))


def _register_tables() -> None:
    def call(operation: str, *xs: Value) -> Value:
        return xs[0].call(operation, *xs[1:])

    for name, operation in _UNARY.items():
        pointwise(name)(functools.partial(call, operation))
    for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh"):
        pointwise(f"aten::{name}")(getattr(functions, name))
    for name, operation in _ROUNDING.items():
        pointwise(name, exact=True)(functools.partial(_round, operation))
    for name, operation in _BINARY.items():
        overloads = [name]
        if "bitwise" in name:
            overloads = [f"{name}.{o}" for o in ("Tensor", "Scalar", "Scalar_Tensor")]
        pointwise(*overloads, exact=True)(functools.partial(call, operation))
    for name, direction in _COMPARISON.items():
        comparison = functools.partial(Value.compare, direction=direction)
        predicate(f"{name}.Tensor", f"{name}.Scalar")(comparison)
    for name, operation in _LOGICAL.items():
        predicate(name)(functools.partial(_logical, operation))


_register_tables()


# ---- one operand ----


@pointwise("aten::neg", exact=True)
def neg(x: Value) -> Value:
    return -x


pointwise("aten::cos")(functions.cos)
pointwise("aten::cosh")(functions.cosh)
pointwise("aten::exp")(exp)
pointwise("aten::log1p")(log1p)
pointwise("aten::sin")(sin)
pointwise("aten::sinh")(functions.sinh)
pointwise("aten::sqrt")(sqrt)
pointwise("aten::maximum", exact=True)(maximum)
pointwise("aten::minimum", exact=True)(minimum)


@pointwise("aten::bitwise_not", exact=True)
def bitwise_not(x: Value) -> Value:
    return ~x


@predicate("aten::logical_not")
def logical_not(x: Value) -> Value:
    return ~x.to(torch.bool)


@pointwise("aten::trunc", exact=True)
def truncate(x: Value) -> Value:
    return x if x.is_exact else trunc(x)


@pointwise("aten::frac")
def frac(x: Value) -> Value:
    return x - trunc(x)


@pointwise("aten::round.decimals")
def round_decimals(x: Value, decimals: int) -> Value:
    if x.is_exact and decimals >= 0:
        return x
    ten = 10.0 ** abs(decimals) if abs(decimals) < 309 else math.inf
    scaled = x * ten if decimals > 0 else x / ten
    return rint(scaled) / ten if decimals > 0 else rint(scaled) * ten


@pointwise("aten::reciprocal")
def reciprocal(x: Value) -> Value:
    return 1 / x


@pointwise("aten::exp2")
def exp2(x: Value) -> Value:
    return 2**x if x.is_float else exp(complex_functions.scaled(x, math.log(2)))


@pointwise("aten::sinc")
def sinc(x: Value) -> Value:
    angle = x * math.pi
    return where(x == 0, 1, sin(angle) / angle)


@rule("aten::abs")
def absolute(b: Builder, x: Value) -> Value:
    unsigned = x.dtype in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    return x if unsigned else abs(x)


@pointwise("aten::sign", "aten::sgn", exact=True)
def sign(x: Value) -> Value:
    if x.dtype == torch.bool:
        return x
    if x.is_complex:
        return complex_functions.sign(x)
    one = x.full(1)
    positive = where(x > 0, one, 0)
    return positive - where(x < 0, one, 0) if x.dtype.is_signed else positive  # 0 for nan


@predicate("aten::signbit")
def signbit(x: Value) -> Value:
    return sign_bit(x) if x.dtype.is_signed else (x != x)


@predicate("aten::isnan")
def isnan(x: Value) -> Value:
    return x.is_nan()


@predicate("aten::isinf")
def isinf(x: Value) -> Value:
    if x.is_complex:
        return isinf(x.real) | isinf(x.imag)
    return abs(x) == math.inf if x.is_float else x != x


@predicate("aten::isposinf")
def isposinf(x: Value) -> Value:
    return x == math.inf if x.is_float else x != x


@predicate("aten::isneginf")
def isneginf(x: Value) -> Value:
    return x == -math.inf if x.is_float else x != x


@pointwise("aten::nan_to_num", exact=True)
def nan_to_num(x: Value, nan: Value | None, posinf: Value | None, neginf: Value | None) -> Value:
    if x.is_exact:
        return x
    if x.is_complex:
        nan, posinf, neginf = (None if n is None else n.real for n in (nan, posinf, neginf))
        return x.b.complex(*(nan_to_num(p, nan, posinf, neginf) for p in (x.real, x.imag)))
    limits = torch.finfo(x.b.outputs[0].dtype)
    filled = where(x.is_nan(), 0 if nan is None else nan, x)
    filled = where(x == math.inf, limits.max if posinf is None else posinf, filled)
    return where(x == -math.inf, limits.min if neginf is None else neginf, filled)


# ---- two operands ----


@pointwise("aten::fmax", exact=True)
def fmax(x: Value, y: Value) -> Value:
    return maximum(x, y) if x.is_exact else where(x.is_nan() | (y >= x), where(y.is_nan(), x, y), x)


@pointwise("aten::fmin", exact=True)
def fmin(x: Value, y: Value) -> Value:
    return minimum(x, y) if x.is_exact else where(x.is_nan() | (y <= x), where(y.is_nan(), x, y), x)


@pointwise("aten::hypot")
def hypot(x: Value, y: Value) -> Value:
    x, y = abs(x), abs(y)
    great, small = maximum(x, y), minimum(x, y)
    ratio = where(great == 0, 0, small / great)
    scaled = great * sqrt(ratio * ratio + 1)
    return where((x == math.inf) | (y == math.inf), math.inf, scaled)


@pointwise("aten::copysign.Tensor", "aten::copysign.Scalar", exact=True)
def copysign(x: Value, y: Value) -> Value:
    return where(sign_bit(x) == sign_bit(y), x, -x)


@pointwise("aten::logaddexp")
def logaddexp(x: Value, y: Value) -> Value:
    if x.is_complex:
        first = (x.real < y.real) | (y.is_nan())
        great, small = where(first, y, x), where(first, x, y)
        return where((x == y) & isinf(x.real), x, great + log1p(exp(small - great)))
    same = (x == y) & isinf(x)
    return where(same, x, maximum(x, y) + log1p(exp(-abs(x - y))))


@pointwise("aten::logaddexp2")
def logaddexp2(x: Value, y: Value) -> Value:
    same = (x == y) & isinf(x)
    return where(same, x, maximum(x, y) + log1p(exp2(-abs(x - y))) / math.log(2))


def _times_log(x: Value, y: Value, logarithm: Value) -> Value:
    return where(y.is_nan(), y, where(x == 0, 0, x * logarithm))


@pointwise("aten::xlogy.Tensor", "aten::xlogy.Scalar_Self", "aten::xlogy.Scalar_Other")
def xlogy(x: Value, y: Value) -> Value:
    return _times_log(x, y, log(y))


@pointwise(
    "aten::special_xlog1py",
    "aten::special_xlog1py.self_scalar",
    "aten::special_xlog1py.other_scalar",
)
def xlog1py(x: Value, y: Value) -> Value:
    return _times_log(x, y, log1p(y))


@pointwise("aten::heaviside", exact=True)
def heaviside(x: Value, at_zero: Value) -> Value:
    return where(x == 0, at_zero, where(x > 0, x.full(1), 0))


@pointwise(
    "aten::bitwise_left_shift.Tensor",
    "aten::bitwise_left_shift.Tensor_Scalar",
    "aten::bitwise_left_shift.Scalar_Tensor",
    "aten::__lshift__.Tensor",
    "aten::__lshift__.Scalar",
)
def left_shift(x: Value, y: Value) -> Value:
    return x << y if x.is_exact else x * exp2(y)


@pointwise(
    "aten::bitwise_right_shift.Tensor",
    "aten::bitwise_right_shift.Tensor_Scalar",
    "aten::bitwise_right_shift.Scalar_Tensor",
    "aten::__rshift__.Tensor",
    "aten::__rshift__.Scalar",
)
def right_shift(x: Value, y: Value) -> Value:
    return x >> y if x.is_exact else x / exp2(y)


# ---- selection ----


@rule("aten::where.self")
def where_self(b: Builder, condition: Value, x: Value, y: Value) -> Value:
    return where(b.value(condition, torch.bool), *b.align(x, y, dtype=b.outputs[0].dtype))


@rule("aten::masked_fill.Scalar", "aten::masked_fill.Tensor")
def masked_fill(b: Builder, x: Value, mask: Value, value: Operand) -> Value:
    dtype = b.outputs[0].dtype
    return where(b.value(mask, torch.bool), b.value(value, dtype), b.value(x, dtype))


@rule("aten::fill.Scalar", "aten::fill.Tensor")
def fill(b: Builder, x: Value, value: Operand) -> Value:
    return b.full(b.outputs[0].shape, value, b.outputs[0].dtype)


@rule("aten::zero")
def zero(b: Builder, x: Value) -> Value:
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)
