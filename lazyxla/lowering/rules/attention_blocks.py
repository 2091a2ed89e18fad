"""Attention over blocks of the rows of queries, so that not all scores are in memory at once.

Each block holds whole rows, whose softmax needs no running maximum: the numbers are those of all
rows at once, with the memory of a few rows. The gradient computes a block's weights again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering.functions import where
from lazyxla.lowering.rules.random import Stream, dropout
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


PER_BLOCK = 1 << 21
"""About how many scores a block has, within these bounds of its rows."""
LEAST_ROWS, MOST_ROWS = 64, 128

Kept = tuple[Value, Value]
"""Which weights dropout keeps, and what it multiplies them with."""


class Drop(NamedTuple):
    """The probability to drop a weight, and the stream to draw from, by default the operator's."""

    p: Operand
    stream: Stream | None = None

    def kept(self, b: Builder, shape: Sequence[int], first: Value | int = 0) -> Kept:
        """The mask of kept weights of the rows from `first` on, and their factor."""
        if isinstance(first, int) and first == 0:
            return dropout(b, self.p, shape, self.stream)
        # Blocks share the ordinal, so each has its own seed.
        seed, ordinal = self.stream or b.rng
        seed = seed + b.value(first, torch.uint64) * 0xD1B54A32D192ED03
        return dropout(b, self.p, shape, (seed, ordinal))


class _Block(NamedTuple):
    """`rows` rows of queries from `first` on, and the `columns` first keys, which they see."""

    b: Builder
    first: Value | int
    rows: int
    columns: int

    def cut(self, x: Value) -> Value:
        """The block's rows of a value (N, H, S, ...)."""
        if isinstance(self.first, int):
            return self.b.slice_dim(x, 2, self.first, self.first + self.rows)
        sizes = list(x.shape)
        sizes[2] = self.rows
        return self.b.dynamic_slice(x, self._starts(x), sizes)

    def put(self, x: Value, part: Value) -> Value:
        """`x` with its rows of the block replaced."""
        return self.b.dynamic_update_slice(x, part.to(x.dtype), self._starts(x))

    def seen(self, x: Value, dim: int = 2) -> Value:
        """The keys or values that the block sees."""
        return self.b.slice_dim(x, dim, 0, self.columns)

    def add(self, total: Value, part: Value) -> Value:
        """A gradient of keys or values and what the block adds to it."""
        total_seen = self.seen(total) + part.to(total.dtype)
        return self.b.dynamic_update_slice(total, total_seen, [0, 0, 0, 0])

    def mask(self, mask: Value | None, is_causal: bool) -> Value | None:
        """The block's part of a mask."""
        b = self.b
        if mask is not None:
            mask = mask.reshape([*[1] * (4 - mask.rank), *mask.shape])
            mask = mask if mask.shape[2] == 1 else self.cut(mask)
            mask = mask if mask.shape[3] == 1 else self.seen(mask, 3)
        if not is_causal:
            return mask
        shape = [self.rows, self.columns]
        causal = b.iota(shape, 1, torch.int32) <= b.iota(shape, 0, torch.int32) + self.first
        return causal if mask is None else where(causal, mask, b.lowest(mask.dtype))

    def kept(self, drop: Drop | None, query: Value) -> Kept | None:
        if drop is None:
            return None
        shape = [*query.shape[:2], self.rows, self.columns]
        return drop.kept(self.b, shape, self.first)

    def _starts(self, x: Value) -> list[Operand]:
        return [self.first if i == 2 else 0 for i in range(x.rank)]


