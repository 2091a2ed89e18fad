"""Fourier transforms, JAX's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder

_MOST = 3
"""The number of dimensions that XLA transforms in one operation."""


def _scaled(x: Array, size: int, normalization: int) -> Array:
    """Divides by nothing, by the square root of the transformed size, or by the size."""
    if normalization == 0 or not size:
        return x
    return x * (1 / (math.sqrt(size) if normalization == 1 else size))


def _transformed(x: Array, dims: tuple[int, ...], forward: bool) -> Array:
    """The complex transform along dims, without a factor in either direction."""
    import jax.numpy as jnp

    for start in range(0, len(dims), _MOST):
        axes = dims[start : start + _MOST]
        x = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes, norm="forward")
    return x


def _size(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    return math.prod(shape[d] for d in dims)


def fft_c2c(x: Array, dims: tuple[int, ...], normalization: int, forward: bool) -> Array:
    return _scaled(_transformed(x, dims, forward), _size(x.shape, dims), normalization)


def fft_r2c(x: Array, dims: tuple[int, ...], normalization: int, onesided: bool) -> Array:
    import jax.numpy as jnp

    if onesided:
        y = _transformed(jnp.fft.rfft(x, axis=dims[-1]), dims[:-1], True)
    else:
        y = _transformed(x, dims, True)
    return _scaled(y, _size(x.shape, dims), normalization)


def fft_c2r(x: Array, dims: tuple[int, ...], normalization: int, last_size: int) -> Array:
    import jax.numpy as jnp

    y = _transformed(x, dims[:-1], False)
    y = jnp.fft.irfft(y, n=last_size, axis=dims[-1], norm="forward")
    return _scaled(y, _size(y.shape, dims), normalization)


def _by_jax(function: Callable[..., Any], last: str) -> Callable[..., Any]:
    def lower(b: Builder, x: Value, dims: list[int], normalization: int, how: int) -> Any:
        static = {"dims": tuple(dims), "normalization": normalization, last: how}
        return b.fft(function, x, **static)

    return lower


rule("aten::_fft_c2c")(_by_jax(fft_c2c, "forward"))
rule("aten::_fft_r2c")(_by_jax(fft_r2c, "onesided"))
rule("aten::_fft_c2r")(_by_jax(fft_c2r, "last_size"))
