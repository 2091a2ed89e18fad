"""PyTorch's prims, which its reference decompositions end in.

An element-wise prim is lowered by the rule of the ATen operator of the same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import is_finite, where
from lazyxla.lowering.registry import graph_rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


Dims = list[int] | int | None


# prims::x is aten::x.
# fmt: off
_SAME = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_not", "ceil", "cos",
    "cosh", "digamma", "erf", "erfc", "exp", "exp2", "expm1", "floor", "fmax", "fmin",
    "frexp.Tensor", "gcd", "hypot", "igamma", "igammac", "lgamma", "log", "log10", "log1p", "log2",
    "maximum", "minimum", "neg", "nextafter", "reciprocal", "round", "rsqrt", "sign", "signbit",
    "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
]
# fmt: on

# Prim -> ATen operator and what follows the tensors among its arguments.
_RENAMED: dict[str, tuple[Any, ...]] = {
    "add": ("add.Tensor", 1),
    "sub": ("sub.Tensor", 1),
    "mul": ("mul.Tensor",),
    "pow": ("pow.Tensor_Tensor",),
    "fmod": ("fmod.Tensor",),
    "remainder": ("remainder.Tensor",),
    "bitwise_and": ("bitwise_and.Tensor",),
    "bitwise_or": ("bitwise_or.Tensor",),
    "bitwise_xor": ("bitwise_xor.Tensor",),
    "shift_left": ("bitwise_left_shift.Tensor",),
    "shift_right_arithmetic": ("bitwise_right_shift.Tensor",),
    "eq": ("eq.Tensor",),
    "ne": ("ne.Tensor",),
    "lt": ("lt.Tensor",),
    "le": ("le.Tensor",),
    "gt": ("gt.Tensor",),
    "ge": ("ge.Tensor",),
    "erf_inv": ("erfinv",),
    "erfcx": ("special_erfcx",),
    "ndtri": ("special_ndtri",),
    "zeta": ("special_zeta",),
    "bessel_i0": ("i0",),
    "bessel_i0e": ("special_i0e",),
    "bessel_i1": ("special_i1",),
    "bessel_i1e": ("special_i1e",),
    "bessel_j0": ("special_bessel_j0",),
    "bessel_j1": ("special_bessel_j1",),
    "spherical_bessel_j0": ("special_spherical_bessel_j0",),
}

_REDUCTIONS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min", "xor_sum": "xor"}


def _as_aten(name: str, rest: tuple[Any, ...]) -> Callable[..., Any]:
    def lower(b: Builder, *xs: Value) -> Any:
        return b.lower_op(f"aten::{name}", *xs, *rest)

    return lower


def _reduction(kind: str) -> Callable[..., Value]:
    def lower(b: Builder, x: Value, dims: Dims, dtype: torch.dtype | None) -> Value:
        reduce = b.extremum if kind in ("max", "min") else b.reduce
        return reduce(x.to(b.outputs[0].dtype), b.dims(x, dims), kind)

    return lower


for _name in _SAME:
    graph_rule(f"prims::{_name.partition('.')[0]}")(_as_aten(_name, ()))
for _name, (_target, *_rest) in _RENAMED.items():
    graph_rule(f"prims::{_name}")(_as_aten(_target, tuple(_rest)))
for _name, _kind in _REDUCTIONS.items():
    graph_rule(f"prims::{_name}")(_reduction(_kind))


@graph_rule("prims::div")
def div(b: Builder, x: Value, y: Value) -> Value:
    """Truncates for integers, as HLO's division does."""
    x, y = operands(b, x, y, dtype=b.outputs[0].dtype)
    return x / y


@graph_rule("prims::fma")
def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """In torch.compile's graphs, where it replaces addcmul."""
    x, y, z = operands(b, x, y, z, dtype=b.outputs[0].dtype)
    return x * y + z


@graph_rule("prims::cbrt")
def cbrt(b: Builder, x: Value) -> Value:
    return x.call("cbrt")


@graph_rule("prims::isfinite")
def isfinite(b: Builder, x: Value) -> Value:
    return is_finite(x.accumulated())


@graph_rule("prims::var")
def var(
    b: Builder,
    x: Value,
    dims: Dims,
    correction: Scalar | float | None,
    dtype: torch.dtype | None,
) -> Value:
    over = b.dims(x, dims)
    x = x.to(b.compute_dtype(b.outputs[0].dtype))
    deviation = x - x.mean(over, keepdim=True)
    freedom = x.count(over) - (1.0 if correction is None else float(correction))
    return (deviation * deviation).sum(over) / max(freedom, 0.0)


@graph_rule("prims::where")
def select(b: Builder, predicate: Value, x: Value, y: Value) -> Value:
    return where(predicate, *b.align(x, y, dtype=b.outputs[0].dtype))


@graph_rule("prims::convert_element_type", "prims::device_put", "prims::clone", "prims::view_of")
@graph_rule("prims::copy_strided", "prims::scalar_tensor")
def converted(b: Builder, x: Operand, *_: Any) -> Value:
    return b.value(x, b.outputs[0].dtype)


@graph_rule("prims::conj", "prims::conj_physical")
def conj(b: Builder, x: Value) -> Value:
    return b.lower_op("aten::_conj", x)


@graph_rule("prims::real")
def real(b: Builder, x: Value) -> Value:
    return x.real


@graph_rule("prims::imag")
def imag(b: Builder, x: Value) -> Value:
    return x.imag


@graph_rule("prims::fill")
def fill(b: Builder, x: Value, value: Operand) -> Value:
    return x.full(value)


@graph_rule("prims::empty_strided", "prims::empty_permuted")
def empty(b: Builder, *_: Any) -> Value:
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("prims::iota")
def iota(b: Builder, length: int, start: int, step: int, dtype: torch.dtype, *_: Any) -> Value:
    i = b.scale(b.iota([length], 0, dtype), step)
    return i + start if start else i


@graph_rule("prims::cat")
def cat(b: Builder, xs: list[Value], dim: int) -> Value:
    return b.concat(xs, dim)


@graph_rule("prims::rev")
def rev(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return b.flip(x, dims)


@graph_rule("prims::transpose")
def transpose(b: Builder, x: Value, permutation: Sequence[int]) -> Value:
    return b.transpose(x, permutation)


@graph_rule("prims::broadcast_in_dim")
def broadcast_in_dim(b: Builder, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    inner = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        inner[dim] = size
    return b.broadcast_to(x.reshape(inner), shape)


@graph_rule("prims::reshape", "prims::squeeze", "prims::collapse", "prims::collapse_view")
@graph_rule("prims::split_dim")
def reshaped(b: Builder, x: Value, *_: Any) -> Value:
    return x.reshape(b.outputs[0].shape)


@graph_rule("prims::as_strided", "prims::as_strided_scatter")
def _strided(b: Builder, *args: Any) -> Value:
    name = "as_strided" if len(args) == 4 else "as_strided_scatter"
    return b.lower_op(f"aten::{name}", *args)
