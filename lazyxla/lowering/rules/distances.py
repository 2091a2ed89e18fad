"""Distances between all pairs of rows: cdist and pdist, and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import ceil, maximum, minimum, sqrt, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _norm(x: Value, p: float) -> Value:
    """The p-norm over the last dimension."""
    size = abs(x)
    if p == 0:
        # How many are not zero; nan if one is.
        return minimum(ceil(size), 1).sum([-1])
    if p == math.inf:
        if not x.shape[-1]:
            return x.b.zeros(x.shape[:-1], x.dtype)
        return x.b.reduce(size, [-1], "max")  # PyTorch's does not keep nan either
    if p == 1:
        return size.sum([-1])
    if p == 2:
        return sqrt((x * x).sum([-1]))
    return (size**p).sum([-1]) ** (1 / p)


@rule("aten::_cdist_forward")
def cdist(b: Builder, x: Value, y: Value, p: Scalar, compute_mode: int | None) -> Value:
    return _norm(b.unsqueeze(x, -2) - b.unsqueeze(y, -3), float(p))


def _share(difference: Value, p: float, grad: Value, distance: Value) -> Value:
    """What each difference gets of the gradient of a p-norm; nothing where that is zero."""
    if p == 0:
        return difference.full(0)
    size, sign = abs(difference), difference.call("sign")
    if p == math.inf:
        return grad * sign * (size == distance).to(size.dtype)
    if p == 1:
        return grad * sign
    if p == 2:  # of each distance once, not of each difference
        return where(distance != 0, grad / distance, 0) * difference
    # Where p < 2 the power of a zero difference is infinite; its share counts as zero.
    some = (distance != 0) & (size != 0)
    ratio = where(some, size, 1) / where(some, distance, 1)
    return where(some, grad * sign * ratio ** (p - 1), 0)


def _gradient(grad: Value, x: Value, y: Value, p: float, distance: Value) -> Value:
    """That of x, (..., rows of x, size), given those of all distances, (..., x's rows, y's)."""
    b = x.b
    difference = b.unsqueeze(x, -2) - b.unsqueeze(y, -3)
    grad, distance = b.unsqueeze(grad, -1), b.unsqueeze(distance, -1)
    return _share(difference, p, grad, distance).sum([-2])


@rule("aten::_cdist_backward")
def cdist_backward(
    b: Builder, grad: Value, x: Value, y: Value, p: Scalar, distance: Value
) -> Value:
    shape = b.outputs[0].shape
    if 0 in (*x.shape, *y.shape):  # PyTorch does not broadcast the batches of x then
        return b.zeros(shape, x.dtype)
    return _gradient(grad, x, y, float(p), distance).reshape(shape)


def _pairs(b: Builder, count: int) -> list[Value]:
    """The rows of all pairs, in the order of pdist, of up to 23,170 rows.

    Counted from the last pair, the pairs of the rows are 1, 2, 3 ...: a pair's row is found by the
    root of a triangular number, which float32 misses by one at most.
    """

    def triangular(n: Value) -> Value:
        return (n * (n + 1)) >> 1

    pairs = count * (count - 1) // 2
    from_end = pairs - 1 - b.iota([pairs], 0, torch.int32)
    row = ((sqrt((8 * from_end + 1).to(torch.float32)) - 1) / 2).to(torch.int32)
    row = row - (triangular(row) > from_end).to(torch.int32)
    row = row + (triangular(row + 1) <= from_end).to(torch.int32)
    return [count - 2 - row, count - 1 - (from_end - triangular(row))]


@rule("aten::_pdist_forward")
def pdist(b: Builder, x: Value, p: Scalar) -> Value:
    first, second = (b.take(x, rows, 0) for rows in _pairs(b, x.shape[0]))
    difference = first - second
    if (order := float(p)) < math.inf or not x.shape[1]:
        return _norm(difference, order)
    return b.extremum(abs(difference), [-1], "max")  # it keeps nan; PyTorch's cdist does not


@rule("aten::_pdist_backward")
def pdist_backward(b: Builder, grad: Value, x: Value, p: Scalar, distance: Value) -> Value:
    """As that of cdist(x, x) for one of both: each pair is there twice, in either order."""
    count = x.shape[0]
    if 0 in (*grad.shape, *x.shape):
        return b.zeros(x.shape, x.dtype)
    row, column = (b.iota([count, count], dim, torch.int32) for dim in (0, 1))
    low, high = minimum(row, column), maximum(row, column)
    pair = low * count - ((low * (low + 1)) >> 1) + high - low - 1
    pair = where(low < high, pair, 0)
    grad, distance = (where(low < high, b.take(x, pair, 0), 0) for x in (grad, distance))
    return _gradient(grad, x, x, float(p), distance)
