"""Reading and writing a storage through a geometry (sizes, strides, offset), also as another dtype.

view_plan.py plans how, units.py defines elements of another dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.program import Geometry
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.units import common_unit, from_unit, in_units, to_unit
from lazyxla.lowering.value import Value
from lazyxla.lowering.view_plan import plan
from lazyxla.lowering.view_steps import Source, Step, Window

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The layout of a tensor in its storage."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Geometry(tensor.dtype, sizes, strides, int(tensor.storage_offset()))


def read(
    b: Builder,
    x: Value,
    base: Geometry,
    view: Geometry,
    weights: Sequence[int] = (),
    starts: Sequence[Scalar] = (),
) -> Value:
    """The value that `view` shows of the storage whose content is `x`, lying by `base`.

    With `weights` it begins at `starts` (see `plan`), which count elements of the narrower dtype.
    """
    if base.dtype == view.dtype:
        return _read(b, x, _steps(b, base, view, weights, starts))
    unit = common_unit(base, view)
    x = to_unit(b, x, unit)
    steps = _steps(b, in_units(base, unit), in_units(view, unit), weights, starts)
    return from_unit(b, _read(b, x, steps), view.dtype)


def write(
    b: Builder,
    x: Value,
    update: Value,
    base: Geometry,
    view: Geometry,
    weights: Sequence[int] = (),
    starts: Sequence[Scalar] = (),
) -> Value:
    """`x` with the elements that `view` addresses replaced by `update`."""
    if 0 in view.sizes:
        return x
    if base.dtype == view.dtype:
        return _write(b, lambda: x, update, _steps(b, base, view, weights, starts))
    unit = common_unit(base, view)
    steps = _steps(b, in_units(base, unit), in_units(view, unit), weights, starts)
    source = functools.cache(lambda: to_unit(b, x, unit))
    return from_unit(b, _write(b, source, to_unit(b, update, unit), steps), base.dtype)


def _steps(
    b: Builder, base: Geometry, view: Geometry, weights: Sequence[int], starts: Sequence[Scalar]
) -> tuple[Step, ...]:
    known = tuple(None if start.variable else int(start.number.real) for start in starts)
    steps = plan(base, view, tuple(weights), known)
    if None not in known:
        return steps
    # TPUs have no 64-bit integers of their own.
    dtype = torch.int32 if math.prod(base.sizes) < 2**31 else torch.int64
    values = [b.value(start, dtype) for start in starts]
    return tuple(step.bind(values) if isinstance(step, Window) else step for step in steps)


def _read(b: Builder, x: Value, steps: tuple[Step, ...]) -> Value:
    for step in steps:
        x = step.read(b, x)
    return x


def _write(b: Builder, source: Source, update: Value, steps: tuple[Step, ...]) -> Value:
    if not steps:
        return update
    step = steps[0]
    inner = _write(b, functools.cache(lambda: step.read(b, source())), update, steps[1:])
    return step.write(b, source, inner)
