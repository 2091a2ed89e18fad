"""Operations that combine elements of one value: reductions, windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla.lowering.builder.shapes import Shapes
from lazyxla.lowering.value import Number, Operand, Value

COMBINERS = {
    "sum": "add",
    "add": "add",
    "prod": "multiply",
    "mul": "multiply",
    "max": "maximum",
    "min": "minimum",
    "and": "and_",
    "or": "or_",
    "xor": "xor",
}


_LONG_TO_FOLD = 1 << 14  # elements; XLA's constant folding takes 1 to 2 us for each
_FARTHEST = 32  # operations between a constant and what reduces it, about


class Reductions(Shapes):
    """The reducing part of the Builder."""

    def neutral(self, kind: str, dtype: torch.dtype) -> Number:
        """The neutral element of a reduction kind."""
        if kind in ("sum", "add", "or", "xor"):
            return 0
        if kind in ("prod", "mul"):
            return 1
        if kind == "and":
            return True if dtype == torch.bool else -1
        return self.lowest(dtype) if kind == "max" else self.highest(dtype)

    def combine(self, kind: str, x: Value, y: Value) -> Value:
        """The binary operation of a kind: sum, prod, max, min, and, or, xor; "assign" gives y."""
        if kind == "assign":
            return y
        operation = COMBINERS[kind]
        if operation == "add" and x.dtype == torch.bool:
            operation = "or_"  # XLA folds constants by adding bools modulo 2
        return getattr(self if operation in ("maximum", "minimum") else self.hlo, operation)(x, y)

    def reduce(self, x: Value, dims: Sequence[int], kind: str, keepdim: bool = False) -> Value:
        """Reduces `x` over `dims` in its own dtype; `kind` is sum, prod, max, min, and, or.

        For max and min there is `extremum`, which keeps nan on every platform.
        """
        start = self.constant(self.neutral(kind, x.dtype), x.dtype)
        if kind != "sum":  # XLA has a formula for the sum of a constant
            x = self.unfolded(x)

        def body(a: list[Value], e: list[Value]) -> list[Value]:
            if kind in ("max", "min"):
                return [a[0].call(COMBINERS[kind], e[0])]
            return [self.combine(kind, a[0], e[0])]

        (result,) = self.reduce_multi([x], [start], dims, body, keepdim)
        return result

    def extremum(self, x: Value, dims: Sequence[int], kind: str, keepdim: bool = False) -> Value:
        """The maximum or minimum, nan if one element is nan."""
        return self.reduce(x, dims, kind, keepdim)

    def reduce_multi(
        self,
        xs: Sequence[Value],
        starts: Sequence[Value],
        dims: Sequence[int],
        body: Callable[[list[Value], list[Value]], Sequence[Value]],
        keepdim: bool = False,
    ) -> list[Value]:
        """Reduces several values of one shape together.

        `body(accumulators, elements)` gets and returns 0-dim values; `starts` are the 0-dim neutral
        elements.
        """
        shape = xs[0].shape
        gone = {d % max(len(shape), 1) for d in dims} if shape else set()
        if not gone:
            return list(xs)
        kept = [n for i, n in enumerate(shape) if i not in gone]
        dtypes = [x.dtype for x in xs]
        types = [self.type(dtype, kept) for dtype in dtypes]
        op = self.hlo.ReduceOp(types, list(xs), list(starts), sorted(gone))
        self.region(
            op.regions[0], dtypes * 2, lambda *a: body(list(a[: len(xs)]), list(a[len(xs) :]))
        )
        results = self.wrap(op.results)
        if keepdim:
            full = [1 if i in gone else n for i, n in enumerate(shape)]
            results = [self.reshape(r, full) for r in results]
        return results

    def arg_reduce(
        self, x: Value, dim: int, kind: str, keepdim: bool = False
    ) -> tuple[Value, Value]:
        """Maximum or minimum (`kind`) along `dim` and its first int64 index; nan wins."""
        if not x.rank:
            return x, self.constant(0, torch.int64)
        narrow = torch.int32 if x.shape[dim] < 2**31 else torch.int64
        index = self.iota(x.shape, dim, narrow)
        worst = self.constant(self.neutral(kind, x.dtype), x.dtype)

        def body(a: list[Value], e: list[Value]) -> list[Value]:
            (best, index), (other, other_index) = a, e
            better = best > other if kind == "max" else best < other
            same = best == other
            if x.is_float:
                nan, other_nan = best.is_nan(), other.is_nan()
                better |= nan & ~other_nan
                same |= nan & other_nan
            take = better | (same & (index < other_index))
            return [self.select(take, best, other), self.select(take, index, other_index)]

        # An index beyond all others lets any element win over the start.
        last = self.constant(torch.iinfo(narrow).max, narrow)
        value, index = self.reduce_multi([x, index], [worst, last], [dim], body, keepdim)
        return value, index.to(torch.int64)

    def reduce_window(
        self,
        x: Value,
        kind: str,
        window: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: Sequence[tuple[int, int]] | None = None,
        window_dilation: Sequence[int] | None = None,
        base_dilation: Sequence[int] | None = None,
    ) -> Value:
        """Reduces over sliding windows; every argument lists all dimensions of `x`."""
        shape = x.shape
        ones = [1] * len(shape)
        strides, window_dilation = list(strides or ones), list(window_dilation or ones)
        base_dilation, padding = list(base_dilation or ones), list(padding or [(0, 0)] * len(shape))
        sizes = []
        for i, n in enumerate(shape):
            base = (n - 1) * base_dilation[i] + 1 if n else 0
            base += sum(padding[i])
            reach = (window[i] - 1) * window_dilation[i] + 1
            sizes.append(0 if base < reach else (base - reach) // strides[i] + 1)
        op = self.hlo.ReduceWindowOp(
            [self.type(x.dtype, sizes)],
            [self.unfolded(x)],
            [self.constant(self.neutral(kind, x.dtype), x.dtype)],
            list(window),
            window_strides=strides,
            base_dilations=base_dilation,
            window_dilations=window_dilation,
            padding=self.pairs(padding),
        )
        self.region(op.regions[0], [x.dtype] * 2, lambda a, e: [self.combine(kind, a, e)])
        return self.wrap(op.results)[0]

    def unfolded(self, x: Value, count: int | None = None) -> Value:
        """`x`, behind a barrier if it is computed from constants alone, and large, or `count`
        elements are made of it.

        XLA would compute what is made of it, too, when it compiles, one element after the other: of
        a running sum of 1024 x 1024 ones it makes 13 seconds.
        """
        count = math.prod(x.shape) if count is None else count
        if count < _LONG_TO_FOLD or not self._is_constant(x):
            return x
        return self.hlo.optimization_barrier([x])

    def _is_constant(self, x: Value) -> bool:
        """Whether XLA sees that it is computed from constants alone. (An iota is none to it.)"""
        owners = [x.owner]
        for _ in range(_FARTHEST):
            if not owners:
                return True
            owner = owners.pop()
            name = getattr(owner, "name", None)  # a block has none: an argument
            if name in (None, "stablehlo.iota", "stablehlo.optimization_barrier"):
                return False
            owners += [operand.owner for operand in owner.operands]
        return False

    def pairs(self, padding: Sequence[Sequence[int]]) -> Any:
        """A padding attribute: an i64 tensor of shape (rank, 2)."""
        ir = self.mlir.ir
        items = [ir.IntegerAttr.get(self.mlir.element(torch.int64), n) for p in padding for n in p]
        return ir.DenseElementsAttr.get(items, self.type(torch.int64, (len(padding), 2)))

    # ---- small numeric helpers ----

    def scale(self, x: Value, factor: Operand) -> Value:
        """`x * factor` in the dtype of `x`; nothing is emitted for the constant 1."""
        if self.is_const(factor, 1):
            return x
        return x * x.full(factor)

    def region(self, region: Any, dtypes: Sequence[torch.dtype], body: Callable[..., Any]) -> None:
        """Fills `region` with a block: 0-dim arguments of `dtypes`, returning body(*arguments)."""
        self.block(region, [self.type(d) for d in dtypes], body)

    def block(self, region: Any, types: Sequence[Any], body: Callable[..., Any]) -> None:
        """Like `region`, for arguments of any MLIR types."""
        block = region.blocks.append(*types)
        with self.mlir.ir.InsertionPoint(block):
            self.hlo.return_(list(body(*self.wrap(block.arguments))))
