"""Graphs with symbolic sizes: one static graph for each combination of sizes.

When a size varies, Dynamo traces a graph that is valid for all its values: sizes and strides are
expressions in symbols such as ``s0``. XLA compiles for fixed sizes, so at the first call with new
sizes the symbols are replaced by their values throughout the graph. Nothing is traced again: the
graph's own expressions say what every tensor's sizes and every integer become. Where the user gave
sizes bounds, there is a graph for each bucket of them instead: ``padding/``. Numbers that operators
only compute with, or that say where a slice begins, are inputs: ``symbolic_numbers.py``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo.execution import boxed, compile_graph
from lazyxla.dynamo.positions import take_by_positions
from lazyxla.dynamo.result_views import ResultView, take_views
from lazyxla.dynamo.symbolic_numbers import (
    Number,
    NumberInputs,
    evaluate,
    is_symbolic,
    sizing_symbols,
    symbols_of,
)
from lazyxla.dynamo.tensor_meta import TensorMeta
from lazyxla.lowering.fx_graph import NUMBER
from lazyxla.xla_options import Options

MAX_SPECIALISATIONS = 64
"""Combinations of sizes that one graph is kept compiled for, least recently used dropped first."""

_PLAIN_NUMBERS = (int, float, bool)


def has_symbols(graph: fx.Graph) -> bool:
    """Whether anything in the graph has a symbolic size or is a symbolic number."""
    return any(
        is_symbolic(value)
        or (isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides)
        for node in graph.nodes
        for value in _values(node)
    )


class SizedGraph:
    """A compiled graph with symbolic sizes, called with a list of arguments that it empties."""

    def __init__(
        self, graph: fx.Graph, sources: dict[Any, Source], views: list[ResultView], *how: Any
    ) -> None:
        self._graph = graph
        self._sources = sources
        self._views = views
        self._how = how  # to compile: what compile_graph takes besides the graph
        self._compiled: OrderedDict[tuple[int, ...], Callable[..., Any]] = OrderedDict()

    @classmethod
    def of(cls, graph: fx.Graph, options: Options, aliases: bool) -> SizedGraph | None:
        """The compiled graph; None if its arguments do not determine all of its sizes."""
        sources = find_sources(graph)
        used = {symbol for node in graph.nodes for symbol in symbols_of(node)}
        if not used <= sources.keys():
            return None
        sources = {s: source for s, source in sources.items() if s in used}
        views = take_views(graph)
        take_by_positions(graph)
        sizing = sizing_symbols(graph)
        if used <= sizing:
            return boxed(cls(graph, sources, views, options, aliases))
        return boxed(NumberedGraph(graph, sources, views, sizing, options, aliases))

    def __call__(self, args: list[Any]) -> Any:
        sizes = tuple([source(args) for source in self._sources.values()])
        if not self._views:
            return self._for(sizes)(args)
        given = self._viewed(args)
        return self._with_views(list(self._for(sizes)(args)), given, sizes)

    def _viewed(self, args: list[Any]) -> dict[int, torch.Tensor]:
        """The arguments that results are views of."""
        return {view.base: args[view.base] for view in self._views if view.is_of_argument}

    def _with_views(
        self, results: list[Any], given: dict[int, torch.Tensor], sizes: tuple[int, ...]
    ) -> list[Any]:
        """The results with those that are views of others, or of arguments."""
        bindings = dict(zip(self._sources, sizes, strict=True))
        with torch.no_grad():
            for view in self._views:
                base = given[view.base] if view.is_of_argument else results[view.base]
                results[view.position] = view.of(base, lambda n: evaluate(n, bindings))
        return results

    def _for(self, key: tuple[int, ...], values: tuple[int, ...] | None = None) -> Any:
        """The graph for sizes, in a call with these `values` of all symbols; the ones used last
        are kept."""
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._specialise(key if values is None else values)
            if len(self._compiled) > MAX_SPECIALISATIONS:
                self._compiled.popitem(last=False)
        else:
            with contextlib.suppress(KeyError):  # another thread has just dropped it
                self._compiled.move_to_end(key)
        return compiled

    def _specialise(self, key: tuple[int, ...]) -> Any:
        bindings = dict(zip(self._sources, key, strict=True))
        graph, _ = _replace_symbols(self._graph, bindings, lambda _: False)
        return self._compile(graph)

    def _compile(self, graph: fx.Graph) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        compiled = compile_graph(graph, *self._how)
        if compiled is None:
            for node in graph.find_nodes(op="placeholder"):
                if NUMBER in node.meta:
                    with graph.inserting_before(node.next):
                        number = graph.call_method("item", (node,))
                    node.replace_all_uses_with(number, lambda user, n=number: user is not n)
            owner = self._graph.owning_module
            return make_boxed_func(fx.GraphModule({} if owner is None else owner, graph))
        return compiled


class NumberedGraph(SizedGraph):
    """One with symbols that no size depends on, such as a step count.

    The numbers that are computed from those are inputs: 0-dim tensors after the arguments.
    """

    def __init__(
        self,
        graph: fx.Graph,
        sources: dict[Any, Source],
        views: list[ResultView],
        sizing: set[Any],
        *how: Any,
    ) -> None:
        super().__init__(graph, sources, views, *how)
        self._sizing = sizing
        self._places = [place for place, symbol in enumerate(sources) if symbol in sizing]
        results: Any = graph.output_node().args[0]
        values = [r.meta.get("val") if isinstance(r, fx.Node) else None for r in results]
        self._returned = [(place, v) for place, v in enumerate(values) if is_symbolic(v)]

    def __call__(self, args: list[Any]) -> Any:
        values = tuple([source(args) for source in self._sources.values()])
        function, numbers = self._for(tuple([values[place] for place in self._places]), values)
        bindings = dict(zip(self._sources, values, strict=True))
        given = self._viewed(args)
        args += [number.tensor(bindings) for number in numbers]
        results = list(function(args))
        for place, number in self._returned:
            results[place] = evaluate(number, bindings)
        return self._with_views(results, given, values)

    def _specialise(self, key: tuple[int, ...]) -> tuple[Callable[..., Any], list[Number]]:
        def varies(number: Any) -> bool:
            return not number.node.expr.free_symbols <= self._sizing

        bindings = dict(zip(self._sources, key, strict=True))
        graph, numbers = _replace_symbols(self._graph, bindings, varies)
        return self._compile(graph), numbers


@dataclass(slots=True)
class Source:
    """Where the value of a symbol is found in a call's arguments."""

    position: int
    of: Callable[..., int] | None = None  # Tensor.size or Tensor.stride; None: the argument itself
    dim: int = 0

    def __call__(self, args: list[Any]) -> int:
        argument = args[self.position]
        return int(argument) if self.of is None else self.of(argument, self.dim)


