"""Gather, scatter, sort and loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lazyxla.lowering.builder.contract import Contractions
from lazyxla.lowering.value import Operand, Value


class ScatterDims(NamedTuple):
    """What the dimensions of a scatter's operand, indices and updates are, as StableHLO has it. The
    last dimension of the indices is the components of their vectors. In the dimensions that are
    neither indexed nor batches, an update is as large as the operand."""

    indexed: Sequence[int]  # the operand's, one for each component
    windows: Sequence[int]  # the updates' in which they are not single elements
    batches: Sequence[int] = ()  # the operand's
    index_batches: Sequence[int] = ()  # those of the indices


class Indexing(Contractions):
    """The indexing and control-flow part of the Builder.

    Index values are integers of any width, already non-negative (see `wrap_index`). XLA clamps what
    is out of range in a gather and ignores it in a scatter. A gather from nothing gives zeros.
    """

    def take(self, x: Value, index: Value, dim: int) -> Value:
        """torch.index_select for an index of any rank, whose dimensions replace `dim` of `x`."""
        dim %= x.rank
        end = dim + index.rank
        kept = [i for i in range(x.rank + index.rank - 1) if not dim <= i < end]
        numbers = self._gather_numbers(kept, [dim], [dim], index.rank)
        sizes = [1 if i == dim else n for i, n in enumerate(x.shape)]
        result = [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]]
        return self._gather(x, self.unsqueeze(index, -1), numbers, sizes, result)

    def take_along(self, x: Value, index: Value, dim: int) -> Value:
        """torch.gather: the result has the shape of `index`."""
        result = index.shape
        x, dim = self._crop(x, index, dim)
        rank = x.rank
        if rank == 0:
            return x
        rows, index, others, places = self._by_rows(x, index, dim)
        numbers = self.hlo.GatherDimensionNumbers.get(
            rows, [dim], others, places, [dim], rank - len(rows)
        )
        sizes = [n if i in rows else 1 for i, n in enumerate(x.shape)]
        return self._gather(x, self.unsqueeze(index, -1), numbers, sizes, result)

    def pick(self, x: Value, index: Value, dim: int) -> Value:
        """x[i, index[i, ...], ...] for `dim` 1: of each row along `dim` the element at its index,
        which has the shape of `x` without `dim`.
        """
        return self.squeeze(self.take_along(x, self.unsqueeze(index, dim), dim), dim)

    def one_hot(self, shape: Sequence[int], index: Value, dim: int) -> Value:
        """Where in `shape` the coordinate along `dim` is the int64 index of its row: a mask. A
        negative index, or one beyond the end, is of no element.
        """
        index = self.unsqueeze(index, dim)
        # 64-bit comparisons are two for a TPU. What is out of range remains so in 32 bits.
        size = index.full(shape[dim])
        inside = self.bitcast(index, torch.uint64) < self.bitcast(size, torch.uint64)
        index = self.select(inside, index, -1).to(torch.int32)
        return self.iota(shape, dim, torch.int32) == index

    def gather_nd(self, x: Value, index: Value, dims: Sequence[int]) -> Value:
        """x at the index vectors `index[..., k]` over the dimensions `dims`.

        Result shape: index.shape[:-1] followed by the sizes of the other dimensions of `x`, in
        order.
        """
        batch = index.rank - 1
        dims = [d % x.rank for d in dims]
        kept = [batch + i for i in range(x.rank - len(dims))]
        numbers = self._gather_numbers(kept, sorted(dims), dims, batch)
        sizes = [1 if i in dims else n for i, n in enumerate(x.shape)]
        result = [*index.shape[:-1], *(n for i, n in enumerate(x.shape) if i not in dims)]
        return self._gather(x, index, numbers, sizes, result)

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

        `combine` is assign, add, mul, min or max. `unique` promises that all index vectors differ.
        """
        batch = index.rank - 1
        dims = [d % x.rank for d in dims]
        one = math.prod(index.shape[:-1]) == 1 and 0 not in x.shape
        # The partitioner gathers what is sliced at run time along a sharded dimension.
        if one and combine == "assign" and self.annotations is None:
            return self._update_one(x, index, updates, dims)
        windows = [batch + i for i in range(x.rank - len(dims))]
        return self.scatter(x, index, updates, ScatterDims(dims, windows), combine, unique)

    def _update_one(self, x: Value, index: Value, updates: Value, dims: Sequence[int]) -> Value:
        """`scatter_nd` of one index vector, as a slice that XLA writes in place.

        XLA's own expansion of such a scatter reads and selects all of `x`. An index that is out of
        range is ignored here too: the slice that was there is written back. As that is read from
        `x`, the CPU's compiler gets a write that it does not fuse (see `update_apart`); fused with
        several readers it would be done for each of them, on copies of `x`.
        """
        sizes = list(x.shape)
        vector = index.to(torch.int64).reshape([-1])
        starts: list[Operand] = [0] * x.rank
        inside = self.value(True, torch.bool)
        for i, dim in enumerate(dims):
            start = self.select_dim(vector, 0, i)
            last = start.full(x.shape[dim] - 1)
            inside &= start == self.hlo.clamp(start.full(0), start, last)
            sizes[dim], starts[dim] = 1, start
        old = self.dynamic_slice(x, starts, sizes)
        update = self.select(inside, updates.reshape(sizes), old)
        return self.dynamic_update_slice(x, update, starts)

    def scatter_along(
        self, x: Value, index: Value, updates: Value, dim: int, combine: str = "assign"
    ) -> Value:
        """torch.scatter(x, dim, index, updates): `updates` has the shape of `index`."""
        rank, sizes = x.rank, index.shape
        if not rank:
            return self.combine(combine, x, updates.reshape(()))
        dim %= rank
        if all(m == n for i, (m, n) in enumerate(zip(sizes, x.shape, strict=True)) if i != dim):
            rows, index, others, places = self._by_rows(x, index, dim)
            dims = ScatterDims([dim], rows, others, places)
            return self.scatter(x, self.unsqueeze(index, -1), updates, dims, combine, False)
        parts = [index if i == dim else self.iota(sizes, i, index.dtype) for i in range(rank)]
        return self.scatter_nd(x, self.stack(parts, -1), updates, range(rank), combine)

    def _by_rows(
        self, x: Value, index: Value, dim: int
    ) -> tuple[list[int], Value, list[int], list[int]]:
        """How an index that is repeated along dimensions, as an expanded one is, addresses whole
        rows: those dimensions, the index without them, and the others but `dim`, as dimensions of
        `x` and of that index. A row is read and written at once, its elements one by one.
        """
        repeated = self.repeated(index)
        rows = [i for i in repeated if i != dim and index.shape[i] == x.shape[i]]
        kept = [i for i in range(x.rank) if i not in rows]
        if rows:
            ends = [1 if i in rows else n for i, n in enumerate(index.shape)]
            index = self.squeeze(self.slice(index, [0] * index.rank, ends), *rows)
        others = [i for i in kept if i != dim]
        return rows, index, others, [kept.index(i) for i in others]

    def repeated(self, x: Value) -> list[int]:
        """The dimensions along which the operation that makes a value repeats it."""
        owner = x.owner
        if getattr(owner, "name", None) != "stablehlo.broadcast_in_dim":
            return []
        sizes = dict(
            zip(owner.attributes["broadcast_dimensions"], self.operand(owner).shape, strict=True)
        )
        return [i for i, n in enumerate(x.shape) if n > 1 and sizes.get(i, 1) == 1]

    def _crop(self, x: Value, index: Value, dim: int) -> tuple[Value, int]:
        """`x` cut to the sizes of `index`, which torch.gather lets differ, except along `dim`."""
        if not x.rank:
            return self.broadcast_to(x, index.shape), 0
        dim %= x.rank
        limits = [n if i == dim else index.shape[i] for i, n in enumerate(x.shape)]
        return self.slice(x, [0] * x.rank, limits), dim

    def _gather_numbers(
        self, offset: Sequence[int], collapsed: Sequence[int], start: Sequence[int], vector: int
    ) -> Any:
        make = self.hlo.GatherDimensionNumbers.get
        return make(list(offset), list(collapsed), [], [], list(start), vector)

    def _gather(
        self, x: Value, index: Value, numbers: Any, sizes: Sequence[int], result: Sequence[int]
    ) -> Value:
        if 0 in result or any(size > n for size, n in zip(sizes, x.shape, strict=True)):
            # XLA refuses to take from nothing, even if nothing is to be taken.
            return self.zeros(result, x.dtype)
        return self.hlo.gather(self.unfolded(x, math.prod(result)), index, numbers, sizes)

    def scatter(
        self,
        x: Value,
        index: Value,
        updates: Value,
        dims: ScatterDims,
        combine: str,
        unique: bool,
    ) -> Value:
        """`x` with each of the updates combined in at its index vector."""
        ir, dtype = self.mlir.ir, x.dtype
        updates = self.unfolded(updates)
        numbers = self.hlo.ScatterDimensionNumbers.get(
            list(dims.windows),
            sorted(dims.indexed),
            list(dims.batches),
            list(dims.index_batches),
            list(dims.indexed),
            index.rank - 1,
        )
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
        if not xs[0].rank:
            return xs
        dtypes = [x.dtype for x in xs]

        def before(a: Value, b: Value, *_: Value) -> list[Value]:
            if dtypes[0] == torch.bool:
                a, b = a.to(torch.uint8), b.to(torch.uint8)
            first = a > b if descending else a < b
            if a.is_float:
                greater, less = (a, b) if descending else (b, a)
                first |= greater.is_nan() & ~less.is_nan()
            return [first]

        ir = self.mlir.ir
        op = self.hlo.SortOp(
            [x.type for x in xs],
            xs,
            dimension=ir.IntegerAttr.get(self.mlir.element(torch.int64), dim % xs[0].rank),
            is_stable=ir.BoolAttr.get(stable),
        )
        pairs = [self.type(d) for d in dtypes for _ in range(2)]
        self.block(op.regions[0], pairs, before)
        return self.wrap(op.results)

    def sort_with_indices(
        self, x: Value, dim: int, descending: bool = False, stable: bool = False
    ) -> list[Value]:
        """Values sorted along `dim`, nan as the greatest, and their int64 indices in the input."""
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
            reverse: the last slice is taken first.

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
            return [i + (-1 if reverse else 1), *now, *sources, *fixed, *made]

        def more(i: Value, *_: Value) -> Value:
            return i != last

        start = self.constant(first, torch.int32)
        state = self.while_loop(more, step, start, *carry, *xs, *constants, *stacked)
        return state[ends[0] : ends[1]], state[ends[3] :]

    def stacked_apart(self, stacks: Sequence[Value]) -> list[Value]:
        """The values, which are stacks for a loop or of its results; not fused with others where
        the compiler does that badly."""
        return list(stacks)

    def slice_at(self, x: Value, i: Value) -> Value:
        """x[i] for an int32 value."""
        starts = [i, *[self.constant(0, torch.int32)] * (x.rank - 1)]
        return self.reshape(self.hlo.dynamic_slice(x, starts, [1, *x.shape[1:]]), x.shape[1:])

    def put_at(self, x: Value, part: Value, i: Value) -> Value:
        """`x` with x[i] = part, for an int32 value; `part` is not read from `x`."""
        starts = [i, *[self.constant(0, torch.int32)] * (x.rank - 1)]
        return self.hlo.dynamic_update_slice(x, self.unsqueeze(part, 0), starts)

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
