"""The forms in which XLA's CPU backend multiplies matrices faster than as they are written.

Times are of float32 on two cores. Each form computes the same sums of products.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder.contract import Contractions

_GAP, _PAGE = 16, 1024
"""Elements of float32, in which the narrower types are multiplied, too: a line of the processor's
cache, and the distance at which addresses share a line of the first one (4096 bytes)."""

_FEW_ROWS = 4
"""Of 16-bit floats, up to which each is multiplied by the weight apart."""

_MANY_PAIRS, _MOST_PRODUCTS = 16, 4096
"""Of how many matrices a batch is multiplied in one loop, and the products of a pair at most."""


def dot(b: Contractions, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
    """A dot without batch dimensions, in the form that is the fastest.

    The forms are those of matrices; all dimensions but the last one count together as rows, as the
    backend has it in the end.
    """

    def plain(x: Value, y: Value) -> Value:
        return b.plain_dot(left._replace(value=x), right._replace(value=y), dtype)

    lhs, rhs = left.value, right.value
    if dtype in (None, lhs.dtype) and _has_few_terms(left, right):
        return _by_terms(b, left, right)
    last = lhs.rank - 1
    if rhs.rank == 2 and last >= 1 and (*left.contract, *right.contract) == (last, 1):
        if 1 < _rows(lhs) <= _FEW_ROWS and lhs.dtype.itemsize == 2:
            return _row_by_row(b, lhs, rhs, dtype)
        if _better_turned(lhs, rhs):
            # XLA would turn it back without the barrier.
            turned = b.plain_dot(right, left, dtype)
            return b.transpose(b.hlo.optimization_barrier([turned]), [*range(1, last + 1), 0])
        if _summed_rows_collide(lhs, rhs):
            # XLA would leave out what adds nothing without the barrier.
            return plain(*b.hlo.optimization_barrier([_with_gap(x) for x in (lhs, rhs)]))
    same_rows = last >= 1 and rhs.rank == lhs.rank
    same_rows = same_rows and list(left.contract) == list(right.contract) == list(range(last))
    if same_rows and _free_rows_collide(lhs, rhs):
        return b.slice_dim(plain(_with_gap(lhs), rhs), 0, 0, lhs.shape[-1])
    return plain(lhs, rhs)


def _row_by_row(b: Contractions, lhs: Value, rhs: Value, dtype: torch.dtype | None) -> Value:
    """lhs @ rhs.T of a few rows of 16-bit floats.

    The backend converts the weight as it reads it only where it multiplies it by a single row. For
    more it writes it to memory as float32: 2 rows of 2048 elements by a weight of 8192 x 2048 take
    12 ms and apart 3.6, 4 rows 16 and 6.8, 8 rows 14 and 14 (two CPUs of an Intel Xeon).
    """
    rows = lhs.reshape([-1, lhs.shape[-1]])
    products = [
        b.plain_dot(
            DotOperand(b.slice_dim(rows, 0, row, row + 1), [1], []), DotOperand(rhs, [1], []), dtype
        )
        for row in range(rows.shape[0])
    ]
    # Fused with what reads it, one of the products would take the weight from memory.
    (product,) = b.wrap(b.hlo.OptimizationBarrierOp([b.concat(products, 0)]).results)
    return product.reshape([*lhs.shape[:-1], rhs.shape[0]])


def _has_few_terms(left: DotOperand, right: DotOperand) -> bool:
    """Whether the dot is better computed element by element.

    65,536 rows of 3 elements by a weight of 256 x 3 take 23 ms, and 3.3 as the sum of three
    products; of 2 elements by 64 x 2 4.9 and 0.4. Of four elements the dot takes half the time.
    """
    shape = left.value.shape
    terms = math.prod(shape[d] for d in left.contract)
    many = math.prod(right.free_sizes) >= 8 and math.prod(left.free_sizes) >= 1024
    return many and left.value.dtype == torch.float32 and terms in (2, 3)


def without_batch(operand: DotOperand) -> DotOperand:
    """An operand whose batch dimensions are of size 1, as einsum has them, without them."""
    dims = [d for d in range(operand.value.rank) if d not in operand.batch]
    value = operand.value.reshape([operand.value.shape[d] for d in dims])
    return DotOperand(value, [dims.index(d) for d in operand.contract], [])


def batched(
    b: Contractions, left: DotOperand, right: DotOperand, dtype: torch.dtype | None
) -> Value | None:
    """The products of many pairs of small matrices; None where the backend is as fast.

    It calls a function for each pair that is larger than 3 x 3. 16,384 pairs of 4 x 4 take 10.6 ms,
    and 0.15 in one loop over all of them; 2048 of 8 x 8 1.3 and 0.1, 256 of 16 x 16 0.3 and 0.13,
    but 75 of 24 x 24 0.12 and 0.27.
    """
    value = left.value
    sizes = [math.prod(left.free_sizes), math.prod(right.free_sizes)]
    sizes.append(math.prod(value.shape[d] for d in left.contract))
    many = math.prod(value.shape[d] for d in left.batch) >= _MANY_PAIRS
    if not many or min(sizes) < 2 or math.prod(sizes) > _MOST_PRODUCTS or value.is_exact:
        return None
    wide = b.compute_dtype(value.dtype)
    sums = _by_terms(b, *(x._replace(value=x.value.to(wide)) for x in (left, right)))
    return sums.to(dtype or value.dtype)


def _by_terms(b: Contractions, left: DotOperand, right: DotOperand) -> Value:
    """The dot as a sum of products, element by element."""
    shape = left.value.shape
    batch, terms = [shape[d] for d in left.batch], [shape[d] for d in left.contract]
    sizes = [*batch, *left.free_sizes, *terms, *right.free_sizes]
    summed = range(len(batch) + len(left.free), len(sizes) - len(right.free))

    def spread(x: DotOperand, free: int) -> Value:
        """In the dimensions of all products, of which its free ones begin with `free`."""
        dims = [*x.batch, *x.free, *x.contract]
        into = [*range(len(batch)), *range(free, free + len(x.free)), *summed]
        places = [into[dims.index(d)] for d in range(x.value.rank)]
        return b.broadcast_in_dim(x.value, sizes, places)

    products = spread(left, len(batch)) * spread(right, summed.stop)
    return b.reduce(products, list(summed), "sum")


def _with_gap(x: Value) -> Value:
    return x.b.pad(x, [0] * x.rank, [0] * (x.rank - 1) + [_GAP])


def _better_turned(lhs: Value, rhs: Value) -> bool:
    """Whether lhs @ rhs.T is better computed as (rhs @ lhs.T).T.

    The backend is slow at laying out the operand on the right if the sum runs along its rows, as it
    does in a linear layer: 128 rows of 768 elements by a weight of 3072 x 768 take less than half
    the time turned around, 16 rows a fifth. It pays as long as fewer elements have to be transposed
    in the result than need no laying out.
    """
    rows, (columns, inner) = _rows(lhs), rhs.shape
    return rows > 1 and rows * columns < (columns - rows) * inner


def _summed_rows_collide(lhs: Value, rhs: Value) -> bool:
    """Whether lhs @ rhs.T is better computed with a gap between the rows of both.

    Where the rows begin a multiple of 4096 bytes apart, the elements of several rows that are laid
    out together fall into the same few lines of the processor's cache: 1024 rows of 1024 elements
    by as many take 7.2 ms, and with a gap 5.8, the copies that it costs included; 128 rows by 128
    take half the time. The copies do not pay for few columns, and a single row needs no laying out.
    """
    rows, columns = _rows(lhs), rhs.shape[0]
    return _page_apart(lhs) and columns >= 128 and 1 < rows <= 4 * columns


def _free_rows_collide(lhs: Value, rhs: Value) -> bool:
    """Whether lhs.T @ rhs is better computed with a gap between the rows of lhs.

    The backend reads lhs column by column, as in the gradient of every weight. Where its rows begin
    a multiple of 4096 bytes apart, all elements of a column fall into the same few lines of the
    processor's cache: 512 rows of 1024 floats by 512 x 256 take 1.43 ms, and with a gap 0.92, the
    copies that it costs included. These do not pay where the sum is short, nor for a vector, which
    is multiplied without being laid out.
    """
    terms, columns = _rows(lhs), rhs.shape[-1]
    return _page_apart(lhs) and terms >= 256 and 1 < columns <= 2 * terms


def _rows(x: Value) -> int:
    return math.prod(x.shape[:-1])


def _page_apart(x: Value) -> bool:
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)  # float64 gains nothing
    return narrow and x.shape[-1] > 0 and x.shape[-1] % _PAGE == 0
