"""Matrix products, and the linear algebra that XLA has operations for.

A transpose that a product reads is folded into its dimension numbers (`Builder.dot`), so that a
product with a transposed weight is one `dot_general` on the weight as it lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# ---- products ----


@rule("aten::mm", "aten::bmm")
def mm(b: Builder, x: Value, y: Value) -> Value:
    return b.matmul(x, y)


@rule("aten::mm.dtype", "aten::bmm.dtype")
def mm_to(b: Builder, x: Value, y: Value, dtype: torch.dtype) -> Value:
    return b.matmul(x, y, dtype)


@rule("aten::_int_mm")
def int_mm(b: Builder, x: Value, y: Value) -> Value:
    return b.matmul(x, y, torch.int32)


@rule("aten::mv", "aten::dot")
def mv(b: Builder, x: Value, y: Value) -> Value:
    return b.dot(x, y, [-1], [0])


@rule("aten::vdot")
def vdot(b: Builder, x: Value, y: Value) -> Value:
    if b.dtype(x).is_complex:
        x = b.complex(b.hlo.real(x), b.hlo.negate(b.hlo.imag(x)))
    return b.dot(x, y, [0], [0])


# ---- products added to something ----


@rule("aten::addmm", "aten::baddbmm")
def addmm(b: Builder, bias: Value, x: Value, y: Value, beta: Value, alpha: Value) -> Value:
    return _add(b, bias, b.matmul(x, y, b.compute_dtype(b.dtype(x))), beta, alpha)


@rule("aten::addmm.dtype", "aten::baddbmm.dtype")
def addmm_to(
    b: Builder, bias: Value, x: Value, y: Value, dtype: torch.dtype, beta: Value, alpha: Value
) -> Value:
    return _add(b, bias, b.matmul(x, y, dtype), beta, alpha)


@rule("aten::_addmm_activation")
def addmm_activation(
    b: Builder, bias: Value, x: Value, y: Value, beta: Value, alpha: Value, use_gelu: bool
) -> Value:
    total = addmm(b, bias, x, y, beta, alpha)
    if use_gelu:
        return b.lower_op("aten::gelu", total, "none")
    return b.lower_op("aten::relu", total)


@rule("aten::addbmm")
def addbmm(b: Builder, bias: Value, x: Value, y: Value, beta: Value, alpha: Value) -> Value:
    # The sum over the batch is one more contracted dimension.
    x = b.swap(x, 0, 1)
    product = b.dot(x, y, [1, 2], [0, 1], dtype=b.compute_dtype(b.dtype(x)))
    return _add(b, bias, product, beta, alpha)


@rule("aten::addmv")
def addmv(b: Builder, bias: Value, x: Value, y: Value, beta: Value, alpha: Value) -> Value:
    product = b.dot(x, y, [1], [0], dtype=b.compute_dtype(b.dtype(x)))
    if 0 in b.shape(product):  # the one element of the bias stays in PyTorch
        product = b.zeros(b.outputs[0].shape, b.dtype(product))
    return _add(b, bias, product, beta, alpha)


@rule("aten::addr")
def addr(b: Builder, bias: Value, x: Value, y: Value, beta: Value, alpha: Value) -> Value:
    dtype, shape = b.outputs[0]
    wide = b.compute_dtype(dtype)
    x, y = (b.value(v, wide) for v in (x, y))
    x = b.broadcast_to(b.unsqueeze(x, 1), shape)
    y = b.broadcast_to(b.unsqueeze(y, 0), shape)
    return _add(b, bias, b.combine("and" if dtype == torch.bool else "mul", x, y), beta, alpha)


def _add(b: Builder, bias: Value, product: Value, beta: Value, alpha: Value) -> Value:
    """beta * bias + alpha * product; a bias times 0 is not read: its nan does not count."""
    dtype = b.dtype(product)
    times, plus = ("and", "or") if dtype == torch.bool else ("mul", "add")

    def scale(x: Value, factor: Value) -> Value:
        if b.is_const(factor, 1):
            return x
        return b.combine(times, x, b.full(b.shape(x), factor, dtype))

    product = scale(product, alpha)
    if b.is_const(beta, 0):
        return product
    bias = b.value(bias, dtype)
    if not b.is_const(beta):
        unused = b.compare(b.value(beta, dtype), b.constant(0, dtype), "EQ")
        bias = b.select(unused, 0, bias)
    bias = b.broadcast_to(scale(bias, beta), b.shape(product))
    return b.combine(plus, bias, product)


# ---- linear layers ----


@rule("aten::linear")
def linear(b: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    """x (..., I) by weight (O, I), and bias (O,)."""
    rows, wide = _as_rows(b, x), b.compute_dtype(b.dtype(x))
    product = b.dot(rows, weight, [-1], [1], dtype=wide)
    product = b.reshape(product, b.outputs[0].shape)
    if bias is not None:
        product = b.hlo.add(product, b.broadcast_to(b.convert(bias, wide), b.shape(product)))
    return product


@rule("aten::linear_backward")
def linear_backward(
    b: Builder, x: Value, grad: Value, weight: Value, output_mask: list[bool]
) -> tuple[Value | None, ...]:
    """The gradients of x (..., I), weight (O, I) and bias (O,) by that of the result (..., O)."""
    rows, above = _as_rows(b, x), _as_rows(b, grad)
    lead = list(range(b.rank(rows) - 1))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = b.reshape(b.dot(above, weight, [-1], [0]), b.shape(x))
    if output_mask[1]:
        grad_weight = b.dot(above, rows, lead, lead)
    if output_mask[2]:
        grad_bias = b.reduce(above, lead, "sum")
    return grad_x, grad_weight, grad_bias


def _as_rows(b: Builder, x: Value) -> Value:
    """A matrix of the rows of x (..., I); in a program for many devices x with its dimensions.

    The partitioner cannot split rows along two dimensions that were made one, such as samples and
    positions: it would give each device all positions.
    """
    *lead, size = b.shape(x)
    if b.annotations is not None and len(lead) > 1:
        return x
    return b.reshape(x, [math.prod(lead), size])


# ---- triangular matrices ----


@rule("aten::linalg_cholesky_ex")
def cholesky_ex(b: Builder, x: Value, upper: bool, check_errors: bool) -> tuple[Value, Value]:
    factor = cholesky(b, x, upper)
    diagonal = b.reduce(b.select(_triangle(b, factor, "EQ"), factor, 0), [-1], "sum")
    if b.dtype(diagonal).is_complex:
        diagonal = b.hlo.real(diagonal)
    # XLA reports a matrix that is not positive definite as nan, without the failing minor's number,
    # but takes the root of a zero.
    good = b.reduce(b.compare(diagonal, b.full_like(diagonal, 0), "GT"), [-1], "and")
    return factor, b.convert(b.hlo.not_(good), torch.int32)


@rule("aten::cholesky")
def cholesky(b: Builder, x: Value, upper: bool) -> Value:
    factor = b.hlo.cholesky(_adjoint(b, x) if upper else x, lower=True)
    factor = b.select(_triangle(b, factor, "GE"), factor, 0)
    return _adjoint(b, factor) if upper else factor


@rule("aten::linalg_solve_triangular")
def solve_triangular(
    b: Builder, a: Value, y: Value, upper: bool, left: bool, unitriangular: bool
) -> Value:
    shape = b.outputs[0].shape
    n = b.shape(a)[-1]
    a = b.broadcast_to(a, [*shape[:-2], n, n])
    return _solve(b, a, b.broadcast_to(y, shape), left, not upper, unitriangular, "NO_TRANSPOSE")


@rule("aten::triangular_solve")
def triangular_solve(
    b: Builder, y: Value, a: Value, upper: bool, transpose: bool, unitriangular: bool
) -> tuple[Value, Value]:
    solution, copy = b.outputs
    a, y = b.broadcast_to(a, copy.shape), b.broadcast_to(y, solution.shape)
    kind = "TRANSPOSE" if transpose else "NO_TRANSPOSE"
    return _solve(b, a, y, True, not upper, unitriangular, kind), a


@rule("aten::cholesky_solve")
def cholesky_solve(b: Builder, y: Value, factor: Value, upper: bool) -> Value:
    shape = b.outputs[0].shape
    n = b.shape(factor)[-1]
    factor = b.broadcast_to(factor, [*shape[:-2], n, n])
    y = b.broadcast_to(y, shape)
    kinds = ("ADJOINT", "NO_TRANSPOSE") if upper else ("NO_TRANSPOSE", "ADJOINT")
    for kind in kinds:
        y = _solve(b, factor, y, True, not upper, False, kind)
    return y


def _solve(b: Builder, a: Value, y: Value, left: bool, lower: bool, unit: bool, kind: str) -> Value:
    return b.hlo.triangular_solve(a, y, left, lower, unit, b.hlo.TransposeAttr.get(kind))


def _adjoint(b: Builder, x: Value) -> Value:
    if b.dtype(x).is_complex:
        x = b.complex(b.hlo.real(x), b.hlo.negate(b.hlo.imag(x)))
    return b.swap(x, -2, -1)


def _triangle(b: Builder, x: Value, direction: str) -> Value:
    """Where row `direction` column holds, in the shape of `x`."""
    shape, rank = b.shape(x), b.rank(x)
    rows, columns = (b.iota(shape, rank - d, torch.int32) for d in (2, 1))
    return b.compare(rows, columns, direction)


# ---- distances ----


def _norm(p: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The reduction over the last dimension of a p-norm of absolute differences, and its root."""
    import jax.numpy as jnp

    if p == 0:
        # How many are not zero; nan if one is.
        return lambda d: jnp.minimum(jnp.ceil(d), 1).sum(-1), lambda s: s
    if p == float("inf"):
        return lambda d: d.max(-1, initial=0), lambda s: s
    if p == 2:
        return lambda d: (d * d).sum(-1), jnp.sqrt
    return lambda d: (d**p).sum(-1), lambda s: s ** (1 / p)


