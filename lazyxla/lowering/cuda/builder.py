"""The builder for XLA's compiler for NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.builder.attention import Attention
from lazyxla.lowering.cuda import attention
from lazyxla.lowering.streams import philox_below
from lazyxla.lowering.value import Value


class CudaBuilder(Builder):
    """See the module."""

    attention = Attention(kernel=attention)

    def random_below(
        self, shape: Sequence[int], limit: Value, seed: Value, ordinal: Value
    ) -> Value:
        if self.annotations is not None:  # made by index; see streams.py
            return super().random_below(shape, limit, seed, ordinal)
        return philox_below(self, shape, limit, seed, ordinal)

    def apply_maps(self, x: Value, maps: Sequence[Value], adjoint: bool = False) -> Value:
        """By matmuls of plain matrices: XLA's compiler for GPUs refuses some sizes of batched
        ones."""
        # The last dimension is contracted, and its result is first.
        for weights in reversed(maps):
            x = self.dot(weights, x, [0 if adjoint else 1], [-1])
        return self.transpose(x, [*range(len(maps), x.rank), *range(len(maps))])
