"""From a divided graph to a function of a list of arguments, which it empties.

A graph that is one part is a call of ``_C``, which does everything in C++. Any other is a list of
steps, which Python runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from lazyxla import _C
from lazyxla.dynamo.memory_order import order_operands, viewed_by
from lazyxla.dynamo.partition import HOST, Partition, Segment, divide, is_number
from lazyxla.lowering import fx_content, registry
from lazyxla.lowering.fx_graph import NUMBER, FxGraph
from lazyxla.lowering.operators import draws
from lazyxla.xla_options import Options

_numbers = itertools.count()
_C.on_graph_dropped(lambda number: registry.graphs.pop(number, None))

# Their result is their operand: one output of the node serves both.
_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def next_number() -> int:
    """For a graph that C++ is to know by a number of its own."""
    return next(_numbers)


F = TypeVar("F", bound=Callable[..., Any])
Step = Callable[[list[Any]], None]


def compile_graph(graph: fx.Graph, options: Options, aliases: bool) -> Callable[..., Any] | None:
    """The graph as a function; None if no part of it can be one node.

    With `aliases`, results that are views of each other share their memory.
    """
    order_operands(graph)
    partition = divide(graph)
    if partition is None or all(segment.kind == HOST for segment in partition.segments):
        return None
    return boxed(_one_call(partition, options, aliases) or _Steps(partition, options, aliases))


def _one_call(partition: Partition, options: Options, aliases: bool) -> Callable[..., Any] | None:
    """The whole graph as one call; None if there is more to it."""
    if len(partition.segments) > 1 or partition.last:
        return None
    (part,) = partition.segments
    positions = {node: position for position, node in enumerate(partition.arguments)}
    if not all(n in positions and (_on_device(n) or is_number(n)) for n in part.inputs):
        return None
    returns: list[tuple[str, Any]] = []
    constants: list[Any] = []
    for result in partition.results:
        if not isinstance(result, fx.Node):
            returns.append(("constant", len(constants)))
            constants.append(result)
        elif result in positions:
            returns.append(("argument", positions[result]))
        else:
            returns.append(("result", result))
    inputs = [positions[node] for node in part.inputs]
    call = _make_call(part, inputs, returns, constants, options, aliases)
    return functools.partial(call)  # unlike the call itself it can have attributes


def _make_call(
    part: Segment,
    positions: list[int],
    returns: list[tuple[str, Any]],
    constants: list[Any],
    options: Options,
    aliases: bool,
) -> Callable[..., Any]:
    """A part's call. What it returns are results (given as nodes), arguments or constants."""
    members = set(part.nodes)
    outputs: dict[fx.Node, int] = {}  # of the node in the pending graph
    results: list[tuple[Any, int, int, int]] = []  # meta, offset; its output, or a result to view
    places: dict[fx.Node, int] = {}
    sharing = members if aliases else set[fx.Node]()
    memory = {node: memory_of(node, sharing, undeclared=True) for node in part.outputs}
    shared = {m for m, count in Counter(memory.values()).items() if count > 1 and _is_base(m)}

    def output(node: fx.Node) -> int:
        while node.target in _IDENTITIES and node.args[0] in members:
            node = node.args[0]  # type: ignore[assignment]
        return outputs.setdefault(node, len(outputs))

    def result(node: fx.Node) -> int:
        if node not in places:
            base = memory.get(node, node)
            if base is node or base not in shared:
                entry = (_meta(node), 0, output(node), -1)
            else:
                entry = (_meta(node), node.meta["val"].storage_offset(), 0, result(base))
            places[node] = len(results)
            results.append(entry)
        return places[node]

    returned = [(kind, result(what) if kind == "result" else what) for kind, what in returns]
    writes = [(part.inputs.index(argument), output(value)) for argument, value in part.writes]
    number = next_number()
    graph = FxGraph(part.inputs, part.nodes, list(outputs))
    call: Callable[..., Any] = _C.traced_call(
        number=number,
        content=fx_content.content_of(graph),
        operators=len(part.nodes),
        device=part.kind,
        inputs=[
            (position, node.meta["val"].dtype if is_number(node) else None, NUMBER in node.meta)
            for position, node in zip(positions, part.inputs, strict=True)
        ],
        outputs=[_meta(node) for node in outputs],
        results=results,
        writes=writes,
        returns=returned,
        constants=constants,
        random=any(draws(n.target) for n in part.nodes),
        options=options,
    )
    registry.graphs[number] = graph
    return call


