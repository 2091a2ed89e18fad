"""Order statistics and running results along a dimension: median, k-th value, mode, cumulative
operators.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import where
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


# ---- order statistics ----


def _median(b: Builder, x: Value, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Value, Value]:
    """The lower median and its index; the first nan instead, if there is one, unless nan is
    skipped.
    """
    if not x.shape:
        return x, b.zeros((), torch.int64)
    size = x.shape[dim]
    if not size:  # along a dimension this is an error
        nothing = math.nan if x.is_float else b.lowest(x.dtype)
        return b.constant(nothing, x.dtype), b.zeros((), torch.int64)
    values, indices = b.sort_with_indices(x, dim, stable=True)
    count = (values == values).to(torch.int64).sum([dim], keepdim=True)  # of what is not nan
    if skip_nan:
        middle = where(count > 0, (count - 1) >> 1, 0)
    else:
        middle = where(count == size, (size - 1) // 2, count)
    value, index = b.take_along(values, middle, dim), b.take_along(indices, middle, dim)
    return (value, index) if keepdim else (b.squeeze(value, dim), b.squeeze(index, dim))


def _register_median(name: str, skip_nan: bool) -> None:
    def lower(b: Builder, x: Value) -> Value:
        return _median(b, x.reshape([-1]), 0, False, skip_nan)[0]

    def lower_dim(b: Builder, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
        return _median(b, x, dim, keepdim, skip_nan)

    rule(f"aten::{name}")(lower)
    rule(f"aten::{name}.dim")(lower_dim)


_register_median("median", False)
_register_median("nanmedian", True)


@rule("aten::kthvalue")
def kthvalue(b: Builder, x: Value, k: int, dim: int, keepdim: bool) -> list[Value]:
    if not x.shape:
        return [x, b.zeros((), torch.int64)]
    found = [b.slice_dim(s, dim, k - 1, k) for s in b.sort_with_indices(x, dim, stable=True)]
    return found if keepdim else [b.squeeze(f, dim) for f in found]


@jax_rule("aten::mode")
def mode(x: Array, dim: int, keepdim: bool) -> tuple[Array, ...]:
    """The smallest of the most frequent values and the index of its last occurrence."""
    import jax.numpy as jnp
    from jax import lax

    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    indices = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    values, indices = lax.sort((x, indices), dimension=dim, num_keys=1, is_stable=True)
    # The length so far of the run of equal values: the distance to where the run began.
    rank = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    before = jnp.roll(values, 1, dim)
    starts = jnp.where((values != before) | (rank == 0), rank, 0)
    length = rank - lax.cummax(starts, dim)
    best = jnp.argmax(length, dim, keepdims=True)
    found = [jnp.take_along_axis(s, best, dim) for s in (values, indices)]
    return tuple(found if keepdim else [jnp.squeeze(f, dim) for f in found])


# ---- cumulative operators ----


def _accumulated(x: Array, outputs: tuple[TensorSpec, ...]) -> Array:
    """An array of JAX's in the dtype that the running result is accumulated in."""
    import jax.numpy as jnp

    dtype = outputs[0].dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        return x.astype(jnp.float32)
    return x.astype(str(dtype).removeprefix("torch."))


_FEW = 32
"""Elements in a row up to which one windowed reduction computes all running results, at a quadratic
cost. To compile it took 36 ms for 8 integers and 77 for 32, JAX's scan 54 and 92 (an AMD EPYC, in
turns); the scan's first use imports JAX, too."""


def _cumulative(b: Builder, x: Value, dim: int, kind: str) -> Value:
    x = x.to(b.compute_dtype(b.outputs[0].dtype))
    rank = x.rank
    if not rank:
        return x
    dim %= rank
    size = x.shape[dim]
    if size > _FEW:
        return b.call_jax(_scan, x, dim=dim, kind=kind)
    window, padding = [1] * rank, [(0, 0)] * rank
    window[dim], padding[dim] = size, (size - 1, 0)
    return b.reduce_window(x, kind, window, padding=padding)


def _scan(x: Array, dim: int, kind: str) -> Array:
    from jax import lax

    return {"sum": lax.cumsum, "prod": lax.cumprod}[kind](x, dim)


@rule("aten::cumsum")
def cumsum(b: Builder, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    return _cumulative(b, x, dim, "sum")


@rule("aten::cumprod")
def cumprod(b: Builder, x: Value, dim: int, dtype: torch.dtype | None) -> Value:
    return _cumulative(b, x, dim, "prod")


@jax_rule("aten::logcumsumexp", "aten::_logcumsumexp")
def logcumsumexp(x: Array, dim: int, *, outputs: tuple[TensorSpec, ...]) -> Array:
    import jax.numpy as jnp
    from jax import lax

    x = _accumulated(x, outputs)
    if not x.ndim:
        return x
    if not jnp.iscomplexobj(x):
        return lax.cumlogsumexp(x, dim % x.ndim)
    return lax.associative_scan(jnp.logaddexp, x, axis=dim)


def _running(x: Array, dim: int, better: str) -> tuple[Array, Array]:
    """Running maximum or minimum and the last index where it was reached; a nan is kept."""
    import jax.numpy as jnp
    from jax import lax

    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    compare = getattr(jnp, better)

    def latest(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = first[0], second[0]
        take = compare(b, a)
        if jnp.issubdtype(x.dtype, jnp.floating):
            take = jnp.isnan(b) | (take & ~jnp.isnan(a))
        return jnp.where(take, b, a), jnp.where(take, second[1], first[1])

    indices = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    return lax.associative_scan(latest, (x, indices), axis=dim)


@jax_rule("aten::cummax")
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, "greater_equal")


@jax_rule("aten::cummin")
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, "less_equal")
