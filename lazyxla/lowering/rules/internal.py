"""Internal operators: the recorder's, which read and write through a geometry, cast and make
constants; traced graphs, control flow, JAX's functions, and how values are spread over devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import geometry, registry
from lazyxla.lowering.jax_call import call_module
from lazyxla.lowering.partition import constrained
from lazyxla.lowering.registry import graph_rule, rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# `where` are the geometries of base and view, and where the view begins: see geometry.read.


@rule("lazyxla::view")
def view(b: Builder, base: Value, *where: Any) -> Value:
    return geometry.read(b, base, *where)


@rule("lazyxla::view_scatter")
def view_scatter(b: Builder, base: Value, update: Value, *where: Any) -> Value:
    return geometry.write(b, base, update, *where)


@rule("lazyxla::cast")
def cast(b: Builder, x: Operand, dtype: torch.dtype) -> Value:
    return b.value(x, dtype)


@rule("lazyxla::constant")
def constant(b: Builder, number: Operand) -> Value:
    return b.value(number, b.outputs[0].dtype)


@rule("lazyxla::undefined")
def undefined(b: Builder) -> Value:
    """Uninitialised memory: zeros, so that runs are reproducible."""
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)


@rule("lazyxla::graph")
def graph(b: Builder, number: int, inputs: list[Any]) -> list[Any]:
    return registry.graphs[number].lower(b, inputs)


@graph_rule("lazyxla::checkpoint_name")
def checkpoint_name(b: Builder, x: Value, name: str) -> Value:
    return x


@rule("lazyxla::control_flow")
def control_flow(b: Builder, inputs: list[Value], name: str) -> list[Value]:
    from lazyxla.control_flow import by_name

    return by_name[name].lower(b, inputs)


@rule("lazyxla::jax_call")
def jax_call(b: Builder, inputs: list[Value], name: str) -> list[Value]:
    from lazyxla.jax.flat_functions import by_name, taken_as

    function = by_name[name]
    values = [x.to(taken_as(x.dtype, function.wide)) for x in inputs]
    return call_module(b, name, function.bytecode(b.platform), "jax_function", values)


@rule("lazyxla::constrain")
def constrain(b: Builder, x: Value, sharding: str) -> Value:
    return constrained(x, b.annotations, sharding)
