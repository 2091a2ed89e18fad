"""Views as functions, where PyTorch has a kernel for them.

The gradients of views, most `*_copy` and the `*_scatter` operators need no rules: PyTorch makes
them of views and writes in place, so that where they begin is a number like any other. In traced
graphs they are those of graph_rules.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering import geometry
from lazyxla.lowering.geometry import geometry_of
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.windows import Window, add_columns
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::narrow_copy")
def narrow_copy(b: Builder, x: Value, dim: int, start: int, length: int) -> Value:
    start += x.shape[dim] if start < 0 else 0
    return b.slice_dim(x, dim, start, start + length)


@rule("aten::diag_embed")
def diag_embed(b: Builder, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    dtype, shape = b.outputs[0]
    base = torch.empty(shape, dtype=dtype, device="meta")
    view = geometry_of(base.diagonal(offset, dim1, dim2))
    return geometry.write(b, b.zeros(shape, dtype), x, geometry_of(base), view)


@rule("aten::unfold_backward")
def unfold_backward(
    b: Builder, grad: Value, sizes: list[int], dim: int, size: int, step: int
) -> Value:
    """Sums the windows back: (*before, windows, *after, size) to (*before, n, *after)."""
    grad = grad.accumulated()
    if not sizes:
        return grad.sum(range(grad.rank))
    dim %= len(sizes)
    windows = grad.shape[dim]
    if not windows or 0 in grad.shape:
        return b.zeros(sizes, grad.dtype)
    others = [n for i, n in enumerate(sizes) if i != dim]
    columns = b.transpose(grad, [*(i for i in range(grad.rank) if i != dim), dim])
    columns = columns.reshape([1, -1, size, windows])
    total = add_columns(b, columns, [sizes[dim]], Window.of([size], [step], [0], [1]))
    last = len(others)
    return b.transpose(total.reshape([*others, sizes[dim]]), [*range(dim), last, *range(dim, last)])
