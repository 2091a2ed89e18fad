"""Sorting, the k greatest, binary search, histograms and set membership."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# ---- sort ----


@rule("aten::sort.stable")
def sort_stable(
    b: Builder, x: Value, stable: bool | None, dim: int, descending: bool
) -> list[Value]:
    return sort_with_places(b, x, dim, descending, bool(stable))


@rule("aten::sort")
def sort(b: Builder, x: Value, dim: int, descending: bool) -> list[Value]:
    return sort_with_places(b, x, dim, descending)


def sort_with_places(
    b: Builder, x: Value, dim: int, descending: bool = False, stable: bool = False
) -> list[Value]:
    """Sorted values, nan as the greatest, and the int64 places that they come from."""
    dtype, shape = b.spec(x)
    if not shape:
        return [x, b.zeros([], torch.int64)]
    if b.platform == "cpu" and dtype.itemsize <= 4 and shape[dim] < 1 << 31:
        index = _packed_order(b, x, dim, descending)
        return [b.take_along(x, index, dim) if math.prod(shape) else x, index]
    return b.sort([x, b.iota(shape, dim, torch.int64)], dim, descending, stable)


def _packed_order(b: Builder, x: Value, dim: int, descending: bool) -> Value:
    """The order of `x`, found by sorting numbers that hold a value above its index.

    XLA's CPU backend sorts plain integers twice to four times as fast as pairs. The order is
    stable, as no two are equal.
    """
    key = _as_integers(b, x)
    key = b.hlo.not_(key) if descending else key
    key = b.hlo.shift_left(key, b.full_like(key, 32))
    key = b.hlo.or_(key, b.iota(b.shape(x), dim, torch.int64))
    (key,) = b.sort([key], dim, stable=False)
    return b.hlo.and_(key, b.full_like(key, (1 << 32) - 1))


def _as_integers(b: Builder, x: Value) -> Value:
    """A value of at most 32 bits as small int64 numbers in the same order; nan is the greatest."""
    if b.dtype(x) == torch.uint32:
        x = b.convert(x, torch.int64)
        return b.hlo.subtract(x, b.full_like(x, 1 << 31))  # as int32 has them
    if not b.dtype(x).is_floating_point:
        return b.convert(x, torch.int64)
    x = b.convert(x, torch.float32)
    x = b.select(b.compare(x, b.full_like(x, 0), "EQ"), 0.0, x)  # -0.0 equals 0.0
    x = b.select(b.is_nan(x), math.nan, x)
    bits = b.bitcast(x, torch.int32)
    # Negative floats grow downwards.
    sign = b.hlo.shift_right_arithmetic(bits, b.full_like(bits, 31))
    flip = b.hlo.and_(sign, b.full_like(bits, (1 << 31) - 1))
    return b.convert(b.hlo.xor(bits, flip), torch.int64)


# ---- top-k ----


@rule("aten::topk")
def topk(b: Builder, x: Value, k: int, dim: int, largest: bool, sorted_: bool) -> list[Value]:
    """Always sorted."""
    dtype, shape = b.spec(x)
    if not shape:
        return [b.reshape(r, b.outputs[0].shape) for r in (x, b.zeros([], torch.int64))]
    if k == 0 or math.prod(shape) == 0:
        return [b.zeros(spec.shape, spec.dtype) for spec in b.outputs]
    dim %= len(shape)
    if not dtype.is_floating_point or dtype == torch.float64:
        return [b.slice_dim(r, dim, 0, k) for r in sort_with_places(b, x, dim, largest)]
    keys = b.convert(b.swap(x, dim, -1), torch.float32)
    keys = b.select(b.is_nan(keys), math.nan, keys)
    # XLA's total order puts nan first, and last if its sign is set.
    _, index = b.chlo.top_k(keys if largest else b.hlo.negate(keys), k)
    index = b.swap(b.convert(index, torch.int64), dim, -1)
    return [b.take_along(x, index, dim), index]


# ---- binary search ----

_FEW = 64
"""Up to this many elements, comparing with all of them beats a search."""


def _search(b: Builder, sequence: Value, x: Value, right: bool) -> Value:
    """The int64 place where each x belongs, found by PyTorch's binary search, step by step: of a
    sequence that is not sorted, or has nan within, it is the place that PyTorch finds.

    `sequence` has shape (n,), or the shape of `x` but for its last dimension n.
    """
    size, shape = b.shape(sequence)[-1], b.shape(x)
    if not size or not math.prod(shape):
        return b.zeros(shape, torch.int64)

    def before(element: Value) -> Value:
        return b.hlo.not_(b.compare(b.broadcast_to(element, shape), x, "GT" if right else "GE"))

    def decided(start: int, end: int) -> Value:
        """The search between two places as a tree of decisions, which reads each element."""
        if start == end:
            return b.full(shape, start, torch.int64)
        middle = (start + end) // 2
        element = b.slice_dim(sequence, -1, middle, middle + 1)
        element = b.reshape(element, []) if b.rank(sequence) == 1 else element
        return b.select(before(element), decided(middle + 1, end), decided(start, middle))

    if size <= _FEW:
        return decided(0, size)
    start, end = b.zeros(shape, torch.int64), b.full(shape, size, torch.int64)
    one, flat, least = b.full_like(start, 1), b.rank(sequence) == 1, size
    for _ in range(size.bit_length()):
        middle = b.hlo.shift_right_arithmetic(b.hlo.add(start, end), one)
        element = b.take(sequence, middle, 0) if flat else b.take_along(sequence, middle, -1)
        step = before(element)
        if least == 0:  # some have found their place a round earlier than others
            step = b.hlo.and_(step, b.compare(start, end, "LT"))
        start, end = b.select(step, b.hlo.add(middle, one), start), b.select(step, end, middle)
        least = max(least - 1, 0) // 2
    return start


@rule("aten::searchsorted.Tensor", "aten::searchsorted.Scalar")
def searchsorted(
    b: Builder,
    sequence: Value,
    x: Value,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: Value | None,
) -> Value:
    if sorter is not None and b.shape(sequence)[-1]:
        sequence = b.take_along(sequence, sorter, -1)
    sequence, x = b.promote(sequence, x)
    return _search(b, sequence, x, right or side == "right")


@rule("aten::bucketize.Tensor", "aten::bucketize.Scalar")
def bucketize(b: Builder, x: Value, boundaries: Value, out_int32: bool, right: bool) -> Value:
    x, boundaries = b.promote(x, boundaries)
    return _search(b, boundaries, x, right)


# ---- sets and counts ----


@rule("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar", "aten::isin.Scalar_Tensor")
def isin(b: Builder, x: Value, members: Value, assume_unique: bool, invert: bool) -> Value:
    x, members = b.promote(x, members)
    members = b.reshape(members, [-1])
    shape, count = b.shape(x), b.shape(members)[0]
    if not count:
        return b.full(shape, invert, torch.bool)
    if count <= _FEW:
        wide = [*shape, count]
        column = b.broadcast_to(b.unsqueeze(x, -1), wide)
        hits = b.compare(column, b.broadcast_to(members, wide), "EQ")
        found = b.reduce(hits, [len(shape)], "or")
    else:
        (members,) = b.sort([members], 0)
        place = _search(b, members, x, right=False)
        found = b.compare(b.take(members, place, 0), x, "EQ")
    return b.hlo.not_(found) if invert else found


@rule("aten::histc")
def histc(b: Builder, x: Value, bins: int, low: Any, high: Any) -> Value:
    """Equal bounds stand for the least and the greatest element; what lies outside is left out."""
    dtype = b.outputs[0].dtype
    computed = b.compute_dtype(dtype) if dtype.is_floating_point else torch.float64
    x = b.convert(b.reshape(x, [-1]), computed)
    wide, counts = b.dtype(x), b.zeros([bins], torch.int64)
    if not b.shape(x)[0]:
        return counts
    if float(low) == float(high):
        low, high = b.reduce(x, [0], "min"), b.reduce(x, [0], "max")
    else:
        low, high = b.value(low, wide), b.value(high, wide)
    one = b.constant(1, wide)
    single = b.compare(low, high, "EQ")
    low = b.select(single, b.hlo.subtract(low, one), low)
    high = b.select(single, b.hlo.add(high, one), high)
    left, right, span = b.broadcast(low, high, b.hlo.subtract(high, low), x)[:3]
    offset = b.hlo.multiply(b.hlo.subtract(x, left), b.full_like(x, bins))
    place = b.convert(b.hlo.divide(offset, span), torch.int64)
    place = b.hlo.minimum(place, b.full_like(place, bins - 1))
    inside = b.hlo.and_(b.compare(x, left, "GE"), b.compare(x, right, "LE"))
    place = b.select(inside, place, bins)  # out of range: the scatter drops it
    return b.scatter_nd(counts, b.unsqueeze(place, -1), b.full_like(place, 1), [0], "add")
