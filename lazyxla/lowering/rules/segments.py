"""Reductions over segments of a dimension, and the indices of elements that are not zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import maximum, where
from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder

_COMBINED = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min"}
_NAMES = {"amax": "max", "amin": "min"}  # what PyTorch takes for the same

_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def _segment_numbers(table: Array, size: int, has_offsets: bool) -> Array:
    """For each of `size` elements the number of its segment, counted through all leading
    dimensions. Elements of no segment have a number beyond.

    Args:
        table: the segments' lengths or, if it `has_offsets`, where they begin and the last ends.
    """
    import jax.numpy as jnp

    if has_offsets:
        starts, ends = table[..., :-1], table[..., 1:]
    else:
        ends = jnp.cumsum(table, axis=-1)
        starts = ends - table
    count = ends.shape[-1]
    starts, ends = (jnp.reshape(t, (-1, max(count, 1))) for t in (starts, ends))
    rows = len(ends) if count else 0
    # How many segments end before each element.
    row = jnp.arange(rows)[:, None]
    ending = jnp.zeros((rows, size + 1), jnp.int64)
    ending = ending.at[row, jnp.clip(ends, 0)].add(1, mode="drop")
    number = jnp.cumsum(ending[:, :size], axis=-1)
    outside = (number >= count) | (jnp.arange(size) < starts[:, :1])
    return jnp.where(outside, rows * count, number + row * count).reshape(-1)


@rule("aten::segment_reduce")
def segment_reduce(
    b: Builder,
    data: Value,
    reduce: str,
    lengths: Value | None,
    indices: Value | None,
    offsets: Value | None,
    axis: int,
    unsafe: bool,
    initial: Operand | None,
) -> Value:
    axis %= data.rank
    reduce = _NAMES.get(reduce, reduce)
    shape, inner = b.outputs[0].shape, data.shape[axis + 1 :]
    table = lengths if offsets is None else offsets
    size = data.shape[axis]
    numbers = b.call_jax(_segment_numbers, table, size=size, has_offsets=offsets is not None)
    at = b.unsqueeze(numbers, -1)
    count = math.prod(shape[: axis + 1])
    start = b.value(_NEUTRAL[reduce] if initial is None else initial, data.dtype)
    elements = data.reshape([numbers.shape[0], *inner])
    result = b.full([count, *inner], start, data.dtype)
    result = b.scatter_nd(result, at, elements, [0], _COMBINED[reduce])
    if reduce == "mean":
        ones = b.full([numbers.shape[0]], 1, torch.int64)
        sizes = b.scatter_nd(b.zeros([count], torch.int64), at, ones, [0], "add")
        sizes = sizes.reshape([count, *[1] * len(inner)])
        mean = result / maximum(sizes, 1).to(data.dtype)
        result = where(sizes > 0, mean, math.nan if initial is None else start)
    return result.reshape(shape)


def _flat(data: Array, axis: int) -> Array:
    return data.reshape((-1, *data.shape[axis + 1 :]))


def _spread(per_segment: Array, numbers: Array, count: int, like: Array) -> Array:
    """The value of each element's segment; 0 for elements of none."""
    import jax.numpy as jnp

    flat = per_segment.reshape((count, *like.shape[1:]))
    flat = jnp.concatenate([flat, jnp.zeros((1, *like.shape[1:]), flat.dtype)])
    return flat[numbers]


def _reduce(data: Array, numbers: Array, count: int, kind: str) -> Array:
    import jax

    return getattr(jax.ops, f"segment_{kind}")(data, numbers, count)


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

    axis %= data.ndim
    reduce = _NAMES.get(reduce, reduce)
    table = lengths if offsets is None else offsets
    assert table is not None
    numbers = _segment_numbers(table, data.shape[axis], offsets is not None)
    flat, count = _flat(data, axis), math.prod(output.shape[: axis + 1])
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
        # The product of the others: without a division by 0 or nan.
        zero, nan = flat == 0, jnp.isnan(flat)
        start = jnp.asarray(1 if initial is None else initial, flat.dtype)
        factors = jnp.where(zero | nan, 1, flat)

        def in_segment(per_element: Array, kind: str) -> Array:
            return _spread(_reduce(per_element, numbers, count, kind), numbers, count, flat)

        others = in_segment(factors, "prod") * start
        others = jnp.where(in_segment(zero.astype(flat.dtype), "sum") > zero, 0, others)
        others = jnp.where(in_segment(nan.astype(flat.dtype), "sum") > nan, math.nan, others)
        slope = slope * jnp.where(zero | nan, others, result / factors)
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