def find_sources(
    graph: fx.Graph, is_sized: Callable[[fx.Node], bool] = lambda _: True
) -> dict[Any, Source]:
    """For each symbol that is an argument or a size or stride of one, where it is.

    `is_sized`: whether a placeholder's sizes are those of the call.
    """
    sources: dict[Any, Source] = {}

    def offer(number: Any, source: Source) -> None:
        if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            sources.setdefault(number.node.expr, source)

    placeholders = [
        (position, node)
        for position, node in enumerate(graph.find_nodes(op="placeholder"))
        if is_sized(node)
    ]
    for position, node in placeholders:  # plain arguments are the cheapest to read
        offer(node.meta.get("val"), Source(position))
    for position, node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
            for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                offer(size, Source(position, torch.Tensor.size, dim))
                offer(stride, Source(position, torch.Tensor.stride, dim))
    return sources


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _replace_symbols(
    graph: fx.Graph, bindings: dict[Any, int], varies: Callable[[Any], bool]
) -> tuple[fx.Graph, list[Number]]:
    """A copy of a graph in which symbols have values; nodes that are numbers are removed.

    The symbolic numbers that vary are inputs of the copy, in this order after the others.
    """
    evaluated: dict[Any, Any] = {}

    def number(value: Any) -> Any:
        if not is_symbolic(value):
            return value
        key = type(value), value.node.expr
        if key not in evaluated:
            evaluated[key] = evaluate(value, bindings)
        return evaluated[key]

    def static(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape, strides = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
            offset = number(value.storage_offset())
            return TensorMeta(value.dtype, shape, strides, offset, value.device)
        if isinstance(value, (list, tuple)):
            return [static(v) for v in value]
        return number(value)

    copy = fx.Graph(owning_module=graph.owning_module)
    inputs = NumberInputs(copy, varies, bindings)
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if is_symbolic(value) and varies(value):
            known[node] = copy.placeholder(node.name) if node.op == "placeholder" else None
            continue
        value = static(value)
        is_number = isinstance(value, _PLAIN_NUMBERS)
        if is_number and node.op == "call_function":
            known[node] = value
            continue
        args, kwargs = inputs.replace(node, known)
        if node.op == "output":
            copy.output(args[0])
            continue
        if _holds(node, args):
            continue
        new = copy.create_node(node.op, node.target, args, kwargs, node.name)
        new.meta = {"val": value, "stack_trace": node.meta.get("stack_trace")}
        known[node] = value if is_number else new
    return copy, inputs.numbers


def _holds(node: fx.Node, args: tuple[Any, ...]) -> bool:
    """Whether the node is an assertion about sizes that holds for these arguments."""
    aten = torch.ops.aten
    if node.target == aten._assert_scalar.default:
        return bool(args[0])
    return node.target in (
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    )
