"""Traced graphs: one node that lowers to all the operators of an FX graph."""

from typing import TYPE_CHECKING, Any

from lazyxla.lowering import registry
from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("lazyxla::graph")
def graph(b: "Builder", number: int, inputs: list[Any]) -> list[Any]:
    from lazyxla.lowering.fx_graph import run_graph

    return run_graph(b, registry.graphs[number], inputs)
