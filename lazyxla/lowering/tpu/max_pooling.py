"""Maximum pooling for TPUs, which have operations for windows: the maxima by `reduce_window`, and
the gradient by `select_and_scatter`.

The gradient's operator is given the indices of the maxima, and computing these takes operations on
each element of each window. Where a program has both operators, the gradient selects the maxima
again, and nothing reads the indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazyxla.lowering.rules import max_pooling
from lazyxla.lowering.rules.pooling import for_ranks, make_window, planes
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_NOTE = "max_pool"


@for_ranks("aten::max_pool{}d_with_indices", platforms=("tpu",))
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
    geometry = (kernel, stride, padding, dilation)
    best, index = max_pooling.max_pool(b, x, *geometry, ceil_mode, rank=rank)
    window, shape = make_window(rank, *geometry), b.outputs[0].shape
    index = index.to(b.outputs[1].dtype)  # as the gradient gets it
    b.notes[_NOTE, index.ir] = (x.ir, window)
    if x.is_float and 0 not in shape:
        best = _maxima(b, planes(x, rank), window, shape[-rank:]).reshape(shape)
    return best, index


@for_ranks("aten::max_pool{}d_with_indices_backward", platforms=("tpu",))
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
    geometry = (kernel, stride, padding, dilation)
    window = make_window(rank, *geometry)
    is_known = b.notes.get((_NOTE, indices.ir)) == (x.ir, window)
    if not is_known or any(d != 1 for d in window.dilation) or 0 in grad.shape:
        return max_pooling.max_pool_backward(b, grad, x, *geometry, ceil_mode, indices, rank=rank)
    return _to_maxima(b, planes(grad, rank), planes(x, rank), window).reshape(x.shape)


def _maxima(b: Builder, x: Value, window: Window, out: Sequence[int]) -> Value:
    """The maximum of each window over x (1, planes, *sizes): (1, planes, *out)."""
    return b.reduce_window(
        x,
        "max",
        [1, 1, *window.kernel],
        [1, 1, *window.stride],
        _padding(window, x.shape[2:], out),
        [1, 1, *window.dilation],
    )


def _to_maxima(b: Builder, grad: Value, x: Value, window: Window) -> Value:
    """`grad` (1, planes, *out), added where `x` (1, planes, *sizes) has its windows' maxima: the
    first of equal ones, the last of several nan."""
    dtype = b.compute_dtype(x.dtype)
    x, grad = x.to(dtype), grad.to(dtype)

    def select(x: Value, y: Value) -> list[Value]:
        return [(x >= y) | (x.is_nan() & ~y.is_nan())]

    op = b.hlo.SelectAndScatterOp(
        b.type(dtype, x.shape),
        x,
        grad,
        b.constant(0, dtype),
        window_dimensions=[1, 1, *window.kernel],
        window_strides=[1, 1, *window.stride],
        padding=b.pairs(_padding(window, x.shape[2:], grad.shape[2:])),
    )
    b.region(op.regions[0], [dtype, dtype], select)
    b.region(op.regions[1], [dtype, dtype], lambda x, y: [x + y])
    return b.wrap(op.results)[0]


def _padding(window: Window, sizes: Sequence[int], out: Sequence[int]) -> list[tuple[int, int]]:
    """The padding of all dimensions of (1, planes, *sizes), so that there are `out` windows."""
    found = [(0, 0), (0, 0)]
    for n, m, k, s, p, d in zip(sizes, out, *window[:4], strict=True):
        found.append((p, max(0, (m - 1) * s + (k - 1) * d + 1 - n - p)))
    return found
