"""Gather, scatter, sort and loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla.lowering.builder.contract import Contractions
from lazyxla.lowering.value import Operand, Value


class Indexing(Contractions):
    """The indexing and control-flow part of the Builder.

    Index values are integers of any width, already non-negative (see `wrap_index`). XLA clamps what
    is out of range in a gather and ignores it in a scatter. A gather from nothing gives zeros.
    """

    def take(self, x: Value, index: Value, dim: int) -> Value:
        """torch.index_select for an index of any rank, whose dimensions replace `dim` of `x`."""
        shape, places = self.shape(x), self.shape(index)
        dim %= len(shape)
        kept = [i for i in range(len(shape) + len(places) - 1) if not dim <= i < dim + len(places)]
        numbers = self._gather_numbers(kept, [dim], [dim])
        sizes = [1 if i == dim else n for i, n in enumerate(shape)]
        result = [*shape[:dim], *places, *shape[dim + 1 :]]
        return self._gather(x, self.unsqueeze(index, -1), numbers(len(places)), sizes, result)

    def take_along(self, x: Value, index: Value, dim: int) -> Value:
        """torch.gather: the result has the shape of `index`."""
        x, dim = self._crop(x, index, dim)
        rank = self.rank(x)
        if rank == 0:
            return x
        others = [i for i in range(rank) if i != dim]
        numbers = self.hlo.GatherDimensionNumbers.get([], [dim], others, others, [dim], rank)
        return self._gather(x, self.unsqueeze(index, -1), numbers, [1] * rank, self.shape(index))

    def gather_nd(self, x: Value, index: Value, dims: Sequence[int]) -> Value:
        """x at the index vectors `index[..., k]` over the dimensions `dims`.

        Result shape: index.shape[:-1] followed by the sizes of the other dimensions of `x`, in
        order.
        """
        shape, places = self.shape(x), self.rank(index) - 1
        dims = [d % len(shape) for d in dims]
        kept = [places + i for i in range(len(shape) - len(dims))]
        numbers = self._gather_numbers(kept, sorted(dims), dims)
        sizes = [1 if i in dims else n for i, n in enumerate(shape)]
        result = [*self.shape(index)[:-1], *(n for i, n in enumerate(shape) if i not in dims)]
        return self._gather(x, index, numbers(places), sizes, result)

    def scatter_nd(
        self,
        x: Value,
        index: Value,
        updates: Value,
        dims: Sequence[int],
        combine: str = "assign",
        unique: bool = False,
    ) -> Value:
        """`x` with updates combined in at the index vectors; shapes as in `gather_nd`.

        `combine` is assign, add, mul, min or max. `unique` promises that no place is hit twice.
        """
        shape, places = self.shape(x), self.rank(index) - 1
        dims = [d % len(shape) for d in dims]
        one = math.prod(self.shape(index)[:-1]) == 1 and 0 not in shape
        # The partitioner gathers what is sliced at run time along a sharded dimension.
        if one and combine == "assign" and self.annotations is None:
            return self._update_one(x, index, updates, dims)
        window = [places + i for i in range(len(shape) - len(dims))]
        numbers = self.hlo.ScatterDimensionNumbers.get(window, sorted(dims), [], [], dims, places)
        return self._scatter(x, index, updates, numbers, combine, unique)

    def _update_one(self, x: Value, index: Value, updates: Value, dims: Sequence[int]) -> Value:
        """`scatter_nd` of one index vector, as a slice that XLA writes in place.

        XLA's own expansion of such a scatter reads and selects all of `x`. An index that is out of
        range is ignored here too: the slice that was there is written back. As that is read from
        `x`, the CPU's compiler gets a write that it does not fuse (see `update_apart`); fused with
        several readers it would be done for each of them, on copies of `x`.
        """
        shape, sizes = self.shape(x), list(self.shape(x))
        vector = self.reshape(self.convert(index, torch.int64), [-1])
        starts: list[Operand] = [0] * len(shape)
        inside = self.value(True, torch.bool)
        for i, dim in enumerate(dims):
            start = self.reshape(self.slice(vector, [i], [i + 1]), [])
            known = self.hlo.clamp(
                self.full_like(start, 0), start, self.full_like(start, shape[dim] - 1)
            )
            inside = self.hlo.and_(inside, self.compare(start, known, "EQ"))
            sizes[dim], starts[dim] = 1, start
        old = self.dynamic_slice(x, starts, sizes)
        update = self.select(self.broadcast_to(inside, sizes), self.reshape(updates, sizes), old)
        return self.dynamic_update_slice(x, update, starts)

    def scatter_along(
        self, x: Value, index: Value, updates: Value, dim: int, combine: str = "assign"
    ) -> Value:
        """torch.scatter(x, dim, index, updates): `updates` has the shape of `index`."""
        shape, places = self.shape(x), self.shape(index)
        if not shape:
            return self.combine(combine, x, self.reshape(updates, ()))
        dim %= len(shape)
        if all(m == n for i, (m, n) in enumerate(zip(places, shape, strict=True)) if i != dim):
            others = [i for i in range(len(shape)) if i != dim]
            numbers = self.hlo.ScatterDimensionNumbers.get(
                [], [dim], others, others, [dim], len(shape)
            )
            return self._scatter(x, self.unsqueeze(index, -1), updates, numbers, combine, False)
        dtype = self.dtype(index)
        parts = [index if i == dim else self.iota(places, i, dtype) for i in range(len(shape))]
        return self.scatter_nd(x, self.stack(parts, -1), updates, range(len(shape)), combine)

    def _crop(self, x: Value, index: Value, dim: int) -> tuple[Value, int]:
        """`x` cut to the sizes of `index`, which torch.gather lets differ, except along `dim`."""
        shape, places = self.shape(x), self.shape(index)
        if not shape:
            return self.broadcast_to(x, places), 0
        dim %= len(shape)
        limits = [n if i == dim else places[i] for i, n in enumerate(shape)]
        return self.slice(x, [0] * len(shape), limits), dim

    def _gather_numbers(
        self, offset: Sequence[int], collapsed: Sequence[int], start: Sequence[int]
    ) -> Callable[[int], Any]:
        make = self.hlo.GatherDimensionNumbers.get
        return lambda vector: make(list(offset), list(collapsed), [], [], list(start), vector)

    def _gather(
        self, x: Value, index: Value, numbers: Any, sizes: Sequence[int], result: Sequence[int]
    ) -> Value:
        if 0 in result or any(size > n for size, n in zip(sizes, self.shape(x), strict=True)):
            # XLA refuses to take from nothing, even if nothing is to be taken.
            return self.zeros(result, self.dtype(x))
        return self.hlo.gather(x, index, numbers, sizes)

    def _scatter(
        self, x: Value, index: Value, updates: Value, numbers: Any, combine: str, unique: bool
    ) -> Value:
        ir, dtype = self.mlir.ir, self.dtype(x)
        op = self.hlo.ScatterOp(
            [x.type],
            [x],
            index,
            [updates],
            numbers,
            indices_are_sorted=ir.BoolAttr.get(False),
            unique_indices=ir.BoolAttr.get(unique),
        )
        self.region(op.regions[0], [dtype, dtype], lambda a, e: [self.combine(combine, a, e)])
        return self.wrap(op.results)[0]

    # ---- sort ----

    def sort(
        self, xs: Sequence[Value], dim: int, descending: bool = False, stable: bool = True
    ) -> list[Value]:
        """Sorts all values together along `dim` by the first; nan counts as the greatest."""
        xs = list(xs)
        if not self.shape(xs[0]):
            return xs
        dtypes = [self.dtype(x) for x in xs]

        def before(a: Value, b: Value, *_: Value) -> list[Value]:
            if dtypes[0] == torch.bool:
                a, b = self.convert(a, torch.uint8), self.convert(b, torch.uint8)
            first = self.compare(a, b, "GT" if descending else "LT")
            if dtypes[0].is_floating_point:
                low, high = (a, b) if descending else (b, a)
                nan = self.hlo.and_(self.is_nan(low), self.hlo.not_(self.is_nan(high)))
                first = self.hlo.or_(first, nan)
            return [first]

        ir = self.mlir.ir
        op = self.hlo.SortOp(
            [x.type for x in xs],
            xs,
            dimension=ir.IntegerAttr.get(self.mlir.element(torch.int64), dim % self.rank(xs[0])),
            is_stable=ir.BoolAttr.get(stable),
        )
        pairs = [self.type(d) for d in dtypes for _ in range(2)]
        self.block(op.regions[0], pairs, before)
        return self.wrap(op.results)

    def sort_with_indices(
        self, x: Value, dim: int, descending: bool = False, stable: bool = False
    ) -> list[Value]:
        """Values sorted along `dim`, nan as the greatest, and the int64 indices they come from."""
        if not x.shape:
            return [x, self.zeros([], torch.int64)]
        return self.sort([x, self.iota(x.shape, dim, torch.int64)], dim, descending, stable)

    # ---- control flow ----

    def while_loop(
        self,
        condition: Callable[..., Value],
        body: Callable[..., Sequence[Value]],
        *state: Value,
    ) -> list[Value]:
        """Repeats `state = body(*state)` while `condition(*state)`, a 0-dim bool value, holds."""
        types = [x.type for x in state]
        op = self.hlo.WhileOp(types, list(state))
        self.block(op.regions[0], types, lambda *s: [condition(*s)])
        self.block(op.regions[1], types, body)
        return self.wrap(op.results)

    def scan(
        self,
        length: int,
        body: Callable[[Value, list[Value], list[Value], list[Value]], tuple[Any, Any]],
        carry: Sequence[Value],
        xs: Sequence[Value],
        constants: Sequence[Value],
        ys: Sequence[Any],
        reverse: bool = False,
    ) -> tuple[list[Value], list[Value]]:
        """A loop that takes a slice of `xs` and makes a slice of the `ys` in each iteration.

        Args:
            length: of the loop, and of the first dimension of `xs` and `ys`.
            body: a function of the iteration's number, an int32 value, the carry, the slices of
                `xs` without their first dimension, and the constants. It returns the next carry,
                of the same types, and the slices of the `ys`.
            carry: what the first iteration gets.
            constants: what each iteration gets.
            ys: (dtype, shape) of each slice.
            reverse: the last slice comes first.

        Returns:
            The last carry, and the stacked `ys`.
        """
        first, last = (0, length) if not reverse else (length - 1, -1)
        stacked = [self.zeros([length, *shape], dtype) for dtype, shape in ys]
        counts = [1, len(carry), len(xs), len(constants), len(stacked)]
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]

        def step(*state: Value) -> list[Value]:
            i = state[0]
            now, sources, fixed, made = (list(state[a:b]) for a, b in itertools.pairwise(ends))
            now, parts = body(i, now, [self.slice_at(x, i) for x in sources], fixed)
            made = [self.put_at(y, part, i) for y, part in zip(made, parts, strict=True)]
            following = self.hlo.add(i, self.constant(-1 if reverse else 1, torch.int32))
            return [following, *now, *sources, *fixed, *made]

        def more(i: Value, *_: Value) -> Value:
            return self.compare(i, self.constant(last, torch.int32), "NE")

        start = self.constant(first, torch.int32)
        state = self.while_loop(more, step, start, *carry, *xs, *constants, *stacked)
        return state[ends[0] : ends[1]], state[ends[3] :]

    def slice_at(self, x: Value, i: Value) -> Value:
        """x[i] for an int32 value."""
        shape = self.shape(x)
        places = [i, *[self.constant(0, torch.int32)] * (len(shape) - 1)]
        return self.reshape(self.hlo.dynamic_slice(x, places, [1, *shape[1:]]), shape[1:])

    def put_at(self, x: Value, part: Value, i: Value) -> Value:
        """`x` with x[i] = part, for an int32 value; `part` is not read from `x`."""
        places = [i, *[self.constant(0, torch.int32)] * (self.rank(x) - 1)]
        return self.hlo.dynamic_update_slice(x, self.unsqueeze(part, 0), places)

    def cond(
        self,
        predicate: Value,
        if_true: Callable[[], Sequence[Value]],
        if_false: Callable[[], Sequence[Value]],
        outputs: Sequence[Any],
    ) -> list[Value]:
        """Runs one of two branches; `outputs` are the (dtype, shape) pairs that both return."""
        op = self.hlo.IfOp([self.type(*o) for o in outputs], predicate)
        self.block(op.regions[0], [], if_true)
        self.block(op.regions[1], [], if_false)
        return self.wrap(op.results)
