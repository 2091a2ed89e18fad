"""Orthogonal polynomials of a degree that is data, by their recurrences.

Between -1 and 1 and for higher degrees, Chebyshev's have a closed form that loses less; PyTorch
uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.value import Operand

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


def _recurrence(
    x: Array, n: Array, first: Array, step: Callable[..., Array], wanted: Array
) -> Array:
    """P[n](x) from P[0] = 1, P[1] = first and P[k + 1] = step(k, P[k], P[k - 1]).

    n >= 0; only `wanted` elements matter. Stops where all have become nan, so that an enormous
    degree ends.
    """
    import jax.numpy as jnp
    from jax import lax

    def active(k: Array, current: Array) -> Array:
        return wanted & (k < n) & ~jnp.isnan(current)

    def body(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        k, current, last = state
        on = active(k, current)
        following = step(k.astype(x.dtype), current, last)
        return k + 1, jnp.where(on, following, current), jnp.where(on, current, last)

    start = (jnp.ones((), n.dtype), first, jnp.ones_like(x))
    _, result, _ = lax.while_loop(lambda s: jnp.any(active(s[0], s[1])), body, start)
    return jnp.where(n == 0, 1, result)


def _chebyshev(x: Array, n: Array, kind: str, shifted: bool) -> Array:
    import jax.numpy as jnp

    x = 2 * x - 1 if shifted else x
    even, degree = n % 2 == 0, n.astype(x.dtype)
    sign = jnp.where(even, 1, -1).astype(x.dtype)
    angle = jnp.arccos(x)
    right: Array | int  # at x = 1
    left: Array  # at x = -1
    if kind == "t":
        first, right, left = x, 1, sign
        closed = jnp.cos(degree * angle)
    elif kind == "u":
        first, right, left = 2 * x, degree + 1, sign * (degree + 1)
        closed = jnp.sin((degree + 1) * angle) / jnp.sin(angle)
    elif kind == "v":
        first, right, left = 2 * x - 1, 1, sign * (2 * degree + 1)
        closed = jnp.cos((degree + 0.5) * angle) / jnp.cos(angle / 2)
    else:
        first, right, left = 2 * x + 1, 2 * degree + 1, sign
        closed = jnp.sin((degree + 0.5) * angle) / jnp.sin(angle / 2)
    by_angle = (n > (6 if kind == "t" else 8)) & (jnp.abs(x) < 1)

    def step(k: Array, current: Array, last: Array) -> Array:
        return 2 * x * current - last

    at_end = jnp.abs(x) == 1
    result = _recurrence(x, n, first, step, ~by_angle & ~at_end)
    result = jnp.where(by_angle, closed, result)
    return jnp.where(at_end, jnp.where(x > 0, right, left), result)


def _hermite(x: Array, n: Array, factor: int) -> Array:
    import jax.numpy as jnp

    def step(k: Array, current: Array, last: Array) -> Array:
        return factor * (x * current - k * last)

    most = 128 if x.dtype == jnp.float32 else 512  # PyTorch gives nan for higher degrees
    result = _recurrence(x, n, factor * x, step, n <= most)
    return jnp.where(n > most, jnp.nan, result)


def _laguerre(x: Array, n: Array) -> Array:
    def step(k: Array, current: Array, last: Array) -> Array:
        return ((2 * k + 1 - x) * current - k * last) / (k + 1)

    return _recurrence(x, n, 1 - x, step, x != 0)  # elsewhere all are 1, which 1 - x is


def _legendre(x: Array, n: Array) -> Array:
    import jax.numpy as jnp

    def step(k: Array, current: Array, last: Array) -> Array:
        return ((2 * k + 1) * x * current - k * last) / (k + 1)

    at_end = jnp.abs(x) == 1
    left = jnp.where(n % 2 == 0, 1, -1).astype(x.dtype)
    return jnp.where(at_end, jnp.where(x > 0, 1, left), _recurrence(x, n, x, step, ~at_end))


def _of_degree(x: Array, n: Array, *, polynomial: Callable[..., Array], **kind: Any) -> Array:
    import jax.numpy as jnp

    n = n.astype(jnp.int64)
    return jnp.where(n < 0, 0, polynomial(x, jnp.maximum(n, 0), **kind))


def _register(name: str, function: Callable[..., Array], **kind: Any) -> None:
    def lower(b: Builder, x: Operand, n: Operand) -> Any:
        return b.call_jax(_of_degree, *operands(b, x, n), polynomial=function, **kind)

    rule(*(f"aten::special_{name}{overload}" for overload in ("", ".x_scalar", ".n_scalar")))(lower)


for _kind in "tuvw":
    _register(f"chebyshev_polynomial_{_kind}", _chebyshev, kind=_kind, shifted=False)
    _register(f"shifted_chebyshev_polynomial_{_kind}", _chebyshev, kind=_kind, shifted=True)
_register("hermite_polynomial_h", _hermite, factor=2)
_register("hermite_polynomial_he", _hermite, factor=1)
_register("laguerre_polynomial_l", _laguerre)
_register("legendre_polynomial_p", _legendre)
