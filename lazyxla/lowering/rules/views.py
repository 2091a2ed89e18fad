"""The recorder's internal operators: reading and writing through a geometry, casts, constants."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import geometry
from lazyxla.lowering.program import Geometry
from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import Scalar

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any


@rule("lazyxla::view")
def view(
    b: "Builder",
    base: Value,
    base_geometry: Geometry,
    view_geometry: Geometry,
    weights: Sequence[int] = (),
    starts: Sequence[Scalar] = (),
) -> Value:
    return geometry.read(b, base, base_geometry, view_geometry, weights, starts)


@rule("lazyxla::view_scatter")
def view_scatter(
    b: "Builder",
    base: Value,
    update: Value,
    base_geometry: Geometry,
    view_geometry: Geometry,
    weights: Sequence[int] = (),
    starts: Sequence[Scalar] = (),
) -> Value:
    return geometry.write(b, base, update, base_geometry, view_geometry, weights, starts)


@rule("lazyxla::cast")
def cast(b: "Builder", x: Value, dtype: torch.dtype) -> Value:
    return b.value(x, dtype)


@rule("lazyxla::constant")
def constant(b: "Builder", number: Value) -> Value:
    return b.value(number, b.outputs[0].dtype)


@rule("lazyxla::undefined")
def undefined(b: "Builder") -> Value:
    """What uninitialised memory holds: zeros, so that runs are reproducible."""
    return b.zeros(b.outputs[0].shape, b.outputs[0].dtype)
