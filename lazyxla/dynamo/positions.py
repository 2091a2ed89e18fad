"""Slices of a fixed size that begin at a symbolic number, such as the step of a loop.

A slice of a program begins at a fixed place, so that there would be a program for each. Where
nothing else depends on the symbol, the elements are taken, or written, by an index tensor instead:
it is computed from the number, which is an input of the program (``symbolic_numbers.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from lazyxla.dynamo.symbolic_numbers import sizing_symbols

aten = torch.ops.aten


class _Form(NamedTuple):
    """Where a view operator, or one that writes through a view, has its arguments."""

    dim: int
    is_slice: bool  # with an end and a step after the start; of one element otherwise
    writes: bool = False  # the second argument
    is_gradient: bool = False  # the second argument is the base's sizes

    def start(self, node: fx.Node) -> Any:
        return _argument(node, self.dim + 1)


_FORMS: dict[Any, _Form] = {
    aten.select.int: _Form(1, False),
    aten.slice.Tensor: _Form(1, True),
    aten.select_scatter.default: _Form(2, False, writes=True),
    aten.slice_scatter.default: _Form(2, True, writes=True),
    aten.select_backward.default: _Form(2, False, is_gradient=True),
    aten.slice_backward.default: _Form(2, True, is_gradient=True),
}


def take_by_positions(graph: fx.Graph) -> None:
    """Rewrites the slices of a functional graph whose begin alone depends on symbols."""
    found = {node: place for node in graph.nodes if (place := _placed(node))}
    if not found:
        return
    sizing = sizing_symbols(graph, lambda node: _bounds(node) if node in found else [])
    changed: set[fx.Node] = set()
    mode = _fake_mode(graph)
    with mode, enable_python_dispatcher():
        for node, place in found.items():
            if not place.start.meta["val"].node.expr.free_symbols <= sizing:
                changed.add(_rewrite(graph, node, place))
        _propagate(graph, changed)


class _Place(NamedTuple):
    """The elements that a node takes or writes along a dimension of some size."""

    form: _Form
    dim: int
    size: int
    taken: int
    step: int
    start: fx.Node


def _argument(node: fx.Node, position: int) -> Any:
    return node.args[position] if position < len(node.args) else None


def _bounds(node: fx.Node) -> list[Any]:
    """The arguments that say where a slice begins and ends."""
    form = _FORMS[node.target]
    return list(node.args[form.dim + 1 : form.dim + 3])


def _placed(node: fx.Node) -> _Place | None:
    """What a node takes, if it begins at a symbolic number and is of a fixed size."""
    form = _FORMS.get(node.target)
    if form is None or node.kwargs:
        return None
    start, operand = form.start(node), node.args[0]
    if not isinstance(start, fx.Node) or not isinstance(start.meta.get("val"), torch.SymInt):
        return None
    step = _argument(node, form.dim + 3) if form.is_slice else None
    # The base, and what is taken of it or written to it.
    base, part = operand.meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if form.writes:
        part = node.args[1].meta["val"]  # type: ignore[union-attr]
    elif form.is_gradient:
        base, part = part, base
    dim = node.args[form.dim] % base.ndim  # type: ignore[operator]
    size, taken = base.shape[dim], part.shape[dim] if form.is_slice else 1
    if any(isinstance(number, (fx.Node, torch.SymInt)) for number in (size, taken, step)):
        return None
    return _Place(form, dim, size, taken, step or 1, start)


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(v.fake_mode for v in values if isinstance(v, torch._subclasses.FakeTensor))


def _rewrite(graph: fx.Graph, node: fx.Node, place: _Place) -> fx.Node:
    """Puts operators with an index in place of a node."""

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(op, args, kwargs)
        new.meta["stack_trace"] = node.meta.get("stack_trace")
        new.meta["val"] = _value(new)
        return new

    form, dim, start = place.form, place.dim, place.start
    with graph.inserting_before(node):
        device = node.meta["val"].device
        end = place.taken * place.step
        how = {"dtype": torch.int64, "device": device}
        steps = call(aten.arange.start_step, 0, end, place.step, **how)
        index = graph.call_function(aten.add.Tensor, (steps, start))
        index.meta = dict(steps.meta)
        index = call(aten.remainder.Scalar, index, place.size)  # a negative start is from the end
        if not form.writes and not form.is_gradient:
            new = call(aten.index_select.default, node.args[0], dim, index)
            new = new if form.is_slice else call(aten.squeeze.dim, new, dim)
        else:
            if form.is_gradient:
                part: Any = node.args[0]
                base = call(aten.new_zeros.default, part, node.args[1])
            else:
                base, part = node.args[:2]  # type: ignore[assignment]
            part = part if form.is_slice else call(aten.unsqueeze.default, part, dim)
            new = call(aten.index_copy.default, base, dim, index, part)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _value(node: fx.Node) -> Any:
    """What a node computes, as a fake tensor."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return target(*args, **kwargs)


def _propagate(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Describes what is computed from the changed nodes anew: a view of a slice was one of the
    slice's base, at an offset with the symbol in it."""
    for node in graph.nodes:
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if is_operator and not changed.isdisjoint(node.all_input_nodes):
            node.meta["val"] = _value(node)
            changed.add(node)
