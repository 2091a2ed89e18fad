"""Reductions: sums, extrema, moments, norms, softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import exp, log, sqrt, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Dims = list[int] | int | None


def _wide(b: Builder, x: Value) -> Value:
    """`x` in the dtype that PyTorch accumulates the first result in."""
    return b.value(x, b.compute_dtype(b.outputs[0].dtype))


def _reduce(x: Value, dims: list[int], kind: str, keepdim: bool = False) -> Value:
    return x.b.reduce(x, dims, kind, keepdim)


# ---- sums and products ----


@rule("aten::sum")
def sum_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return sum_dims(b, x, None, False, dtype)


@rule("aten::sum.dim_IntList")
def sum_dims(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return b.reduce(_wide(b, x), b.dims(x, dims), "sum", keepdim)


@rule("aten::nansum")
def nansum(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    if b.dtype(x).is_floating_point:
        x = b.select(b.is_nan(x), 0, x)
    return sum_dims(b, x, dims, keepdim, dtype)


@rule("aten::mean")
def mean_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return mean_dims(b, x, None, False, dtype)


@rule("aten::mean.dim")
def mean_dims(b: Builder, x: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return _wide(b, x).mean(b.dims(x, dims), keepdim)


@rule("aten::prod")
def prod_all(b: Builder, x: Value, dtype: torch.dtype | None) -> Value:
    return b.reduce(_wide(b, x), b.dims(x, None), "prod")


@rule("aten::prod.dim_int")
def prod_dim(b: Builder, x: Value, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Value:
    return b.reduce(_wide(b, x), b.dims(x, dim), "prod", keepdim)


@rule("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(b: Builder, x: Value, dims: Dims) -> Value:
    return b.reduce(b.convert(b.convert(x, torch.bool), torch.int64), b.dims(x, dims), "sum")


@rule("aten::trace")
def trace(b: Builder, x: Value) -> Value:
    shape = b.shape(x)
    diagonal = b.compare(b.iota(shape, 0, torch.int32), b.iota(shape, 1, torch.int32), "EQ")
    return b.reduce(b.select(diagonal, _wide(b, x), 0), [0, 1], "sum")


# ---- any and all ----


# An empty list of dimensions stands for none here, not for all.


@rule("aten::any", "aten::any.dim", "aten::any.dims")
def any_(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    dims = b.dims(x, dims, empty_is_all=False)
    return b.reduce(b.convert(x, torch.bool), dims, "or", keepdim)


@rule("aten::all", "aten::all.dim", "aten::all.dims")
def all_(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    dims = b.dims(x, dims, empty_is_all=False)
    return b.reduce(b.convert(x, torch.bool), dims, "and", keepdim)


@rule("aten::_is_any_true")
def is_any_true(b: Builder, x: Value) -> Value:
    return any_(b, x)


@rule("aten::_is_all_true")
def is_all_true(b: Builder, x: Value) -> Value:
    return all_(b, x)


# ---- extrema ----


@rule("aten::amax", "aten::max")
def amax(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return b.extremum(x, b.dims(x, dims), "max", keepdim)


@rule("aten::amin", "aten::min")
def amin(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    return b.extremum(x, b.dims(x, dims), "min", keepdim)


@rule("aten::aminmax")
def aminmax(b: Builder, x: Value, dim: int | None, keepdim: bool) -> tuple[Value, Value]:
    return amin(b, x, dim, keepdim), amax(b, x, dim, keepdim)


@rule("aten::_aminmax", "aten::_aminmax.dim")
def aminmax_dim(
    b: Builder, x: Value, dim: int | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    return aminmax(b, x, dim, keepdim)


def _with_index(b: Builder, x: Value, dim: int, kind: str, keepdim: bool) -> tuple[Value, Value]:
    if not b.shape(x):
        return x, b.zeros((), torch.int64)
    return b.arg_reduce(x, dim, kind, keepdim)


@rule("aten::max.dim")
def max_dim(b: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    return _with_index(b, x, dim, "max", keepdim)


@rule("aten::min.dim")
def min_dim(b: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    return _with_index(b, x, dim, "min", keepdim)


def _arg(b: Builder, x: Value, dim: int | None, kind: str) -> Value:
    if dim is None:
        x, dim = b.reshape(x, (-1,)), 0
    return b.reshape(_with_index(b, x, dim, kind, False)[1], b.outputs[0].shape)


@rule("aten::argmax")
def argmax(b: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return _arg(b, x, dim, "max")


@rule("aten::argmin")
def argmin(b: Builder, x: Value, dim: int | None, keepdim: bool) -> Value:
    return _arg(b, x, dim, "min")


# ---- moments ----


def _moments(
    b: Builder, x: Value, dims: Dims, correction: Value | None, keepdim: bool
) -> tuple[Value, Value]:
    """Variance (real) and mean, in two passes."""
    dims = b.dims(x, dims)
    x = b.value(x, b.compute_dtype(b.dtype(x)))
    mean = x.mean(dims, True)
    spread = x - b.broadcast_to(mean, b.shape(x))
    if spread.is_complex:
        square = spread.real * spread.real + spread.imag * spread.imag
    else:
        square = spread * spread
    total = _reduce(square, dims, "sum", keepdim)
    count = x.count(dims)
    if correction is None or b.is_const(correction):
        freedom = b.constant(
            max(count - (1 if correction is None else correction.number), 0), total.dtype
        )
    else:
        left = b.constant(count, total.dtype) - b.value(correction, total.dtype)
        freedom = b.hlo.maximum(left, b.constant(0, total.dtype))
    shape = b.shape(total)
    return total / b.broadcast_to(freedom, shape), b.reshape(mean, shape)


@rule("aten::var.correction")
def var(b: Builder, x: Value, dims: Dims, correction: Value | None, keepdim: bool) -> Value:
    return _moments(b, x, dims, correction, keepdim)[0]


@rule("aten::std.correction")
def std(b: Builder, x: Value, dims: Dims, correction: Value | None, keepdim: bool) -> Value:
    return sqrt(_moments(b, x, dims, correction, keepdim)[0])


@rule("aten::var_mean.correction")
def var_mean(
    b: Builder, x: Value, dims: Dims, correction: Value | None, keepdim: bool
) -> tuple[Value, Value]:
    variance, mean = _moments(b, x, dims, correction, keepdim)
    return variance, mean


@rule("aten::std_mean.correction")
def std_mean(
    b: Builder, x: Value, dims: Dims, correction: Value | None, keepdim: bool
) -> tuple[Value, Value]:
    variance, mean = _moments(b, x, dims, correction, keepdim)
    return sqrt(variance), mean


# ---- norms ----


def _power_sum(b: Builder, x: Value, dims: list[int], order: float, keepdim: bool) -> Value:
    """The sum of |x| ** order."""
    if order == 2 and x.is_complex:
        return _reduce(x.real * x.real + x.imag * x.imag, dims, "sum", keepdim)
    if order == 2:
        return _reduce(x * x, dims, "sum", keepdim)
    size = abs(x)
    powered = size if order == 1 else (size != 0).to(size.dtype) if order == 0 else size**order
    return _reduce(powered, dims, "sum", keepdim)


@rule("aten::linalg_vector_norm")
def vector_norm(
    b: Builder, x: Value, ord: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Value:
    # The order decides which computation it is, so it is a constant of the program.
    order = float(ord)
    dims = b.dims(x, dims)
    wanted = b.dtype(x) if dtype is None else dtype
    (x,) = operands(b, x, dtype=b.compute_dtype(wanted))
    if math.isinf(order):
        return b.extremum(abs(x), dims, "max" if order > 0 else "min", keepdim)
    total = _power_sum(b, x, dims, order, keepdim)
    if order in (0, 1):
        return total
    return sqrt(total) if order == 2 else total ** (1 / order)


@rule("aten::linalg__powsum")
def powsum(
    b: Builder, x: Value, ord: Value, dims: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Value:
    dims, wanted = b.dims(x, dims), b.dtype(x) if dtype is None else dtype
    (x,) = operands(b, x, dtype=b.compute_dtype(wanted))
    return _power_sum(b, x, dims, float(ord), keepdim)


@rule("aten::norm.Scalar", "aten::norm.ScalarOpt_dim")
def norm(b: Builder, x: Value, p: Value | None, dims: Dims = None, keepdim: bool = False) -> Value:
    return vector_norm(b, x, 2.0 if p is None else p, dims, keepdim, None)


@rule("aten::norm.ScalarOpt_dim_dtype")
def norm_dim_dtype(
    b: Builder, x: Value, p: Value | None, dims: Dims, keepdim: bool, dtype: torch.dtype
) -> Value:
    return vector_norm(b, x, 2.0 if p is None else p, dims, keepdim, dtype)


@rule("aten::norm.ScalarOpt_dtype")
def norm_dtype(b: Builder, x: Value, p: Value | None, dtype: torch.dtype) -> Value:
    return vector_norm(b, x, 2.0 if p is None else p, None, False, dtype)


@rule("aten::dist")
def dist(b: Builder, x: Value, y: Value, p: Value) -> Value:
    wide = b.compute_dtype(b.result_type(x, y))
    x, y = operands(b, x, y, dtype=wide)
    return vector_norm(b, (x - y), p, None, False, None)


@rule("aten::renorm")
def renorm(b: Builder, x: Value, p: Value, dim: int, maxnorm: Value) -> Value:
    """Slices along `dim` whose norm exceeds `maxnorm` are scaled down to it."""
    dim %= b.rank(x)
    (x,) = operands(b, x)
    dims = [d for d in range(b.rank(x)) if d != dim]
    size = vector_norm(b, x, p, dims, True, None)
    limit = b.full(b.shape(size), maxnorm, size.dtype)
    factor = where(size > limit, limit / (size + 1e-7), 1)
    return x * _along(b, b.convert(factor, x.dtype), x)


# ---- exponentials ----


@rule("aten::logsumexp")
def logsumexp(b: Builder, x: Value, dims: Dims, keepdim: bool) -> Value:
    dims = b.dims(x, dims)
    (x,) = operands(b, x)
    top = _reduce(x.real if x.is_complex else x, dims, "max", True)
    top = where(abs(top) == math.inf, 0, top)
    shift = b.broadcast_to(b.convert(top, x.dtype), b.shape(x))
    total = log(_reduce(exp(x - shift), dims, "sum", True)) + top.to(x.dtype)
    return b.reshape(total, b.outputs[0].shape)


def _along(b: Builder, reduced: Value, like: Value) -> Value:
    return b.broadcast_to(reduced, b.shape(like))


def _shifted(b: Builder, x: Value, dim: int) -> tuple[Value, Value]:
    """x less its maximum along `dim`, and the sum of the exponentials of that."""
    top = b.reduce(x, [dim], "max", True)
    shifted = x - _along(b, top, x)
    total = b.reduce(exp(shifted), [dim], "sum", True)
    return shifted, _along(b, total, x)


@rule("aten::_softmax")
def softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    (x,) = operands(b, x)
    shifted, total = _shifted(b, x, dim)
    return exp(shifted) / total


@rule("aten::_safe_softmax")
def safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    """Softmax with zeros where everything along `dim` is -inf."""
    (x,) = operands(b, x)
    shifted, total = _shifted(b, x, dim)
    masked = b.reduce((x == -math.inf), [dim], "and", True)
    return where(_along(b, masked, x), 0, exp(shifted) / total)


@rule("aten::_log_softmax")
def log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    (x,) = operands(b, x)
    shifted, total = _shifted(b, x, dim)
    return shifted - log(total)


@rule("aten::_softmax_backward_data")
def softmax_backward(
    b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    grad, output = operands(b, grad, output)
    total = b.reduce((grad * output), [dim], "sum", True)
    if b.platform == "tpu":
        # In attention the gradient is read by two products. XLA would compute the sums in both of
        # them again, and the weights for them; so it adds them up where the gradient is made.
        total = b.hlo.optimization_barrier([total])
    return output * (grad - _along(b, total, grad))


@rule("aten::_log_softmax_backward_data")
def log_softmax_backward(
    b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    grad, output = operands(b, grad, output)
    total = b.reduce(grad, [dim], "sum", True)
    return grad - exp(output) * _along(b, total, grad)
