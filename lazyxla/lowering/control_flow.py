"""Control flow: PyTorch's ``cond``, ``while_loop``, ``scan`` and ``map`` as StableHLO's.

In an FX graph each is a node of a higher-order operator, whose functions are graphs of their own.
What depends on a random number is left to PyTorch, and so is ``associative_scan``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lazyxla.lowering.fx_graph import (
    HIGHER_ORDER,
    FxGraph,
    attribute_of,
    is_function,
    run_graph,
)
from lazyxla.lowering.operators import draws
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def is_control_flow(target: Any) -> bool:
    """Whether a node's target is one of the operators that can be lowered."""
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in HIGHER_ORDER


def functions(node: fx.Node) -> Iterator[FxGraph]:
    """The graphs that the operator of a node calls."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and is_function(argument):
            yield _graph(argument)


def lowers(node: fx.Node, lowers_operator: Callable[[fx.Node], bool]) -> bool:
    """Whether an operator's graphs can be lowered; `lowers_operator` decides for ATen's."""
    return all(_lowers_graph(graph, lowers_operator) for graph in functions(node))


def _lowers_graph(graph: FxGraph, lowers_operator: Callable[[fx.Node], bool]) -> bool:
    def lowers_node(node: fx.Node) -> bool:
        if node.op == "get_attr":
            return isinstance(attribute_of(node), (torch.Tensor, fx.GraphModule))
        if node.target is operator.getitem:
            return True
        if is_control_flow(node.target):
            return lowers(node, lowers_operator)
        return (
            isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
            and not draws(node.target)
            and lowers_operator(node)
        )

    values = [*graph.inputs, *graph.outputs]
    if not all(isinstance(n, fx.Node) and _is_static(n.meta.get("val")) for n in values):
        return False
    return all(map(lowers_node, graph.nodes))


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in value.shape)


def _graph(node: fx.Node) -> FxGraph:
    return FxGraph.of(attribute_of(node).graph)


def _operands(b: Builder, argument: Any, known: dict[Any, Any]) -> Any:
    """Values, lists of values, and functions' graphs."""
    if isinstance(argument, (list, tuple)):
        return [_operands(b, a, known) for a in argument]
    if isinstance(argument, fx.Node):
        return _graph(argument) if is_function(argument) else b.value(known[argument])
    return argument


def _specs(graph: FxGraph) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    values = [node.meta["val"] for node in graph.outputs]
    return [(v.dtype, tuple(v.shape)) for v in values]


def _cond(
    b: Builder, predicate: Value, if_true: FxGraph, if_false: FxGraph, operands: list[Value]
) -> list[Value]:
    return b.cond(
        predicate.reshape(()),
        lambda: run_graph(b, if_true, operands),
        lambda: run_graph(b, if_false, operands),
        _specs(if_true),
    )


def _while_loop(
    b: Builder, condition: FxGraph, body: FxGraph, carried: list[Value], fixed: list[Value]
) -> list[Value]:
    def holds(*state: Value) -> Value:
        (more,) = run_graph(b, condition, [*state, *fixed])
        return more.reshape(())

    return b.while_loop(holds, lambda *state: run_graph(b, body, [*state, *fixed]), *carried)


def _scan(
    b: Builder, combine: FxGraph, carry: list[Value], xs: list[Value], fixed: list[Value]
) -> list[Value]:
    def body(
        _: Value, now: list[Value], parts: list[Value], constants: list[Value]
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        results = run_graph(b, combine, [*now, *parts, *constants])
        return results[: len(carry)], results[len(carry) :]

    slices = _specs(combine)[len(carry) :]
    last, stacks = b.scan(xs[0].shape[0], body, carry, xs, fixed, slices)
    return [*last, *stacks]


def _map(b: Builder, function: FxGraph, xs: list[Value], fixed: list[Value]) -> list[Value]:
    return _scan(b, function, [], xs, fixed)


def _by_operands(function: Callable[..., list[Value]]) -> Callable[..., list[Value]]:
    """A lowering of a node, from one of its operands."""

    def lower(b: Builder, node: fx.Node, known: dict[Any, Any]) -> list[Value]:
        return function(b, *(_operands(b, argument, known) for argument in node.args))

    return lower


HIGHER_ORDER.update(
    cond=_by_operands(_cond),
    while_loop=_by_operands(_while_loop),
    scan=_by_operands(_scan),
    map_impl=_by_operands(_map),
)
