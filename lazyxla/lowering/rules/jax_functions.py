"""Functions of JAX's that a program calls (lazyxla/jax)."""

from __future__ import annotations

from typing import Any

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.jax_call import call_module
from lazyxla.lowering.registry import rule


@rule("lazyxla::jax_call")
def jax_call(b: Builder, inputs: list[Any], name: str) -> list[Any]:
    from lazyxla.jax.flat_functions import by_name, taken_as

    function = by_name[name]
    values = [b.convert(x, taken_as(b.dtype(x), function.wide)) for x in inputs]
    return call_module(b, name, function.bytecode(b.platform), "jax_function", values)
