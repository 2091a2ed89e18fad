"""Attention over blocks of the rows of queries, so that not all scores are in memory at once.

Each block holds whole rows, whose softmax needs no running maximum: the numbers are those of all
rows at once, with the memory of a few rows. The gradient computes a block's weights again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lazyxla.lowering.rules.random import Stream, dropout
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


MANY, MANY_ON_TPU = 1 << 22, 1 << 26
"""From how many scores on attention goes over blocks.

A TPU's compiler fuses what is made of all scores with their products; over blocks it cannot. There
blocks are for memory alone: 2**26 scores take 256 MiB in float32. A training step of two of
ViT-B/16's layers (32 x 12 x 197 x 197 scores) takes 11.4 million cycles by libtpu's estimate for
v5e with all scores at once, and 12.6 over blocks; 580 and 460 MiB of temporary memory.
"""
PER_BLOCK = 1 << 21
"""About how many scores a block has, within these bounds of its rows."""
LEAST_ROWS, MOST_ROWS = 64, 128
PARTS = 8
"""In how many parts rows are taken if each sees only the columns up to its own.

Each is a loop of its own over the columns that its last row sees. On the CPU only: the TPU's
compiler takes many seconds for each loop.
"""


class Drop(NamedTuple):
    """The probability to drop a weight, and the stream to draw from, by default the operator's."""

    p: Any
    stream: Stream | None = None

    def kept(self, b: Builder, shape: Sequence[int], first: Value | int = 0) -> Any:
        """What is kept of the weights of the rows from `first` on, and their factor."""
        if isinstance(first, int) and first == 0:
            return dropout(b, self.p, shape, self.stream)
        # Blocks share the ordinal, so each has its own seed.
        seed, ordinal = self.stream or b.rng
        step = b.constant(0xD1B54A32D192ED03, torch.uint64)
        seed = b.hlo.add(seed, b.hlo.multiply(b.value(first, torch.uint64), step))
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
        sizes = list(self.b.shape(x))
        sizes[2] = self.rows
        return self.b.dynamic_slice(x, self._starts(x), sizes)

    def put(self, x: Value, part: Value) -> Value:
        """`x` with its rows of the block replaced."""
        part = self.b.convert(part, self.b.dtype(x))
        return self.b.dynamic_update_slice(x, part, self._starts(x))

    def seen(self, x: Value, dim: int = 2) -> Value:
        """The keys or values that the block sees."""
        return self.b.slice_dim(x, dim, 0, self.columns)

    def add(self, total: Value, part: Value) -> Value:
        """A gradient of keys or values and what the block adds to it."""
        b = self.b
        total_seen = b.hlo.add(self.seen(total), b.convert(part, b.dtype(total)))
        return b.dynamic_update_slice(total, total_seen, [0, 0, 0, 0])

    def mask(self, mask: Value | None, is_causal: bool) -> Value | None:
        """The block's part of a mask."""
        b = self.b
        if mask is not None:
            mask = b.reshape(mask, [1] * (4 - b.rank(mask)) + list(b.shape(mask)))
            mask = mask if b.shape(mask)[2] == 1 else self.cut(mask)
            mask = mask if b.shape(mask)[3] == 1 else self.seen(mask, 3)
        if not is_causal:
            return mask
        shape = [self.rows, self.columns]
        row = b.hlo.add(
            b.iota(shape, 0, torch.int32),
            b.broadcast_to(b.value(self.first, torch.int32), shape),
        )
        causal = b.compare(b.iota(shape, 1, torch.int32), row, "LE")
        if mask is None:
            return causal
        causal, mask = b.broadcast(causal, mask)
        return b.select(causal, mask, b.lowest(b.dtype(mask)))

    def kept(self, drop: Drop | None, query: Value) -> Any:
        if drop is None:
            return None
        shape = [*self.b.shape(query)[:2], self.rows, self.columns]
        return drop.kept(self.b, shape, self.first)

    def _starts(self, x: Value) -> list[Any]:
        return [self.first if i == 2 else 0 for i in range(self.b.rank(x))]


def forward(
    b: Builder,
    whole: Callable[..., tuple[Value, Value]],
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    mask: Value | None,
    scale: Any,
    drop: Drop | None,
) -> tuple[Value, Value]:
    """What `whole` computes from all rows, the result and the logarithm of each row's sum."""
    shape = _scores_shape(b, query, key)
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

    dtype = b.dtype(query)
    result, sums = b.zeros(b.shape(query), dtype), b.zeros(shape[:3], b.compute_dtype(dtype))
    result, sums = _over_blocks(b, shape, is_causal, step, [result, sums])
    return result, sums


def backward(
    b: Builder,
    whole: Callable[..., tuple[Value, ...]],
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    mask: Value | None,
    scale: Any,
    drop: Drop | None,
) -> tuple[Value, ...]:
    """What `whole` computes from all rows, the gradients of query, key and value."""
    query, key, value, result, logsumexp = inputs
    shape = _scores_shape(b, query, key)
    if _at_once(b, shape):
        kept = None if drop is None else drop.kept(b, shape)
        return whole(b, grad, inputs, is_causal, mask, scale, kept)
    compute = b.compute_dtype(b.dtype(query))

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

    totals = [b.zeros(b.shape(query), b.dtype(query))]
    totals += [b.zeros(b.shape(x), compute) for x in (key, value)]
    return tuple(_over_blocks(b, shape, is_causal, step, totals))


def _scores_shape(b: Builder, query: Value, key: Value) -> list[int]:
    return [*b.shape(query)[:3], b.shape(key)[2]]


def _at_once(b: Builder, shape: Sequence[int]) -> bool:
    if b.target.any_sizes:
        return True
    many = MANY_ON_TPU if b.platform == "tpu" else MANY
    return math.prod(shape) < many or shape[2] <= _rows_of_block(shape)


def _over_blocks(
    b: Builder,
    shape: Sequence[int],
    is_causal: bool,
    step: Callable[..., list[Value]],
    state: list[Value],
) -> list[Value]:
    """Repeats `state = step(block, *state)` for all blocks of scores of a shape."""
    for first, blocks, rows, columns in _loops(
        shape, PARTS if is_causal and b.platform == "cpu" else 1
    ):
        if blocks == 1:
            state = step(_Block(b, first, rows, columns), *state)
            continue
        end = first + blocks * rows

        def more(row: Value, *_: Value, end: int = end) -> Value:
            return b.compare(row, b.constant(end, torch.int32), "LT")

        def body(row: Value, *now: Value, rows: int = rows, columns: int = columns) -> list[Value]:
            following = b.hlo.add(row, b.constant(rows, torch.int32))
            return [following, *step(_Block(b, row, rows, columns), *now)]

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
