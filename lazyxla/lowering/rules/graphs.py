"""Traced graphs: one node that lowers to all the operators of an FX graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyxla.lowering import registry
from lazyxla.lowering.registry import graph_rule, rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("lazyxla::graph")
def graph(b: Builder, number: int, inputs: list[Any]) -> list[Any]:
    return registry.graphs[number].lower(b, inputs)


@graph_rule("lazyxla::checkpoint_name")
def checkpoint_name(b: Builder, x: Value, name: str) -> Value:
    return x
