"""Sliding windows as shifted copies of the input.

A window visits an input of shape (A, B, *sizes) at the positions `out`. What one of its weights (a
tap) meets over all positions is a strided slice of the padded input: of shape (A, B, *out).
Operators on windows (convolution, pooling, im2col) are element-wise formulas over these slices,
which XLA turns into one loop; their adjoints add the slices back up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lazyxla.lowering.functions import total
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_MOST_SLICES = 64
"""Taps up to which each is a slice; 1024 of them take minutes to compile."""


class Window(NamedTuple):
    """The geometry of the windows, one number per spatial dimension; padding is on both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @classmethod
    def of(
        cls,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int = 1,
    ) -> Window:
        """From an operator's arguments; one number may be given for all dimensions."""
        rank = len(kernel)
        stride, padding, dilation = (
            tuple(x) * rank if len(x) == 1 else tuple(x) for x in (stride, padding, dilation)
        )
        return cls(tuple(kernel), stride, padding, dilation, groups)

    def out_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the result for an input of `sizes`."""
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def spread(self, out: Sequence[int]) -> tuple[int, ...]:
        """The extent of `out` positions laid `stride` apart."""
        return tuple((n - 1) * s + 1 for n, s in zip(out, self.stride, strict=True))

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Where each weight of the kernel reads from the window's start, last dimension fastest."""
        steps = [range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True)]
        return itertools.product(*steps)

    def tiles(self, sizes: Sequence[int]) -> bool:
        """Whether the windows cover an input of `sizes` once, side by side."""
        return (
            self.stride == self.kernel
            and not any(self.padding)
            and all(d == 1 or k == 1 for d, k in zip(self.dilation, self.kernel, strict=True))
            and not any(n % k for n, k in zip(sizes, self.kernel, strict=True))
        )

    @property
    def is_dense(self) -> bool:
        """Whether a window begins at every position."""
        return all(s == 1 for s in self.stride)

    @property
    def taps(self) -> int:
        """Weights of the kernel."""
        return math.prod(self.kernel)


def shifted(
    b: Builder, x: Value, window: Window, out: Sequence[int], fill: Operand = 0
) -> list[Value]:
    """For each tap the elements of `x` (A, B, *sizes) that it meets, in shape (A, B, *out).

    The border is filled with `fill`, as far as the positions `out` reach.
    """
    lead, sizes = x.shape[:2], x.shape[2:]
    spread = window.spread(out)
    high = [
        max(0, s + d * (k - 1) - n - p)
        for s, d, k, n, p in zip(
            spread, window.dilation, window.kernel, sizes, window.padding, strict=True
        )
    ]
    if any(window.padding) or any(high):
        x = b.pad(x, [0, 0, *window.padding], [0, 0, *high], value=fill)
        # Not to be fused into its readers, which would check every element against the borders.
        x = b.hlo.optimization_barrier([x])
    strides = [1, 1, *window.stride]
    return [
        b.slice(x, [0, 0, *at], [*lead, *(a + s for a, s in zip(at, spread, strict=True))], strides)
        for at in window.offsets()
    ]


def add_shifted(b: Builder, parts: Sequence[Value], sizes: Sequence[int], window: Window) -> Value:
    """The adjoint of `shifted`: one part (A, B, *out) per tap, summed into (A, B, *sizes)."""
    spread = window.spread(parts[0].shape[2:])
    interior = [0, 0, *(s - 1 for s in window.stride)]

    def padded(part: Value, at: Sequence[int]) -> Value:
        low = [a - p for a, p in zip(at, window.padding, strict=True)]
        high = [n - i - s for n, i, s in zip(sizes, low, spread, strict=True)]
        return b.pad(part, [0, 0, *low], [0, 0, *high], interior)

    return total(map(padded, parts, window.offsets()))


