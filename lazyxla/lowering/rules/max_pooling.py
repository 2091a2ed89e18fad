"""Maximum pooling, which also gives the index of each maximum, and unpooling by these indices.

Indices count the elements of a plane, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import where
from lazyxla.lowering.rules.pooling import adaptive_spans, for_ranks, make_window, planes
from lazyxla.lowering.rules.windows import Window, add_shifted, shifted
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_MOST_TAPS = 128
"""For larger windows the elements are gathered, so that programs do not grow with windows."""


@for_ranks("aten::max_pool{}d_with_indices")
def max_pool(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    *,
    rank: int,
) -> tuple[Value, Value]:
    """The maxima and their indices; the first maximum counts, and nan is one."""
    shape = b.outputs[0].shape
    window = make_window(rank, kernel, stride, padding, dilation)
    out, sizes = shape[-rank:], x.shape[-rank:]
    x = planes(x, rank)
    if window.taps > _MOST_TAPS:
        best, index = _gathered_maximum(b, x, _window_indices(window, out, sizes))
    else:
        parts = shifted(b, x, window, out, b.lowest(x.dtype))
        indices = _tap_indices(b, window, out, sizes)
        best, index = _first_maximum(b, parts, indices, _first_indices(b, window, out, sizes))
    return best.reshape(shape), index.reshape(shape)


@for_ranks("aten::adaptive_max_pool{}d")
def adaptive_max_pool(
    b: Builder, x: Value, output_size: Sequence[int], *, rank: int
) -> tuple[Value, Value]:
    shape = b.outputs[0].shape
    out, sizes = shape[-rank:], x.shape[-rank:]
    pairs = list(zip(sizes, out, strict=True))
    if not any(n % m for n, m in pairs):
        kernel = [n // m for n, m in pairs]
        return max_pool(b, x, kernel, kernel, [0], [1], False, rank=rank)
    windows = [[list(range(*span)) for span in adaptive_spans(n, m)] for n, m in pairs]
    best, index = _gathered_maximum(b, planes(x, rank), windows)
    return best.reshape(shape), index.reshape(shape)


# ---- small windows: the element-wise maximum over all taps ----


def _first_maximum(
    b: Builder, parts: Sequence[Value], indices: Sequence[Value], first: Value
) -> tuple[Value, Value]:
    """The element-wise maximum of `parts`, and which of `indices` it has (`first` if none)."""
    best = parts[0].full(b.lowest(parts[0].dtype))
    best_index = b.broadcast_to(first, best.shape)
    for part, index in zip(parts, indices, strict=True):
        better = part > best
        if part.is_float:
            better |= part.is_nan()
        best, best_index = where(better, part, best), where(better, index, best_index)
    return best, best_index


def _tap_indices(
    b: Builder, window: Window, out: Sequence[int], sizes: Sequence[int]
) -> list[Value]:
    """For each tap the indices that it reads, (*out,); undefined where it reads padding."""
    dims = zip(out, window.stride, window.padding, strict=True)
    start = _flat_index(b, [[i * s - p for i in range(n)] for n, s, p in dims], sizes)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return [start + sum(a * s for a, s in zip(at, strides, strict=True)) for at in window.offsets()]


def _first_indices(b: Builder, window: Window, out: Sequence[int], sizes: Sequence[int]) -> Value:
    """The index of the first element of each window that is not padding."""
    coordinates = []
    for n, s, p, d in zip(out, window.stride, window.padding, window.dilation, strict=True):
        starts = [i * s - p for i in range(n)]
        coordinates.append([start if start >= 0 else start % d for start in starts])
    return _flat_index(b, coordinates, sizes)


def _flat_index(b: Builder, coordinates: Sequence[Sequence[int]], sizes: Sequence[int]) -> Value:
    """int32 indices (*out,) into a plane of `sizes`, from the coordinates along each dimension."""
    shape = [len(column) for column in coordinates]
    index = b.zeros(shape, torch.int32)
    for dim, column in enumerate(coordinates):
        stride = math.prod(sizes[dim + 1 :])
        offsets = b.array([c * stride for c in column], torch.int32)
        index += b.broadcast_in_dim(offsets, shape, [dim])
    return index


# ---- large and adaptive windows: their elements are gathered ----


def _window_indices(
    window: Window, out: Sequence[int], sizes: Sequence[int]
) -> list[list[list[int]]]:
    """Per dimension and position the coordinates that a window meets, without padding."""
    result = []
    for n, size, k, s, p, d in zip(out, sizes, *window[:4], strict=True):
        starts = [i * s - p for i in range(n)]
        taps = [range(start, start + k * d, d) for start in starts]
        result.append([[i for i in tap if 0 <= i < size] for tap in taps])
    return result


def _gathered_maximum(
    b: Builder, x: Value, windows: Sequence[list[list[int]]]
) -> tuple[Value, Value]:
    """The maxima of windows over x (1, planes, *sizes) and their indices, both (1, planes, *out);
    along one dimension after the other, the last one first.

    Along a dimension every window has its coordinates in order; the shorter ones meet their last
    one again, which changes neither the maximum nor where it is first.
    """
    sizes = x.shape[2:]
    index = b.broadcast_to(_flat_index(b, [range(n) for n in sizes], sizes), x.shape)
    for dim in reversed(range(len(sizes))):
        longest = max(map(len, windows[dim]))
        taps = [w + w[-1:] * (longest - len(w)) for w in windows[dim]]
        if taps == [list(range(sizes[dim]))]:
            x, index = (b.unsqueeze(v, dim + 2) for v in (x, index))
        else:
            coordinates = b.array(taps, torch.int32)
            x, index = (b.take(v, coordinates, dim + 2) for v in (x, index))
        x, index = _maximum_along(b, x, index, dim + 3)
    return x, index


def _maximum_along(b: Builder, x: Value, index: Value, dim: int) -> tuple[Value, Value]:
    """The maxima and their numbers in `index`, which grow along `dim`: the first one of equal
    ones, the last one of several nan.
    """
    best = b.extremum(x, [dim], "max", keepdim=True)
    first = b.reduce(where(x == best, index, torch.iinfo(torch.int32).max), [dim], "min")
    if x.is_float:
        last = b.reduce(where(x.is_nan(), index, -1), [dim], "max")
        first = where(last >= 0, last, first)
    return b.squeeze(best, dim), first


# ---- the gradient, and unpooling ----


@for_ranks("aten::max_pool{}d_with_indices_backward")
def max_pool_backward(
    b: Builder,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
    *,
    rank: int,
) -> Value:
    """Each tap passes the gradient on where the saved index is its own."""
    window, sizes = make_window(rank, kernel, stride, padding, dilation), x.shape[-rank:]
    grad = grad.accumulated()
    if window.taps > _MOST_TAPS:
        return _scatter_planes(b, grad, indices, x.shape, rank, "add")
    grad, indices = planes(grad, rank), planes(indices.to(torch.int32), rank)
    taps = _tap_indices(b, window, grad.shape[2:], sizes)
    parts = [where(indices == tap, grad, 0) for tap in taps]
    return add_shifted(b, parts, sizes, window).reshape(x.shape)


@for_ranks("aten::adaptive_max_pool{}d_backward")
def adaptive_max_pool_backward(
    b: Builder, grad: Value, x: Value, indices: Value, *, rank: int
) -> Value:
    return _scatter_planes(b, grad.accumulated(), indices, x.shape, rank, "add")


@for_ranks("aten::max_unpool{}d")
def max_unpool(
    b: Builder,
    x: Value,
    indices: Value,
    output_size: Sequence[int],
    *window: Sequence[int],
    rank: int,
) -> Value:
    return _scatter_planes(b, x, indices, b.outputs[0].shape, rank, "assign")


def _scatter_planes(
    b: Builder, x: Value, indices: Value, shape: Sequence[int], rank: int, combine: str
) -> Value:
    """`x` scattered by its indices in each plane of a result of `shape`."""
    lead, sizes = shape[: len(shape) - rank], shape[len(shape) - rank :]
    count = math.prod(lead)
    flat = b.zeros([count, math.prod(sizes)], x.dtype)
    x, indices = x.reshape([count, -1]), indices.reshape([count, -1])
    return b.scatter_along(flat, indices, x, 1, combine).reshape(shape)
