"""Matmul of several pairs of matrices, which are concatenated along a dimension of one operand.

Where each ends is data: a program serves any sizes of the groups. XLA multiplies all rows by every
group's matrix, as many times the work as there are groups; so TPUs have a kernel for it
(tpu/grouped_matmul.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


@rule("aten::_grouped_mm")
def grouped_mm(
    b: Builder,
    x: Value,
    y: Value,
    ends: Value | None,
    bias: Value | None,
    dtype: torch.dtype | None,
) -> Value:
    """(M, K) and (G, K, N): (M, N), rows in groups; (G, M, K) and (K, N): (M, N), columns in
    groups; (M, K) and (K, N): (G, M, N), in groups what is summed over."""
    if ends is None:
        return b.matmul(x, y)
    wanted = {"highest": "highest", "high": "high", "medium": "default"}
    return b.call_jax(_grouped, x, y, ends, precision=wanted[b.settings.matmul_precision])


def _grouped(x: Array, y: Array, ends: Array, *, precision: str) -> Array:
    import jax.numpy as jnp
    from jax import lax

    sizes = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
    if x.ndim == 3:
        return _grouped(y.T, jnp.swapaxes(x, 1, 2), ends, precision=precision).T
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [y.ndim - 2]), ([], [])),
        lhs_ragged_dimensions=[1] if y.ndim == 2 else [0],
        rhs_group_dimensions=[] if y.ndim == 2 else [0],
    )
    accumulated = jnp.float32
    precision = precision if x.dtype == accumulated else "default"
    result = lax.ragged_dot_general(
        x, y, sizes, numbers, precision=precision, preferred_element_type=accumulated
    )
    return result.astype(x.dtype)