def columns(b: Builder, x: Value, window: Window, out: Sequence[int]) -> Value:
    """What `shifted` gives, as one value of shape (A, B, taps, *out)."""
    if not _in_blocks(window):
        return b.stack(shifted(b, x, window, out), 2)
    stride, counts = window.stride, _block_counts(window)
    blocks = [m + n - 1 for m, n in zip(counts, out, strict=True)]
    high = [
        m * s - n - p
        for m, s, n, p in zip(blocks, stride, x.shape[2:], window.padding, strict=True)
    ]
    lead, rank = x.shape[:2], len(out)
    x = b.pad(x, [0, 0, *window.padding], [0, 0, *high])
    x = x.reshape([*lead, *_pairs(blocks, stride)])
    limits = _pairs(out, stride)
    parts = []
    for block in itertools.product(*map(range, counts)):
        starts = _pairs(block, [0] * rank)
        ends = [start + n for start, n in zip(starts, limits, strict=True)]
        parts.append(b.slice(x, [0, 0, *starts], [*lead, *ends]))
    x = b.stack(parts, 2).reshape([*lead, *counts, *limits])
    x = b.transpose(x, _invert(_column_order(rank)))
    x = x.reshape([*lead, *(m * s for m, s in zip(counts, stride, strict=True)), *out])
    x = b.slice(x, [0] * x.rank, [*lead, *window.kernel, *out])
    return x.reshape([*lead, window.taps, *out])


def add_columns(b: Builder, x: Value, sizes: Sequence[int], window: Window) -> Value:
    """The adjoint of `columns`: (A, B, taps, *out), summed into (A, B, *sizes)."""
    if not _in_blocks(window):
        parts = [b.select_dim(x, 2, tap) for tap in range(window.taps)]
        return add_shifted(b, parts, sizes, window)
    stride, counts = window.stride, _block_counts(window)
    lead, out, rank = x.shape[:2], x.shape[3:], len(stride)
    x = x.reshape([*lead, *window.kernel, *out])
    rest = [m * s - k for m, s, k in zip(counts, stride, window.kernel, strict=True)]
    x = b.pad(x, [0] * x.rank, [0, 0, *rest, *[0] * rank])
    x = b.transpose(x.reshape([*lead, *_pairs(counts, stride), *out]), _column_order(rank))
    x = x.reshape([*lead, math.prod(counts), *_pairs(out, stride)])

    def padded(part: Value, block: Sequence[int]) -> Value:
        high = [m - 1 - i for m, i in zip(counts, block, strict=True)]
        none = [0] * rank
        return b.pad(part, [0, 0, *_pairs(block, none)], [0, 0, *_pairs(high, none)])

    blocks = itertools.product(*map(range, counts))
    x = total(padded(b.select_dim(x, 2, i), block) for i, block in enumerate(blocks))
    covered = [(m + n - 1) * s for m, n, s in zip(counts, out, stride, strict=True)]
    low = [-p for p in window.padding]
    high = [n + p - c for n, p, c in zip(sizes, window.padding, covered, strict=True)]
    return b.pad(x.reshape([*lead, *covered]), [0, 0, *low], [0, 0, *high])


def _in_blocks(window: Window) -> bool:
    """Whether to cut the windows into blocks as long as the stride instead of single elements.

    The blocks of a window are elements that follow each other, so a few slices of an input cut into
    blocks take the place of one for each tap.
    """
    dilated = any(d > 1 for d in window.dilation)
    return window.taps > _MOST_SLICES and not window.is_dense and not dilated


def _block_counts(window: Window) -> list[int]:
    """How many blocks cover a window, for each dimension."""
    return [-(-k // s) for k, s in zip(window.kernel, window.stride, strict=True)]


def _pairs(outer: Sequence[int], inner: Sequence[int]) -> list[int]:
    """A number of each in turns, for dimensions that are split in two."""
    return [n for pair in zip(outer, inner, strict=True) for n in pair]


def _column_order(rank: int) -> list[int]:
    """From (A, B, blocks and their elements in turns, *out) to (A, B, *blocks, then each of out
    and its elements in turns)."""
    blocks, elements = (range(first, 2 + 2 * rank, 2) for first in (2, 3))
    return [0, 1, *blocks, *_pairs(range(2 + 2 * rank, 2 + 3 * rank), elements)]


def _invert(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def sum_terms(b: Builder, parts: Sequence[Value], weight: Value, shape: Sequence[int]) -> Value:
    """Sum over taps t and features i of parts[t][:, :, i] * weight[:, :, i, t].

    Each part has shape (N, groups, inner, *positions), `weight` (groups, outer, inner, taps) and
    the result `shape`: (N, groups, outer, *positions).
    """
    positions = range(3, len(shape))

    def term(tap: int, i: int) -> Value:
        factor = b.select_dim(b.select_dim(weight, 3, tap), 2, i)
        feature = b.select_dim(parts[tap], 2, i)
        feature = b.broadcast_in_dim(feature, shape, [0, 1, *positions])
        return feature * b.broadcast_in_dim(factor, shape, [1, 2])

    return total(term(tap, i) for tap, part in enumerate(parts) for i in range(part.shape[2]))
