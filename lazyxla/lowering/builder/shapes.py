"""Moving elements without indices: reshape, transpose, slice, concatenate, pad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lazyxla.lowering.builder.elements import Elements
from lazyxla.lowering.value import Operand, Value


class Shapes(Elements):
    """The data-movement part of the Builder."""

    def bitcast_to_width(self, x: Value, dtype: torch.dtype, shape: Sequence[int]) -> Value:
        """The same bits as elements of another width: a narrower one adds a last dimension, a wider
        one uses it up."""
        # XLA's simplifier merges two in a row without minding their shapes, for CPUs and for GPUs.
        x = self.hlo.optimization_barrier([x])
        return self.hlo.bitcast_convert(self.type(dtype, shape), x)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Row-major reshape; one size may be -1."""
        dtype, old = x.dtype, x.shape
        shape = tuple(shape)
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            rest = math.prod(old) // known if known else 0
            shape = tuple(rest if n == -1 else n for n in shape)
        return x if shape == old else self.hlo.reshape(self.type(dtype, shape), x)

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Result dimension i is operand dimension permutation[i]."""
        permutation = [p % len(permutation) for p in permutation]
        if permutation == sorted(permutation):
            return x
        return self.hlo.transpose(x, permutation)

    def swap(self, x: Value, i: int, j: int) -> Value:
        """torch.transpose(x, i, j)."""
        order = list(range(x.rank))
        order[i], order[j] = order[j], order[i]
        return self.transpose(x, order)

    def unsqueeze(self, x: Value, *dims: int) -> Value:
        """Adds dimensions of size 1 at the positions `dims` of the result."""
        rank = x.rank + len(dims)
        added = {d % rank for d in dims}
        sizes = iter(x.shape)
        return self.reshape(x, [1 if i in added else next(sizes) for i in range(rank)])

    def squeeze(self, x: Value, *dims: int) -> Value:
        """Drops the dimensions `dims`, which have size 1."""
        dropped = {d % x.rank for d in dims}
        return self.reshape(x, [n for i, n in enumerate(x.shape) if i not in dropped])

    def broadcast_in_dim(self, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Dimension i of `x` is dimension dims[i] of the result, which repeats it along others."""
        return self.hlo.broadcast_in_dim(self.type(x.dtype, shape), x, list(dims))

    def slice(
        self,
        x: Value,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Value:
        """Static slice in all dimensions."""
        shape = x.shape
        strides = [1] * len(shape) if strides is None else list(strides)
        if not any(starts) and tuple(limits) == shape and all(s == 1 for s in strides):
            return x
        return self.hlo.slice(x, list(starts), list(limits), strides)

    def slice_dim(self, x: Value, dim: int, start: int, limit: int, stride: int = 1) -> Value:
        """Static slice along one dimension."""
        shape = x.shape
        dim %= x.rank
        starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
        starts[dim], limits[dim], strides[dim] = start, limit, stride
        return self.slice(x, starts, limits, strides)

    def select_dim(self, x: Value, dim: int, index: int) -> Value:
        """x[..., index, ...] with a static, non-negative index: the dimension is dropped."""
        return self.squeeze(self.slice_dim(x, dim, index, index + 1), dim)

    def dynamic_slice(self, x: Value, starts: Sequence[Operand], sizes: Sequence[int]) -> Value:
        """Slice at run-time starts (integer values or numbers), which XLA clamps into range."""
        return self.hlo.dynamic_slice(x, self.starts(starts), list(sizes))

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Operand]) -> Value:
        """`x` with the block at `starts` replaced by `update`."""
        return self.hlo.dynamic_update_slice(x, update, self.starts(starts))

    def starts(self, starts: Sequence[Operand]) -> list[Value]:
        """Where a slice begins, as values."""
        # TPUs have no 64-bit integers of their own: numbers known now need none.
        known = all(isinstance(s, int) and s < 2**31 for s in starts)
        return [self.value(s, torch.int32 if known else torch.int64) for s in starts]

    def concat(self, xs: Sequence[Value], dim: int) -> Value:
        if len(xs) == 1:
            return xs[0]
        return self.hlo.concatenate(list(xs), dim % xs[0].rank)

    def stack(self, xs: Sequence[Value], dim: int) -> Value:
        """torch.stack."""
        return self.concat([self.unsqueeze(x, dim) for x in xs], dim)

    def pad(
        self,
        x: Value,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int] | None = None,
        value: Operand = 0,
    ) -> Value:
        """Pads with `value` (number, Scalar or 0-dim value); negative amounts crop."""
        interior = [0] * len(low) if interior is None else list(interior)
        if not any(low) and not any(high) and not any(interior):
            return x
        return self.hlo.pad(x, self.value(value, x.dtype), list(low), list(high), interior)

    def flip(self, x: Value, dims: Sequence[int]) -> Value:
        return self.hlo.reverse(x, [d % x.rank for d in dims]) if dims else x

    def dims(self, x: Value, dims: Any, *, empty_is_all: bool = True) -> list[int]:
        """A `dim` argument (None, int or int[]) as a sorted list of non-negative dimensions."""
        rank = x.rank
        if dims is None or (not isinstance(dims, int) and not dims and empty_is_all):
            return list(range(rank))
        listed = [dims] if isinstance(dims, int) else dims
        return sorted({d % max(rank, 1) for d in listed}) if rank else []
