"""Functions of JAX's that a program calls (lazyxla/jax)."""

from __future__ import annotations

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.jax_call import call_module
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value


@rule("lazyxla::jax_call")
def jax_call(b: Builder, inputs: list[Value], name: str) -> list[Value]:
    from lazyxla.jax.flat_functions import by_name, taken_as

    function = by_name[name]
    values = [x.to(taken_as(x.dtype, function.wide)) for x in inputs]
    return call_module(b, name, function.bytecode(b.platform), "jax_function", values)
