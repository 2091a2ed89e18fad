"""Indexing with tensors: gather, scatter and the operators that are made of them.

Indices that PyTorch lets count from the end do so here. PyTorch's check of the range would need
the index values, so there is none: what is read out of range comes from the nearest element in
range, and what is written there is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Indices = Sequence[Value | None]

# ---- x[indices] ----


def _places(b: Builder, x: Value, indices: Indices) -> tuple[list[int], Value, int]:
    """What x[indices] addresses: the indexed dimensions, index vectors, where their dimensions go.

    The index vectors have the shape (*common shape of the indices, number of indexed dimensions).
    PyTorch puts the common shape where the indexed dimensions were if these are adjacent, and in
    front otherwise.
    """
    shape = b.shape(x)
    dims = [d for d, index in enumerate(indices) if index is not None]
    given = b.broadcast(*(b.value(indices[d], torch.int64) for d in dims))
    vectors = b.stack([b.wrap_index(i, shape[d]) for i, d in zip(given, dims, strict=True)], -1)
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    return dims, vectors, dims[0] if adjacent else 0


def _move(b: Builder, x: Value, count: int, source: int, target: int) -> Value:
    """`x` with its `count` dimensions from `source` on moved to `target`."""
    rest = [i for i in range(b.rank(x)) if not source <= i < source + count]
    moved = list(range(source, source + count))
    return b.transpose(x, rest[:target] + moved + rest[target:])


def _read(b: Builder, x: Value, indices: Indices) -> Value:
    if all(index is None for index in indices):
        return x
    dims, vectors, target = _places(b, x, indices)
    if len(dims) == 1:
        return b.take(x, b.squeeze(vectors, -1), dims[0])
    return _move(b, b.gather_nd(x, vectors, dims), b.rank(vectors) - 1, 0, target)


def _write(b: Builder, x: Value, indices: Indices, values: Value, combine: str = "assign") -> Value:
    dtype, shape = b.spec(x)
    values = b.value(values, dtype)
    if all(index is None for index in indices):
        return b.combine(combine, x, b.broadcast_to(values, shape))
    dims, vectors, target = _places(b, x, indices)
    common = b.shape(vectors)[:-1]
    kept = [n for i, n in enumerate(shape) if i not in dims]
    values = b.broadcast_to(values, [*kept[:target], *common, *kept[target:]])
    updates = _move(b, values, len(common), target, 0)
    return _scatter(b, combine, x, vectors, updates, dims)


def _scatter(
    b: Builder, combine: str, x: Value, vectors: Value, updates: Value, dims: Sequence[int]
) -> Value:
    """scatter_nd, where sums and products of narrow floats accumulate in float32."""
    if 0 in b.shape(updates):
        return x
    dtype = b.dtype(x)
    wide = b.compute_dtype(dtype) if combine in ("add", "mul") else dtype
    x, updates = b.convert(x, wide), b.convert(updates, wide)
    return b.convert(b.scatter_nd(x, vectors, updates, dims, combine), dtype)


@rule("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index(b: Builder, x: Value, indices: Indices) -> Value:
    return _read(b, x, indices)


@rule("aten::index_put", "aten::_unsafe_index_put")
def index_put(b: Builder, x: Value, indices: Indices, values: Value, accumulate: bool) -> Value:
    if any(i is not None and b.dtype(i) in (torch.bool, torch.uint8) for i in indices):
        return _put_by_mask(b, x, indices, values, accumulate)
    return _write(b, x, indices, values, "add" if accumulate else "assign")


def _put_by_mask(b: Builder, x: Value, indices: Indices, values: Value, accumulate: bool) -> Value:
    """The one index is a mask, whose dimensions `values` has as one: how many elements are true.

    Only graphs come with masks: the recorder turns them into positions.
    """
    dtype, shape = b.spec(x)
    first = next(i for i, index in enumerate(indices) if index is not None)
    mask = b.value(indices[first], torch.bool)
    masked, after = b.rank(mask), len(shape) - first - b.rank(mask)
    values = b.value(values, dtype)
    axis = b.rank(values) - after - 1
    if axis >= 0:
        count, given = b.shape(values)[axis], list(b.shape(values))
        if count != 1:  # the k-th true element takes the k-th value
            flat = b.convert(b.reshape(mask, [-1]), torch.int64)
            spec = [TensorSpec(torch.int64, b.shape(flat))]
            order = b.lower_op("aten::cumsum", flat, 0, None, outputs=spec)
            place = b.hlo.subtract(order, b.full_like(order, 1))
            values = b.take(values, b.wrap_index(place, max(count, 1)), axis) if count else values
            given[axis : axis + 1] = b.shape(mask)
        else:
            given[axis : axis + 1] = [1] * masked
        values = b.zeros(shape, dtype) if count == 0 else b.reshape(values, given)
    values = b.broadcast_to(values, shape)
    inside = b.broadcast_to(b.reshape(mask, [*b.shape(mask), *[1] * after]), shape)
    return b.select(inside, b.hlo.add(x, values) if accumulate else values, x)


@rule("aten::_index_put_impl")
def index_put_impl(
    b: Builder, x: Value, indices: Indices, values: Value, accumulate: bool, unsafe: bool
) -> Value:
    return index_put(b, x, indices, values, accumulate)


@rule("aten::_unsafe_masked_index")
def masked_index(b: Builder, x: Value, mask: Value, indices: Indices, fill: Value) -> Value:
    dtype, shape = b.outputs[0]
    fill = b.full(shape, fill, dtype)
    if 0 in b.shape(x):
        return fill
    return b.select(_as_mask(b, mask), _read(b, x, indices), fill)


@rule("aten::_unsafe_masked_index_put_accumulate")
def masked_index_put(b: Builder, x: Value, mask: Value, indices: Indices, values: Value) -> Value:
    dtype = b.dtype(x)
    return _write(b, x, indices, b.select(_as_mask(b, mask), b.value(values, dtype), 0), "add")


def _as_mask(b: Builder, mask: Value) -> Value:
    return b.value(mask, torch.bool)


# ---- whole slices along one dimension ----


def _along(
    b: Builder, x: Value, dim: int, index: Value, wrap: bool = False
) -> tuple[Value, Value, int]:
    """`x` with at least one dimension, `index` with exactly one, and `dim` from the front."""
    x = x if b.rank(x) else b.reshape(x, [1])
    index = b.reshape(b.value(index, torch.int64), [-1])
    dim %= b.rank(x)
    return x, b.wrap_index(index, b.shape(x)[dim]) if wrap else index, dim


def _scatter_slices(
    b: Builder, combine: str, x: Value, index: Value, source: Value, dim: int
) -> Value:
    """Combines slice i of `source` along `dim` into slice index[i] of `x`."""
    shape = list(b.shape(x))
    shape[dim] = b.shape(index)[0]
    source = b.reshape(b.value(source, b.dtype(x)), shape)
    return _scatter(b, combine, x, b.unsqueeze(index, -1), _move(b, source, 1, dim, 0), [dim])


@rule("aten::index_select")
def index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    x, index, dim = _along(b, x, dim, index)
    return b.reshape(b.take(x, index, dim), b.outputs[0].shape)


@rule("aten::index_add")
def index_add(b: Builder, x: Value, dim: int, index: Value, source: Value, alpha: Value) -> Value:
    shape = b.shape(x)
    x, index, dim = _along(b, x, dim, index)
    source = b.scale(b.value(source, b.dtype(x)), alpha)
    return b.reshape(_scatter_slices(b, "add", x, index, source, dim), shape)


@rule("aten::index_copy")
def index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    shape = b.shape(x)
    x, index, dim = _along(b, x, dim, index)
    return b.reshape(_scatter_slices(b, "assign", x, index, source, dim), shape)


@rule("aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor")
def index_fill(b: Builder, x: Value, dim: int, index: Value, value: Value) -> Value:
    """A mask of the filled slices is cheaper than a scatter of them."""
    dtype, shape = b.spec(x)
    x, index, dim = _along(b, x, dim, index, wrap=True)
    size = b.shape(x)[dim]
    hit = _scatter(
        b,
        "assign",
        b.zeros([size], torch.bool),
        b.unsqueeze(index, -1),
        b.full(b.shape(index), True, torch.bool),
        [0],
    )
    hit = b.reshape(hit, [size if i == dim else 1 for i in range(b.rank(x))])
    filled = b.select(b.broadcast_to(hit, b.shape(x)), b.value(value, dtype), x)
    return b.reshape(filled, shape)


# ---- element by element along one dimension ----


def _elements(b: Builder, x: Value, dim: int, index: Value) -> tuple[Value, Value, int]:
    """`x` and `index` with at least one dimension."""
    index = b.value(index, torch.int64)
    x = x if b.rank(x) else b.reshape(x, [1])
    index = index if b.rank(index) else b.reshape(index, [1])
    return x, index, dim % b.rank(x)


@rule("aten::gather")
def gather(b: Builder, x: Value, dim: int, index: Value, sparse_grad: bool) -> Value:
    x, index, dim = _elements(b, x, dim, index)
    if 0 in b.shape(index):
        return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)
    return b.reshape(b.take_along(x, index, dim), b.outputs[0].shape)


def _scatter_along(
    b: Builder, combine: str, x: Value, dim: int, index: Value, source: Value
) -> Value:
    """torch.scatter; `source` is a value at least as large as `index`, or a number."""
    dtype, shape = b.spec(x)
    x, index, dim = _elements(b, x, dim, index)
    sizes = b.shape(index)
    if 0 in sizes:
        return b.reshape(x, shape)
    wide = b.compute_dtype(dtype) if combine in ("add", "mul") else dtype
    source = b.value(source, wide)
    if b.rank(source) == len(sizes):
        source = b.slice(source, [0] * len(sizes), sizes)
    source = b.broadcast_to(source, sizes)
    result = b.scatter_along(b.convert(x, wide), index, source, dim, combine)
    return b.reshape(b.convert(result, dtype), shape)


@rule("aten::scatter.src", "aten::scatter.value")
def scatter(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter_along(b, "assign", x, dim, index, source)


@rule("aten::scatter_add")
def scatter_add(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter_along(b, "add", x, dim, index, source)


_COMBINERS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
}


@rule("aten::scatter.reduce", "aten::scatter.value_reduce")
def scatter_reduce(
    b: Builder, x: Value, dim: int, index: Value, source: Value, reduce: str
) -> Value:
    return _scatter_along(b, _COMBINERS[reduce], x, dim, index, source)


@rule("aten::scatter_reduce.two")
def scatter_reduce_two(
    b: Builder,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    include_self: bool,
) -> Value:
    def put(target: Value, updates: Value, combine: str) -> Value:
        return _scatter_along(b, combine, target, dim, index, updates)

    return _reduce_into(b, x, source, reduce, include_self, put)


@rule("aten::index_reduce")
def index_reduce(
    b: Builder,
    x: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    include_self: bool,
) -> Value:
    shape = b.shape(x)
    x, index, dim = _along(b, x, dim, index)

    def put(target: Value, updates: Value, combine: str) -> Value:
        if not b.rank(updates):
            sizes = list(b.shape(x))
            sizes[dim] = b.shape(index)[0]
            updates = b.broadcast_to(updates, sizes)
        return _scatter_slices(b, combine, target, index, updates, dim)

    return b.reshape(_reduce_into(b, x, source, reduce, include_self, put), shape)


def _reduce_into(
    b: Builder, x: Value, source: Value, reduce: str, include_self: bool, put: Any
) -> Value:
    """Reduces `source` into `x` by `put(target, updates, combine)`.

    Without include_self, what is hit starts from the neutral element. Means of integers round
    down, as in PyTorch.
    """
    dtype, shape = b.spec(x)
    combine = _COMBINERS[reduce]
    mean = reduce == "mean"
    wide = b.compute_dtype(dtype) if combine in ("add", "mul") else dtype
    if not include_self:
        x = put(x, b.constant(b.neutral(combine, dtype), dtype), "assign")
    result = put(b.convert(x, wide), b.value(source, wide), combine)
    if not mean:
        return b.convert(result, dtype)
    counts = put(b.full(shape, int(include_self), torch.int32), b.constant(1, torch.int32), "add")
    counts = b.convert(b.hlo.maximum(counts, b.full_like(counts, 1)), wide)
    if dtype.is_floating_point or dtype.is_complex:
        return b.convert(b.hlo.divide(result, counts), dtype)
    return _floor_divide(b, result, counts)


def _floor_divide(b: Builder, x: Value, y: Value) -> Value:
    """Integer division that rounds down, for y > 0."""
    quotient = b.hlo.divide(x, y)
    inexact = b.compare(b.hlo.multiply(quotient, y), x, "NE")
    below = b.hlo.and_(b.compare(x, b.full_like(x, 0), "LT"), inexact)
    return b.hlo.subtract(quotient, b.convert(below, b.dtype(x)))


# ---- flat indices and masks ----


@rule("aten::take")
def take(b: Builder, x: Value, index: Value) -> Value:
    flat, index = b.reshape(x, [-1]), b.value(index, torch.int64)
    if 0 in b.shape(index):
        return b.zeros(b.shape(index), b.dtype(x))
    return b.take(flat, b.wrap_index(index, b.shape(flat)[0]), 0)


@rule("aten::put")
def put(b: Builder, x: Value, index: Value, source: Value, accumulate: bool) -> Value:
    flat = b.reshape(x, [-1])
    index = b.reshape(b.value(index, torch.int64), [-1])
    source = b.reshape(b.value(source, b.dtype(x)), b.shape(index))
    return b.reshape(
        _write(b, flat, [index], source, "add" if accumulate else "assign"), b.shape(x)
    )


def _rank_among(b: Builder, mask: Value) -> Value:
    """For every element of a flat mask the number of true ones up to it, less one."""
    spec = TensorSpec(torch.int64, b.shape(mask))
    counts = b.lower_op("aten::cumsum", mask, 0, torch.int64, outputs=[spec])
    return b.hlo.subtract(counts, b.full_like(counts, 1))


@rule("aten::masked_scatter")
def masked_scatter(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    dtype, shape = b.outputs[0]
    x, mask = b.broadcast_to(b.value(x, dtype), shape), _as_mask(b, mask)
    flat_mask = b.reshape(b.broadcast_to(mask, shape), [-1])
    source = b.reshape(b.value(source, dtype), [-1])
    if 0 in b.shape(flat_mask) or 0 in b.shape(source):
        return x
    taken = b.take(source, _rank_among(b, flat_mask), 0)
    return b.reshape(b.select(flat_mask, taken, b.reshape(x, [-1])), shape)


@rule("aten::masked_scatter_backward")
def masked_scatter_backward(b: Builder, grad: Value, mask: Value, sizes: Sequence[int]) -> Value:
    """Element i of the result is the gradient at the i-th true element of the mask."""
    grad, mask = b.broadcast(grad, _as_mask(b, mask))
    count = math.prod(sizes)
    flat_mask = b.reshape(mask, [-1])
    result = b.zeros([count], b.dtype(grad))
    if 0 in b.shape(flat_mask) or not count:
        return b.reshape(result, sizes)
    index = b.select(flat_mask, _rank_among(b, flat_mask), count)
    updates = b.reshape(grad, [-1])
    return b.reshape(b.scatter_nd(result, b.unsqueeze(index, -1), updates, [0]), sizes)
