"""Bessel and Airy functions: power series near zero, asymptotic series elsewhere.

All in float64, since the power series lose digits where their terms alternate: at most seven of
sixteen up to the arguments where the asymptotic series take over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder

_TERMS = 48
"""Terms of a power series: enough for its last term to vanish wherever it is used."""

_EULER = 0.57721566490153286


def _power_series(x: Array, order: int, sign: int) -> tuple[Array, Array]:
    """Sums over k of t = sign**k (x/2)**(2k) / (k! (k + order)!), and of t (H[k] + H[k + order]),
    with H the harmonic numbers; for order 0 of t H[k].
    """
    import jax.numpy as jnp
    from jax import lax

    quarter = sign * x * x / 4

    def body(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        term, total, weighted, harmonic, shifted = state
        k = k.astype(x.dtype)
        term = term * quarter / (k * (k + order))
        harmonic, shifted = harmonic + 1 / k, shifted + 1 / (k + order)
        weight = harmonic + shifted if order else harmonic
        return term, total + term, weighted + term * weight, harmonic, shifted

    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    start = (one, one, one * order, zero, one * order)
    _, total, weighted, _, _ = lax.fori_loop(1, _TERMS, body, start)
    return total, weighted


def _coefficients(order: int, count: int) -> list[float]:
    """Coefficients of Hankel's asymptotic series in 1 / x."""
    result = [1.0]
    for k in range(1, count):
        result.append(result[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    return result


def _horner(coefficients: list[float], x: Array) -> Array:
    import jax.numpy as jnp

    total = jnp.zeros_like(x)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def _even_and_odd(coefficients: list[float], inverse: Array) -> tuple[Array, Array]:
    """The sums of the even and of the odd terms, each with alternating signs."""
    square = -inverse * inverse
    return _horner(coefficients[::2], square), inverse * _horner(coefficients[1::2], square)


def _oscillating(x: Array, order: int) -> tuple[Array, Array]:
    """J and Y for x >= 0 (Y for x > 0)."""
    import jax.numpy as jnp

    near = x < 16
    small, large = jnp.where(near, x, 1), jnp.where(near, 16, x)
    total, weighted = _power_series(small, order, -1)
    logarithm = jnp.log(small / 2) + _EULER
    if order == 0:
        j = total
        y = 2 / math.pi * (logarithm * j - weighted)
    else:
        j = small / 2 * total
        y = 2 / math.pi * (logarithm * j - 1 / small - small / 4 * weighted)
    even, odd = _even_and_odd(_coefficients(order, 28), 1 / large)
    phase, height = large - (order / 2 + 0.25) * math.pi, jnp.sqrt(2 / math.pi / large)
    far_j = height * (even * jnp.cos(phase) - odd * jnp.sin(phase))
    far_y = height * (even * jnp.sin(phase) + odd * jnp.cos(phase))
    far_j, far_y = (jnp.where(jnp.isinf(x), 0, far) for far in (far_j, far_y))
    return jnp.where(near, j, far_j), jnp.where(near, y, far_y)


def _decaying(x: Array, order: int, scaled: bool) -> Array:
    """K, times exp(x) if `scaled`."""
    import jax.numpy as jnp

    near = x < 9
    small, large = jnp.where(near, x, 1), jnp.where(near, 9, x)
    total, weighted = _power_series(small, order, 1)
    logarithm = jnp.log(small / 2) + _EULER
    if order == 0:
        k = weighted - logarithm * total
    else:
        k = 1 / small + logarithm * small / 2 * total - small / 4 * weighted
    far = jnp.sqrt(math.pi / 2 / large) * _horner(_coefficients(order, 18), 1 / large)
    k, far = (k * jnp.exp(small), far) if scaled else (k, far * jnp.exp(-large))
    result = jnp.where(near, k, far)
    return jnp.where(x > 0, result, jnp.where(x == 0, jnp.inf, jnp.nan))


def _first_kind(x: Array, order: int) -> Array:
    import jax.numpy as jnp

    result = _oscillating(jnp.abs(x), order)[0]
    return jnp.sign(x) * result if order else result


def _second_kind(x: Array, order: int) -> Array:
    import jax.numpy as jnp

    result = _oscillating(jnp.abs(x), order)[1]
    return jnp.where(x > 0, result, jnp.where(x == 0, -jnp.inf, jnp.nan))


def _spherical(x: Array) -> Array:
    import jax.numpy as jnp

    return jnp.where(jnp.isinf(x), 0, jnp.where(x == 0, 1, jnp.sin(x) / jnp.where(x == 0, 1, x)))


def _airy(x: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax

    near = (x > -7) & (x < 5.5)
    small, far = jnp.where(near, x, 0), jnp.where(near, 7, jnp.abs(x))
    cube = small**3

    def body(k: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        even, odd, evens, odds = state
        k = 3 * k.astype(x.dtype)
        even, odd = even * cube / (k * (k - 1)), odd * cube / (k * (k + 1))
        return even, odd, evens + even, odds + odd

    start = (jnp.ones_like(x), small, jnp.ones_like(x), small)
    _, _, evens, odds = lax.fori_loop(1, _TERMS, body, start)
    # The values of Ai and -Ai' at 0.
    series = 0.355028053887817239 * evens - 0.258819403792806798 * odds
    coefficients = [1.0]
    for k in range(1, 18):
        ratio = (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1))
        coefficients.append(coefficients[-1] * ratio)
    zeta, height = 2 / 3 * far**1.5, 1 / (math.sqrt(math.pi) * far**0.25)
    falling = height / 2 * jnp.exp(-zeta) * _horner(coefficients, -1 / zeta)
    even, odd = _even_and_odd(coefficients, 1 / zeta)
    phase = zeta - math.pi / 4
    waving = height * (even * jnp.cos(phase) + odd * jnp.sin(phase))
    return jnp.where(near, series, jnp.where(x > 0, falling, waving))


def _register(name: str, function: Callable[..., Array], **kind: Any) -> None:
    def lower(b: Builder, x: Value) -> Any:
        # First to the result's dtype: PyTorch's kernels see an integer as a float32.
        return b.call_jax(function, x.to(b.outputs[0].dtype).to(torch.float64), **kind)

    rule(f"aten::special_{name}")(lower)


_register("airy_ai", _airy)
_register("spherical_bessel_j0", _spherical)
for _order in (0, 1):
    _register(f"bessel_j{_order}", _first_kind, order=_order)
    _register(f"bessel_y{_order}", _second_kind, order=_order)
    _register(f"modified_bessel_k{_order}", _decaying, order=_order, scaled=False)
    _register(f"scaled_modified_bessel_k{_order}", _decaying, order=_order, scaled=True)
