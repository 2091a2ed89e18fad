"""Linear maps along single dimensions: what resampling is made of.

Each element of the result is a weighted sum of a few elements along a dimension. Such a map is a
sparse matrix, given by `taps`: pairs of an index and a weight for each result element. It is
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


def matrix(b: Builder, taps: Taps, size: int, dtype: torch.dtype) -> Value:
    """The map from `size` elements as a matrix (out, size)."""
    column = b.iota([len(taps[0][0]), size], 1, torch.int32)

    def part(index: torch.Tensor, weight: torch.Tensor) -> Value:
        row = b.unsqueeze(b.array(index.tolist(), torch.int32), 1)
        return where(column == row, b.unsqueeze(b.array(weight.tolist(), dtype), 1), 0)

    return total(part(*tap) for tap in taps)
