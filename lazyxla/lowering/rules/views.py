"""The recorder's internal operators: reading and writing through a geometry, casts, constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import geometry
from lazyxla.lowering.registry import rule
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