def _meta(node: fx.Node) -> tuple[torch.dtype, list[int], list[int]]:
    value = node.meta["val"]
    return value.dtype, list(value.shape), list(value.stride())


def memory_of(node: fx.Node, members: set[fx.Node], undeclared: bool = False) -> fx.Node:
    """The node whose memory a node's tensor is in: itself, or what it is a view of."""
    while (viewed := viewed_by(node, undeclared)) in members:
        node = viewed
    return node


def _is_base(node: fx.Node) -> bool:
    """Whether a node's tensor covers its memory, so that others can be views of it."""
    value = node.meta["val"]
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return bool(value.storage_offset() == 0)


def _on_device(node: fx.Node) -> bool:
    return node.meta["val"].device.type == "lazyxla"


def boxed(call: F) -> F:
    """Marks for AOTAutograd that a function empties its list of arguments.

    An attribute of the object, not of its class: wrappers copy the former only.
    """
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _Steps:
    """Parts and operators that run one after the other on a list of values.

    The list starts as the arguments; every node has an index in it, whose entry is cleared after
    the node's last use.
    """

    def __init__(self, partition: Partition, options: Options, aliases: bool) -> None:
        self._places: dict[fx.Node, int] = {}
        for node in partition.arguments:
            self._place(node)
        self._constants: list[Any] = []
        self._constant_places: list[int] = []
        steps: list[tuple[Step, list[fx.Node]]] = []
        for segment in partition.segments:
            if segment.kind == HOST:
                steps += [(self._operator(n), n.all_input_nodes) for n in segment.nodes]
            else:
                steps.append((self._part(segment, options, aliases), segment.inputs))
        steps += [(self._operator(n), n.all_input_nodes) for n in partition.last]
        self._results = [
            (True, self._place(r)) if isinstance(r, fx.Node) else (False, r)
            for r in partition.results
        ]
        self._steps = self._with_last_uses(steps)
        self._extra = len(self._places) - len(partition.arguments)

    def __call__(self, args: list[Any]) -> list[Any]:
        values = args + [None] * self._extra
        args.clear()
        for place, constant in zip(self._constant_places, self._constants, strict=True):
            values[place] = constant
        for step, dead in self._steps:
            step(values)
            for place in dead:
                values[place] = None
        return [values[r] if is_index else r for is_index, r in self._results]

    def _place(self, node: fx.Node) -> int:
        place = self._places.get(node)
        if place is None:
            place = self._places[node] = len(self._places)
            if node.op == "get_attr":
                self._constants.append(_attribute(node))
                self._constant_places.append(place)
        return place

    def _with_last_uses(
        self, steps: list[tuple[Step, list[fx.Node]]]
    ) -> list[tuple[Step, list[int]]]:
        kept = {place for is_index, place in self._results if is_index} | set(self._constant_places)
        seen: set[int] = set()
        result = []
        for step, used in reversed(steps):
            places = {self._places[node] for node in used} - kept
            result.append((step, sorted(places - seen)))
            seen |= places
        return result[::-1]

    def _operator(self, node: fx.Node) -> Step:
        target: Any = node.target
        places = {n: self._place(n) for n in node.all_input_nodes}
        place = self._place(node)
        args, kwargs = node.args, node.kwargs

        def step(values: list[Any]) -> None:
            known = {
                n: values[p].item() if NUMBER in n.meta else values[p] for n, p in places.items()
            }
            positional, keywords = fx.map_arg((args, kwargs), known.__getitem__)
            values[place] = target(*positional, **keywords)

        return step

    def _part(self, part: Segment, options: Options, aliases: bool) -> Step:
        device = torch.device("lazyxla", part.kind)
        inputs = [self._place(n) for n in part.inputs]
        uploads = [i for i, n in enumerate(part.inputs) if not _on_device(n) and not is_number(n)]
        for i in uploads:
            if part.inputs[i].op == "get_attr":
                where = self._constant_places.index(inputs[i])
                self._constants[where] = self._constants[where].to(device)
        outputs = [self._place(n) for n in part.outputs]
        returns = [("result", n) for n in part.outputs]
        call = _make_call(part, list(range(len(inputs))), returns, [], options, aliases)

        def step(values: list[Any]) -> None:
            operands = [values[p] for p in inputs]
            for i in uploads:
                operands[i] = operands[i].to(device)
            for place, result in zip(outputs, call(operands), strict=True):
                values[place] = result

        return step


def _attribute(node: fx.Node) -> Any:
    return functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module)
