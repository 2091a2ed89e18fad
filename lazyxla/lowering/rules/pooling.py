"""Pooling over two or three trailing dimensions, with or without a batch dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import separable
from lazyxla.lowering.rules.windows import Window, add_shifted, shifted
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _for_ranks(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a rule with a keyword `rank` for both numbers of spatial dimensions in `name`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for rank in (2, 3):
            rule(name.format(rank))(functools.partial(function, rank=rank))
        return function

    return register


def _planes(b: Builder, x: Value, rank: int) -> Value:
    """(..., *sizes) as (1, planes, *sizes) with `rank` trailing sizes."""
    sizes = b.shape(x)[b.rank(x) - rank :]
    return b.reshape(x, [1, math.prod(b.shape(x)[: b.rank(x) - rank]), *sizes])


def _window(
    rank: int, kernel: Sequence[int], stride: Sequence[int], *rest: Sequence[int]
) -> Window:
    """A window of `rank` dimensions; an empty stride means the kernel's size."""
    kernel = list(kernel) * rank if len(kernel) == 1 else kernel
    padding, dilation = (*rest, [1])[:2]
    return Window.of(kernel, stride or kernel, padding, dilation)


# ---- maximum, with the place of each maximum ----

_MOST_TAPS = 128
"""Of larger windows the elements are gathered, so that a program does not grow with them."""


@_for_ranks("aten::max_pool{}d_with_indices")
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
    """The maxima and their flat indices in the plane; the first maximum counts, and nan is one."""
    shape = b.outputs[0].shape
    window = _window(rank, kernel, stride, padding, dilation)
    out, sizes = shape[-rank:], b.shape(x)[-rank:]
    x = _planes(b, x, rank)
    if window.taps > _MOST_TAPS:
        best, index = _gathered_maximum(b, x, _windows(window, out, sizes))
        return b.reshape(best, shape), b.reshape(index, shape)
    parts = shifted(b, x, window, out, b.lowest(b.dtype(x)))
    places = _places(b, window, out, sizes)
    best, index = _first_maximum(b, parts, places, _first_places(b, window, out, sizes))
    return b.reshape(best, shape), b.reshape(index, shape)


