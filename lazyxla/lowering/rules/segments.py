"""Reductions over segments of a dimension, and the indices of elements that are not zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import jax_rule

if TYPE_CHECKING:
    from jax import Array

# The result of an empty segment if no initial value is given.
_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf")}


def _segment_numbers(
    data: Array, lengths: Array | None, offsets: Array | None, axis: int
) -> tuple[Array, int]:
    """For each element along `axis` the number of its segment, counted through all leading
    dimensions, and the number of segments. Elements of no segment have a number beyond.
    """
    import jax.numpy as jnp

    if offsets is None:
        assert lengths is not None
        ends = jnp.cumsum(lengths, axis=-1)
        starts = ends - lengths
    else:
        starts, ends = offsets[..., :-1], offsets[..., 1:]
    starts, ends = starts.astype(jnp.int64), ends.astype(jnp.int64)
    count, size = ends.shape[-1], data.shape[axis]
    rows = ends.size // count if count else 0
    index = jnp.arange(size)
    number = jnp.sum(index[:, None] >= ends[..., None, :], axis=-1)
    outside = (number >= count) | (index < starts[..., :1])
    row = jnp.arange(rows).reshape((*ends.shape[:-1], 1))
    return jnp.where(outside, rows * count, number + row * count).reshape(-1), rows * count


def _flat(data: Array, axis: int) -> Array:
    return data.reshape((-1, *data.shape[axis + 1 :]))


def _spread(per_segment: Array, numbers: Array, count: int, like: Array) -> Array:
    """The value of each element's segment; 0 for elements of none."""
    import jax.numpy as jnp

    flat = per_segment.reshape((count, *like.shape[1:]))
    flat = jnp.concatenate([flat, jnp.zeros((1, *like.shape[1:]), flat.dtype)])
    return flat[numbers]


def _reduce(data: Array, numbers: Array, count: int, reduce: str) -> Array:
    import jax
    import jax.numpy as jnp

    kind = "sum" if reduce == "mean" else reduce
    result = getattr(jax.ops, f"segment_{kind}")(data, numbers, count)
    if kind in ("max", "min"):  # XLA's CPU backend drops nan (xla_cpu_enable_fast_min_max)
        nans = jax.ops.segment_sum(jnp.isnan(data).astype(jnp.int32), numbers, count)
        result = jnp.where(nans > 0, jnp.nan, result)
    return result


@jax_rule("aten::segment_reduce")
def segment_reduce(
    data: Array,
    reduce: str,
    lengths: Array | None,
    indices: Array | None,
    offsets: Array | None,
    axis: int,
    unsafe: bool,
    initial: Array | None,
    *,
    outputs: tuple[TensorSpec, ...],
) -> Array:
    import jax.numpy as jnp

    axis %= data.ndim
    numbers, count = _segment_numbers(data, lengths, offsets, axis)
    flat = _flat(data, axis)
    result = _reduce(flat, numbers, count, reduce)
    sizes = _reduce(jnp.ones_like(flat), numbers, count, "sum")
    start = jnp.asarray(_START[reduce] if initial is None else initial, flat.dtype)
    if reduce == "max":
        result = jnp.where(result < start, start, result)
    elif reduce == "min":
        result = jnp.where(result > start, start, result)
    else:
        result = result * start if reduce == "prod" else result + start
    if reduce == "mean":
        empty = jnp.nan if initial is None else start
        result = jnp.where(sizes > 0, result / jnp.maximum(sizes, 1), empty)
    return result.reshape(outputs[0].shape)


@jax_rule("aten::_segment_reduce_backward")
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    lengths: Array | None,
    offsets: Array | None,
    axis: int,
    initial: Array | None,
) -> Array:
    import jax.numpy as jnp

    numbers, count = _segment_numbers(data, lengths, offsets, axis)
    flat = _flat(data, axis)
    slope = _spread(grad, numbers, count, flat)
    result = _spread(output, numbers, count, flat)
    if reduce in ("max", "min"):  # shared by all that are the extremum
        chosen = ((flat == result) | jnp.isnan(flat)).astype(flat.dtype)
        sharing = _reduce(chosen, numbers, count, "sum")
        slope = slope * chosen / jnp.maximum(_spread(sharing, numbers, count, flat), 1)
    elif reduce == "mean":
        sizes = _reduce(jnp.ones_like(flat), numbers, count, "sum")
        slope = slope / jnp.maximum(_spread(sizes, numbers, count, flat), 1)
    elif reduce == "prod":
        # The product of the others: without a division by zero.
        zero = flat == 0
        start = jnp.asarray(1 if initial is None else initial, flat.dtype)
        others = start * _reduce(jnp.where(zero, 1, flat), numbers, count, "prod")
        zeros = _reduce(zero.astype(flat.dtype), numbers, count, "sum")
        others, zeros = (_spread(s, numbers, count, flat) for s in (others, zeros))
        alone = jnp.where(zeros == 1, others, 0)
        slope = slope * jnp.where(zero, alone, result / jnp.where(zero, 1, flat))
    return slope.reshape(data.shape)


@jax_rule("aten::nonzero_static")
def nonzero_static(x: Array, size: int, fill_value: int) -> Array:
    import jax.numpy as jnp

    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if x.size == 0:  # JAX forgets the fill value
        return jnp.full((size, x.ndim), fill_value, jnp.int64)
    indices = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(indices, axis=1)
