"""Matmul for TPUs: rows that a reshape merged stay apart.

The TPU's compiler chooses the layout of a matmul's result by its readers. If rows are samples times
positions, it cannot lay out one apart from the other: attention, which reads them as samples and
heads, then starts with a copy. So what PyTorch multiplies as a matrix of rows is multiplied in the
dimensions that the rows have, and the result is merged instead; where it is read in these
dimensions again, the two reshapes cancel.

Dimensions of the batch stay merged: of a matmul with a batch of samples and one of heads the
compiler makes no more than of one batch, and less where keys are repeated for groups of heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder.contract import Contractions


def dot(b: Contractions, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
    """As `Contractions.platform_dot`."""
    shape = _result_shape(left, right)
    while (found := _apart(b, left, right)) is not None:
        left, right = map(b.folded, found)
    if torch.int64 in (left.value.dtype, dtype):
        return _multiplied_and_summed(b, left, right).reshape(shape)
    return b.plain_dot(left, right, dtype).reshape(shape)


def _result_shape(left: DotOperand, right: DotOperand) -> list[int]:
    return [left.value.shape[i] for i in left.batch] + left.free_sizes + right.free_sizes


def _multiplied_and_summed(b: Contractions, left: DotOperand, right: DotOperand) -> Value:
    """A dot of int64 values: elementwise products, summed over the last dimensions.

    XLA's TPU compiler makes pairs of 32-bit numbers of 64-bit ones, but not in a dot ("HLO for
    which this rewriting is not implemented"). It fuses the two steps taken here.
    """
    x = _lined_up(b, left, 0, right.value.rank)
    y = _lined_up(b, right, left.value.rank, 0)
    sizes = [max(n, m) if n and m else 0 for n, m in zip(x.shape, y.shape, strict=True)]
    x, y = (b.broadcast_to(v.to(torch.int64), sizes) for v in (x, y))
    dims = range(len(sizes) - len(left.contract), len(sizes))
    return (x * y).sum(dims).reshape(_result_shape(left, right))


def _lined_up(b: Contractions, x: DotOperand, before: int, after: int) -> Value:
    """A side of a dot with dimensions: batch, free ones of both sides, contracted.

    `before` or `after` is the other side's rank; its free dimensions are of size 1 here.
    """
    sizes, taken = x.value.shape, len(x.batch) + len(x.contract)
    free = [i for i in range(len(sizes)) if i not in x.batch and i not in x.contract]
    other = [1] * max(before + after - taken, 0)
    own = [sizes[i] for i in free]
    middle = other + own if before else own + other
    moved = b.transpose(x.value, [*x.batch, *free, *x.contract])
    first, last = [sizes[i] for i in x.batch], [sizes[i] for i in x.contract]
    return moved.reshape([*first, *middle, *last])


def _apart(
    b: Contractions, left: DotOperand, right: DotOperand
) -> tuple[DotOperand, DotOperand] | None:
    """Both operands with the dimensions apart that reshapes merged; None if there are none."""
    of_left, of_right = _parts(b, left), _parts(b, right)
    for i, j in zip(left.contract, right.contract, strict=True):
        if of_left[i] != of_right[j]:
            of_left[i], of_right[j] = [math.prod(of_left[i])], [math.prod(of_right[j])]
    if all(len(part) == 1 for part in of_left + of_right):
        return None
    return _split(b, left, of_left), _split(b, right, of_right)


def _parts(b: Contractions, x: DotOperand) -> list[list[int]]:
    """The sizes that each dimension but those of the batch was merged from, by the reshape that
    defines x."""
    sizes, owner = x.value.shape, x.value.owner
    whole = [[n] for n in sizes]
    if getattr(owner, "name", None) != "stablehlo.reshape" or 0 in sizes:
        return whole
    source = iter([n for n in b.operand(owner).shape if n != 1])
    parts = []
    for i, size in enumerate(sizes):
        part: list[int] = []
        while math.prod(part) < size:
            part.append(next(source))
        if math.prod(part) != size:
            return whole
        parts.append(part if part and i not in x.batch else [size])
    return parts


def _split(b: Contractions, x: DotOperand, parts: list[list[int]]) -> DotOperand:
    """The operand in these dimensions."""
    first = [sum(map(len, parts[:i])) for i in range(len(parts))]

    def split(dims: Sequence[int]) -> list[int]:
        return [first[i] + k for i in dims for k in range(len(parts[i]))]

    value = x.value
    if any(len(part) > 1 for part in parts):
        value = b.operand(value.owner).reshape([n for part in parts for n in part])
    return DotOperand(value, split(x.contract), split(x.batch))
