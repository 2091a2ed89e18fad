"""Distances between all pairs of rows: cdist and pdist, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


def _norm(p: float) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """The reduction over the last dimension of a p-norm of absolute differences, and its root."""
    import jax.numpy as jnp

    if p == 0:
        # How many are not zero; nan if one is.
        return lambda d: jnp.minimum(jnp.ceil(d), 1).sum(-1), lambda s: s
    if p == float("inf"):
        return lambda d: d.max(-1, initial=0), lambda s: s
    if p == 2:
        return lambda d: (d * d).sum(-1), jnp.sqrt
    return lambda d: (d**p).sum(-1), lambda s: s ** (1 / p)


@jax_rule("aten::_cdist_forward", static=("p",))
def cdist(x: Array, y: Array, p: float, compute_mode: int | None) -> Array:
    import jax.numpy as jnp

    total, root = _norm(p)
    return root(total(jnp.abs(x[..., :, None, :] - y[..., None, :, :])))


def _norm_slope(difference: Array, p: float, distance: Array) -> Array:
    """The derivative of a p-norm by the differences."""
    import jax.numpy as jnp

    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == float("inf"):
        return sign * (size == distance)
    # Where p < 2 the power of a zero difference is infinite; its contribution counts as zero.
    some = (distance != 0) & (size != 0)
    ratio = jnp.where(some, size, 1) / jnp.where(some, distance, 1)
    return jnp.where(some, sign * ratio ** (p - 1), 0)


@jax_rule("aten::_cdist_backward", static=("p",))
def cdist_backward(
    grad: Array, x: Array, y: Array, p: float, distance: Array, *, outputs: tuple[TensorSpec, ...]
) -> Array:
    import jax.numpy as jnp

    difference = x[..., :, None, :] - y[..., None, :, :]
    if not difference.size:  # PyTorch does not broadcast the batches of x then
        return jnp.zeros(outputs[0].shape, x.dtype)
    result = (grad[..., None] * _norm_slope(difference, p, distance[..., None])).sum(-2)
    return result.reshape(outputs[0].shape)


def _pairs(count: int) -> tuple[Array, Array]:
    """The rows of all pairs, in the order of pdist, of up to 23,170 rows.

    Counted from the last pair, the pairs of the rows are 1, 2, 3 ...: a pair's row is found by the
    root of a triangular number, which float32 misses by one at most.
    """
    import jax.numpy as jnp

    def triangular(n: Array) -> Array:
        return (n * (n + 1)) >> 1

    from_end = jnp.arange(count * (count - 1) // 2 - 1, -1, -1, dtype=jnp.int32)
    row = ((jnp.sqrt((8 * from_end + 1).astype(jnp.float32)) - 1) / 2).astype(jnp.int32)
    row -= triangular(row) > from_end
    row += triangular(row + 1) <= from_end
    return count - 2 - row, count - 1 - (from_end - triangular(row))


def _pair_sizes(x: Array) -> Array:
    import jax.numpy as jnp

    first, second = _pairs(x.shape[0])
    return jnp.abs(x[first] - x[second])


def _pair_norms(x: Array, p: float) -> Array:
    total, root = _norm(p)
    return root(total(_pair_sizes(x)))


@rule("aten::_pdist_forward")
def pdist(b: Builder, x: Value, p: Scalar) -> Value:
    if (order := float(p)) < math.inf or not x.shape[1]:
        return b.call_jax(_pair_norms, x, p=order)
    # It keeps nan; PyTorch's cdist does not.
    return b.extremum(b.call_jax(_pair_sizes, x), [-1], "max")


@jax_rule("aten::_pdist_backward", static=("p",))
def pdist_backward(grad: Array, x: Array, p: float, distance: Array) -> Array:
    import jax.numpy as jnp

    first, second = _pairs(x.shape[0])
    part = grad[:, None] * _norm_slope(x[first] - x[second], p, distance[:, None])
    return jnp.zeros_like(x).at[first].add(part).at[second].add(-part)
