"""Resampling of images and volumes to other sizes.

Every interpolation is separable: a linear map along each spatial dimension, whose indices and
weights depend on sizes and scales only and are computed here (interpolation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import interpolation, separable
from lazyxla.lowering.rules.interpolation import MakeTaps
from lazyxla.lowering.rules.separable import Map
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Scale = Scalar | float | None
"""How many output pixels there are for an input pixel, if the caller gave it."""


# ---- linear maps along each dimension ----


def _numbers(scales: Sequence[Scale]) -> list[float | None]:
    """The scales, which weights are computed from, as numbers of the program."""
    return [None if s is None else float(s) for s in scales]


def _maps(
    make: MakeTaps,
    sizes: Sequence[int],
    out: Sequence[int],
    align_corners: bool,
    scales: Sequence[Scale],
    dtype: torch.dtype,
) -> list[Map]:
    return [
        Map(make(n, m, align_corners, factor, dtype), n)
        for n, m, factor in zip(sizes, out, _numbers(scales), strict=True)
    ]


def _resample(
    make: MakeTaps, b: Builder, x: Value, out: Sequence[int], align_corners: bool, *scales: Scale
) -> Value:
    if not x.is_float:
        return _resample_bytes(b, make, x, out, align_corners, scales)
    x = x.accumulated()
    return separable.apply(b, x, _maps(make, x.shape[2:], out, align_corners, scales, x.dtype))


def _resample_bytes(
    b: Builder,
    make: MakeTaps,
    x: Value,
    out: Sequence[int],
    align_corners: bool,
    scales: Sequence[Scale],
) -> Value:
    """As PyTorch does (after Pillow): fixed-point weights of 16 bits, the last dimension first,
    rounded half up after each pass.
    """
    dtype = torch.float64  # which holds the sums exactly
    limits = torch.iinfo(x.dtype)
    low, high = b.constant(limits.min, dtype), b.constant(limits.max, dtype)
    result, factors = x.to(dtype), _numbers(scales)
    for dim in reversed(range(2, x.rank)):
        n = x.shape[dim]
        taps = make(n, out[dim - 2], align_corners, factors[dim - 2], dtype)
        weights = [Map(interpolation.in_16_bits(taps), n)]
        order = [*(d for d in range(x.rank) if d != dim), dim]
        passed = separable.apply(b, b.transpose(result, order), weights)
        rounded = b.hlo.clamp(low, (passed + 0.5).call("floor"), high)
        result = b.transpose(rounded, sorted(range(x.rank), key=order.__getitem__))
    return result.to(x.dtype)


def _resample_backward(
    make: MakeTaps,
    b: Builder,
    grad: Value,
    out: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: Scale,
) -> Value:
    grad = grad.accumulated()
    maps = _maps(make, input_size[2:], out, align_corners, scales, grad.dtype)
    return separable.apply(b, grad, maps, adjoint=True)


def _bicubic_backward(
    make: MakeTaps,
    b: Builder,
    grad: Value,
    out: Sequence[int],
    input_size: Sequence[int],
    *rest: Any,
) -> Value:
    if list(out) == list(input_size[2:]):  # PyTorch's kernel copies it, whatever the scales
        return grad
    return _resample_backward(make, b, grad, out, input_size, *rest)


# ---- nearest ----


def _whole_factors(
    sizes: Sequence[int], out: Sequence[int], scales: Sequence[Scale]
) -> list[int] | None:
    """How often nearest resampling repeats each pixel, if it is as often for all of them."""
    if any(m % n for n, m in zip(sizes, out, strict=True)):
        return None
    factors = [m // n for n, m in zip(sizes, out, strict=True)]
    pairs = zip(_numbers(scales), factors, strict=True)
    return factors if all(given in (None, factor) for given, factor in pairs) else None


def _nearest(make: MakeTaps, b: Builder, x: Value, out: Sequence[int], *scales: Scale) -> Value:
    lead, sizes, rank = x.shape[:2], x.shape[2:], len(out)
    if factors := _whole_factors(sizes, out, scales):
        repeated = [k for pair in zip(sizes, factors, strict=True) for k in pair]
        apart = x.reshape([*lead, *(k for n in sizes for k in (n, 1))])
        return b.broadcast_to(apart, [*lead, *repeated]).reshape([*lead, *out])
    # Pixels are only picked: no arithmetic touches their values.
    for dim, (n, m, s) in enumerate(zip(sizes, out, _numbers(scales), strict=True)):
        ((index, _),) = make(n, m, False, s, torch.float32)
        x = b.take(x, b.array(index.tolist(), torch.int32), x.rank - rank + dim)
    return x


def _nearest_backward(
    make: MakeTaps,
    b: Builder,
    grad: Value,
    out: Sequence[int],
    input_size: Sequence[int],
    *scales: Scale,
) -> Value:
    lead, sizes = input_size[:2], input_size[2:]
    factors = _whole_factors(sizes, out, scales)
    if not factors:
        return _resample_backward(make, b, grad, out, input_size, False, *scales)
    repeated = [k for pair in zip(sizes, factors, strict=True) for k in pair]
    apart = grad.accumulated().reshape([*lead, *repeated])
    return apart.sum(range(3, apart.rank, 2))


_NEAREST: dict[str, MakeTaps] = {
    "upsample_nearest": interpolation.nearest,
    "_upsample_nearest_exact": interpolation.nearest_exact,
}
_INTERPOLATED: dict[str, MakeTaps] = {
    "upsample_linear1d": interpolation.linear,
    "upsample_bilinear2d": interpolation.linear,
    "upsample_trilinear3d": interpolation.linear,
    "upsample_bicubic2d": interpolation.cubic,
    "_upsample_bilinear2d_aa": interpolation.antialiased(1, lambda x: (1 - x.abs()).clamp(min=0)),
    "_upsample_bicubic2d_aa": interpolation.antialiased(
        2, lambda x: interpolation.cubic_filter(x, -0.5)
    ),
    "_upsample_lanczos2d_aa": interpolation.antialiased(3, interpolation.lanczos_filter),
}

for _name, _make in _NEAREST.items():
    for _rank in (1, 2, 3):
        rule(f"aten::{_name}{_rank}d")(partial(_nearest, _make))
        rule(f"aten::{_name}{_rank}d_backward")(partial(_nearest_backward, _make))

for _name, _make in _INTERPOLATED.items():
    # Antialiased, PyTorch's kernels copy dimensions that keep their size, but not in the gradient.
    _forward = interpolation.unless_equal(_make) if _name.endswith("_aa") else _make
    rule(f"aten::{_name}")(partial(_resample, _forward))
    if "lanczos" not in _name:
        _backward = _bicubic_backward if _name == "upsample_bicubic2d" else _resample_backward
        rule(f"aten::{_name}_backward")(partial(_backward, _make))
