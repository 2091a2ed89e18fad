"""Reductions: sums, extrema, moments, norms, softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import exp, log, maximum, sqrt, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Dims = list[int] | int | None
Order = Scalar | float


def _accumulated(b: Builder, x: Value) -> Value:
    """`x` in the dtype that PyTorch accumulates the first result in."""
    return x.to(b.compute_dtype(b.outputs[0].dtype))


# ---- sums and products ----


@rule("aten::sum")
def sum_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return sum_dims(b, x, None, False, dtype)


@rule("aten::sum.dim_IntList")
def sum_dims(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return _accumulated(b, x).sum(b.dims(x, dims), keepdim)


@rule("aten::nansum")
def nansum(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    x = where(x.is_nan(), 0, x) if x.is_float else x
    return sum_dims(b, x, dims, keepdim, dtype)


@rule("aten::mean")
def mean_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return mean_dims(b, x, None, False, dtype)


@rule("aten::mean.dim")
def mean_dims(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return _accumulated(b, x).mean(b.dims(x, dims), keepdim)


@rule("aten::prod")
def prod_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return b.reduce(_accumulated(b, x), b.dims(x, None), "prod")


@rule("aten::prod.dim_int")
def prod_dim(b: Builder, x: Value, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return b.reduce(_accumulated(b, x), b.dims(x, dim), "prod", keepdim)


@rule("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(b: Builder, x: Value, dims: Dims) -> Value:
    return x.to(torch.bool).to(torch.int64).sum(b.dims(x, dims))


# ---- any and all ----


# An empty list of dimensions means none here, not all.


@rule("aten::any", "aten::any.dim", "aten::any.dims", "aten::_is_any_true")
def any_(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    dims = b.dims(x, dims, empty_is_all=False)
    return b.reduce(x.to(torch.bool), dims, "or", keepdim)


@rule("aten::all", "aten::all.dim", "aten::all.dims", "aten::_is_all_true")
def all_(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    dims = b.dims(x, dims, empty_is_all=False)
    return b.reduce(x.to(torch.bool), dims, "and", keepdim)


# ---- extrema ----


@rule("aten::amax", "aten::max")
def amax(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return b.extremum(x, b.dims(x, dims), "max", keepdim)


@rule("aten::amin", "aten::min")
def amin(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return b.extremum(x, b.dims(x, dims), "min", keepdim)


@rule("aten::aminmax", "aten::_aminmax", "aten::_aminmax.dim")
def aminmax(
    b: Builder, x: Value, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return amin(b, x, dim, keepdim), amax(b, x, dim, keepdim)


@rule("aten::max.dim")
def max_dim(b: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    return b.arg_reduce(x, dim, "max", keepdim)


@rule("aten::min.dim")
def min_dim(b: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    return b.arg_reduce(x, dim, "min", keepdim)


def _arg(b: Builder, x: Value, dim: int | None, kind: str) -> Value:
    if dim is None:
        x, dim = x.reshape([-1]), 0
    return b.arg_reduce(x, dim, kind)[1].reshape(b.outputs[0].shape)


@rule("aten::argmax")
def argmax(b: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return _arg(b, x, dim, "max")


@rule("aten::argmin")
def argmin(b: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return _arg(b, x, dim, "min")


# ---- moments ----


def _moments(
    b: Builder, x: Value, dims: Dims, correction: Operand | None, keepdim: bool
) -> tuple[Value, Value]:
    """Variance (real) and mean, in two passes."""
    dims = b.dims(x, dims)
    x = x.accumulated()
    mean = x.mean(dims, keepdim=True)
    squares = _squared(x - mean).sum(dims, keepdim)
    correction = 1 if correction is None else correction
    freedom: Operand
    if (known := b.known(correction)) is not None:
        freedom = max(x.count(dims) - known.real, 0)
    else:
        freedom = maximum(x.count(dims) - b.value(correction, squares.dtype), 0)
    return squares / freedom, mean.reshape(squares.shape)


def _squared(x: Value) -> Value:
    """|x| ** 2."""
    return x.real * x.real + x.imag * x.imag if x.is_complex else x * x


@rule("aten::var.correction")
def var(b: Builder, x: Value, dims: Dims, correction: Operand | None, keepdim: bool) -> Value:
    return _moments(b, x, dims, correction, keepdim)[0]


@rule("aten::std.correction")
def std(b: Builder, x: Value, dims: Dims, correction: Operand | None, keepdim: bool) -> Value:
    return sqrt(_moments(b, x, dims, correction, keepdim)[0])


@rule("aten::var_mean.correction")
def var_mean(
    b: Builder, x: Value, dims: Dims, correction: Operand | None, keepdim: bool
) -> tuple[Value, Value]:
    return _moments(b, x, dims, correction, keepdim)


@rule("aten::std_mean.correction")
def std_mean(
    b: Builder, x: Value, dims: Dims, correction: Operand | None, keepdim: bool
) -> tuple[Value, Value]:
    variance, mean = _moments(b, x, dims, correction, keepdim)
    return sqrt(variance), mean


# ---- norms ----


def _power(x: Value, order: float) -> Value:
    """|x| ** order, where 0 ** 0 is 0."""
    if order == 2:
        return _squared(x)
    size = abs(x)
    return size if order == 1 else (size != 0).to(size.dtype) if order == 0 else size**order


@rule("aten::linalg_vector_norm")
def vector_norm(
    b: Builder, x: Value, ord: Order, dims: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Value:
    # The order decides which computation it is, so it is a constant of the program.
    order = float(ord)
    dims = b.dims(x, dims)
    x = x.to(b.compute_dtype(dtype or x.dtype))
    if math.isinf(order):
        return b.extremum(abs(x), dims, "max" if order > 0 else "min", keepdim)
    total = _power(x, order).sum(dims, keepdim)
    if order in (0, 1):
        return total
    return sqrt(total) if order == 2 else total ** (1 / order)


@rule("aten::linalg__powsum")
def powsum(
    b: Builder, x: Value, ord: Order, dims: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Value:
    x = x.to(b.compute_dtype(dtype or x.dtype))
    return _power(x, float(ord)).sum(b.dims(x, dims), keepdim)


@rule("aten::norm.Scalar", "aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype")
def norm(
    b: Builder,
    x: Value,
    p: Order | None,
    dims: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Value:
    return vector_norm(b, x, 2.0 if p is None else p, dims, keepdim, dtype)


@rule("aten::norm.ScalarOpt_dtype")
def norm_dtype(b: Builder, x: Value, p: Order | None, dtype: torch.dtype) -> Value:
    return norm(b, x, p, None, False, dtype)


@rule("aten::renorm")
def renorm(b: Builder, x: Value, p: Order, dim: int, maxnorm: Operand) -> Value:
    """Slices along `dim` whose norm exceeds `maxnorm` are scaled down to it."""
    x = _accumulated(b, x)
    dims = [d for d in range(x.rank) if d != dim % x.rank]
    size = vector_norm(b, x, p, dims, True, None)
    limit = size.full(maxnorm)
    return x * where(size > limit, limit / (size + 1e-7), 1).to(x.dtype)


# ---- exponentials ----


@rule("aten::logsumexp")
def logsumexp(b: Builder, x: Value, dims: Dims, keepdim: bool) -> Value:
    dims = b.dims(x, dims)
    x = _accumulated(b, x)
    top = b.reduce(x.real if x.is_complex else x, dims, "max", True)
    top = where(abs(top) == math.inf, 0, top).to(x.dtype)
    total = log(exp(x - top).sum(dims, keepdim=True)) + top
    return total.reshape(b.outputs[0].shape)


def _shifted(x: Value, dim: int) -> tuple[Value, Value]:
    """x less its maximum along `dim`, and the sum of the exponentials of that."""
    shifted = x - x.b.reduce(x, [dim], "max", True)
    return shifted, exp(shifted).sum([dim], keepdim=True)


@rule("aten::_softmax")
def softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, total = _shifted(_accumulated(b, x), dim)
    return exp(shifted) / total


@rule("aten::_safe_softmax")
def safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    """Softmax with zeros where everything along `dim` is -inf."""
    x = _accumulated(b, x)
    shifted, total = _shifted(x, dim)
    masked = b.reduce(x == -math.inf, [dim], "and", True)
    return where(masked, 0, exp(shifted) / total)


@rule("aten::_log_softmax")
def log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, total = _shifted(_accumulated(b, x), dim)
    return shifted - log(total)


@rule("aten::_softmax_backward_data")
def softmax_backward(
    b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    grad, output = operands(b, grad, output)
    total = b.computed_once((grad * output).sum([dim], keepdim=True))
    return output * (grad - total)


@rule("aten::_log_softmax_backward_data")
def log_softmax_backward(
    b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    grad, output = operands(b, grad, output)
    return grad - exp(output) * grad.sum([dim], keepdim=True)
