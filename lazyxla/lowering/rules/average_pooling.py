"""Average pooling over windows, and adaptive average pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import total
from lazyxla.lowering.rules.pooling import adaptive_spans, for_ranks, make_window, planes
from lazyxla.lowering.rules.separable import NO_TAP, Map, apply
from lazyxla.lowering.rules.windows import (
    MOST_SLICES,
    Window,
    add_columns,
    add_shifted,
    columns,
    shifted,
)
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# ---- windows: a sliding sum along each dimension in turn ----


@for_ranks("aten::avg_pool{}d")
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
    window, out, sizes = make_window(rank, kernel, stride, padding), shape[-rank:], x.shape[-rank:]
    x = planes(x.accumulated(), rank)
    for dim in range(rank):
        along = [*x.shape[2:]]
        along[dim] = out[dim]
        x = _sums(b, x, _along(window, dim), along)
    divisor = _divisor(b, window, out, sizes, count_include_pad, divisor_override, x.dtype)
    return (x / divisor).reshape(shape)


@for_ranks("aten::avg_pool{}d_backward")
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
    window = make_window(rank, kernel, stride, padding)
    sizes, out = x.shape[-rank:], grad.shape[-rank:]
    grad = planes(grad.accumulated(), rank)
    grad /= _divisor(b, window, out, sizes, count_include_pad, divisor_override, grad.dtype)
    for dim in range(rank):
        one = _along(window, dim)
        along = [*grad.shape[2:]]
        along[dim] = sizes[dim]
        grad = _add_sums(b, grad, one, along)
    return grad.reshape(x.shape)


def _sums(b: Builder, x: Value, window: Window, out: Sequence[int]) -> Value:
    """The sums over the windows along one spatial dimension."""
    if window.taps <= MOST_SLICES:
        return total(shifted(b, x, window, out))
    return columns(b, x, window, out).sum([2])


def _add_sums(b: Builder, grad: Value, window: Window, sizes: Sequence[int]) -> Value:
    """The adjoint of `_sums`."""
    if window.taps <= MOST_SLICES:
        return add_shifted(b, [grad] * window.taps, sizes, window)
    shape = [*grad.shape[:2], window.taps, *grad.shape[2:]]
    return add_columns(b, b.broadcast_to(b.unsqueeze(grad, 2), shape), sizes, window)


def _along(window: Window, dim: int) -> Window:
    """The window along one spatial dimension only."""

    def only(values: Sequence[int], other: int) -> tuple[int, ...]:
        return tuple(v if i == dim else other for i, v in enumerate(values))

    kernel, stride, padding, dilation, _ = window
    return Window(only(kernel, 1), only(stride, 1), only(padding, 0), only(dilation, 1))


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
    count = b.constant(1, dtype, out)
    for dim, (n, size, k, s, p) in enumerate(
        zip(out, sizes, window.kernel, window.stride, window.padding, strict=True)
    ):
        starts = [i * s - p for i in range(n)]
        if count_include_pad:
            counts = [min(start + k, size + p) - start for start in starts]
        else:
            counts = [min(start + k, size) - max(start, 0) for start in starts]
        count *= b.broadcast_in_dim(b.array(counts, dtype), out, [dim])
    return count


# ---- adaptive windows ----


@for_ranks("aten::_adaptive_avg_pool{}d")
def adaptive_avg_pool(b: Builder, x: Value, output_size: Sequence[int], *, rank: int) -> Value:
    shape = b.outputs[0].shape
    out, sizes = shape[-rank:], x.shape[-rank:]
    x = planes(x.accumulated(), rank)
    if any(n % m for n, m in zip(sizes, out, strict=True)):
        x = apply(b, x, _mean_maps(sizes, out))
    else:
        blocks = x.reshape([x.shape[1], *_blocks(sizes, out)])
        x = blocks.mean(range(2, 2 * rank + 2, 2))
    return x.reshape(shape)


@for_ranks("aten::_adaptive_avg_pool{}d_backward")
def adaptive_avg_pool_backward(b: Builder, grad: Value, x: Value, *, rank: int) -> Value:
    out, sizes = grad.shape[-rank:], x.shape[-rank:]
    if math.prod(grad.shape) == 0:
        return b.zeros(x.shape, x.dtype)
    grad = planes(grad.accumulated(), rank)
    if any(n % m for n, m in zip(sizes, out, strict=True)):
        return apply(b, grad, _mean_maps(sizes, out), adjoint=True).reshape(x.shape)
    count = grad.shape[1]
    spread = grad.reshape([count, *(k for m in out for k in (m, 1))])
    spread = b.broadcast_to(spread, [count, *_blocks(sizes, out)])
    return b.scale(spread, math.prod(out) / math.prod(sizes)).reshape(x.shape)


def _blocks(sizes: Sequence[int], out: Sequence[int]) -> list[int]:
    """Each size as its windows and the elements of a window, where windows tile the dimension."""
    return [k for n, m in zip(sizes, out, strict=True) for k in (m, n // m)]


def _mean_map(size: int, out: int) -> Map:
    """The adaptive means along a dimension."""
    starts, ends = (torch.tensor(v)[:, None] for v in zip(*adaptive_spans(size, out), strict=True))
    index = starts + torch.arange(int((ends - starts).max()))
    weights = torch.where(index < ends, 1 / (ends - starts).double(), 0)
    index = torch.where(index < ends, index, NO_TAP)
    return Map(list(zip(index.T, weights.T, strict=True)), size)


def _mean_maps(sizes: Sequence[int], out: Sequence[int]) -> list[Map]:
    return [_mean_map(n, m) for n, m in zip(sizes, out, strict=True)]