def forward(
    b: Builder,
    whole: Callable[..., tuple[Value, Value]],
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    drop: Drop | None,
) -> tuple[Value, Value]:
    """What `whole` computes from all rows, the result and the logarithm of each row's sum."""
    shape = scores_shape(query, key)
    if _at_once(b, shape):
        kept = None if drop is None else drop.kept(b, shape)
        return whole(b, query, key, value, is_causal, mask, scale, kept)

    def step(block: _Block, result: Value, sums: Value) -> list[Value]:
        part, logs = whole(
            b,
            block.cut(query),
            block.seen(key),
            block.seen(value),
            False,
            block.mask(mask, is_causal),
            scale,
            block.kept(drop, query),
        )
        return [block.put(result, part), block.put(sums, logs)]

    dtype = query.dtype
    result, sums = b.zeros(query.shape, dtype), b.zeros(shape[:3], b.compute_dtype(dtype))
    result, sums = _over_blocks(b, shape, is_causal, step, [result, sums])
    return result, sums


def backward(
    b: Builder,
    whole: Callable[..., tuple[Value, ...]],
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    drop: Drop | None,
) -> tuple[Value, ...]:
    """What `whole` computes from all rows, the gradients of query, key and value."""
    query, key, value, result, logsumexp = inputs
    shape = scores_shape(query, key)
    if _at_once(b, shape):
        kept = None if drop is None else drop.kept(b, shape)
        return whole(b, grad, inputs, is_causal, mask, scale, kept)
    compute = b.compute_dtype(query.dtype)

    def step(block: _Block, *totals: Value) -> list[Value]:
        cut, seen = block.cut, block.seen
        parts = whole(
            b,
            cut(grad),
            (cut(query), seen(key), seen(value), cut(result), cut(logsumexp)),
            False,
            block.mask(mask, is_causal),
            scale,
            block.kept(drop, query),
            compute,
        )
        of_query, *others = totals
        added = [block.add(x, part) for x, part in zip(others, parts[1:], strict=True)]
        return [block.put(of_query, parts[0]), *added]

    totals = [b.zeros(query.shape, query.dtype)]
    totals += [b.zeros(x.shape, compute) for x in (key, value)]
    return tuple(_over_blocks(b, shape, is_causal, step, totals))


def scores_shape(query: Value, key: Value) -> list[int]:
    return [*query.shape[:3], key.shape[2]]


def _at_once(b: Builder, shape: Sequence[int]) -> bool:
    if b.target.any_sizes:
        return True
    return math.prod(shape) < b.attention.most_scores or shape[2] <= _rows_of_block(shape)


def _over_blocks(
    b: Builder,
    shape: Sequence[int],
    is_causal: bool,
    step: Callable[..., list[Value]],
    state: list[Value],
) -> list[Value]:
    """Repeats `state = step(block, *state)` for all blocks of scores of a shape."""
    parts = b.attention.causal_loops if is_causal else 1
    for first, blocks, rows, columns in _loops(shape, parts):
        if blocks == 1:
            state = step(_Block(b, first, rows, columns), *state)
            continue
        end = first + blocks * rows

        def more(row: Value, *_: Value, end: int = end) -> Value:
            return row < end

        def body(row: Value, *now: Value, rows: int = rows, columns: int = columns) -> list[Value]:
            return [row + rows, *step(_Block(b, row, rows, columns), *now)]

        state = b.while_loop(more, body, b.constant(first, torch.int32), *state)[1:]
    return state


def _loops(shape: Sequence[int], parts: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, number of blocks, their rows and columns."""
    *_, rows, columns = shape
    size = _rows_of_block(shape)
    blocks = rows // size
    # A single block would be no loop, and XLA keeps the scores of several at the same time.
    parts = max(min(parts, blocks // 2), 1)
    marks = [blocks * i // parts for i in range(parts + 1)]
    for start, end in pairwise(marks):
        seen = min(end * size, columns) if parts > 1 else columns
        yield start * size, end - start, size, seen
    if rest := rows % size:
        yield rows - rest, 1, rest, columns


def _rows_of_block(shape: Sequence[int]) -> int:
    """A power of 2."""
    samples, heads, rows, columns = shape
    fit = PER_BLOCK // (samples * heads * columns)
    fit = min(max(fit, LEAST_ROWS), MOST_ROWS)
    return min(1 << (fit.bit_length() - 1), rows)
