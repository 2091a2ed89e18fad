"""Products of several pairs of matrices, which lie one after the other in a dimension of one.

Where each ends is data: a program serves any sizes of the groups. On TPUs XLA has an operation for
it; elsewhere JAX makes one product of it in which each group sees 0 in the place of the others, as
many times the work as there are groups.
"""

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any


@rule("aten::_grouped_mm")
def grouped_mm(
    b: "Builder",
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
    precision = wanted[b.settings.matmul_precision]
    return b.call_jax(_grouped, x, y, ends, precision=precision)


def _grouped(x: Any, y: Any, ends: Any, *, precision: str) -> Any:
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
    wide = jnp.float32
    precision = precision if x.dtype == wide else "default"
    result = lax.ragged_dot_general(
        x, y, sizes, numbers, precision=precision, preferred_element_type=wide
    )
    return result.astype(x.dtype)
