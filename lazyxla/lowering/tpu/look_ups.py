"""Look-ups in short rows and small tables, by comparison.

A TPU gathers one element after the other, or one row. All elements of a short row are compared at
once, and the rows of a small table are found by a matmul with a mask. Times of look-ups in float32,
as lazyxla.aot estimates them for a v5e (libtpu counts a tile of 4 KiB for each element that is
gathered, at the memory's bandwidth; none was run):

                                                        gathered   here
    2 of 8 elements in each of 4,096 rows                 2.6 ms   6 us
    2**20 in rows of 64                                   5.9      0.5 ms
    2**20 in rows of 1,024                                5.9      7.1
    2**20 in a table of 32 rows of 8, as of relative
    positions in attention                                6.6      0.5
    2**14 in a table of 255 rows of 8                     104 us   10 us
    2**12 in a table of 512 rows of 512                   98       118

Both move bits: sums would lose the sign of a zero, and one nan in a table would be in all results.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import total
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_SHORT = 512
"""Elements of a row, or rows of a table, up to which all are compared."""

_NARROW = 64
"""Elements of a table's row up to which a matmul finds it."""

_MANY = 1024
"""Look-ups from which that pays."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def suit_rows(b: Builder, x: Value, index: Value, dim: int) -> bool:
    """Whether `in_rows` is for these arguments of Builder.take_along."""
    if not x.rank or b.annotations is not None or b.repeated(index):
        return False
    is_short = 0 < x.shape[dim] <= _SHORT and math.prod(index.shape) >= _MANY
    return is_short and (x.is_exact or x.dtype in _BITS)


def in_rows(b: Builder, x: Value, dim: int, index: Value) -> Value:
    """All bits of a row but those at the index are cleared."""
    found = b.unsqueeze(_in_range(index, x.shape[dim]), -1) == b.iota(
        [x.shape[dim]], 0, torch.int32
    )
    order = [*(d for d in range(x.rank) if d != dim), dim]
    rows = b.unsqueeze(b.transpose(x, order), dim)
    bits = rows if x.is_exact else b.bitcast(rows, _BITS[x.dtype])
    chosen = b.reduce(b.select(found, bits, 0), [x.rank], "or")
    return chosen if x.is_exact else b.bitcast(chosen, x.dtype)


def suit_table(b: Builder, x: Value, index: Value, dim: int) -> bool:
    """Whether `in_table` is for these arguments of Builder.take."""
    rows, count = x.shape[dim], math.prod(index.shape)
    is_small = 0 < rows <= _SHORT and 0 < math.prod(x.shape) // rows <= _NARROW
    return is_small and count >= _MANY and x.dtype in _BITS and b.annotations is None


def in_table(b: Builder, x: Value, index: Value, dim: int) -> Value:
    """The bytes of each row are numbers below 256, which a matmul in bfloat16 keeps."""
    dim %= x.rank
    rows, before, after = x.shape[dim], x.shape[:dim], x.shape[dim + 1 :]
    width = math.prod(before) * math.prod(after)
    order = [*(d for d in range(x.rank) if d != dim), dim]
    bits = b.bitcast(b.transpose(x, order), _BITS[x.dtype]).reshape([width, rows])
    shifts = range(0, 8 * x.dtype.itemsize, 8)
    parts = b.concat([((bits >> n) & 255).to(torch.bfloat16) for n in shifts], 0)
    wanted = _in_range(index, rows).reshape([1, -1])
    mask = b.unsqueeze(b.iota([rows], 0, torch.int32), 1) == wanted
    found = b.dot(parts, mask.to(torch.bfloat16), [1], [0]).to(torch.int32)
    each = [b.slice_dim(found, 0, k * width, (k + 1) * width) for k in range(len(shifts))]
    whole = total(part << n for part, n in zip(each, shifts, strict=True))
    found = b.bitcast(whole.to(_BITS[x.dtype]), x.dtype)
    found = found.reshape([*before, *after, *index.shape])
    last = range(len(before) + len(after), found.rank)
    first = range(len(before))
    return b.transpose(found, [*first, *last, *range(len(before), len(before) + len(after))])


def _in_range(index: Value, size: int) -> Value:
    """The nearest index in range, as a gather takes it."""
    low, high = index.full(0), index.full(size - 1)
    return index.b.hlo.clamp(low, index, high).to(torch.int32)
