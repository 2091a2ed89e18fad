"""Scatters into the elements or rows of an operand in memory order, by an index of one component.

XLA's CPU compiler computes where each element goes from all components of the index vectors, and
takes the elements of an update one by one unless the operand has them side by side. The components
added up in a loop of their own are an index into the operand's memory. 2**20 updates in float32, in
turns on two CPUs of an AMD EPYC (Zen 3), in ms:

                scatter_add, dim 0  dim 1  index_add of columns  index_put, two indices
      vectors   5.3                 3.4    4.0                   10.2
      one       4.1                 2.1    2.1                   6.3

Where an index is of a dimension in the middle, XLA also copies the operand: 128 positions of a
cache of 4 x 8 x 2048 x 64 are written in 5.0 ms, and in 0.17.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering.builder.indexing import ScatterDims
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_FEW = 64
"""Among so few elements each form is as fast."""


class Flat(NamedTuple):
    """A scatter into the elements or rows of an operand in memory order."""

    operand: Value
    indices: Value
    updates: Value
    dims: ScatterDims


def flatten(b: Builder, x: Value, index: Value, updates: Value, dims: ScatterDims) -> Flat | None:
    """The same scatter with an index of one component, or None where that is no use."""
    sizes = math.prod(x.shape), math.prod(updates.shape)
    if 0 in sizes or max(sizes) <= _FEW:
        return None
    windows = [d for d in range(x.rank) if d not in (*dims.indexed, *dims.batches)]
    first = x.rank  # of the dimensions that a row has
    while first - 1 in windows:
        first -= 1
    if first <= 1:
        return None
    # In the order of the operand's memory; updates of the same element stay in theirs.
    outer = [u for d, u in zip(windows, dims.windows, strict=True) if d < min(dims.indexed)]
    order = outer + [u for u in range(updates.rank) if u not in outer]
    updates = b.transpose(updates, order)
    placed = [order.index(u) for u in range(updates.rank) if u not in dims.windows]
    count, row = math.prod(x.shape[:first]), x.shape[first:]
    shape = updates.shape[: updates.rank - len(row)]
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    flat, inside = b.zeros(shape, dtype), b.full(shape, True, torch.bool)
    for dim in range(first):
        if dim in dims.indexed:
            component = b.select_dim(index, -1, list(dims.indexed).index(dim)).to(torch.int64)
            component = b.broadcast_in_dim(component, shape, placed)
            inside &= (component >= 0) & (component < x.shape[dim])
            coordinate = component.to(dtype)
        elif dim in windows:
            coordinate = b.iota(shape, order.index(dims.windows[windows.index(dim)]), dtype)
        else:
            batch = dims.index_batches[list(dims.batches).index(dim)]
            coordinate = b.iota(shape, placed[batch], dtype)
        flat += coordinate * math.prod(x.shape[dim + 1 : first])
    flat = b.select(inside, flat, count)  # which is out of range, too
    return Flat(
        x.reshape([count, *row]),
        b.unsqueeze(flat.reshape([-1]), -1),
        updates.reshape([math.prod(shape), *row]),
        ScatterDims([0], list(range(1, 1 + len(row)))),
    )
