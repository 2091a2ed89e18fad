"""Products for TPUs: rows that a reshape merged stay apart.

The TPU's compiler chooses how a product's result lies in memory, for what reads it. Of rows that
are samples times positions it cannot place the one apart from the other: attention, which reads
them as samples and heads, then starts with a copy. So what PyTorch multiplies as a matrix of rows
is multiplied in the dimensions that the rows have, and the result is merged instead; where it is
read in these dimensions again, the two reshapes are none.

Dimensions of the batch stay merged: of products with a batch of samples and one of heads the
compiler makes no more than of one batch, and less where keys are repeated for groups of heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder.contract import Contractions


class Operand(NamedTuple):
    """A value, and which of its dimensions are contracted and which of the batch."""

    value: Value
    contract: Sequence[int]
    batch: Sequence[int]


def product(b: Contractions, lhs: Operand, rhs: Operand, dtype: torch.dtype | None) -> Value:
    """As `Contractions.dot`."""
    shape = [b.shape(lhs.value)[i] for i in lhs.batch] + _free(b, lhs) + _free(b, rhs)
    while (found := _apart(b, lhs, rhs)) is not None:
        lhs, rhs = (Operand(*b.fold(*operand)) for operand in found)
    result = b.plain_dot(
        lhs.value, rhs.value, lhs.contract, rhs.contract, lhs.batch, rhs.batch, dtype
    )
    return b.reshape(result, shape)


def _free(b: Contractions, x: Operand) -> list[int]:
    """The sizes of the dimensions that are neither contracted nor of the batch."""
    sizes = b.shape(x.value)
    return [n for i, n in enumerate(sizes) if i not in x.contract and i not in x.batch]


def _apart(b: Contractions, lhs: Operand, rhs: Operand) -> tuple[Operand, Operand] | None:
    """Both operands with the dimensions apart that reshapes merged; None if there are none."""
    left, right = _parts(b, lhs), _parts(b, rhs)
    for i, j in zip(lhs.contract, rhs.contract, strict=True):
        if left[i] != right[j]:
            left[i], right[j] = [math.prod(left[i])], [math.prod(right[j])]
    if all(len(part) == 1 for part in left + right):
        return None
    return _split(b, lhs, left), _split(b, rhs, right)


def _parts(b: Contractions, x: Operand) -> list[list[int]]:
    """The sizes that each dimension but those of the batch was merged from, by the reshape that
    defines x."""
    sizes, owner = b.shape(x.value), x.value.owner
    whole = [[n] for n in sizes]
    if getattr(owner, "name", None) != "stablehlo.reshape" or 0 in sizes:
        return whole
    source = iter([n for n in b.shape(owner.operands[0]) if n != 1])
    parts = []
    for i, size in enumerate(sizes):
        part: list[int] = []
        while math.prod(part) < size:
            part.append(next(source))
        if math.prod(part) != size:
            return whole
        parts.append(part if part and i not in x.batch else [size])
    return parts


def _split(b: Contractions, x: Operand, parts: list[list[int]]) -> Operand:
    """The operand in these dimensions."""
    first = [sum(map(len, parts[:i])) for i in range(len(parts))]

    def places(dims: Sequence[int]) -> list[int]:
        return [first[i] + k for i in dims for k in range(len(parts[i]))]

    value = x.value
    if any(len(part) > 1 for part in parts):
        value = b.reshape(value.owner.operands[0], [n for part in parts for n in part])
    return Operand(value, places(x.contract), places(x.batch))
