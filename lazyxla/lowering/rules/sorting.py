"""Sorting, the k greatest, binary search, histograms and set membership."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import minimum, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


Bound = Scalar | float


# ---- sort ----


@rule("aten::sort.stable")
def sort_stable(
    b: Builder, x: Value, stable: bool | None, dim: int, descending: bool
) -> list[Value]:
    return b.sort_with_indices(x, dim, descending, bool(stable))


@rule("aten::sort")
def sort(b: Builder, x: Value, dim: int, descending: bool) -> list[Value]:
    return b.sort_with_indices(x, dim, descending)


# ---- top-k ----


@rule("aten::topk")
def topk(b: Builder, x: Value, k: int, dim: int, largest: bool, sorted_: bool) -> list[Value]:
    """Always sorted."""
    if not x.shape:
        return [r.reshape(b.outputs[0].shape) for r in (x, b.zeros([], torch.int64))]
    dim %= x.rank
    if not x.is_float or x.dtype == torch.float64:
        return [b.slice_dim(r, dim, 0, k) for r in b.sort_with_indices(x, dim, largest)]
    keys = b.swap(x, dim, -1).to(torch.float32)
    keys = where(keys.is_nan(), math.nan, keys)
    # XLA's total order puts nan first, and last if its sign is set.
    values, index = b.chlo.top_k(keys if largest else -keys, k)
    values = (values if largest else -values).to(x.dtype)
    return [b.swap(values, dim, -1), b.swap(index.to(torch.int64), dim, -1)]


# ---- binary search ----

_FEW = 64
"""Up to this many elements, comparing with all of them beats a search."""


def _search(sequence: Value, x: Value, right: bool) -> Value:
    """The int64 index at which each x belongs, found by PyTorch's binary search, step by step: in a
    sequence that is not sorted, or has nan within, it is the index that PyTorch finds.

    `sequence` has shape (n,), or the shape of `x` but for its last dimension n.
    """
    b, size, shape = x.b, sequence.shape[-1], x.shape
    if not size or 0 in shape:
        return b.zeros(shape, torch.int64)

    def before(element: Value) -> Value:
        return ~(element > x if right else element >= x)

    def decided(start: int, end: int) -> Value:
        """The search between two indices as a tree of decisions, which reads each element."""
        if start == end:
            return b.full(shape, start, torch.int64)
        middle = (start + end) // 2
        element = b.slice_dim(sequence, -1, middle, middle + 1)
        element = element.reshape([]) if sequence.rank == 1 else element
        return where(before(element), decided(middle + 1, end), decided(start, middle))

    if size <= _FEW:
        return decided(0, size)
    start, end = b.zeros(shape, torch.int64), b.full(shape, size, torch.int64)
    flat, least = sequence.rank == 1, size
    for _ in range(size.bit_length()):
        middle = (start + end) >> 1
        element = b.take(sequence, middle, 0) if flat else b.take_along(sequence, middle, -1)
        right_half = before(element)
        if least == 0:  # some have found their index a round earlier than others
            right_half = right_half & (start < end)
        start, end = where(right_half, middle + 1, start), where(right_half, end, middle)
        least = max(least - 1, 0) // 2
    return start


@rule("aten::searchsorted.Tensor", "aten::searchsorted.Scalar")
def searchsorted(
    b: Builder,
    sequence: Value,
    x: Operand,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: Value | None,
) -> Value:
    if sorter is not None and sequence.shape[-1]:
        sequence = b.take_along(sequence, sorter, -1)
    sequence, values = b.promote(sequence, x)
    return _search(sequence, values, right or side == "right")


@rule("aten::bucketize.Tensor", "aten::bucketize.Scalar")
def bucketize(b: Builder, x: Operand, boundaries: Value, out_int32: bool, right: bool) -> Value:
    boundaries, values = b.promote(boundaries, x)
    return _search(boundaries, values, right)


# ---- sets and counts ----


@rule("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Scalar", "aten::isin.Scalar_Tensor")
def isin(b: Builder, elements: Operand, test: Operand, assume_unique: bool, invert: bool) -> Value:
    x, members = b.promote(elements, test)
    members = members.reshape([-1])
    shape, count = x.shape, members.shape[0]
    if not count:
        return b.full(shape, invert, torch.bool)
    if count <= _FEW:
        found = b.reduce(b.unsqueeze(x, -1) == members, [len(shape)], "or")
    else:
        (members,) = b.sort([members], 0)
        found = b.take(members, _search(members, x, right=False), 0) == x
    return ~found if invert else found


@rule("aten::histc")
def histc(b: Builder, x: Value, bins: int, low: Bound, high: Bound) -> Value:
    """Equal bounds mean the least and the greatest element; elements outside are left out."""
    dtype = b.outputs[0].dtype
    x = x.reshape([-1]).to(b.compute_dtype(dtype) if dtype.is_floating_point else torch.float64)
    counts = b.zeros([bins], torch.int64)
    if not x.shape[0]:
        return counts
    left, right = b.value(low, x.dtype), b.value(high, x.dtype)
    known = b.known(low), b.known(high)
    if None in known or known[0] == known[1]:
        whole = left == right
        left = where(whole, b.reduce(x, [0], "min"), left)
        right = where(whole, b.reduce(x, [0], "max"), right)
    empty = left == right
    left, right = where(empty, left - 1, left), where(empty, right + 1, right)
    bin_ = ((x - left) * bins / (right - left)).to(torch.int64)
    inside = (x >= left) & (x <= right)
    # Out of range: the scatter drops it.
    bin_ = where(inside, minimum(bin_, bins - 1), bins)
    return b.scatter_nd(counts, b.unsqueeze(bin_, -1), bin_.full(1), [0], "add")
