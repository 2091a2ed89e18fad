"""Hyperbolic functions of real values.

XLA halves an exponential by adding log(1/2) to its argument, so that it overflows no earlier than
the result; what that rounds away makes cosh(80) wrong by 60 units of the last place. Subtracting 1
rounds nothing away.
"""

from __future__ import annotations

import math

from lazyxla.lowering.value import Value


def cosh(x: Value) -> Value:
    size = abs(x)
    return _half_exponential(size) + (-size).call("exponential") * 0.5


def sinh(x: Value) -> Value:
    size = abs(x)
    large = _half_exponential(size) - (-size).call("exponential") * 0.5
    small = x.call("chlo.sinh")  # by exp(x) - 1, since large terms would cancel
    return x.b.select(size < 1, small, x.b.select(x < 0, -large, large))


def _half_exponential(x: Value) -> Value:
    """exp(x) / 2 for x >= 0."""
    return (x - 1).call("exponential") * (math.e / 2)
