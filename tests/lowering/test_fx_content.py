"""What a graph computes, as a text: the same for the same graph, another for any other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lazyxla.lowering.fx_content import content_of
from lazyxla.lowering.fx_graph import DRAW, TRUE_SIZE, FxGraph

X, Y = torch.ones(2, 3), torch.ones(3, 2)


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> FxGraph:
    return FxGraph.of(make_fx(function, tracing_mode="fake")(*inputs).graph)


def with_constant(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * torch.tensor([value, 2.0, 3.0])


def branches(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cond(x.sum() > 0, lambda x: x * scale, lambda x: x - 1, (x,))


GRAPHS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "sum": (lambda x: x.sum(), (X,)),
    "of another shape": (lambda x: x.sum(), (Y,)),
    "of another dtype": (lambda x: x.sum(), (X.double(),)),
    "laid out in another way": (lambda x: x.sum(), (Y.t(),)),
    "of a dimension": (lambda x: x.sum(0), (X,)),
    "of another dimension": (lambda x: x.sum(1), (X,)),
    "another operator": (lambda x: x.prod(), (X,)),
    "one more operator": (lambda x: x.sum().sin(), (X,)),
    "a number": (lambda x: x + 1, (X,)),
    "another number": (lambda x: x + 2, (X,)),
    "a float": (lambda x: x + 1.0, (X,)),
    "zero": (lambda x: x + 0.0, (X,)),
    "negative zero": (lambda x: x + -0.0, (X,)),
    "nearly one": (lambda x: x + 1.0000000000000002, (X,)),
    "to bfloat16": (lambda x: x.to(torch.bfloat16), (X,)),
    "to float16": (lambda x: x.to(torch.float16), (X,)),
    "two inputs": (lambda x, y: x - y, (X, X.clone())),
    "swapped": (lambda x, y: y - x, (X, X.clone())),
    "the first result": (lambda x: torch.split(x, 1)[0], (X,)),
    "the second result": (lambda x: torch.split(x, 1)[1], (X,)),
    "both results": (lambda x: list(torch.split(x, 1)), (X,)),
    "a constant": (with_constant(1.0), (X,)),
    "another constant": (with_constant(4.0), (X,)),
    "a branch": (branches(2.0), (X,)),
    "another branch": (branches(3.0), (X,)),
}


def test_each_graph_has_its_own() -> None:
    contents = {name: content_of(graph_of(f, *inputs)) for name, (f, inputs) in GRAPHS.items()}
    assert all(contents.values())
    for one, other in combinations(GRAPHS, 2):
        assert contents[one] != contents[other], f"{one} and {other}"


@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_graph_has_the_same(name: str) -> None:
    function, inputs = GRAPHS[name]
    assert content_of(graph_of(function, *inputs)) == content_of(graph_of(function, *inputs))


@pytest.mark.parametrize(("position", "mark"), [(0, TRUE_SIZE), (1, DRAW)])
def test_marks_count(position: int, mark: str) -> None:
    graph = graph_of(lambda x: x.sum(), X)
    before = content_of(graph)
    [*graph.inputs, *graph.nodes][position].meta[mark] = 1
    assert content_of(graph) != before


def test_what_nothing_can_be_said_of_has_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, object()))
    y.meta["val"] = X
    graph.output((y,))
    assert content_of(FxGraph.of(graph)) == ""
