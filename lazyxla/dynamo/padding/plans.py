"""Which sizes are padded to which buckets.

``torch._dynamo.mark_dynamic(x, dim, min=, max=)`` gives the size of a dimension bounds, and Dynamo
the symbol of that size. Each halving of the upper bound that is not below the lower one is a
bucket. A symbol without bounds of the user's has none, and a graph with an operator that
``analysis.py`` refuses is compiled for exact sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo.execution import memory_of
from lazyxla.dynamo.padding.analysis import analyse
from lazyxla.dynamo.padding.rewriting import write
from lazyxla.dynamo.padding.rules import NOTE, RefusedError, is_tensor, structure_of
from lazyxla.dynamo.padding.structure import has_symbol
from lazyxla.lowering.fx_graph import user_frame
from lazyxla.reporting import logger

_PLAN = "lazyxla_padding_plan"  # in the meta of a graph's output


@dataclass(frozen=True, slots=True)
class Plan:
    """How a graph is padded."""

    buckets: dict[Any, tuple[int, ...]]  # of each padded symbol, ascending
    results: int | None = None  # the first results: the user's, sliced; None: all
    arguments: frozenset[str] | None = None  # the names of those that come unpadded; None: all

    def comes_unpadded(self, argument: fx.Node) -> bool:
        return self.arguments is None or argument.name in self.arguments


def plan(graph: fx.Graph, aliases: bool = False) -> None:
    """Decides about a whole graph: one for inference, or a joint one for training.

    With `aliases`, results that are views of each other are to share their memory.
    """
    buckets = _find_buckets(graph)
    if not buckets or torch._dynamo.config.compiled_autograd:  # it traces what is kept once more
        return
    try:
        analyse(graph, frozenset(buckets))
        if aliases:
            _check_memory(graph, frozenset(buckets))
        _rehearse(graph, buckets)
    except RefusedError as error:
        where = user_frame(error.node).split(": ", 1)[0] or "a graph"
        symbols = ", ".join(sorted(map(str, buckets)))
        logger.info(
            "%s: sizes are not padded to buckets (%s): %s %s",
            *(where, symbols, error.node.target, error),
        )
        return
    _set(graph, Plan(buckets))


def _rehearse(graph: fx.Graph, buckets: dict[Any, tuple[int, ...]]) -> None:
    """Writes the graph for the largest buckets: what cannot be written is refused now."""
    bindings: dict[Any, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            bindings[value.node.expr] = value.node.hint
    bindings.update({symbol: sizes[-1] for symbol, sizes in buckets.items()})
    write(graph, bindings, frozenset(buckets), torch.device("lazyxla", 0))


def _check_memory(graph: fx.Graph, padded: frozenset[Any]) -> None:
    """Refuses results that share memory: each is cut out of a padded one."""
    (output,) = graph.find_nodes(op="output")
    members = {node for node in graph.nodes if node.op == "call_function"}
    found: dict[fx.Node, fx.Node] = {}
    results = [n for n in dict.fromkeys(output.all_input_nodes) if n in members and is_tensor(n)]
    for node in results:
        if not has_symbol(list(structure_of(node)), padded):
            continue
        if found.setdefault(memory_of(node, members), node) is not node:
            raise RefusedError(node, "is a view of another result")


def hand_on(joint: fx.Graph, forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Gives the parts of a joint graph its plan. What the forward one keeps remains padded."""
    whole = plan_of(joint)
    if whole is None or not (_has_notes(forward) and _has_notes(backward)):
        return
    tangents = {n.name for n in joint.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    _set(forward, replace(whole, results=results))
    _set(backward, replace(whole, arguments=frozenset(tangents)))


def plan_of(graph: fx.Graph) -> Plan | None:
    (output,) = graph.find_nodes(op="output")
    found: Plan | None = output.meta.get(_PLAN)
    return found


def _set(graph: fx.Graph, made: Plan) -> None:
    (output,) = graph.find_nodes(op="output")
    output.meta[_PLAN] = made


def _has_notes(graph: fx.Graph) -> bool:
    """Whether the partitioner has made no tensors that padding was not thought of for."""
    return all(
        NOTE in node.meta
        for node in graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and node.op != "output"
    )


def _find_buckets(graph: fx.Graph) -> dict[Any, tuple[int, ...]]:
    """The buckets of symbols for which a user has given bounds."""
    values = [n.meta.get("val") for n in graph.find_nodes(op="placeholder")]
    shape_env = next((v.node.shape_env for v in values if isinstance(v, torch.SymInt)), None)
    if shape_env is None:
        return {}
    symbols = {v.node.expr for v in values if isinstance(v, torch.SymInt) and v.node.expr.is_Symbol}
    buckets = {}
    for symbol in symbols & _bounded(shape_env):
        bounds = shape_env.var_to_range[symbol]
        if bounds.upper.is_Integer:
            buckets[symbol] = halvings(int(bounds.upper), max(int(bounds.lower), 1))
    return buckets


def _bounded(shape_env: Any) -> set[Any]:
    """The symbols of dimensions that a user has marked with an upper bound."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    found = set()
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None)
        for dim, constraint in enumerate(constraints or ()):
            size = tracked.fake.shape[dim]
            strict = isinstance(constraint, StrictMinMaxConstraint)
            if strict and isinstance(size, torch.SymInt) and constraint.vr.upper.is_Integer:
                found.add(size.node.expr)
    return found


def halvings(upper: int, lower: int) -> tuple[int, ...]:
    """The buckets between two bounds, ascending: the upper one, its half, and so on."""
    buckets = [upper]
    while (half := -(-buckets[-1] // 2)) >= lower and half < buckets[-1]:
        buckets.append(half)
    return tuple(reversed(buckets))
