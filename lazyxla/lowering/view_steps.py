"""Steps from a value in the shape of a storage to one in the shape of a view, and back.

Each step can be read through (``read``) and written through (``write``), the write being the mirror
image: a slice becomes an update of that slice, a transpose its inverse, and so on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering.functions import where
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Source = Callable[[], Value]
"""Makes the value that a step reads; called only where a write leaves some of it in place."""


class Reshape(NamedTuple):
    before: tuple[int, ...]
    after: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return x.reshape(self.after)

    def write(self, b: Builder, _: Source, update: Value) -> Value:
        return update.reshape(self.before)


class Transpose(NamedTuple):
    permutation: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return b.transpose(x, self.permutation)

    def write(self, b: Builder, _: Source, update: Value) -> Value:
        inverse = sorted(range(len(self.permutation)), key=self.permutation.__getitem__)
        return b.transpose(update, inverse)


class Broadcast(NamedTuple):
    """Places dimension i of the operand at dims[i] of `sizes` and repeats it along the others."""

    dims: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return b.broadcast_in_dim(x, self.sizes, self.dims)

    def write(self, b: Builder, _: Source, update: Value) -> Value:
        # Several elements write to one; which of them is kept is not defined in PyTorch either.
        limits = [n if i in self.dims else 1 for i, n in enumerate(self.sizes)]
        first = b.slice(update, [0] * len(limits), limits)
        return first.reshape([self.sizes[i] for i in self.dims])


class Slice(NamedTuple):
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return b.slice(x, self.starts, self.limits, self.strides)

    def write(self, b: Builder, source: Source, update: Value) -> Value:
        x = source()
        if all(s == 1 for s in self.strides):
            return b.dynamic_update_slice(x, update, self.starts)
        return self._interleave(b, x, update)

    def _interleave(self, b: Builder, x: Value, update: Value) -> Value:
        """Spreads the update by interior padding and selects it at the slice's positions."""
        shape, sizes = x.shape, update.shape
        ends = [s + (n - 1) * t for s, n, t in zip(self.starts, sizes, self.strides, strict=True)]
        high = [n - 1 - e for n, e in zip(shape, ends, strict=True)]
        spread = b.pad(update, self.starts, high, [t - 1 for t in self.strides])
        masks = []
        for dim, (start, end, stride) in enumerate(
            zip(self.starts, ends, self.strides, strict=True)
        ):
            if stride > 1 or end - start + 1 < shape[dim]:
                inside = self._inside(b, shape[dim], start, end, stride)
                masks.append(b.broadcast_in_dim(inside, shape, [dim]))
        return where(functools.reduce(operator.and_, masks), spread, x)

    def _inside(self, b: Builder, size: int, start: int, end: int, stride: int) -> Value:
        """Which of 0..size-1 the slice addresses, as a bool vector."""
        i = b.iota([size], 0, torch.int32)
        mask = (i <= end) & (i >= start)
        return mask if stride == 1 else mask & ((i - start) % stride == 0)


class Window(NamedTuple):
    """Cuts `sizes` out, from starts that are known when the program runs.

    `numbers`: per dimension, the index of its start among a view's starts; None is 0. `starts`: the
    values, once they are bound.
    """

    numbers: tuple[int | None, ...]
    sizes: tuple[int, ...]
    starts: tuple[Operand, ...] = ()

    def bind(self, values: Sequence[Value]) -> Window:
        return self._replace(starts=tuple(0 if n is None else values[n] for n in self.numbers))

    def read(self, b: Builder, x: Value) -> Value:
        return b.dynamic_slice(x, self.starts, self.sizes)

    def write(self, b: Builder, source: Source, update: Value) -> Value:
        return b.dynamic_update_slice(source(), update, self.starts)


class Pad(NamedTuple):
    """Completes the last block of a digit; what is added is never read."""

    high: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return b.pad(x, [0] * len(self.high), self.high)

    def write(self, b: Builder, _: Source, update: Value) -> Value:
        limits = [n - h for n, h in zip(update.shape, self.high, strict=True)]
        return b.slice(update, [0] * len(limits), limits)


class Take(NamedTuple):
    """Replaces dimension `dim` by the dimensions `sizes`, read at start + sum of index * stride."""

    dim: int
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def _index(self, b: Builder) -> Value:
        last = self.start + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        dtype = torch.int32 if last < 2**31 else torch.int64
        index = b.constant(self.start, dtype, self.sizes)
        for i, stride in enumerate(self.strides):
            step = b.iota(self.sizes, i, dtype)
            index = index + b.scale(step, stride)
        return index

    def read(self, b: Builder, x: Value) -> Value:
        windows = b.windows(x, self.dim, self.start, self.sizes, self.strides)
        return b.take(x, self._index(b), self.dim) if windows is None else windows

    def write(self, b: Builder, source: Source, update: Value) -> Value:
        # scatter_nd wants the indexed dimensions first.
        rank, count = update.rank, len(self.sizes)
        moved = range(self.dim, self.dim + count)
        order = [*moved, *(i for i in range(rank) if i not in moved)]
        index = b.unsqueeze(self._index(b), -1)
        return b.scatter_nd(source(), index, b.transpose(update, order), [self.dim])


class Empty(NamedTuple):
    """A view without elements."""

    sizes: tuple[int, ...]

    def read(self, b: Builder, x: Value) -> Value:
        return b.zeros(self.sizes, x.dtype)

    def write(self, b: Builder, source: Source, _: Value) -> Value:
        raise AssertionError("the planner makes no write to nothing")


Step = Reshape | Transpose | Broadcast | Slice | Window | Pad | Take | Empty