@jax_rule("aten::_cdist_forward", static=("p",))
def cdist(x: Any, y: Any, p: float, compute_mode: int | None) -> Any:
    import jax.numpy as jnp

    total, root = _norm(p)
    return root(total(jnp.abs(x[..., :, None, :] - y[..., None, :, :])))


def _norm_slope(difference: Any, p: float, distance: Any) -> Any:
    """The derivative of a p-norm by the differences."""
    import jax.numpy as jnp

    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == float("inf"):
        return sign * (size == distance)
    # Where p < 2 the power of a zero difference is infinite; its contribution counts as zero.
    some = (distance != 0) & (size != 0)
    ratio = jnp.where(some, size, 1) / jnp.where(some, distance, 1)
    return jnp.where(some, sign * ratio ** (p - 1), 0)


@jax_rule("aten::_cdist_backward", static=("p",))
def cdist_backward(grad: Any, x: Any, y: Any, p: float, distance: Any, *, outputs: Any) -> Any:
    difference = x[..., :, None, :] - y[..., None, :, :]
    result = (grad[..., None] * _norm_slope(difference, p, distance[..., None])).sum(-2)
    # Without elements PyTorch does not broadcast the batches of x.
    return result.reshape(outputs[0].shape) if result.size else x * 0


def _pairs(count: int) -> tuple[Any, Any]:
    """The rows of all pairs, in the order of pdist."""
    import numpy as np

    return np.triu_indices(count, 1)


@jax_rule("aten::_pdist_forward", static=("p",))
def pdist(x: Any, p: float) -> Any:
    import jax.numpy as jnp

    first, second = _pairs(x.shape[0])
    total, root = _norm(p)
    size = jnp.abs(x[first] - x[second])
    result = root(total(size))
    if p == float("inf"):
        # XLA's CPU backend drops nan from the maximum. PyTorch's cdist does so, too, its pdist not.
        result = jnp.where(jnp.isnan(size).any(-1), jnp.nan, result)
    return result


@jax_rule("aten::_pdist_backward", static=("p",))
def pdist_backward(grad: Any, x: Any, p: float, distance: Any) -> Any:
    import jax.numpy as jnp

    first, second = _pairs(x.shape[0])
    part = grad[:, None] * _norm_slope(x[first] - x[second], p, distance[:, None])
    return jnp.zeros_like(x).at[first].add(part).at[second].add(-part)
