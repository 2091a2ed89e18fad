"""Lowering an FX graph of ATen operators, node by node: a decomposition's or torch.compile's."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lazyxla.lowering import composites
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.operators import draws, schema_name, schema_of
from lazyxla.lowering.program import Node, Program, Ref, Slot, SlotSpec, TensorSpec
from lazyxla.lowering.scalar import Scalar, wrap_number

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_MOST_RANDOMS = 1 << 20
"""More random operators than a graph has."""


DRAW = "lazyxla_draw"
"""In the meta of a random operator: which of a graph's it is, where parts of the graph that are
lowered apart must draw the same. Counted from 1."""


TRUE_SIZE = "lazyxla_true_size"
"""In the meta of an input that holds the true size of a padded dimension."""


NUMBER = "lazyxla_number"
"""In the meta of an input that is a 0-dim CPU tensor in place of a Python number: that number, when
the graph was made."""


class FxGraph(NamedTuple):
    """A graph, or a part of one: `nodes` in execution order, from `inputs` to `outputs`.

    Every node's ``meta["val"]`` is what has its dtype and static shape, or a list of such things.
    """

    inputs: list[fx.Node]
    nodes: list[fx.Node]
    outputs: list[fx.Node]

    @property
    def is_padded(self) -> bool:
        """Whether there is one such graph for each of a few buckets of sizes."""
        return any(TRUE_SIZE in node.meta for node in self.inputs)

    def lower(self, b: Builder, values: list[Any]) -> list[Any]:
        """Lowers the graph on `values`; returns its outputs, flattened."""
        return run_graph(b, self, values)

    @classmethod
    def of(cls, graph: fx.Graph) -> FxGraph:
        """The whole graph."""
        nodes = list(graph.nodes)
        (result,) = (n for n in nodes if n.op == "output")
        listed = result.args[0]
        return cls(
            [n for n in nodes if n.op == "placeholder"],
            [n for n in nodes if n.op not in ("placeholder", "output")],
            list(listed) if isinstance(listed, (list, tuple)) else [listed],
        )


HIGHER_ORDER: dict[str, Callable[[Builder, fx.Node, dict[Any, Any]], list[Any]]] = {}
"""How a node of a higher-order operator is lowered, by the operator's name; control_flow.py has
these. A function gets the values of the graph so far and returns those of the node's results."""


def is_function(node: fx.Node) -> bool:
    """Whether a node stands for a graph that a higher-order operator calls."""
    return node.op == "get_attr" and isinstance(attribute_of(node), fx.GraphModule)


def attribute_of(node: fx.Node) -> Any:
    """The attribute that a "get_attr" node refers to."""
    return functools.reduce(getattr, str(node.target).split("."), node.graph.owning_module)


def run_graph(b: Builder, graph: FxGraph, values: list[Any]) -> list[Any]:
    """Lowers a graph on `values`; returns its outputs, flattened."""
    known: dict[Any, Any] = {}
    for node, value in zip(graph.inputs, values, strict=True):
        is_tensor = isinstance(value, Scalar) and not value.wrapped
        known[node] = b.value(value, value.dtype) if is_tensor else value
    randoms = 0
    for node in graph.nodes:
        if node.op == "get_attr":
            if not is_function(node):
                known[node] = _constant(b, attribute_of(node))
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            known[node] = HIGHER_ORDER[node.target.name()](b, node, known)
        elif node.target is operator.getitem:
            known[node] = known[node.args[0]][node.args[1]]
        else:
            if draws(node.target):
                randoms = node.meta.get(DRAW, randoms + 1)
            known[node] = _run_node(b, node, known, randoms)
    results = [known[node] for node in graph.outputs]
    return [r for part in results for r in (part if isinstance(part, list) else [part])]


def user_frame(node: fx.Node) -> str:
    """The user's line that a node was traced from, as 'file:line: code'; empty if unknown."""
    frames = re.findall(
        r'File "(.*)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or ""
    )
    return "{}:{}: {}".format(*frames[-1]) if frames else ""


