"""Linear maps along single dimensions: what adaptive pooling and resampling are made of.

Each element of the result is a weighted sum of a few elements along a dimension. Such a map is a
sparse matrix, given by `taps`: pairs of an index and a weight for each result element. It is
applied as a dense product, which every platform does well; the adjoint is the product transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Taps = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of int64 indices and weights, both of shape (out,)."""


def apply(b: Builder, x: Value, maps: Sequence[Value], adjoint: bool = False) -> Value:
    """`x` with one map (see `matrix`) applied to each of its last dimensions, in order."""
    rank, contracted = b.rank(x), 0 if adjoint else 1
    if b.platform == "cuda":
        # The last dimension is contracted and comes back first: all are products of plain matrices.
        # XLA's compiler for GPUs refuses some sizes of others. On the CPU those are up to five
        # times as fast as this, which has to transpose its result.
        for weights in reversed(maps):
            x = b.dot(weights, x, [contracted], [rank - 1])
        return b.transpose(x, [*range(len(maps), rank), *range(len(maps))])
    for weights in maps:
        # The contracted dimension leaves and comes back last: after all maps the order is restored.
        x = b.dot(x, weights, [rank - len(maps)], [contracted])
    return x


def matrix(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """The map from `size` elements as a matrix (out, size)."""
    shape = [len(taps[0][0]), size]
    column = b.iota(shape, 1, torch.int32)
    total = None
    for index, weight in taps:
        index, weight = b.array(index.tolist(), torch.int32), b.array(weight.tolist(), dtype)
        hit = b.compare(column, b.broadcast_to(b.unsqueeze(index, 1), shape), "EQ")
        part = b.select(hit, b.unsqueeze(weight, 1), 0)
        total = part if total is None else b.hlo.add(total, part)
    return total
