"""Products of several pairs of matrices, which lie one after the other in a dimension of one.

Where each ends is data: a program serves any sizes of the groups. XLA multiplies all rows by every
group's matrix, as many times the work as there are groups; so on TPUs it is a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import grouped_matmul_tpu
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
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
    precision = wanted[b.settings.matmul_precision]
    if b.platform == "tpu" and (result := _by_kernel(b, x, y, ends)) is not None:
        return result
    return b.call_jax(_grouped, x, y, ends, precision=precision)


def _by_kernel(b: Builder, x: Value, y: Value, ends: Value) -> Value | None:
    """The product by a kernel for TPUs, or None if none takes these operands."""
    if b.rank(x) == 3:  # the columns of the result are the rows of its transpose
        result = _by_kernel(b, b.transpose(y, [1, 0]), b.transpose(x, [0, 2, 1]), ends)
        return None if result is None else b.transpose(result, [1, 0])
    columns, inner = b.shape(y)[-1], b.shape(x)[1]
    # Kernels know no precision between these two.
    is_exact = b.dtype(x) == torch.float32 and b.settings.matmul_precision != "medium"
    precision = "highest" if is_exact else "default"
    if b.rank(y) == 2:
        x = b.transpose(x, [1, 0])
        if not grouped_matmul_tpu.suits(b, x, columns, b.shape(x)[1]):
            return None
        return b.call_jax(grouped_matmul_tpu.sums_in_groups, x, y, ends, precision=precision)
    if not grouped_matmul_tpu.suits(b, x, columns, inner):
        return None
    found = b.untransposed(y)
    transposed = found is not None and found[1] == [0, 2, 1]
    y = found[0] if found is not None and transposed else y
    kernel = grouped_matmul_tpu.rows_in_groups
    return b.call_jax(kernel, x, y, ends, transposed=transposed, precision=precision)


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
