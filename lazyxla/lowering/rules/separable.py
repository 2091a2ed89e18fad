"""Linear maps along single dimensions: what resampling is made of.

Each element of the result is a weighted sum of a few elements along a dimension. Such a map is a
sparse matrix, given by `taps`: pairs of an index and a weight for each result element, which are
those of neighbours, in order, if there are many (more than `_MOST_TERMS`). It is
applied as a dense matmul (`Builder.apply_maps`), which every platform does well; the adjoint is
that with the transposed matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import total, where
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Taps = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of int64 indices and weights, both of shape (out,)."""


_MOST_TERMS = 16
"""Taps up to which a matrix is a sum of terms."""


def matrix(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """The map from `size` elements as a matrix (out, size)."""
    out = len(taps[0][0])
    if len(taps) > _MOST_TERMS:
        return _matrix_of_many(b, taps, size, dtype)
    column = b.iota([out, size], 1, torch.int32)

    def part(index: torch.Tensor, weight: torch.Tensor) -> Value:
        row = b.unsqueeze(b.array(index.tolist(), torch.int32), 1)
        return where(column == row, b.unsqueeze(b.array(weight.tolist(), dtype), 1), 0)

    return total(part(*tap) for tap in taps)


def _matrix_of_many(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """With one gather instead of a term for each tap."""
    indices, weights = (torch.stack(column, 1) for column in zip(*taps, strict=True))
    out, count = indices.shape
    start = b.unsqueeze(b.array(indices[:, 0].tolist(), torch.int32), 1)
    tap = b.iota([out, size], 1, torch.int32) - start
    own = (tap >= 0) & (tap < count)
    given = b.take_along(b.array(weights.tolist(), dtype), where(own, tap, 0), 1)
    return where(own, given, 0)
