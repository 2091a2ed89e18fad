"""Matmul, matmul added to something, and linear layers.

A transpose that a matmul reads is folded into its dimension numbers (`Builder.dot`), so that a
matmul with a transposed weight is one `dot_general` on the weight in its own layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import conj, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


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
    return b.dot(conj(x), y, [0], [0])


# ---- matmul added to something: beta * bias + alpha * (x @ y) ----


@rule("aten::addmm", "aten::baddbmm")
def addmm(b: Builder, bias: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Value:
    return _add(b, bias, b.matmul(x, y, b.compute_dtype(x.dtype)), beta, alpha)


@rule("aten::addmm.dtype", "aten::baddbmm.dtype")
def addmm_to(
    b: Builder, bias: Value, x: Value, y: Value, dtype: torch.dtype, beta: Operand, alpha: Operand
) -> Value:
    return _add(b, bias, b.matmul(x, y, dtype), beta, alpha)


@rule("aten::addbmm")
def addbmm(b: Builder, bias: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Value:
    # The sum over the batch is one more contracted dimension.
    product = b.dot(b.swap(x, 0, 1), y, [1, 2], [0, 1], dtype=b.compute_dtype(x.dtype))
    return _add(b, bias, product, beta, alpha)


@rule("aten::addmv")
def addmv(b: Builder, bias: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Value:
    product = b.dot(x, y, [1], [0], dtype=b.compute_dtype(x.dtype))
    if 0 in product.shape:  # the one element of the bias stays in PyTorch
        product = b.zeros(b.outputs[0].shape, product.dtype)
    return _add(b, bias, product, beta, alpha)


@rule("aten::addr")
def addr(b: Builder, bias: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Value:
    dtype = b.compute_dtype(b.outputs[0].dtype)
    x, y = b.unsqueeze(x.to(dtype), 1), b.unsqueeze(y.to(dtype), 0)
    return _add(b, bias, x & y if dtype == torch.bool else x * y, beta, alpha)


def _add(b: Builder, bias: Value, product: Value, beta: Operand, alpha: Operand) -> Value:
    """beta * bias + alpha * product; a bias times 0 is not read: its nan does not count."""

    def scale(x: Value, factor: Operand) -> Value:
        if b.is_const(factor, 1):
            return x
        return x & x.full(factor) if x.dtype == torch.bool else x * x.full(factor)

    product = scale(product, alpha)
    if b.is_const(beta, 0):
        return product
    bias = bias.to(product.dtype)
    if not b.is_const(beta):
        factor = b.value(beta, bias.dtype)
        bias = where(factor == factor.full(0), 0, bias)
    return scale(bias, beta) + product


# ---- linear layers ----


@rule("aten::linear")
def linear(b: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    """x (..., I) by weight (O, I), and bias (O,)."""
    product = b.dot(_as_rows(b, x), weight, [-1], [1], dtype=b.compute_dtype(x.dtype))
    shape = b.outputs[0].shape
    if bias is None:
        return product.reshape(shape)
    # A vector is a row to PyTorch: its bias may be a row, too.
    return (product.reshape([*(shape[:-1] or [1]), shape[-1]]) + bias).reshape(shape)


@rule("aten::linear_backward")
def linear_backward(
    b: Builder, x: Value, grad: Value, weight: Value, output_mask: list[bool]
) -> tuple[Value | None, ...]:
    """The gradients of x (..., I), weight (O, I) and bias (O,) by that of the result (..., O)."""
    rows, grad = _as_rows(b, x), _as_rows(b, grad)
    lead = list(range(rows.rank - 1))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = b.dot(grad, weight, [-1], [0]).reshape(x.shape)
    if output_mask[1]:
        grad_weight = b.dot(grad, rows, lead, lead)
    if output_mask[2]:
        grad_bias = grad.sum(lead)
    return grad_x, grad_weight, grad_bias


def _as_rows(b: Builder, x: Value) -> Value:
    """A matrix of the rows of x (..., I); in a program for many devices x with its dimensions.

    The partitioner cannot split rows along two dimensions that were made one, such as samples and
    positions: it would give each device all positions.
    """
    *lead, size = x.shape
    if b.annotations is not None and len(lead) > 1:
        return x
    return x.reshape([math.prod(lead), size])


# ---- three operands: nn.Bilinear and its gradients ----


@rule("aten::_trilinear")
def trilinear(
    b: Builder,
    x: Value,
    y: Value,
    z: Value,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int,
) -> Value:
    """The sum over the dimensions `summed` of x * y * z, each of which lacks the dimensions that it
    is expanded in."""
    every = range(x.rank + len(expand_x))
    of_x, of_y, of_z = (
        [d for d in every if d not in lacking] for lacking in (expand_x, expand_y, expand_z)
    )
    kept = set(every) - set(summed)
    product, known = _contracted(b, (x, of_x), (y, of_y), kept | set(of_z))
    result, known = _contracted(b, (product, known), (z, of_z), kept)
    return b.transpose(result, [known.index(d) for d in sorted(known)])


def _contracted(
    b: Builder, left: tuple[Value, list[int]], right: tuple[Value, list[int]], kept: set[int]
) -> tuple[Value, list[int]]:
    """The product of two values, of which each dimension has a number, summed over the dimensions
    that are not kept; and the numbers of the result's dimensions."""

    def reduced(value: Value, dims: list[int], other: list[int]) -> tuple[Value, list[int]]:
        alone = [i for i, d in enumerate(dims) if d not in kept and d not in other]
        left = [d for d in dims if d in kept or d in other]
        return (value.sum(alone) if alone else value), left

    (x, of_x), (y, of_y) = reduced(*left, right[1]), reduced(*right, left[1])
    shared = [d for d in of_x if d in of_y]
    batch, contract = [d for d in shared if d in kept], [d for d in shared if d not in kept]
    contract_x, contract_y = ([of.index(d) for d in contract] for of in (of_x, of_y))
    batch_x, batch_y = ([of.index(d) for d in batch] for of in (of_x, of_y))
    result = b.dot(x, y, contract_x, contract_y, batch_x, batch_y)
    free = [d for of in (of_x, of_y) for d in of if d not in shared]
    return result, [*batch, *free]
