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

import torch

from lazyxla.lowering.functions import total
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


MOST_SLICES = 64
"""Taps up to which each is a slice; 1024 of them take minutes to compile."""


class Along(NamedTuple):
    """The geometry of the windows along one dimension."""

    kernel: int
    stride: int
    dilation: int


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

    def along(self, dim: int) -> Along:
        """The windows along one spatial dimension."""
        return Along(self.kernel[dim], self.stride[dim], self.dilation[dim])

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
    if window.taps <= MOST_SLICES:
        return b.stack(shifted(b, x, window, out), 2)
    rank = len(out)
    reach = [
        s + d * (k - 1)
        for s, d, k in zip(window.spread(out), window.dilation, window.kernel, strict=True)
    ]
    high = [r - n - p for r, n, p in zip(reach, x.shape[2:], window.padding, strict=True)]
    x = b.pad(x, [0, 0, *window.padding], [0, 0, *high])
    for dim in reversed(range(rank)):
        x = _spread_windows(b, x, dim + 2, window.along(dim), out[dim])
    order = [*range(2, 2 + 2 * rank, 2), *range(3, 2 + 2 * rank, 2)]
    x = b.transpose(x, [0, 1, *order])
    return x.reshape([*x.shape[:2], window.taps, *out])


def add_columns(b: Builder, x: Value, sizes: Sequence[int], window: Window) -> Value:
    """The adjoint of `columns`: (A, B, taps, *out), summed into (A, B, *sizes)."""
    if window.taps <= MOST_SLICES:
        parts = [b.select_dim(x, 2, tap) for tap in range(window.taps)]
        return add_shifted(b, parts, sizes, window)
    lead, out, rank = x.shape[:2], x.shape[3:], len(sizes)
    x = x.reshape([*lead, *window.kernel, *out])
    x = b.transpose(x, [0, 1, *(i for dim in range(2, 2 + rank) for i in (dim, dim + rank))])
    for dim in reversed(range(rank)):
        x = _add_windows(b, x, 2 + 2 * dim, window.along(dim))
    low = [-p for p in window.padding]
    high = [n + p - m for n, p, m in zip(sizes, window.padding, x.shape[2:], strict=True)]
    return b.pad(x, [0, 0, *low], [0, 0, *high])


def _spread_windows(b: Builder, x: Value, dim: int, window: Along, out: int) -> Value:
    """What the windows meet along `dim`, in whose place there are two: (kernel, out)."""
    shape = [window.kernel, out]
    taps, positions = (b.iota(shape, i, torch.int32) for i in (0, 1))
    return b.take(x, taps * window.dilation + positions * window.stride, dim)


def _add_windows(b: Builder, x: Value, dim: int, window: Along) -> Value:
    """The adjoint of `_spread_windows`: dimensions `dim` and `dim` + 1, (kernel, out), summed into
    the one that the windows cover.

    Each tap's row is shifted by its distance from the first one, so that the sum is one of columns.
    """
    kernel, stride, dilation = window
    before, out, after = x.shape[:dim], x.shape[dim + 1], x.shape[dim + 2 :]
    if stride > 1 and dilation == 1:
        # Blocks as long as the stride are elements that follow each other in every window.
        count = -(-kernel // stride)
        x = _padded(b, x, dim, high=count * stride - kernel)
        x = b.swap(x.reshape([*before, count, stride, out, *after]), dim + 1, dim + 2)
        x = _add_windows(b, x, dim, Along(count, 1, 1))
        return x.reshape([*before, x.shape[dim] * stride, *after])
    row = (out - 1) * stride + 1 + (kernel - 1) * dilation
    x = _padded(b, x, dim + 1, interior=stride - 1)
    x = _padded(b, x, dim + 1, high=row + dilation - x.shape[dim + 1])
    # A row further down begins `dilation` elements earlier in rows that are shorter by as much.
    x = x.reshape([*before, kernel * (row + dilation), *after])
    x = b.slice_dim(x, dim, 0, kernel * row).reshape([*before, kernel, row, *after])
    return x.sum([dim])


def _padded(b: Builder, x: Value, dim: int, high: int = 0, interior: int = 0) -> Value:
    """`x` with zeros along `dim`: after the last element, and between each two."""
    before, after, between = (
        [n if i == dim else 0 for i in range(x.rank)] for n in (0, high, interior)
    )
    return b.pad(x, before, after, between)


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
