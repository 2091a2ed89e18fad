"""Elements that are moved, not computed with.

XLA's CPU compiler (jaxlib 0.10.2, xla-cpu-pjrt 0.0.1) converts bfloat16 and float8 to float32, and
back, for whatever is done with them, and cannot write in place what it converts. So they are moved
as integers: to concatenate two of 1001 x 1003 bfloat16 takes 0.24 ms instead of 1.17 (two CPUs of
an Intel Xeon).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.builder.indexing import ScatterDims
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Operand, Value

BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""The dtypes that are converted, and the integers of their width."""

_WRITE = "lazyxla_host::dynamic_update_slice"
"""A kernel of ours that writes in place, which XLA does not even with integers: their conversion is
a copy. To write 8 x 1 x 128 of 8 x 8192 x 128 bfloat16 takes 2.8 ms, and 0.02 by a call."""

_LARGE = 1 << 14
"""Elements from which on a copy of all costs more than a call."""


def as_bits(move: Callable[..., Value], *values: Value) -> Value:
    """`move` of the values as integers, in their dtype again."""
    b, dtype = values[0].b, values[0].dtype
    return b.bitcast(move(*[b.bitcast(x, BITS[dtype]) for x in values]), dtype)


class Moves(Builder):
    """The builder's operations that move elements."""

    def concat(self, xs: Sequence[Value], dim: int) -> Value:
        if len(xs) > 1 and xs[0].dtype in BITS:
            return as_bits(lambda *xs: self.concat(xs, dim), *xs)
        return super().concat(xs, dim)

    def pad(
        self,
        x: Value,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int] | None = None,
        value: Operand = 0,
    ) -> Value:
        if x.dtype not in BITS:
            return super().pad(x, low, high, interior, value)
        filler = self.value(value, x.dtype)
        return as_bits(lambda x, filler: self.pad(x, low, high, interior, filler), x, filler)

    def slice(
        self,
        x: Value,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Value:
        if x.dtype in BITS:
            return as_bits(lambda x: self.slice(x, starts, limits, strides), x)
        return super().slice(x, starts, limits, strides)

    def flip(self, x: Value, dims: Sequence[int]) -> Value:
        if dims and x.dtype in BITS:
            return as_bits(lambda x: self.flip(x, dims), x)
        return super().flip(x, dims)

    def dynamic_slice(self, x: Value, starts: Sequence[Operand], sizes: Sequence[int]) -> Value:
        if x.dtype in BITS:
            return as_bits(lambda x: self.dynamic_slice(x, starts, sizes), x)
        return super().dynamic_slice(x, starts, sizes)

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Operand]) -> Value:
        if x.dtype not in BITS:
            return super().dynamic_update_slice(x, update, starts)
        if math.prod(x.shape) < _LARGE or not host_call.may_call_kernel(self):
            return as_bits(lambda x, y: self.dynamic_update_slice(x, y, starts), x, update)
        return self._write_in_place(x, update, self.starts(starts)).reshape(x.shape)

    def _write_in_place(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        long = [d for d, size in enumerate(x.shape) if size > 1]
        if getattr(x.owner, "name", None) == "stablehlo.reshape":
            # XLA copies what loses or gets dimensions of size 1 just before a call.
            given = self.operand(x.owner)
            if [n for n in given.shape if n > 1] == [x.shape[d] for d in long]:
                x = given
        into = [d for d, size in enumerate(x.shape) if size > 1]
        sizes, begins = [1] * x.rank, [self.constant(0, torch.int32)] * x.rank
        for d, old in zip(into, long, strict=True):
            sizes[d], begins[d] = update.shape[old], starts[old]
        args = (x, update.reshape(sizes), begins)
        outputs, split = [TensorSpec(x.dtype, x.shape)], [-1] * (x.rank + 3)
        [written] = host_call.call_kernel(self, _WRITE, args, outputs, split, in_place=True)
        return written  # type: ignore[no-any-return]

    def scatter(
        self,
        x: Value,
        index: Value,
        updates: Value,
        dims: ScatterDims,
        combine: str,
        unique: bool,
    ) -> Value:
        if x.dtype in BITS and combine == "assign":
            return as_bits(
                lambda x, y: self.scatter(x, index, y, dims, combine, unique), x, updates
            )
        return super().scatter(x, index, updates, dims, combine, unique)

    def _gather(
        self, x: Value, index: Value, numbers: Any, sizes: Sequence[int], result: Sequence[int]
    ) -> Value:
        if x.dtype in BITS:
            return as_bits(lambda x: self._gather(x, index, numbers, sizes, result), x)
        return super()._gather(x, index, numbers, sizes, result)
