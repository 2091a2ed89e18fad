"""The builder for XLA's CPU compiler: operations in the forms that it computes right, or fast.

Times are of float32 on two cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from lazyxla.lowering.builder.attention import Attention
from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.builder.indexing import ScatterDims
from lazyxla.lowering.cpu import attention, matmul, matmul_kernels, scatter
from lazyxla.lowering.cpu.flat import flatten
from lazyxla.lowering.cpu.in_place import may_read_what_it_replaces, update_apart
from lazyxla.lowering.cpu.moves import BITS, Moves
from lazyxla.lowering.cpu.parts import compute_in_parts
from lazyxla.lowering.cpu.reduced import reduce_in_few_dimensions
from lazyxla.lowering.cpu.sorting import packed_order
from lazyxla.lowering.cpu.stored import store_shared_values
from lazyxla.lowering.cpu.sums import sum_by_matmul
from lazyxla.lowering.program import Program
from lazyxla.lowering.streams import threefry_bits
from lazyxla.lowering.value import Operand, Value

_FEW_TERMS = 64
"""Up to this many terms are added one after the other."""

_PART = 16
"""A longer sum is split into sums of at least this many terms, which are then added."""

_SHORT_COLUMN = 16
"""Up to this length columns are sorted where they are. 50,257 columns of 8 floats take 5.8 ms, and
as rows 7.0; 8,192 of 32 19.7 and 6.7; 1,024 of 1,024 184 and 55 (two CPUs of an AMD EPYC)."""


class CpuBuilder(Moves):
    """See the module."""

    attention = Attention(kernel=attention, causal_loops=8)
    _has_sums_by_matmul = False

    @property
    def takes_host_calls(self) -> bool:
        return self.target.host_calls

    @property
    def gathers_what_is_not_finite(self) -> bool:  # type: ignore[override]
        return not self.target.any_sizes

    def in_fewer_dimensions(self, program: Program) -> Program | None:
        return flatten(program)

    def finish(self) -> None:
        reduce_in_few_dimensions(self)
        if not self.target.any_sizes and self.annotations is None:
            store_shared_values(self)
        if self._has_sums_by_matmul:
            compute_in_parts(self)

    def random_bits(
        self, shape: Sequence[int], dtype: torch.dtype, seed: Value, ordinal: Value
    ) -> Value:
        return threefry_bits(self, shape, dtype, seed, ordinal)

    def platform_dot(self, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
        if self.target.any_sizes:  # the forms depend on the sizes
            return self.plain_dot(left, right, dtype)
        if left.batch:
            if all(left.value.shape[d] == 1 for d in left.batch):
                one, other = matmul.without_batch(left), matmul.without_batch(right)
                product = self.platform_dot(one, other, dtype)
                return product.reshape([1] * len(left.batch) + [*product.shape])
            summed = matmul.batched(self, left, right, dtype)
            return self.plain_dot(left, right, dtype) if summed is None else summed
        if dtype in (None, left.value.dtype):
            called = matmul_kernels.product(self, left, right)
            if called is not None:
                return called
        return matmul.dot(self, left, right, dtype)

    def conv(self, lhs: Value, rhs: Value, *args: Any, **options: Any) -> Value:
        # PyTorch's CPU kernels round 16-bit results once, after the bias.
        return super().conv(lhs, rhs, *args, **{"dtype": self.compute_dtype(lhs.dtype), **options})

    def maximum(self, x: Value, y: Value) -> Value:
        return self._extreme("maximum", "GE", x, y)

    def minimum(self, x: Value, y: Value) -> Value:
        return self._extreme("minimum", "LE", x, y)

    def _extreme(self, operation: str, first: str, x: Value, y: Value) -> Value:
        # XLA keeps the nan of one operand only (xla_cpu_enable_fast_min_max), and which one that is
        # changes when it finds the same maximum with the operands exchanged.
        if not x.is_float:
            return x.call(operation, y)
        return self.select(x.compare(y, first) | x.is_nan(), x, y)

    def absolute(self, x: Value) -> Value:
        # XLA's form loses the nan of a part, as its maximum does, and an infinity beside a nan.
        size = super().absolute(x)
        if not x.is_complex:
            return size
        infinite = (abs(x.real) == math.inf) | (abs(x.imag) == math.inf)
        whole = self.select(x.is_nan(), math.nan, size)
        return self.select(infinite, math.inf, whole)

    def log1p(self, x: Value) -> Value:
        """XLA's own operation takes four times as long as the logarithm of the rounded sum and the
        share that the rounding left out (W. Kahan), whose error is no greater.
        """
        if x.dtype != torch.float32:
            return self.hlo.log_plus_one(x)
        # XLA would cancel a constant that is added and subtracted again.
        one = self.broadcast_to(self.hlo.optimization_barrier([self.constant(1, x.dtype)]), x.shape)
        total = x + one
        excess = ((total - one) - x) / total  # nan at -1 and infinity
        rest = self.hlo.log(total) - self.select(excess.is_nan(), 0, excess)
        return self.select(x == 0, x, rest)

    def reduce(self, x: Value, dims: Sequence[int], kind: str, keepdim: bool = False) -> Value:
        """XLA's loops over several leading dimensions read the operand with long strides: the
        maxima of 8 x 32 x 64 x 64 over the first two take 2.4 ms, over one of 256 0.3. So adjacent
        dimensions that are reduced, or kept, are one.
        """
        gone = {d % max(x.rank, 1) for d in dims} if x.rank else set()
        full = [1 if d in gone else n for d, n in enumerate(x.shape)]
        kept = [n for d, n in enumerate(x.shape) if d not in gone]
        if kind in ("max", "min") and x.dtype in BITS:
            # XLA would round the result of each pair of elements.
            return self.reduce(x.accumulated(), dims, kind, keepdim).to(x.dtype)
        # The form depends on the sizes, and the partitioner could not split what it reshapes.
        if not self.target.any_sizes and self.annotations is None:
            sizes, dims = _merged(x.shape, gone, all_of_them=kind != "sum")
            x = x.reshape(sizes)
            x = self._summed_rows(x, dims) if kind == "sum" else x
        for part in self._summed_before(x, dims) if kind == "sum" else []:
            # XLA would make one reduction of both again without the barrier.
            x = self.hlo.optimization_barrier([super().reduce(x, part, kind, keepdim=True)])
        return super().reduce(x, dims, kind).reshape(full if keepdim else kept)

    def _summed_rows(self, x: Value, dims: Sequence[int]) -> Value:
        """`x` with the sum over its last dimensions in place of them, where a matmul with ones is
        the better form of it."""
        last = {d % max(x.rank, 1) for d in dims}
        first = x.rank
        while first - 1 in last:
            first -= 1
        sums = sum_by_matmul(self, x, first)
        if sums is None:
            return x
        self._has_sums_by_matmul = True
        return sums.reshape([*x.shape[:first], *[1] * (x.rank - first)])

    def _summed_before(self, x: Value, dims: Sequence[int]) -> list[list[int]]:
        """Which dimensions to sum before the others, in turn; none if all are to be at once.

        XLA adds the elements of several dimensions one after the other, with an error that grows
        with their number; those of a single one it adds as a tree, mostly in less time.
        """
        if x.is_exact:
            return []
        shape = x.shape
        left = sorted({d % max(len(shape), 1) for d in dims if shape and shape[d] > 1})
        if math.prod(shape[d] for d in left) <= _FEW_TERMS:
            return []
        parts: list[list[int]] = [[]]
        while left:
            if math.prod(shape[d] for d in parts[-1]) >= _PART:
                parts.append([])
            parts[-1].append(left.pop())
        return parts[:-1]

    def extremum(self, x: Value, dims: Sequence[int], kind: str, keepdim: bool = False) -> Value:
        """Nans are looked for apart, which takes three times as long again. (With XLA's option
        xla_cpu_enable_fast_min_max off, its own loops take 18 times as long.)
        """
        result = self.reduce(x, dims, kind, keepdim)
        if not x.is_float:
            return result
        return self.select(self.reduce(x.is_nan(), dims, "or", keepdim), math.nan, result)

    def arg_reduce(
        self, x: Value, dim: int, kind: str, keepdim: bool = False
    ) -> tuple[Value, Value]:
        """Two reductions: the extremum, then the first index at which it is.

        XLA reduces pairs element by element: 512 rows of 2048 take 3.06 ms, and like this 0.45.
        """
        if not x.rank:
            return super().arg_reduce(x, dim, kind, keepdim)
        value, index = self._find_extremum(x, dim, kind)
        if not keepdim:
            value, index = self.squeeze(value, dim), self.squeeze(index, dim)
        return value, index.to(torch.int64)

    def _find_extremum(self, x: Value, dim: int, kind: str) -> tuple[Value, Value]:
        size = x.shape[dim]
        narrow = torch.int32 if size < 2**30 else torch.int64  # indices go up to 2 * size
        index = self.iota(x.shape, dim, narrow)
        value = self.reduce(x, [dim], kind, keepdim=True)
        found = x == value
        if not x.is_float:
            first = self.reduce(self.select(found, index, size), [dim], "min", keepdim=True)
            return value, first
        # Indices of nan come before all others, which are `size` further on.
        later = self.select(found, index + size, 2 * size)
        first = self.select(x.is_nan(), index, later)
        first = self.reduce(first, [dim], "min", keepdim=True)
        is_nan = first < size
        other = first - size
        return self.select(is_nan, math.nan, value), self.select(is_nan, first, other)

    def maps_by_matmul(self, size: int, adjoint: bool) -> bool:
        """Images of 512 x 512 become 224 x 224 in 0.4 ms by gathering, in 7.9 by matmuls; 8 x 32 of
        56 x 56 pixels become 112 x 112 in 3.0 and 7.7. The adjoint of the latter gathers four
        elements for each, which takes 20 ms, and 6 by matmuls.
        """
        return adjoint and size <= 1 << 15

    def sort_with_indices(
        self, x: Value, dim: int, descending: bool = False, stable: bool = False
    ) -> list[Value]:
        if not x.shape or x.dtype.itemsize > 4 or x.shape[dim] >= 1 << 31:
            return super().sort_with_indices(x, dim, descending, stable)
        last = -1 if x.shape[dim] > _SHORT_COLUMN else dim
        rows = self.swap(x, dim, last)
        index = packed_order(rows, last, descending)
        values = self.take_along(rows, index, last) if 0 not in x.shape else rows
        return [self.swap(values, dim, last), self.swap(index, dim, last)]

    def scatter(
        self,
        x: Value,
        index: Value,
        updates: Value,
        dims: ScatterDims,
        combine: str,
        unique: bool,
    ) -> Value:
        if combine == "assign" and x.dtype in BITS:
            return super().scatter(x, index, updates, dims, combine, unique)
        # The form depends on the sizes, and the partitioner could not split what it reshapes.
        may_flatten = not self.target.any_sizes and self.annotations is None
        flat = scatter.flatten(self, x, index, updates, dims) if may_flatten else None
        if flat is None:
            return super().scatter(x, index, updates, dims, combine, unique)
        return super().scatter(*flat, combine, unique).reshape(x.shape)

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Operand]) -> Value:
        if x.dtype in BITS:
            return super().dynamic_update_slice(x, update, starts)
        if may_read_what_it_replaces(x, update):
            return update_apart(self, x, update, self.starts(starts))
        return super().dynamic_update_slice(x, update, starts)

    def stacked_apart(self, stacks: Sequence[Value]) -> list[Value]:
        # Fused with what makes the parts or reads them, they take XLA several times as long, and
        # longer to compute.
        return self.wrap(self.hlo.OptimizationBarrierOp(list(stacks)).results) if stacks else []


def _merged(shape: Sequence[int], gone: set[int], all_of_them: bool) -> tuple[list[int], list[int]]:
    """The sizes with adjacent dimensions as one, and which of these are reduced. Of those in
    `gone`, which are to be, `all_of_them`; sums are made of one dimension after the other.
    """
    sizes: list[int] = []
    reduced: list[int] = []
    for is_gone, group in itertools.groupby(range(len(shape)), lambda d: d in gone):
        found = [shape[d] for d in group]
        found = found if is_gone and not all_of_them else [math.prod(found)]
        if is_gone:
            reduced += range(len(sizes), len(sizes) + len(found))
        sizes += found
    return sizes, reduced
