"""Grouped convolutions over flat positions, for XLA's CPU compiler.

If a window keeps the sizes of an image, each of its taps reads, at position p (counted row by row),
the element at p plus a constant. So the images remain flat vectors here: a tap is a shifted copy of
the vector, and where the shift carries elements over from one row into the next, a mask drops them.
Loops over rows and columns are slow where a matmul (a 1x1 convolution, say) reads the result: it
wants the positions flat, and XLA takes each of them apart within the loop. For 32 groups of 8
features on 28x28 positions, read by a 1x1 convolution, that took 3 ms instead of 0.6.

- rows: the kernel's rows are laid out for one batched matmul, which computes all its columns;
  these are shifted and added afterwards.
- taps: one multiplication for each weight of a group, all in one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import total, where
from lazyxla.lowering.rules.windows import Window, sum_terms
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_MOST_TERMS = 32
"""Weights per output feature up to which a sum of terms beats a matmul."""
_MOST_POSITIONS = 8192
"""Positions up to which laying out the rows pays."""


def applies(window: Window, sizes: Sequence[int]) -> bool:
    """Whether a window has these forms, on an image of `sizes`."""
    return len(sizes) == 2 and window.groups > 1 and window.keeps(sizes)


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value | None:
    """y of shape (N, O, height, width) as accumulated; None if other forms are better."""
    n, _, height, width = x.shape
    if n == 1 and w.shape[1] * window.taps <= _MOST_TERMS:
        return _taps(b, x, w, window)
    return _rows(b, x, w, window) if n * height * width <= _MOST_POSITIONS else None


def input_grad(b: Builder, y: Value, w: Value, window: Window) -> Value | None:
    """x of shape (N, C, height, width): `forward` with the weight turned around."""
    groups, (o, inner) = window.groups, w.shape[:2]
    w = w.reshape([groups, o // groups, inner, *window.kernel])
    w = b.flip(b.swap(w, 1, 2), [3, 4])
    return forward(b, y, w.reshape([groups * inner, o // groups, *window.kernel]), window)


def _rows(b: Builder, x: Value, w: Value, window: Window) -> Value:
    (n, c, height, width), (o, inner) = x.shape, w.shape[:2]
    groups, (rows, columns) = window.groups, window.kernel
    size, margin = height * width, window.padding[0] * width
    x = b.swap(x, 0, 1).reshape([c, n, size])
    x = b.pad(x, [0, 0, margin], [0, 0, margin])
    starts = [margin + shift for shift in _shifts(window, 0, width)]
    x = b.stack([b.slice_dim(x, 2, start, start + size) for start in starts], 1)
    x = x.reshape([groups, inner * rows, n * size])
    w = w.reshape([groups, o // groups, inner * rows, columns])
    w = b.transpose(w, [0, 3, 1, 2]).reshape([groups, -1, inner * rows])
    y = b.dot(w, x, [2], [1], [0], [0], b.compute_dtype(x.dtype))
    y = y.reshape([groups, columns, o // groups, n, size])

    def column(k: int, shift: int) -> Value:
        part = b.select_dim(y, 1, k)
        part = b.pad(part, [0, 0, 0, -shift], [0, 0, 0, shift]) if shift else part
        return _within_row(b, part, width, shift)

    y = total(column(k, shift) for k, shift in enumerate(_shifts(window, 1)))
    return b.swap(y.reshape([o, n, height, width]), 0, 1)


def _taps(b: Builder, x: Value, w: Value, window: Window) -> Value:
    (n, c, height, width), (o, inner) = x.shape, w.shape[:2]
    groups, (rows, columns) = window.groups, window.kernel
    size, margin = height * width, window.padding[0] * width + window.padding[1]
    x = b.pad(x.reshape([n, c, size]), [0, 0, margin], [0, 0, margin])
    x = x.reshape([n, groups, inner, -1])
    w = w.accumulated().reshape([groups, o // groups, inner, rows, columns])

    def column(k: int, shift: int) -> Value:
        starts = [margin + shift + down for down in _shifts(window, 0, width)]
        parts = [b.slice_dim(x, 3, start, start + size).to(w.dtype) for start in starts]
        terms = sum_terms(b, parts, b.select_dim(w, 4, k), [n, groups, o // groups, size])
        return _within_row(b, terms, width, shift)

    y = total(column(k, shift) for k, shift in enumerate(_shifts(window, 1)))
    return y.reshape([n, o, height, width])


def _shifts(window: Window, dim: int, step: int = 1) -> list[int]:
    """How far each row (dim 0) or column (dim 1) of the kernel reads from the window's center."""
    start, dilation = window.padding[dim], window.dilation[dim]
    return [step * (k * dilation - start) for k in range(window.kernel[dim])]


def _within_row(b: Builder, x: Value, width: int, shift: int) -> Value:
    """`x` (..., positions), zero where the position `shift` further is in another row."""
    if not shift:
        return x
    column = b.iota(x.shape[-1:], 0, torch.int32) % width
    inside = column >= -shift if shift < 0 else column < width - shift
    return where(inside, x, 0)
