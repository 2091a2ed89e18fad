"""Resampling of images and volumes: nearest, linear, cubic, antialiased, and at given points.

Every interpolation is separable: a linear map along each spatial dimension, whose indices and
weights depend on sizes and scales only and are computed here. Positions follow PyTorch: with
`align_corners` the corners coincide and position i lies at i * (size - 1) / (out - 1); otherwise
pixels are areas and i lies at (i + 0.5) * scale - 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.rules import separable
from lazyxla.lowering.rules.separable import Taps
from lazyxla.lowering.rules.windows import Window, add_shifted, shifted
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

MakeTaps = Callable[[int, int, bool, float | None, torch.dtype], Taps]
"""(input size, output size, align_corners, scale factor or None, dtype) -> taps."""


# ---- indices and weights along one dimension ----


def _scale(size: int, out: int, factor: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Input pixels per output pixel, for pixels that are areas."""
    if factor is not None and factor > 0:
        return torch.tensor(1 / factor, dtype=dtype)
    return torch.tensor(size, dtype=dtype) / out


def _positions(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """Where the output pixels lie in the input."""
    i = torch.arange(out, dtype=dtype)
    if align_corners:
        step = torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else 0
        return i * step
    return (i + 0.5) * _scale(size, out, factor, dtype) - 0.5


def _nearest(size: int, out: int, _: bool, factor: float | None, dtype: torch.dtype) -> Taps:
    i = torch.arange(out, dtype=torch.float32)
    index = (i * _scale(size, out, factor, torch.float32)).floor().long().clamp(max=size - 1)
    return [(index, torch.ones(out))]


def _nearest_exact(size: int, out: int, _: bool, factor: float | None, dtype: torch.dtype) -> Taps:
    i = torch.arange(out, dtype=torch.float32) + 0.5
    index = (i * _scale(size, out, factor, torch.float32)).floor().long().clamp(max=size - 1)
    return [(index, torch.ones(out))]


def _linear(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    at = _positions(size, out, align_corners, factor, dtype).clamp(min=0)
    low = at.long().clamp(max=size - 1)
    part = (at - low).clamp(0, 1)
    return [(low, 1 - part), ((low + 1).clamp(max=size - 1), part)]


def _cubic(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    at = _positions(size, out, align_corners, factor, dtype)
    low = at.floor()
    return [
        ((low.long() + tap).clamp(0, size - 1), _cubic_filter(at - low - tap, -0.75))
        for tap in range(-1, 3)
    ]


def _cubic_filter(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel with the parameter `a`."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


def _antialiased(support: float, kernel: Callable[[torch.Tensor], torch.Tensor]) -> MakeTaps:
    """Taps of a filter that widens with the reduction in size, its weights normalized to sum 1."""

    def make(
        size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
    ) -> Taps:
        if align_corners:
            step = torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else 0
            scale = torch.as_tensor(step, dtype=dtype)
        else:
            scale = _scale(size, out, factor, dtype)
        wide = scale.clamp(min=1)
        reach = support * wide
        center = (torch.arange(out, dtype=dtype) + 0.5) * scale
        start = (center - reach + 0.5).long().clamp(min=0)
        end = (center + reach + 0.5).long().clamp(max=size)
        offsets = torch.arange(int((end - start).max()))
        index = start[:, None] + offsets
        weights = kernel((index - center[:, None] + 0.5) / wide)
        weights = torch.where(index < end[:, None], weights, 0)
        total = weights.sum(1, keepdim=True)
        weights = weights / total.where(total != 0, 1)  # some factors lead beyond the input
        return list(zip(index.clamp(max=size - 1).unbind(1), weights.unbind(1), strict=True))

    return make


def _lanczos_filter(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0)


# ---- the operators ----


def _maps(
    b: Builder,
    make: MakeTaps,
    sizes: Sequence[int],
    out: Sequence[int],
    align_corners: bool,
    scales: Sequence[Value],
    dtype: torch.dtype,
) -> list[Value]:
    factors = [None if s is None else float(s) for s in scales]
    return [
        separable.matrix(b, make(n, m, align_corners, f, dtype), n, dtype)
        for n, m, f in zip(sizes, out, factors, strict=True)
    ]


def _resample(
    b: Builder,
    make: MakeTaps,
    x: Value,
    out: Sequence[int],
    align_corners: bool,
    scales: Sequence[Value],
) -> Value:
    dtype, shape = b.spec(x)
    if math.prod(b.outputs[0].shape) == 0:
        return b.zeros(b.outputs[0].shape, dtype)
    if not dtype.is_floating_point:
        return _resample_bytes(b, make, x, out, align_corners, scales)
    wide = b.compute_dtype(dtype)
    maps = _maps(b, make, shape[2:], out, align_corners, scales, wide)
    return separable.apply(b, b.convert(x, wide), maps)


def _resample_bytes(
    b: Builder,
    make: MakeTaps,
    x: Value,
    out: Sequence[int],
    align_corners: bool,
    scales: Sequence[Value],
) -> Value:
    """As PyTorch does (after Pillow): fixed-point weights of 16 bits, the last dimension first,
    rounded half up after each pass.
    """
    (dtype, shape), wide = b.spec(x), torch.float64  # which holds the sums exactly
    limits, half = torch.iinfo(dtype), b.constant(0.5, wide)
    low, high = (b.constant(v, wide) for v in (limits.min, limits.max))
    result, rank = b.convert(x, wide), len(shape)
    for dim in reversed(range(2, rank)):
        n, m, factor = shape[dim], out[dim - 2], scales[dim - 2]
        taps = make(n, m, align_corners, None if factor is None else float(factor), wide)
        weights = separable.matrix(b, _in_16_bits(taps), n, wide)
        order = [d for d in range(rank) if d != dim] + [dim]
        passed = separable.apply(b, b.transpose(result, order), [weights])
        rounded = b.hlo.floor(b.hlo.add(passed, b.broadcast_to(half, b.shape(passed))))
        result = b.transpose(
            b.hlo.clamp(low, rounded, high), sorted(range(rank), key=order.__getitem__)
        )
    return b.convert(result, dtype)


def _in_16_bits(taps: Taps) -> Taps:
    """The weights as int16 multiples of the power of two that fits the greatest of them."""
    indices, weights = (torch.stack(column) for column in zip(*taps, strict=True))
    for later in range(1, len(indices)):  # taps beyond the border count for its element
        for earlier in range(later):
            same = (indices[later] == indices[earlier]) & (weights[later] != 0)
            weights[earlier] += torch.where(same, weights[later], 0)
            weights[later] = torch.where(same, 0, weights[later])
    greatest, bits = float(weights.max()), 0
    while bits < 22 and int(0.5 + greatest * 2 ** (bits + 1)) < 1 << 15:
        bits += 1
    weights = (weights * 2**bits + torch.where(weights < 0, -0.5, 0.5)).trunc() / 2**bits
    return list(zip(indices.unbind(), weights.unbind(), strict=True))


def _resample_backward(
    b: Builder,
    make: MakeTaps,
    grad: Value,
    out: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales: Sequence[Value],
) -> Value:
    dtype = b.dtype(grad)
    wide = b.compute_dtype(dtype)
    if math.prod(b.shape(grad)) == 0:
        return b.zeros(input_size, dtype)
    maps = _maps(b, make, input_size[2:], out, align_corners, scales, wide)
    return separable.apply(b, b.convert(grad, wide), maps, adjoint=True)


def _whole_factors(
    sizes: Sequence[int], out: Sequence[int], scales: Sequence[Value]
) -> list[int] | None:
    """How often nearest resampling repeats each pixel, if it is as often for all of them."""
    if any(m % n for n, m in zip(sizes, out, strict=True)):
        return None
    factors = [m // n for n, m in zip(sizes, out, strict=True)]
    given = [None if s is None else float(s) for s in scales]
    return factors if all(g in (None, f) for g, f in zip(given, factors, strict=True)) else None


def _upsample_nearest(make: MakeTaps) -> Callable[..., Value]:
    def lower(b: Builder, x: Value, out: Sequence[int], *scales: Value) -> Value:
        shape, rank = b.shape(x), len(out)
        if factors := _whole_factors(shape[2:], out, scales):
            pairs = [k for n, f in zip(shape[2:], factors, strict=True) for k in (n, f)]
            apart = b.reshape(x, [*shape[:2], *(k for n in shape[2:] for k in (n, 1))])
            return b.reshape(b.broadcast_to(apart, [*shape[:2], *pairs]), [*shape[:2], *out])
        # Pixels are only picked: no arithmetic touches them, whatever they are.
        for dim, (n, m, s) in enumerate(zip(shape[2:], out, scales, strict=True)):
            ((index, _),) = make(n, m, False, None if s is None else float(s), torch.float32)
            x = b.take(x, b.array(index.tolist(), torch.int32), b.rank(x) - rank + dim)
        return x

    return lower


def _upsample_nearest_backward(make: MakeTaps) -> Callable[..., Value]:
    def lower(
        b: Builder, grad: Value, out: Sequence[int], input_size: Sequence[int], *scales: Value
    ) -> Value:
        factors = _whole_factors(input_size[2:], out, scales)
        if not factors:
            return _resample_backward(b, make, grad, out, input_size, False, scales)
        pairs = [k for n, f in zip(input_size[2:], factors, strict=True) for k in (n, f)]
        grad = b.convert(grad, b.compute_dtype(b.dtype(grad)))
        apart = b.reshape(grad, [*input_size[:2], *pairs])
        return b.reduce(apart, range(3, b.rank(apart), 2), "sum")

    return lower


def _upsample(make: MakeTaps) -> Callable[..., Value]:
    def lower(
        b: Builder, x: Value, out: Sequence[int], align_corners: bool, *scales: Value
    ) -> Value:
        return _resample(b, make, x, out, align_corners, scales)

    return lower


def _upsample_backward(make: MakeTaps) -> Callable[..., Value]:
    def lower(
        b: Builder,
        grad: Value,
        out: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: Value,
    ) -> Value:
        return _resample_backward(b, make, grad, out, input_size, align_corners, scales)

    return lower


_NEAREST: dict[str, MakeTaps] = {
    "upsample_nearest": _nearest,
    "_upsample_nearest_exact": _nearest_exact,
}
_INTERPOLATED: dict[str, MakeTaps] = {
    "upsample_linear1d": _linear,
    "upsample_bilinear2d": _linear,
    "upsample_trilinear3d": _linear,
    "upsample_bicubic2d": _cubic,
    "_upsample_bilinear2d_aa": _antialiased(1, lambda x: (1 - x.abs()).clamp(min=0)),
    "_upsample_bicubic2d_aa": _antialiased(2, lambda x: _cubic_filter(x, -0.5)),
    "_upsample_lanczos2d_aa": _antialiased(3, _lanczos_filter),
}

for _name, _make in _NEAREST.items():
    for _rank in (1, 2, 3):
        rule(f"aten::{_name}{_rank}d")(_upsample_nearest(_make))
        rule(f"aten::{_name}{_rank}d_backward")(_upsample_nearest_backward(_make))

for _name, _make in _INTERPOLATED.items():
    rule(f"aten::{_name}")(_upsample(_make))
    if "lanczos" not in _name:
        rule(f"aten::{_name}_backward")(_upsample_backward(_make))


# ---- windows to columns and back ----


@rule("aten::im2col")
def im2col(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    window = Window.of(kernel, stride, padding, dilation)
    x = b.reshape(x, [-1, *b.shape(x)[-3:]])
    columns = b.stack(shifted(b, x, window, window.out_sizes(b.shape(x)[2:])), 2)
    return b.reshape(columns, b.outputs[0].shape)


@rule("aten::col2im")
def col2im(
    b: Builder,
    columns: Value,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    window = Window.of(kernel, stride, padding, dilation)
    out = window.out_sizes(output_size)
    columns = b.reshape(columns, [1, -1, window.taps, *out])
    parts = [b.select_dim(columns, 2, tap) for tap in range(window.taps)]
    return b.reshape(add_shifted(b, parts, output_size, window), b.outputs[0].shape)


# ---- sampling at positions that are data ----


def _sample(image: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """grid_sample: `image` (N, C, *sizes) at the points `grid` (N, *out, rank), x before y and z.

    mode: 0 linear, 1 nearest, 2 cubic; padding: 0 zeros, 1 border, 2 reflection.
    """
    import itertools

    import jax
    import jax.numpy as jnp

    sizes = image.shape[2:]

    def unnormalize(x: Any, size: int) -> Any:
        return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2

    def reflect(x: Any, size: int) -> Any:
        low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        if low == high:
            return jnp.zeros_like(x)
        span, start = (high - low) / 2, low / 2
        x = jnp.abs(x - start)
        turns, rest = jnp.floor(x / span), x % span
        return jnp.where(turns % 2 == 0, rest, span - rest) + start

    def into_range(x: Any, size: int) -> Any:
        if padding == 2:
            x = reflect(x, size)
        return jnp.clip(x, 0, size - 1) if padding in (1, 2) else x

    def fetch(places: Any) -> Any:
        inside = jnp.ones(places[0].shape, bool)
        for place, size in zip(places, sizes, strict=True):
            inside &= (place >= 0) & (place <= size - 1)
        pairs = zip(places, sizes, strict=True)
        index = [jnp.clip(p, 0, n - 1).astype(jnp.int32) for p, n in pairs]
        pick = jax.vmap(lambda plane, *at: plane[(slice(None), *at)])
        found = pick(image, *index)
        return jnp.where(inside[:, None], found, 0)

    points = [unnormalize(grid[..., -1 - d], n) for d, n in enumerate(sizes)]
    if mode != 2:
        points = [into_range(p, n) for p, n in zip(points, sizes, strict=True)]
    if mode == 1:
        return fetch([jnp.round(p) for p in points])
    floors = [jnp.floor(p) for p in points]
    parts = [p - f for p, f in zip(points, floors, strict=True)]
    total: Any = 0
    for taps in itertools.product((0, 1) if mode == 0 else (-1, 0, 1, 2), repeat=len(sizes)):
        weight: Any = 1
        for part, tap in zip(parts, taps, strict=True):
            weight = weight * (
                (part if tap else 1 - part) if mode == 0 else _cubic_weight(jnp, part - tap)
            )
        places = [f + t for f, t in zip(floors, taps, strict=True)]
        if mode == 2:
            places = [into_range(p, n) for p, n in zip(places, sizes, strict=True)]
        total = total + fetch(places) * weight[:, None]
    return total


def _cubic_weight(jnp: Any, x: Any) -> Any:
    """`_cubic_filter` with PyTorch's parameter, on JAX arrays."""
    x = jnp.abs(x)
    far = -0.75 * (((x - 5) * x + 8) * x - 4)
    return jnp.where(x <= 1, (1.25 * x - 2.25) * x * x + 1, far)


@jax_rule("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def grid_sampler(image: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    return _sample(image, grid, mode, padding, align_corners)


@jax_rule("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: Any,
    image: Any,
    grid: Any,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: tuple[bool, ...],
) -> Any:
    import jax

    _, pull = jax.vjp(lambda i, g: _sample(i, g, mode, padding, align_corners), image, grid)
    of_image, of_grid = pull(grad)
    # PyTorch asks for the grid's, and gets it whether it wants it or not.
    return (of_image, of_grid) if output_mask[0] else (of_grid,)
