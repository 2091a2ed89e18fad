"""Indexing with tensors: gather, scatter and the operators that are made of them.

Indices that PyTorch lets count from the end do so here. PyTorch's check of the range would need the
index values, so there is none: a read out of range returns the nearest element in range, and a
write there is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import maximum, where
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.arithmetic import floor_divide
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Indices = Sequence[Operand | None]

# ---- x[indices] ----


def _index_vectors(b: Builder, x: Value, indices: Indices) -> tuple[list[int], Value, int]:
    """What x[indices] addresses: the indexed dimensions, index vectors, and the positions of their
    dimensions.

    The index vectors have the shape (*common shape of the indices, number of indexed dimensions).
    PyTorch puts the common shape where the indexed dimensions were if these are adjacent, and in
    front otherwise.
    """
    given = {d: index for d, index in enumerate(indices) if index is not None}
    dims = list(given)
    columns = b.broadcast(*(b.value(index, torch.int64) for index in given.values()))
    wrapped = [b.wrap_index(c, x.shape[d]) for c, d in zip(columns, dims, strict=True)]
    adjacent = dims[-1] - dims[0] == len(dims) - 1
    return dims, b.stack(wrapped, -1), dims[0] if adjacent else 0


def _move(b: Builder, x: Value, count: int, source: int, target: int) -> Value:
    """`x` with its `count` dimensions from `source` on moved to `target`."""
    moved = list(range(source, source + count))
    rest = [i for i in range(x.rank) if i not in moved]
    return b.transpose(x, rest[:target] + moved + rest[target:])


def _read(b: Builder, x: Value, indices: Indices) -> Value:
    if all(index is None for index in indices):
        return x
    dims, vectors, target = _index_vectors(b, x, indices)
    if len(dims) == 1:
        return b.take(x, b.squeeze(vectors, -1), dims[0])
    return _move(b, b.gather_nd(x, vectors, dims), vectors.rank - 1, 0, target)


def _write(
    b: Builder, x: Value, indices: Indices, values: Operand, combine: str = "assign"
) -> Value:
    values = b.value(values, x.dtype)
    if all(index is None for index in indices):
        return b.combine(combine, x, b.broadcast_to(values, x.shape))
    dims, vectors, target = _index_vectors(b, x, indices)
    common = vectors.shape[:-1]
    kept = [n for i, n in enumerate(x.shape) if i not in dims]
    values = b.broadcast_to(values, [*kept[:target], *common, *kept[target:]])
    updates = _move(b, values, len(common), target, 0)
    return _scatter(b, combine, x, vectors, updates, dims)


def _accumulated(x: Value, combine: str) -> Value:
    """In the accumulation dtype: float32 for sums and products of 16-bit floats."""
    return x.accumulated() if combine in ("add", "mul") else x


def _scatter(
    b: Builder, combine: str, x: Value, vectors: Value, updates: Value, dims: Sequence[int]
) -> Value:
    """scatter_nd, in the dtype that values are combined in."""
    if 0 in updates.shape:
        return x
    into = _accumulated(x, combine)
    return b.scatter_nd(into, vectors, updates.to(into.dtype), dims, combine).to(x.dtype)


@rule("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index(b: Builder, x: Value, indices: Indices) -> Value:
    return _read(b, x, indices)


@rule("aten::index_put", "aten::_unsafe_index_put")
def index_put(b: Builder, x: Value, indices: Indices, values: Operand, accumulate: bool) -> Value:
    if any(i is not None and b.dtype(i) in (torch.bool, torch.uint8) for i in indices):
        return _put_by_mask(b, x, indices, values, accumulate)
    return _write(b, x, indices, values, "add" if accumulate else "assign")


def _put_by_mask(b: Builder, x: Value, indices: Indices, given: Operand, accumulate: bool) -> Value:
    """The one index is a mask, whose dimensions the values have as one: how many elements are true.

    Only graphs have masks: the recorder turns them into indices.
    """
    first, index = next((i, index) for i, index in enumerate(indices) if index is not None)
    mask, values = b.value(index, torch.bool), b.value(given, x.dtype)
    after = x.rank - first - mask.rank
    axis = values.rank - after - 1
    if axis >= 0:
        lead, count, rest = values.shape[:axis], values.shape[axis], values.shape[axis + 1 :]
        if count == 0:
            values = b.zeros(x.shape, x.dtype)
        elif count == 1:
            values = values.reshape([*lead, *[1] * mask.rank, *rest])
        else:  # the k-th true element takes the k-th value
            number = b.wrap_index(_rank_among(b, mask.reshape([-1]).to(torch.int64)), count)
            values = b.take(values, number, axis).reshape([*lead, *mask.shape, *rest])
    values = b.broadcast_to(values, x.shape)
    mask = mask.reshape([*mask.shape, *[1] * after])
    return where(mask, x + values if accumulate else values, x)


def _rank_among(b: Builder, mask: Value) -> Value:
    """For every element of a flat mask the number of true ones up to it, less one."""
    spec = TensorSpec(torch.int64, mask.shape)
    counts: Value = b.lower_op("aten::cumsum", mask, 0, torch.int64, outputs=[spec])
    return counts - 1


@rule("aten::_index_put_impl")
def index_put_impl(
    b: Builder, x: Value, indices: Indices, values: Operand, accumulate: bool, unsafe: bool
) -> Value:
    return index_put(b, x, indices, values, accumulate)


@rule("aten::_unsafe_masked_index")
def masked_index(b: Builder, x: Value, mask: Operand, indices: Indices, fill: Operand) -> Value:
    dtype, shape = b.outputs[0]
    rest = b.full(shape, fill, dtype)
    if 0 in x.shape:
        return rest
    return where(b.value(mask, torch.bool), _read(b, x, indices), rest)


@rule("aten::_unsafe_masked_index_put_accumulate")
def masked_index_put(
    b: Builder, x: Value, mask: Operand, indices: Indices, values: Operand
) -> Value:
    updates = where(b.value(mask, torch.bool), b.value(values, x.dtype), 0)
    return _write(b, x, indices, updates, "add")


# ---- whole slices along one dimension ----


def _along(
    b: Builder, x: Value, dim: int, index: Operand, wrap: bool = False
) -> tuple[Value, Value, int]:
    """`x` with at least one dimension, `index` with exactly one, and `dim` from the front."""
    x = x if x.rank else x.reshape([1])
    index = b.value(index, torch.int64).reshape([-1])
    dim %= x.rank
    return x, b.wrap_index(index, x.shape[dim]) if wrap else index, dim


def _scatter_slices(
    b: Builder, combine: str, x: Value, index: Value, source: Operand, dim: int
) -> Value:
    """Combines slice i of `source` along `dim` into slice index[i] of `x`."""
    shape = list(x.shape)
    shape[dim] = index.shape[0]
    source = b.value(source, x.dtype).reshape(shape)
    return _scatter(b, combine, x, b.unsqueeze(index, -1), _move(b, source, 1, dim, 0), [dim])


@rule("aten::index_select")
def index_select(b: Builder, x: Value, dim: int, index: Operand) -> Value:
    x, index, dim = _along(b, x, dim, index)
    return b.take(x, index, dim).reshape(b.outputs[0].shape)


@rule("aten::index_add")
def index_add(
    b: Builder, x: Value, dim: int, index: Operand, source: Operand, alpha: Operand
) -> Value:
    shape = x.shape
    x, index, dim = _along(b, x, dim, index)
    source = b.scale(b.value(source, x.dtype), alpha)
    return _scatter_slices(b, "add", x, index, source, dim).reshape(shape)


@rule("aten::index_copy")
def index_copy(b: Builder, x: Value, dim: int, index: Operand, source: Operand) -> Value:
    shape = x.shape
    x, index, dim = _along(b, x, dim, index)
    return _scatter_slices(b, "assign", x, index, source, dim).reshape(shape)


@rule("aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor")
def index_fill(b: Builder, x: Value, dim: int, index: Operand, value: Operand) -> Value:
    """A mask of the filled slices is cheaper than a scatter of them."""
    shape = x.shape
    x, index, dim = _along(b, x, dim, index, wrap=True)
    size = x.shape[dim]
    true = b.full(index.shape, True, torch.bool)
    hit = b.zeros([size], torch.bool)
    hit = _scatter(b, "assign", hit, b.unsqueeze(index, -1), true, [0])
    hit = hit.reshape([size if i == dim else 1 for i in range(x.rank)])
    return where(hit, b.value(value, x.dtype), x).reshape(shape)


# ---- element by element along one dimension ----


def _elements(b: Builder, x: Value, dim: int, index: Operand) -> tuple[Value, Value, int]:
    """`x` and `index` with at least one dimension."""
    index = b.value(index, torch.int64)
    x = x if x.rank else x.reshape([1])
    index = index if index.rank else index.reshape([1])
    return x, index, dim % x.rank


@rule("aten::gather")
def gather(b: Builder, x: Value, dim: int, index: Operand, sparse_grad: bool) -> Value:
    x, index, dim = _elements(b, x, dim, index)
    return b.take_along(x, index, dim).reshape(b.outputs[0].shape)


def _scatter_along(
    b: Builder, combine: str, x: Value, dim: int, index: Operand, source: Operand
) -> Value:
    """torch.scatter; `source` is a value at least as large as `index`, or a number."""
    dtype, shape = x.dtype, x.shape
    x, index, dim = _elements(b, x, dim, index)
    sizes = index.shape
    if 0 in sizes:
        return x.reshape(shape)
    x = _accumulated(x, combine)
    source = b.value(source, x.dtype)
    if source.rank == len(sizes):
        source = b.slice(source, [0] * len(sizes), sizes)
    source = b.broadcast_to(source, sizes)
    return b.scatter_along(x, index, source, dim, combine).to(dtype).reshape(shape)


@rule("aten::scatter.src", "aten::scatter.value")
def scatter(b: Builder, x: Value, dim: int, index: Operand, source: Operand) -> Value:
    return _scatter_along(b, "assign", x, dim, index, source)


@rule("aten::scatter_add")
def scatter_add(b: Builder, x: Value, dim: int, index: Operand, source: Operand) -> Value:
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
    b: Builder, x: Value, dim: int, index: Operand, source: Operand, reduce: str
) -> Value:
    return _scatter_along(b, _COMBINERS[reduce], x, dim, index, source)


@rule("aten::scatter_reduce.two")
def scatter_reduce_two(
    b: Builder,
    x: Value,
    dim: int,
    index: Operand,
    source: Operand,
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
    index: Operand,
    source: Operand,
    reduce: str,
    include_self: bool,
) -> Value:
    shape = x.shape
    x, slices, dim = _along(b, x, dim, index)
    sizes = [slices.shape[0] if i == dim else n for i, n in enumerate(x.shape)]

    def put(target: Value, updates: Value, combine: str) -> Value:
        updates = updates if updates.rank else b.broadcast_to(updates, sizes)
        return _scatter_slices(b, combine, target, slices, updates, dim)

    return _reduce_into(b, x, source, reduce, include_self, put).reshape(shape)


def _reduce_into(
    b: Builder,
    x: Value,
    source: Operand,
    reduce: str,
    include_self: bool,
    put: Callable[[Value, Value, str], Value],
) -> Value:
    """Reduces `source` into `x` by `put(target, updates, combine)`.

    Without include_self, what is hit starts from the neutral element. Means of integers round
    down, as in PyTorch.
    """
    combine, dtype = _COMBINERS[reduce], x.dtype
    if not include_self:
        x = put(x, b.constant(b.neutral(combine, dtype), dtype), "assign")
    x = _accumulated(x, combine)
    result = put(x, b.value(source, x.dtype), combine)
    if reduce != "mean":
        return result.to(dtype)
    counts = put(b.full(x.shape, int(include_self), torch.int32), b.constant(1, torch.int32), "add")
    counts = maximum(counts, 1).to(x.dtype)
    return floor_divide(result, counts) if x.is_exact else (result / counts).to(dtype)


# ---- flat indices and masks ----


@rule("aten::take")
def take(b: Builder, x: Value, index: Operand) -> Value:
    flat, index = x.reshape([-1]), b.value(index, torch.int64)
    return b.take(flat, b.wrap_index(index, flat.shape[0]), 0)


@rule("aten::put")
def put(b: Builder, x: Value, index: Operand, source: Operand, accumulate: bool) -> Value:
    index = b.value(index, torch.int64).reshape([-1])
    source = b.value(source, x.dtype).reshape(index.shape)
    combine = "add" if accumulate else "assign"
    return _write(b, x.reshape([-1]), [index], source, combine).reshape(x.shape)


@rule("aten::masked_scatter")
def masked_scatter(b: Builder, x: Operand, mask: Operand, source: Operand) -> Value:
    dtype, shape = b.outputs[0]
    x = b.broadcast_to(b.value(x, dtype), shape)
    mask = b.broadcast_to(b.value(mask, torch.bool), shape).reshape([-1])
    source = b.value(source, dtype).reshape([-1])
    if 0 in source.shape:
        return x
    taken = b.take(source, _rank_among(b, mask), 0)
    return where(mask, taken, x.reshape([-1])).reshape(shape)


@rule("aten::masked_scatter_backward")
def masked_scatter_backward(b: Builder, grad: Value, mask: Operand, sizes: Sequence[int]) -> Value:
    """Element i of the result is the gradient at the i-th true element of the mask."""
    grad, mask = (x.reshape([-1]) for x in b.broadcast(grad, b.value(mask, torch.bool)))
    count = math.prod(sizes)
    result = b.zeros([count], grad.dtype)
    if 0 not in mask.shape and count:
        index = where(mask, _rank_among(b, mask), count)
        result = b.scatter_nd(result, b.unsqueeze(index, -1), grad, [0])
    return result.reshape(sizes)
