"""Sampling of images and volumes at positions that are data (grid_sample)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import jax_rule

if TYPE_CHECKING:
    from jax import Array


def _sample(image: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    """grid_sample: `image` (N, C, *sizes) at the points `grid` (N, *out, rank), x before y and z.

    mode: 0 linear, 1 nearest, 2 cubic; padding: 0 zeros, 1 border, 2 reflection.
    """
    import jax
    import jax.numpy as jnp

    sizes = image.shape[2:]

    def unnormalize(x: Array, size: int) -> Array:
        return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2

    def reflect(x: Array, size: int) -> Array:
        low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        if low == high:
            return jnp.zeros_like(x)
        span, start = (high - low) / 2, low / 2
        x = jnp.abs(x - start)
        turns, rest = jnp.floor(x / span), x % span
        return jnp.where(turns % 2 == 0, rest, span - rest) + start

    def into_range(x: Array, size: int) -> Array:
        if padding == 2:
            x = reflect(x, size)
        return jnp.clip(x, 0, size - 1) if padding in (1, 2) else x

    def fetch(coordinates: Sequence[Array]) -> Array:
        inside = jnp.ones(coordinates[0].shape, bool)
        for at, size in zip(coordinates, sizes, strict=True):
            inside &= (at >= 0) & (at <= size - 1)
        pairs = zip(coordinates, sizes, strict=True)
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
                (part if tap else 1 - part) if mode == 0 else _cubic_weight(part - tap)
            )
        coordinates = [f + t for f, t in zip(floors, taps, strict=True)]
        if mode == 2:
            coordinates = [into_range(p, n) for p, n in zip(coordinates, sizes, strict=True)]
        total = total + fetch(coordinates) * weight[:, None]
    return total


def _cubic_weight(x: Array) -> Array:
    """`interpolation.cubic_filter` with PyTorch's parameter, on JAX arrays."""
    import jax.numpy as jnp

    x = jnp.abs(x)
    far = -0.75 * (((x - 5) * x + 8) * x - 4)
    return jnp.where(x <= 1, (1.25 * x - 2.25) * x * x + 1, far)


@jax_rule("aten::grid_sampler_2d", "aten::grid_sampler_3d")
def grid_sampler(image: Array, grid: Array, mode: int, padding: int, align_corners: bool) -> Array:
    return _sample(image, grid, mode, padding, align_corners)


@jax_rule("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: Array,
    image: Array,
    grid: Array,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: tuple[bool, ...],
) -> tuple[Array, ...]:
    import jax

    _, pull = jax.vjp(lambda i, g: _sample(i, g, mode, padding, align_corners), image, grid)
    of_image, of_grid = pull(grad)
    # PyTorch always gets the grid's gradient, even if it does not need it.
    return (of_image, of_grid) if output_mask[0] else (of_grid,)
