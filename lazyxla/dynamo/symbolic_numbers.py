"""Graphs with symbolic numbers that operators only compute with, such as a step count.

An int that varies is a symbol for Dynamo, as a size is. Where nothing but the values of tensors
depends on it, as in ``x * step`` or ``x / (1 - 0.9**step)``, the numbers that are computed from it
are inputs of the program, as Python numbers that are recorded are: one graph serves all of them.
A symbol that a size, a stride or an index depends on has a graph for each of its values
(``symbolic_sizes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo.tensor_meta import TensorMeta
from lazyxla.lowering.fx_graph import NUMBER, schema_arguments

_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def is_symbolic(value: Any) -> bool:
    """Whether it is a number with symbols."""
    return type(value) in _KINDS


def symbols_of(node: fx.Node, with_offsets: bool = True) -> Iterator[Any]:
    """The symbols in the sizes, strides and offsets of a node's tensors, or in its number."""
    value: Any = node.meta.get("val")
    for part in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(part, torch.Tensor):
            if part._has_symbolic_sizes_strides:
                offsets = [part.storage_offset()] if with_offsets else []
                for number in (*part.shape, *part.stride(), *offsets):
                    if isinstance(number, torch.SymInt):
                        yield from number.node.expr.free_symbols
        elif is_symbolic(part):
            yield from part.node.expr.free_symbols


def evaluate(number: Any, bindings: dict[Any, int]) -> Any:
    """A number in which symbols have values."""
    kind = _KINDS.get(type(number))
    if kind is None:
        return number
    expression = number.node.expr
    value = bindings[expression] if expression.is_Symbol else expression.xreplace(bindings)
    return kind(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number that an operator computes with, and its dtype as an input of the program."""

    value: Any  # a SymInt or SymFloat
    dtype: torch.dtype

    @property
    def key(self) -> tuple[Any, torch.dtype]:
        return self.value.node.expr, self.dtype

    def tensor(self, bindings: dict[Any, int]) -> torch.Tensor:
        """What the program gets in a call."""
        return torch.tensor(evaluate(self.value, bindings), dtype=self.dtype, device="cpu")


def number_at(arg: Any, kind: str) -> Number | None:
    """The number that an operator's argument of this schema type is, if it only computes with it.

    Lists of numbers, and what an operator takes as an int, may be sizes or positions.
    """
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return None
    if "List" in kind:
        return None
    if "float" in kind:
        return Number(value, torch.float64)
    if "number" in kind or "Scalar" in kind or "Tensor" in kind:
        return Number(value, torch.float64 if isinstance(value, torch.SymFloat) else torch.int64)
    return None


def sizing_symbols(
    graph: fx.Graph, but_for: Callable[[fx.Node], list[Any]] = lambda node: []
) -> set[Any]:
    """The symbols that more depends on than numbers that operators compute with.

    Offsets do not count: in a functional graph each tensor is a value of its own. `but_for`: the
    arguments of a node that are left out.
    """
    found: set[Any] = set()
    for node in graph.nodes:
        if node.op == "output" or is_symbolic(node.meta.get("val")):
            continue  # returned as it is in the call; only its uses count
        found.update(symbols_of(node, with_offsets=False))
        numbers = {arg for arg, kind in _arguments(node) if number_at(arg, kind)}
        others = [arg for arg, kind in _arguments(node) if number_at(arg, kind) is None]
        if left_out := but_for(node):
            numbers.update(arg for arg in left_out if isinstance(arg, fx.Node))
            others = [arg for arg in others if not any(arg is given for given in left_out)]
        used: list[fx.Node] = []
        fx.map_arg(others, used.append)
        used += [n for n in node.all_input_nodes if n not in numbers]
        for operand in used:
            if is_symbolic(operand.meta.get("val")):
                found.update(symbols_of(operand))
    return found


def _arguments(node: fx.Node) -> list[tuple[Any, str]]:
    """Those of an operator that computes tensors, with their schema types."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta.get("val") is None:
        return []
    return schema_arguments(node.target, node)


class NumberInputs:
    """Gives a graph whose symbols get values the numbers that vary as inputs, each once."""

    def __init__(
        self, graph: fx.Graph, varies: Callable[[Any], bool], bindings: dict[Any, int]
    ) -> None:
        self._graph = graph
        self._varies = varies
        self._bindings = bindings
        self._nodes: dict[Any, fx.Node] = {}
        self.numbers: list[Number] = []

    def replace(self, node: fx.Node, known: dict[fx.Node, Any]) -> tuple[Any, Any]:
        """A node's arguments for its copy, given the copies of its operands."""
        target: Any = node.target
        args, kwargs = fx.map_arg((list(node.args), dict(node.kwargs)), known.__getitem__)
        args, kwargs = list(args), dict(kwargs)
        found = [
            (place, number)
            for place, (arg, kind) in enumerate(_arguments(node))
            if (number := number_at(arg, kind)) and self._varies(number.value)
        ]
        for place, number in found:
            if place < len(args):
                args[place] = self._input(number)
            else:
                kwargs[target._schema.arguments[place].name] = self._input(number)
        return tuple(args), kwargs

    def _input(self, number: Number) -> fx.Node:
        node = self._nodes.get(number.key)
        if node is None:
            last = self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):
                node = self._graph.placeholder(f"number_{len(self.numbers)}")
            device = torch.device("cpu")
            node.meta = {
                "val": TensorMeta(number.dtype, (), (), 0, device),
                NUMBER: number.tensor(self._bindings).item(),
            }
            self._nodes[number.key] = node
            self.numbers.append(number)
        return node
