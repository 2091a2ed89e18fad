"""Operators of traced graphs that the recorder never records: views, copies and empty tensors.

What PyTorch takes apart before a graph holds it (reshape, narrow, contiguous) has no rule.

In a functional graph every tensor is a value of its own. A view operator then reads its operand,
taken as contiguous, through the geometry that PyTorch's meta function gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import geometry
from lazyxla.lowering.functions import conj
from lazyxla.lowering.geometry import geometry_of
from lazyxla.lowering.program import Geometry
from lazyxla.lowering.registry import graph_rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# fmt: off
_VIEWS = [
    "alias", "detach", "view", "view.dtype", "_unsafe_view", "_reshape_alias", "expand", "permute",
    "transpose.int", "t", "slice.Tensor", "select.int", "unsqueeze", "squeeze", "squeeze.dim",
    "squeeze.dims", "split.Tensor", "split_with_sizes", "unsafe_split.Tensor",
    "unsafe_split_with_sizes", "unbind.int", "diagonal", "unfold", "view_as_real",
    "view_as_complex",
]

# fmt: on

# Operator -> the view that it writes through. Arguments: self, source, the view's own ones.
_SCATTERS = {
    "slice_scatter": "slice.Tensor",
    "select_scatter": "select.int",
    "diagonal_scatter": "diagonal",
}

# Operator -> the view whose gradient it is. Arguments: the gradient, the base's sizes, the view's.
_GRADIENTS = {
    "slice_backward": "slice.Tensor",
    "select_backward": "select.int",
    "diagonal_backward": "diagonal",
}

_COPIES = ["clone", "_to_copy", "lift", "lift_fresh", "lift_fresh_copy"]

# fmt: off
_EMPTY = [
    "empty.memory_format", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided",
]
# fmt: on


def _contiguous(x: Value) -> tuple[torch.Tensor, Geometry]:
    """A meta tensor like `x` and its geometry."""
    meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return meta, geometry_of(meta)


def _call(name: str, *args: Any) -> Any:
    """Calls an operator of PyTorch with its arguments in schema order."""
    base, _, overload = name.partition(".")
    op: Any = getattr(getattr(torch.ops.aten, base), overload or "default")
    named = [a.name for a in op._schema.arguments if a.kwarg_only]
    count = len(op._schema.arguments) - len(named)
    return op(*args[:count], **dict(zip(named, args[count:], strict=False)))


def _view(name: str) -> Callable[..., Value | list[Value]]:
    def lower(b: Builder, x: Value, *args: Any) -> Value | list[Value]:
        meta, base = _contiguous(x)
        views = _call(name, meta, *args)
        if isinstance(views, torch.Tensor):
            return geometry.read(b, x, base, geometry_of(views))
        return [geometry.read(b, x, base, geometry_of(v)) for v in views]

    return lower


def _scatter(view: str) -> Callable[..., Value]:
    def lower(b: Builder, x: Value, source: Operand, *args: Any) -> Value:
        meta, base = _contiguous(x)
        target = geometry_of(_call(view, meta, *args))
        update = b.broadcast_to(b.value(source, base.dtype), target.sizes)
        return geometry.write(b, x, update, base, target)

    return lower


def _gradient(view: str) -> Callable[..., Value]:
    def lower(b: Builder, grad: Value, sizes: list[int], *args: Any) -> Value:
        zeros = b.zeros(sizes, grad.dtype)
        meta, base = _contiguous(zeros)
        return geometry.write(b, zeros, grad, base, geometry_of(_call(view, meta, *args)))

    return lower


for _name in _VIEWS:
    _base, _dot, _overload = _name.partition(".")
    graph_rule(f"aten::{_name}", f"aten::{_base}_copy{_dot}{_overload}")(_view(_name))
graph_rule("aten::_reshape_copy")(_view("view"))
for _name, _target in _SCATTERS.items():
    graph_rule(f"aten::{_name}")(_scatter(_target))
for _name, _target in _GRADIENTS.items():
    graph_rule(f"aten::{_name}")(_gradient(_target))


@graph_rule(*(f"aten::{name}" for name in _COPIES))
def copy_of(b: Builder, x: Operand, *_: Any) -> Value:
    return b.value(x, b.outputs[0].dtype)


@graph_rule("aten::copy")
def copy(b: Builder, x: Value, source: Operand, _: bool) -> Value:
    return b.broadcast_to(b.value(source, x.dtype), x.shape)


@graph_rule(*(f"aten::{name}" for name in _EMPTY))
def empty(b: Builder, *_: Any) -> Value:
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)


@graph_rule("aten::as_strided", "aten::as_strided_copy")
def as_strided(
    b: Builder, x: Value, sizes: Sequence[int], strides: Sequence[int], offset: int | None
) -> Value:
    """Exact for an operand that is contiguous in its storage, as a fresh value is."""
    _, base = _contiguous(x)
    view = Geometry(base.dtype, tuple(sizes), tuple(strides), offset or 0)
    return geometry.read(b, x, base, view)


@graph_rule("aten::as_strided_scatter")
def as_strided_scatter(
    b: Builder,
    x: Value,
    source: Value,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int | None,
) -> Value:
    _, base = _contiguous(x)
    view = Geometry(base.dtype, tuple(sizes), tuple(strides), offset or 0)
    return geometry.write(b, x, source, base, view)


@graph_rule("aten::_conj")
def conjugate(b: Builder, x: Value) -> Value:
    return conj(x)


@graph_rule("aten::_neg_view")
def negative(b: Builder, x: Value) -> Value:
    return -x
