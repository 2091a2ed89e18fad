"""Values of one dtype as elements of another, for a view that reads its storage as another dtype.

A storage and its view have a common unit: a dtype of which an element of either holds a whole
number. Complex numbers are pairs of reals and bools are bytes; of two dtypes of different sizes the
narrower one is the unit. A geometry of larger elements has one more, innermost dimension in units,
and so does a value. For example a complex64 storage of shape [3, 4] that is viewed as float32 has
the unit float32 and the shape [3, 4, 2] in it; viewed as int16, it has the unit int16 and the shape
[3, 4, 2, 2].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.program import Geometry
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_RAW = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.bool: torch.uint8,
}


def _raw(dtype: torch.dtype) -> torch.dtype:
    return _RAW.get(dtype, dtype)


def common_unit(base: Geometry, view: Geometry) -> torch.dtype:
    """The dtype in which values of both geometries can be expressed without computing."""
    first, second = _raw(base.dtype), _raw(view.dtype)
    return first if first.itemsize <= second.itemsize else second


def in_units(geometry: Geometry, unit: torch.dtype) -> Geometry:
    """The same geometry counted in elements of `unit`."""
    ratio = geometry.dtype.itemsize // unit.itemsize
    if ratio == 1:
        return geometry._replace(dtype=unit)
    sizes, strides = geometry.sizes, tuple(s * ratio for s in geometry.strides)
    inner = [ratio]
    if geometry.dtype.is_complex and ratio > 2:
        inner = [2, ratio // 2]
        strides += (ratio // 2,)
    return Geometry(unit, (*sizes, *inner), (*strides, 1), geometry.offset * ratio)


def to_unit(b: Builder, x: Value, unit: torch.dtype) -> Value:
    """The elements of `x` as elements of `unit`, in the dimensions that `in_units` gives."""
    if x.is_complex:
        x = b.stack([x.real, x.imag], -1)
    elif x.dtype == torch.bool:
        x = x.to(torch.uint8)
    return _reinterpret(b, x, unit)


def from_unit(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """The inverse of `to_unit`."""
    x = _reinterpret(b, x, _raw(dtype))
    if dtype.is_complex:
        return b.complex(b.select_dim(x, -1, 0), b.select_dim(x, -1, 1))
    return x.to(dtype)


def _reinterpret(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """The same bits; a narrower dtype adds an innermost dimension, a wider one uses it up."""
    ratio = x.dtype.itemsize // dtype.itemsize
    if x.dtype.itemsize == dtype.itemsize:
        return b.bitcast(x, dtype)
    shape = (*x.shape, ratio) if ratio else x.shape[:-1]
    return b.bitcast_to_width(x, dtype, shape)