def _windows(window: Window, out: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Per dimension and position the places that a window meets, without padding."""
    result = []
    for n, size, k, s, p, d in zip(out, sizes, *window[:4], strict=True):
        starts = [i * s - p for i in range(n)]
        taps = [range(start, start + k * d, d) for start in starts]
        result.append([[i for i in tap if 0 <= i < size] for tap in taps])
    return result


def _gathered_maximum(
    b: Builder, x: Value, windows: Sequence[list[list[int]]]
) -> tuple[Value, Value]:
    """The maxima of windows over x (1, planes, *sizes) and their flat indices, both
    (1, planes, *out); along one dimension after the other, the last one first.

    Along a dimension every window has its places in order; the shorter ones meet their last one
    again, which changes neither the maximum nor where it is first.
    """
    sizes = b.shape(x)[2:]
    index = _flat(b, [range(n) for n in sizes], sizes)
    index = b.broadcast_to(index, b.shape(x))
    for dim in reversed(range(len(sizes))):
        longest = max(map(len, windows[dim]))
        taps = [w + w[-1:] * (longest - len(w)) for w in windows[dim]]
        if taps == [list(range(sizes[dim]))]:
            x, index = (b.unsqueeze(v, dim + 2) for v in (x, index))
        else:
            places = b.array(taps, torch.int32)
            x, index = (b.take(v, places, dim + 2) for v in (x, index))
        x, index = _maximum_along(b, x, index, dim + 3)
    return x, index


def _maximum_along(b: Builder, x: Value, index: Value, dim: int) -> tuple[Value, Value]:
    """The maxima and their numbers in `index`, which grow along `dim`: the first one of equal
    ones, the last one of several nan.
    """
    best = b.extremum(x, [dim], "max", keepdim=True)
    same = b.compare(x, b.broadcast_to(best, b.shape(x)), "EQ")
    first = b.reduce(b.select(same, index, torch.iinfo(torch.int32).max), [dim], "min")
    if b.dtype(x).is_floating_point:
        last = b.reduce(b.select(b.is_nan(x), index, -1), [dim], "max")
        first = b.select(b.compare(last, b.full_like(last, 0), "GE"), last, first)
    return b.squeeze(best, dim), first


def _first_maximum(
    b: Builder, parts: Sequence[Value], places: Sequence[Value], first: Value
) -> tuple[Value, Value]:
    """The element-wise maximum of `parts`, and which of `places` it came from (`first` if none)."""
    dtype = b.dtype(parts[0])
    best = b.full_like(parts[0], b.lowest(dtype))
    index = b.broadcast_to(first, b.shape(best))
    for part, place in zip(parts, places, strict=True):
        better = b.compare(part, best, "GT")
        if dtype.is_floating_point:
            better = b.hlo.or_(better, b.is_nan(part))
        best = b.select(better, part, best)
        index = b.select(better, place, index)
    return best, index


def _flat(b: Builder, columns: Sequence[Sequence[int]], sizes: Sequence[int]) -> Value:
    """Flat int32 indices of shape (*out,) from the coordinates of each output position."""
    shape = [len(column) for column in columns]
    total = b.zeros(shape, torch.int32)
    for dim, column in enumerate(columns):
        stride = math.prod(sizes[dim + 1 :])
        values = b.array([c * stride for c in column], torch.int32)
        values = b.hlo.broadcast_in_dim(b.type(torch.int32, shape), values, [dim])
        total = b.hlo.add(total, values)
    return total


def _first_places(b: Builder, window: Window, out: Sequence[int], sizes: Sequence[int]) -> Value:
    """The flat index of the first element of each window that is not padding."""
    columns = []
    for n, s, p, d in zip(out, window.stride, window.padding, window.dilation, strict=True):
        starts = [i * s - p for i in range(n)]
        columns.append([start if start >= 0 else start % d for start in starts])
    return _flat(b, columns, sizes)


def _places(b: Builder, window: Window, out: Sequence[int], sizes: Sequence[int]) -> list[Value]:
    """For each tap the flat indices it meets; without meaning where it meets padding."""
    zeros = zip(out, window.stride, window.padding, strict=True)
    start = _flat(b, [[i * s - p for i in range(n)] for n, s, p in zeros], sizes)
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return [
        b.hlo.add(start, b.full_like(start, sum(a * s for a, s in zip(at, strides, strict=True))))
        for at in window.offsets()
    ]


@_for_ranks("aten::max_pool{}d_with_indices_backward")
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
    """Each tap passes the gradient on where the saved index is its own place."""
    window, sizes = _window(rank, kernel, stride, padding, dilation), b.shape(x)[-rank:]
    wide = b.compute_dtype(b.dtype(grad))
    grad = b.convert(grad, wide)
    if window.taps > _MOST_TAPS:
        return _scatter_planes(b, grad, indices, b.shape(x), rank, "add")
    grad = _planes(b, grad, rank)
    indices = _planes(b, b.convert(indices, torch.int32), rank)
    parts = []
    for place in _places(b, window, b.shape(grad)[2:], sizes):
        mine = b.compare(indices, b.broadcast_to(place, b.shape(indices)), "EQ")
        parts.append(b.select(mine, grad, 0))
    return b.reshape(add_shifted(b, parts, sizes, window), b.shape(x))


@_for_ranks("aten::max_unpool{}d")
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
    """`x` scattered to flat indices in each plane of a result of `shape`."""
    planes = math.prod(shape[: len(shape) - rank])
    flat = b.zeros([planes, math.prod(shape[len(shape) - rank :])], b.dtype(x))
    x, indices = (b.reshape(v, [planes, -1]) for v in (x, indices))
    return b.reshape(b.scatter_along(flat, indices, x, 1, combine), shape)


# ---- mean: a sliding sum along each dimension in turn ----


@_for_ranks("aten::avg_pool{}d")
def avg_pool(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> Value:
    shape = b.outputs[0].shape
    window, out, sizes = _window(rank, kernel, stride, padding), shape[-rank:], b.shape(x)[-rank:]
    x = _planes(b, b.convert(x, b.compute_dtype(b.dtype(x))), rank)
    for dim in range(rank):
        x = _total(b, shifted(b, x, *_along(b, x, window, out, dim)))
    divisor = _divisor(b, window, out, sizes, count_include_pad, divisor_override, b.dtype(x))
    return b.reshape(b.hlo.divide(x, b.broadcast_to(divisor, b.shape(x))), shape)


@_for_ranks("aten::avg_pool{}d_backward")
def avg_pool_backward(
    b: Builder,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> Value:
    shape = b.shape(x)
    window, sizes, out = (
        _window(rank, kernel, stride, padding),
        shape[-rank:],
        b.shape(grad)[-rank:],
    )
    grad = _planes(b, b.convert(grad, b.compute_dtype(b.dtype(grad))), rank)
    divisor = _divisor(b, window, out, sizes, count_include_pad, divisor_override, b.dtype(grad))
    grad = b.hlo.divide(grad, b.broadcast_to(divisor, b.shape(grad)))
    for dim in range(rank):
        one, _ = _along(b, grad, window, out, dim)
        parts = [grad] * one.taps
        into = list(b.shape(grad)[2:])
        into[dim] = sizes[dim]
        grad = add_shifted(b, parts, into, one)
    return b.reshape(grad, shape)


def _along(
    b: Builder, x: Value, window: Window, out: Sequence[int], dim: int
) -> tuple[Window, list[int]]:
    """The window along one spatial dimension only, and the sizes that it leaves."""

    def only(values: Sequence[int], other: int) -> tuple[int, ...]:
        return tuple(v if i == dim else other for i, v in enumerate(values))

    left = list(b.shape(x)[2:])
    left[dim] = out[dim]
    kernel, stride, padding, dilation, _ = window
    return Window(only(kernel, 1), only(stride, 1), only(padding, 0), only(dilation, 1)), left


def _total(b: Builder, parts: Sequence[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = b.hlo.add(total, part)
    return total


def _divisor(
    b: Builder,
    window: Window,
    out: Sequence[int],
    sizes: Sequence[int],
    count_include_pad: bool,
    override: int | None,
    dtype: torch.dtype,
) -> Value:
    """How many elements each window counts, of shape (*out,)."""
    if override is not None:
        return b.constant(override, dtype, out)
    total = b.constant(1, dtype, out)
    for dim, (n, size, k, s, p) in enumerate(
        zip(out, sizes, window.kernel, window.stride, window.padding, strict=True)
    ):
        starts = [i * s - p for i in range(n)]
        if count_include_pad:
            counts = [min(start + k, size + p) - start for start in starts]
        else:
            counts = [min(start + k, size) - max(start, 0) for start in starts]
        counts = b.array(counts, dtype)
        total = b.hlo.multiply(total, b.hlo.broadcast_in_dim(b.type(dtype, out), counts, [dim]))
    return total


# ---- adaptive pooling: windows from floor(i * size / out) to ceil((i + 1) * size / out) ----


def _spans(size: int, out: int) -> list[tuple[int, int]]:
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


def _averages(b: Builder, size: int, out: int, dtype: torch.dtype) -> Value:
    """The matrix (out, size) of adaptive means along one dimension."""
    spans = _spans(size, out)
    taps = []
    for tap in range(max(end - start for start, end in spans)):
        index = torch.tensor([min(start + tap, end - 1) for start, end in spans])
        weight = [1 / (end - start) if start + tap < end else 0.0 for start, end in spans]
        taps.append((index, torch.tensor(weight, dtype=torch.float64)))
    return separable.matrix(b, taps, size, dtype)


@_for_ranks("aten::_adaptive_avg_pool{}d")
def adaptive_avg_pool(b: Builder, x: Value, output_size: Sequence[int], *, rank: int) -> Value:
    shape = b.outputs[0].shape
    out, sizes = shape[-rank:], b.shape(x)[-rank:]
    if math.prod(shape) == 0:
        return b.zeros(shape, b.dtype(x))
    x = _planes(b, b.convert(x, b.compute_dtype(b.dtype(x))), rank)
    if any(n % m for n, m in zip(sizes, out, strict=True)):
        pairs = zip(sizes, out, strict=True)
        x = separable.apply(b, x, [_averages(b, n, m, b.dtype(x)) for n, m in pairs])
    else:
        blocks = [k for n, m in zip(sizes, out, strict=True) for k in (m, n // m)]
        x = x.reshape([x.shape[1], *blocks]).mean(range(2, 2 * rank + 2, 2))
    return b.reshape(x, shape)


@_for_ranks("aten::_adaptive_avg_pool{}d_backward")
def adaptive_avg_pool_backward(b: Builder, grad: Value, x: Value, *, rank: int) -> Value:
    shape = b.shape(x)
    out, sizes = b.shape(grad)[-rank:], shape[-rank:]
    if math.prod(b.shape(grad)) == 0:
        return b.zeros(shape, b.dtype(x))
    grad = _planes(b, b.convert(grad, b.compute_dtype(b.dtype(grad))), rank)
    pairs = list(zip(sizes, out, strict=True))
    if any(n % m for n, m in pairs):
        maps = [_averages(b, n, m, b.dtype(grad)) for n, m in pairs]
        return b.reshape(separable.apply(b, grad, maps, adjoint=True), shape)
    blocks = [k for n, m in pairs for k in (m, n // m)]
    spread = b.reshape(grad, [b.shape(grad)[1], *(k for m in out for k in (m, 1))])
    spread = b.broadcast_to(spread, [b.shape(grad)[1], *blocks])
    factor = math.prod(out) / math.prod(sizes)
    return b.reshape(b.scale(spread, factor), shape)


@_for_ranks("aten::adaptive_max_pool{}d")
def adaptive_max_pool(
    b: Builder, x: Value, output_size: Sequence[int], *, rank: int
) -> tuple[Value, Value]:
    shape = b.outputs[0].shape
    out, sizes = shape[-rank:], b.shape(x)[-rank:]
    pairs = list(zip(sizes, out, strict=True))
    if math.prod(shape) == 0:
        return b.zeros(shape, b.dtype(x)), b.zeros(shape, torch.int64)
    if not any(n % m for n, m in pairs):
        kernel = [n // m for n, m in pairs]
        return max_pool(b, x, kernel, kernel, [0], [1], False, rank=rank)
    windows = [[list(range(*span)) for span in _spans(n, m)] for n, m in pairs]
    best, index = _gathered_maximum(b, _planes(b, x, rank), windows)
    return b.reshape(best, shape), b.reshape(index, shape)


@_for_ranks("aten::adaptive_max_pool{}d_backward")
def adaptive_max_pool_backward(
    b: Builder, grad: Value, x: Value, indices: Value, *, rank: int
) -> Value:
    grad = b.convert(grad, b.compute_dtype(b.dtype(grad)))
    return _scatter_planes(b, grad, indices, b.shape(x), rank, "add")