def _run_node(b: Builder, node: fx.Node, known: dict[Any, Any], salt: int) -> Any:
    op: Any = node.target
    args = [known_or_wrapped(known, a, kind) for a, kind in schema_arguments(op, node)]
    single = not isinstance(node.meta["val"], (list, tuple))
    parts = [node.meta["val"]] if single else list(node.meta["val"])
    present = [p for p in parts if p is not None]
    before, salt_before = b.outputs, b.salt
    try:
        b.outputs = tuple(TensorSpec(p.dtype, tuple(p.shape)) for p in present)
        b.salt = salt_before * _MOST_RANDOMS + salt  # a decomposition within: still its own
        results = iter(_apply(b, op, args))
    except LoweringError as error:
        if b.depth or not (where := user_frame(node)):
            raise
        raise LoweringError(f"{error}\n(traced from {where})") from error
    finally:
        b.outputs, b.salt = before, salt_before
    listed = [None if p is None else next(results) for p in parts]
    return listed[0] if single else listed


def _apply(b: Builder, op: Any, args: list[Any]) -> list[Any]:
    name = schema_name(op)
    if not composites.is_composite(b, name):
        return b.apply(name, tuple(args))
    names = [argument for argument, _, _ in schema_of(op)]
    return composites.composite(b, name, dict(zip(names, args, strict=True)))


def schema_arguments(op: Any, node: fx.Node) -> list[tuple[Any, str]]:
    """All arguments of an FX node in schema order, defaults filled in, with their schema types."""
    count = len(node.args)
    return [
        (node.args[i] if i < count else node.kwargs.get(name, default), kind)
        for i, (name, kind, default) in enumerate(schema_of(op))
    ]


def known_or_wrapped(known: dict[Any, Any], arg: Any, kind: str) -> Any:
    """An FX argument as the rules take it: a node's value, a Scalar for a number."""
    if isinstance(arg, fx.Node):
        return known[arg]
    if isinstance(arg, (list, tuple)):
        return [known_or_wrapped(known, a, kind) for a in arg]
    if isinstance(arg, (bool, int, float, complex)):
        if "float" in kind:
            return wrap_number(arg if isinstance(arg, complex) else float(arg))
        if "number" in kind or "Scalar" in kind or "Tensor" in kind:
            return wrap_number(arg)
    return arg


def _constant(b: Builder, tensor: torch.Tensor) -> Any:
    """A tensor that the trace of a decomposition has captured."""
    value = b.array(tensor.detach().cpu().tolist(), tensor.dtype)
    return b.reshape(value, tuple(tensor.shape))


def program_of(node: fx.Node) -> Program:
    """A node of a static graph as a program of its own, whose inputs are the node's operands."""
    return _program(node.target, schema_arguments(node.target, node), node.meta["val"])


def program_of_call(op: Any, args: list[Any], kwargs: dict[str, Any], result: Any) -> Program:
    """A call of an operator on tensors, of which only the types count, as a program."""
    listed = [
        (args[i] if i < len(args) else kwargs.get(name, default), kind)
        for i, (name, kind, default) in enumerate(schema_of(op))
    ]
    return _program(op, listed, result)


def _program(op: Any, arguments: list[tuple[Any, str]], result: Any) -> Program:
    """The program of one call; FX nodes and tensors are its inputs, each once."""
    operands: dict[Any, Ref] = {}
    inputs: list[TensorSpec] = []
    slots: list[SlotSpec] = []

    def slot(value: Any, dtype: torch.dtype) -> Slot:
        slots.append(SlotSpec(value, dtype, True, False))
        return Slot(len(slots) - 1)

    def bind(arg: Any, kind: str) -> Any:
        if isinstance(arg, (list, tuple)):
            return [bind(a, kind) for a in arg]
        if isinstance(arg, fx.Node) and NUMBER in arg.meta:
            return slot(arg.meta[NUMBER], arg.meta["val"].dtype)
        if isinstance(arg, (fx.Node, torch.Tensor)):
            if arg not in operands:
                operands[arg] = Ref(len(inputs))
                inputs.append(_spec(arg.meta["val"] if isinstance(arg, fx.Node) else arg))
            return operands[arg]
        wrapped = known_or_wrapped({}, arg, kind)
        return slot(wrapped.number, wrapped.dtype) if isinstance(wrapped, Scalar) else arg

    args = tuple(bind(arg, kind) for arg, kind in arguments)
    outputs = tuple(_spec(r) for r in tree_leaves(result) if r is not None)
    rng = None
    if draws(op):
        rng = (slot(0, torch.int64), slot(0, torch.int64))
    results = [Ref(len(inputs) + i) for i in range(len(outputs))]
    return Program(inputs, [Node(schema_name(op), args, outputs, rng)], results, slots, {})


def _spec(value: Any) -> TensorSpec:
    return TensorSpec(value.dtype, tuple(value.shape))
