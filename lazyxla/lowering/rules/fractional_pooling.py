"""Maximum pooling over windows whose positions are drawn: fractional_max_pool2d and 3d."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering.registry import jax_rule

if TYPE_CHECKING:
    from jax import Array


def _starts(sample: Array, size: int, windows: int, kernel: int) -> Array:
    """The first index of each window along a dimension, for samples of any shape."""
    import jax.numpy as jnp

    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int64)
    if windows == 1:
        return last
    alpha = jnp.asarray((size - kernel) / (windows - 1), sample.dtype)
    number = jnp.arange(windows - 1, dtype=sample.dtype)
    # Truncated, as in PyTorch: samples ought to be positive, but this is not checked.
    offset = (sample[..., None] * alpha).astype(jnp.int64)
    starts = ((number + sample[..., None]) * alpha).astype(jnp.int64) - offset
    return jnp.concatenate([starts, last], axis=-1)


def _pool(
    x: Array, kernel: tuple[int, ...], output: tuple[int, ...], samples: Array
) -> tuple[Array, Array]:
    import jax.numpy as jnp

    rank = len(kernel)
    lead, sizes = x.shape[:-rank], x.shape[-rank:]
    # PyTorch reads the samples in order; of an input without a batch, the first ones.
    samples = samples.reshape(-1)[: math.prod(lead) * rank].reshape((*lead, rank))
    # In two dimensions PyTorch takes the first sample for the width, in three for the depth.
    order = range(rank) if rank == 3 else reversed(range(rank))
    flat = jnp.zeros((*lead, *([1] * 2 * rank)), jnp.int64)
    for dim, column in zip(range(rank), order, strict=True):
        starts = _starts(samples[..., column], sizes[dim], output[dim], kernel[dim])
        index = starts[..., None] + jnp.arange(kernel[dim])
        spread = [1] * (2 * rank)
        spread[dim], spread[rank + dim] = output[dim], kernel[dim]
        flat = flat + index.reshape((*lead, *spread)) * math.prod(sizes[dim + 1 :])
    windows = flat.reshape((*lead, math.prod(output), math.prod(kernel)))
    pixels = x.reshape((*lead, math.prod(sizes)))
    values = jnp.take_along_axis(pixels[..., None, :], windows, axis=-1)
    best = jnp.argmax(values, axis=-1, keepdims=True)
    shape = (*lead, *output)
    maxima, indices = (
        jnp.take_along_axis(s, best, axis=-1).reshape(shape) for s in (values, windows)
    )
    return maxima, indices


def _pool_backward(grad: Array, x: Array, rank: int, indices: Array) -> Array:
    import jax.numpy as jnp

    planes, pixels = math.prod(x.shape[:-rank]), math.prod(x.shape[-rank:])
    total = jnp.zeros((planes, pixels), grad.dtype)
    rows = jnp.arange(planes)[:, None]
    total = total.at[rows, indices.reshape((planes, -1))].add(grad.reshape((planes, -1)))
    return total.reshape(x.shape)


@jax_rule("aten::fractional_max_pool2d", "aten::fractional_max_pool3d")
def fractional_max_pool(
    x: Array, kernel: tuple[int, ...], output: tuple[int, ...], samples: Array
) -> tuple[Array, Array]:
    return _pool(x, kernel, output, samples)


@jax_rule("aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward")
def fractional_max_pool_backward(
    grad: Array, x: Array, kernel: tuple[int, ...], output: tuple[int, ...], indices: Array
) -> Array:
    return _pool_backward(grad, x, len(kernel), indices)
