"""Calling a padded graph.

A call with new sizes has no new program. Arguments are padded to the bucket's sizes by a small
program of their own, which runs before, so that the large one knows no other sizes. The true sizes
are arguments on the device. What the user gets is sliced from the results by a small program that
runs after; what the forward graph keeps for the backward one remains padded.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla import _C
from lazyxla.dynamo.execution import boxed
from lazyxla.dynamo.padding.plans import Plan
from lazyxla.dynamo.padding.rewriting import Key, write
from lazyxla.dynamo.padding.rules import is_tensor, structure_of
from lazyxla.dynamo.padding.structure import Structure, has_symbol
from lazyxla.dynamo.result_views import take_views
from lazyxla.dynamo.symbolic_numbers import evaluate, symbols_of
from lazyxla.dynamo.symbolic_sizes import SizedGraph, Source, find_sources
from lazyxla.xla_options import Options

PADDING = 0.0
"""The value of padding in floating-point arguments. Any value will do; tests use nan."""

_MOST_CASES = 1024  # combinations of true sizes that one graph remembers


@dataclass(slots=True)
class _Program:
    """A graph for the sizes of a bucket, and the numbers that it takes."""

    function: Callable[[list[Any]], Any]
    numbers: list[Key]


@dataclass(slots=True)
class _Move:
    """How a tensor is padded or cut: each factor of its dimensions apart."""

    position: int  # among the arguments, or the results
    true_factors: list[int]
    factors: list[int]
    true_shape: list[int]
    shape: list[int]
    strides: list[int]  # of the true tensor

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with zeros; itself if it has the bucket's size."""
        if self.true_factors == self.factors:
            return tensor
        pads = []
        for true, size in zip(reversed(self.true_factors), reversed(self.factors), strict=True):
            pads += [0, size - true]
        value = PADDING if tensor.is_floating_point() else 0
        padded = torch.constant_pad_nd(tensor.reshape(self.true_factors), pads, value)
        return padded.reshape(self.shape)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The true elements, on memory of their own."""
        if self.true_factors == self.factors:
            return tensor
        part = tensor.reshape(self.factors)
        for dim, size in enumerate(self.true_factors):
            part = part.narrow(dim, 0, size)
        part = part.reshape(self.true_shape)
        for dim, stride in enumerate(self.strides):
            part = part if stride else part.narrow(dim, 0, 1)  # expanded
        result = torch.empty_strided(
            part.shape, self.strides, dtype=tensor.dtype, device=tensor.device
        )
        return result.copy_(part).expand(self.true_shape)


@dataclass(slots=True)
class _Case:
    """The steps around the program for a combination of true sizes."""

    pads: list[_Move]
    cuts: list[_Move]
    numbers: list[torch.Tensor]
    results: list[tuple[int, Any]]  # numbers among the results: position, value


class PaddedGraph(SizedGraph):
    """A graph that is compiled for buckets of sizes, called with a list that it empties."""

    def __init__(self, graph: fx.Graph, sources: dict[Any, Source], plan: Plan, *how: Any) -> None:
        super().__init__(graph, sources, take_views(graph), *how)
        self._plan = plan
        self._padded = frozenset(plan.buckets)
        self._cases: dict[tuple[int, ...], _Case] = {}
        self._arguments = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        self._returned: list[Any] = list(output.args[0])
        self._given = [
            (position, node)
            for position, node in enumerate(self._arguments)
            if self._is_padded(node) and plan.comes_unpadded(node)
        ]
        self._cut = [
            (position, node)
            for position, node in enumerate(self._returned[: plan.results])
            if self._is_padded(node)
        ]
        places = {node: position for position, node in enumerate(self._arguments)}
        self._place = {p: places[node] for p, node in self._cut if node in places}
        devices = [n.meta["val"].device for n in self._arguments if self._is_padded(n)]
        self._device = devices[0] if devices else torch.device("lazyxla", 0)

    @classmethod
    def planned(cls, graph: fx.Graph, plan: Plan, options: Options, aliases: bool) -> PaddedGraph:
        """The compiled graph.

        Raises:
            RuntimeError: its arguments do not determine its sizes.
        """

        def is_sized(node: fx.Node) -> bool:
            return not is_tensor(node) or plan.comes_unpadded(node)

        sources = find_sources(graph, is_sized)
        used = {symbol for node in graph.nodes for symbol in symbols_of(node)}
        if not used <= sources.keys():
            missing = ", ".join(sorted(str(s) for s in used - sources.keys()))
            raise RuntimeError(f"lazyxla: no argument of a padded graph tells {missing}")
        kept = {s: source for s, source in sources.items() if s in used}
        return boxed(cls(graph, kept, plan, options, aliases))

    def __call__(self, args: list[Any]) -> Any:
        sizes = tuple([source(args) for source in self._sources.values()])
        program: Any = self._for(self._bucket(sizes))
        with torch.no_grad():
            case = self._cases.get(sizes) or self._new_case(sizes, program)
            if not self._views:
                return self._run(program, case, args)
            given = self._viewed(args)
            return self._with_views(self._run(program, case, args), given, sizes)

    def _run(self, program: _Program, case: _Case, args: list[Any]) -> list[Any]:
        arguments = list(args)
        args.clear()
        originals = {p: arguments[self._place[p]] for p in self._place}
        if case.pads:
            _flush()
            for move in case.pads:
                arguments[move.position] = move.pad(arguments[move.position])
            _flush()
        arguments += case.numbers
        results = list(program.function(arguments))  # which empties the list
        for position, value in case.results:
            results[position] = value
        if len(case.cuts) > len(originals):
            _flush()
        cut: dict[fx.Node, torch.Tensor] = {}  # a result may be there twice
        for move, (position, node) in zip(case.cuts, self._cut, strict=True):
            if node not in cut:
                given = originals.get(position)
                cut[node] = move.cut(results[position]) if given is None else given
            results[position] = cut[node]
        return results

    def _is_padded(self, node: Any) -> bool:
        return is_tensor(node) and has_symbol(list(structure_of(node)), self._padded)

    def _bucket(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that a program is made for."""
        result = []
        for symbol, size in zip(self._sources, sizes, strict=True):
            buckets = self._plan.buckets.get(symbol)
            result.append(buckets[bisect.bisect_left(buckets, size)] if buckets else size)
        return tuple(result)

    def _specialise(self, key: tuple[int, ...]) -> Any:
        bindings = dict(zip(self._sources, key, strict=True))
        written = write(self._graph, bindings, self._padded, self._device)
        return _Program(self._compile(written.graph), written.numbers)

    def _new_case(self, sizes: tuple[int, ...], program: _Program) -> _Case:
        true = dict(zip(self._sources, sizes, strict=True))
        bucket = dict(zip(self._sources, self._bucket(sizes), strict=True))

        def moves(nodes: list[tuple[int, fx.Node]]) -> list[_Move]:
            return [_move(position, node, true, bucket) for position, node in nodes]

        results = [
            (position, evaluate(node.meta["val"], true))
            for position, node in enumerate(self._returned)
            if isinstance(node, fx.Node)
            and not is_tensor(node)
            and node.meta.get("val") is not None
        ]
        numbers = [
            torch.tensor(_value(expr, true), dtype=dtype).to(device)
            for expr, dtype, device in program.numbers
        ]
        if len(self._cases) >= _MOST_CASES:
            self._cases.clear()
        case = _Case(moves(self._given), moves(self._cut), numbers, results)
        self._cases[sizes] = case
        return case


def _flush() -> None:
    """Runs what is recorded: what follows is a program of its own. A region remains one program."""
    if not _C.in_region():
        _C.sync(False)


def _move(position: int, node: fx.Node, true: dict[Any, int], bucket: dict[Any, int]) -> _Move:
    structure: Structure = structure_of(node)
    factors = [factor for dim in structure for factor in dim]
    value = node.meta["val"]
    return _Move(
        position,
        [_value(f, true) for f in factors],
        [_value(f, bucket) for f in factors],
        [evaluate(s, true) for s in value.shape],
        [evaluate(s, bucket) for s in value.shape],
        [evaluate(s, true) for s in value.stride()],
    )


def _value(expr: Any, bindings: dict[Any, int]) -> Any:
    """The value of an expression: an integer if it is one."""
    if not hasattr(expr, "xreplace"):
        return expr
    value = expr.xreplace(bindings)
    return int(value) if isinstance(value, int) or value.is_integer else float(value)
