"""Views as functions: `*_copy` operators, `*_scatter` operators and the gradients of views.

A view is a Geometry over a dense tensor. Reading through it is the copy; writing through it the
scatter; writing a gradient into zeros the backward. So each kind of view is stated once, as the
function from the sizes of its base to its geometry.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import geometry
from lazyxla.lowering.program import Geometry
from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any
Shape = Sequence[int]
Place = tuple[list[int], list[int], int]
"""Sizes, strides and offset."""


def _strides(shape: Shape) -> list[int]:
    """Row-major strides."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return strides


# ---- each kind of view ----


def _select(shape: Shape, dim: int, index: int) -> Place:
    sizes, strides = list(shape), _strides(shape)
    dim %= len(shape)
    offset = (index % sizes[dim]) * strides[dim]
    del sizes[dim], strides[dim]
    return sizes, strides, offset


def _slice(
    shape: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Place:
    sizes, strides = list(shape), _strides(shape)
    dim %= len(shape)
    first, last, _ = slice(start, end, step).indices(sizes[dim])
    offset = first * strides[dim] if first < last else 0
    sizes[dim] = len(range(first, last, step))
    strides[dim] *= step
    return sizes, strides, offset


def _diagonal(shape: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Place:
    sizes, strides = list(shape), _strides(shape)
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rows, columns = sizes[dim1] - max(-offset, 0), sizes[dim2] - max(offset, 0)
    length = max(min(rows, columns), 0)
    start = max(-offset, 0) * strides[dim1] + max(offset, 0) * strides[dim2] if length else 0
    step = strides[dim1] + strides[dim2]
    kept = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    return [sizes[d] for d in kept] + [length], [strides[d] for d in kept] + [step], start


def _unfold(shape: Shape, dim: int, size: int, step: int) -> Place:
    if not shape:
        return [size], [1], 0
    sizes, strides = list(shape), _strides(shape)
    dim %= len(shape)
    sizes.append(size)
    strides.append(strides[dim])
    sizes[dim] = (sizes[dim] - size) // step + 1
    strides[dim] *= step
    return sizes, strides, 0


def _narrow(shape: Shape, dim: int, start: int, length: int) -> Place:
    start = start + shape[dim] if start < 0 else start
    return _slice(shape, dim, start, start + length)


# ---- reading and writing ----


def _base(dtype: torch.dtype, shape: Shape) -> Geometry:
    return Geometry(dtype, tuple(shape), tuple(_strides(shape)), 0)


def _view(dtype: torch.dtype, place: Place) -> Geometry:
    sizes, strides, offset = place
    return Geometry(dtype, tuple(sizes), tuple(strides), offset)


def _copy(view: Callable[..., Place]) -> Callable[..., Value]:
    def lower(b: "Builder", x: Value, *args: Any) -> Value:
        dtype, shape = b.spec(x)
        return geometry.read(b, x, _base(dtype, shape), _view(dtype, view(shape, *args)))

    return lower


def _scatter(view: Callable[..., Place]) -> Callable[..., Value]:
    def lower(b: "Builder", x: Value, source: Value, *args: Any) -> Value:
        dtype, shape = b.spec(x)
        place = view(shape, *args)
        source = b.broadcast_to(b.value(source, dtype), place[0])
        return geometry.write(b, x, source, _base(dtype, shape), _view(dtype, place))

    return lower


def _backward(view: Callable[..., Place]) -> Callable[..., Value]:
    def lower(b: "Builder", grad: Value, sizes: list[int], *args: Any) -> Value:
        dtype = b.dtype(grad)
        x = b.zeros(sizes, dtype)
        return geometry.write(b, x, grad, _base(dtype, sizes), _view(dtype, view(sizes, *args)))

    return lower


_COPIES: dict[str, Callable[..., Place]] = {
    "select_copy.int": _select,
    "slice_copy.Tensor": _slice,
    "diagonal_copy": _diagonal,
    "unfold_copy": _unfold,
    "narrow_copy": _narrow,
}
_SCATTERS: dict[str, Callable[..., Place]] = {
    "select_scatter": _select,
    "slice_scatter": _slice,
    "diagonal_scatter": _diagonal,
}
_GRADIENTS: dict[str, Callable[..., Place]] = {
    "select_backward": _select,
    "slice_backward": _slice,
    "diagonal_backward": _diagonal,
}

for _name, _place in _COPIES.items():
    rule(f"aten::{_name}")(_copy(_place))
for _name, _place in _SCATTERS.items():
    rule(f"aten::{_name}")(_scatter(_place))
for _name, _place in _GRADIENTS.items():
    rule(f"aten::{_name}")(_backward(_place))


@rule(
    "aten::_reshape_copy",
    "aten::view_copy",
    "aten::unsqueeze_copy",
    "aten::squeeze_copy",
    "aten::squeeze_copy.dim",
    "aten::squeeze_copy.dims",
)
def reshape(b: "Builder", x: Value, *_: Any) -> Value:
    return b.reshape(x, b.outputs[0].shape)


@rule("aten::alias_copy", "aten::detach_copy", "aten::lift_fresh_copy")
def same(b: "Builder", x: Value) -> Value:
    return b.value(x)


@rule("aten::expand_copy")
def expand_copy(b: "Builder", x: Value, size: list[int], implicit: bool) -> Value:
    return b.broadcast_to(x, b.outputs[0].shape)


@rule("aten::permute_copy")
def permute_copy(b: "Builder", x: Value, dims: list[int]) -> Value:
    return b.transpose(x, dims)


@rule("aten::transpose_copy.int")
def transpose_copy(b: "Builder", x: Value, first: int, second: int) -> Value:
    return b.swap(x, first, second) if b.rank(x) else x


@rule("aten::t_copy")
def t_copy(b: "Builder", x: Value) -> Value:
    return b.swap(x, 0, 1) if b.rank(x) == 2 else x


@rule("aten::split_copy.Tensor", "aten::split_with_sizes_copy")
def split_copy(b: "Builder", x: Value, sizes: Any, dim: int) -> list[Value]:
    parts, start = [], 0
    for output in b.outputs:
        size = output.shape[dim]
        parts.append(b.slice_dim(x, dim, start, start + size))
        start += size
    return parts


@rule("aten::unbind_copy.int")
def unbind_copy(b: "Builder", x: Value, dim: int) -> list[Value]:
    return [b.select_dim(x, dim, i) for i in range(b.shape(x)[dim])]


@rule("aten::diag_embed")
def diag_embed(b: "Builder", x: Value, offset: int, dim1: int, dim2: int) -> Value:
    dtype, shape = b.outputs[0]
    view = _view(dtype, _diagonal(shape, offset, dim1, dim2))
    return geometry.write(b, b.zeros(shape, dtype), x, _base(dtype, shape), view)


@rule("aten::unfold_backward")
def unfold_backward(
    b: "Builder", grad: Value, sizes: list[int], dim: int, size: int, step: int
) -> Value:
    """Sums the windows back: element j of every window is one strided placement along `dim`."""
    dtype = b.compute_dtype(b.dtype(grad))
    grad = b.convert(grad, dtype)
    if not sizes:
        return b.reduce(grad, range(b.rank(grad)), "sum")
    dim %= len(sizes)
    windows = b.shape(grad)[dim]
    total = b.zeros(sizes, dtype)
    if not windows:
        return total
    lows, highs, interior = [0] * len(sizes), [0] * len(sizes), [0] * len(sizes)
    interior[dim] = step - 1
    for j in range(size):
        lows[dim] = j
        highs[dim] = sizes[dim] - j - ((windows - 1) * step + 1)
        part = b.pad(b.select_dim(grad, -1, j), lows, highs, interior)
        total = b.hlo.add(total, part)
    return total
