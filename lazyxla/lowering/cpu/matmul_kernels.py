"""Matmuls by PyTorch's own kernels, those of MKL or oneDNN, called by the program.

Times of XLA's, divided by those of PyTorch's; float32, two CPUs of an AMD EPYC with AVX-512:

    matrices, columns, terms        x @ w.T     g @ w     g.T @ x
    512 x 256, 256                      1.3       1.2         1.4
    196 x 512, 196                      1.2       1.3         1.6
    128 x 3072, 768                     1.0       1.1         1.0
    2048 x 2048, 2048                   0.9       0.9         0.9
    32 of 128 x 128, 32                 1.8       1.4         2.0
    6 of 197 x 64, 197                  2.2       1.9         7.9
    8 of 512 x 512, 64                  0.9       0.9         1.2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder
    from lazyxla.lowering.builder.contract import DotOperand

_LEAST = 32
"""Rows, columns and terms of a matrix, from which on its kernel is better ..."""
_MOST = 1 << 28
"""... and the multiplications up to which it is, if there is one matrix ..."""
_MOST_OF_BATCH = 1 << 24
"""... or of each of a batch."""


def dot(b: Builder, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value | None:
    """`Contractions.platform_dot`; None if the compiler's is better."""
    rows, columns = math.prod(left.free_sizes), math.prod(right.free_sizes)
    terms = math.prod(left.value.shape[i] for i in left.contract)
    batch = [left.value.shape[i] for i in left.batch]
    if not _serves(b, left, right, dtype) or min(rows, columns, terms) < _LEAST:
        return None
    if rows * columns * terms > (_MOST_OF_BATCH if math.prod(batch) > 1 else _MOST):
        return None
    lead = [math.prod(batch)] if batch else []
    x, turn_left = _as_matrix(b, left, free_first=True)
    y, turn_right = _as_matrix(b, right, free_first=False)
    x = x.reshape([*lead, terms, rows] if turn_left else [*lead, rows, terms])
    y = y.reshape([*lead, columns, terms] if turn_right else [*lead, terms, columns])
    args = (x, y, turn_left, turn_right, None)
    spec = TensorSpec(x.dtype, (*lead, rows, columns))
    [out] = host_call.call_kernel(b, "lazyxla::matmul.out", args, [spec])
    return out.reshape([*batch, *left.free_sizes, *right.free_sizes])  # type: ignore[no-any-return]


def _serves(b: Builder, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> bool:
    """Whether the kernel can be called."""
    return (
        b.annotations is None
        and not b.target.any_sizes
        and b.takes_host_calls
        and left.value.dtype == right.value.dtype == torch.float32
        and dtype in (None, torch.float32)
        and b.settings.matmul_precision == "highest"
        and host_call.available()
    )


def _as_matrix(b: Builder, x: DotOperand, free_first: bool) -> tuple[Value, bool]:
    """The operand with its batch dimensions first and the contracted ones together, and whether
    these are on the other side of the free ones than `free_first` says."""
    free = [i for i in range(x.value.rank) if i not in x.contract and i not in x.batch]
    orders: list[Sequence[int]] = [[*x.batch, *free, *x.contract], [*x.batch, *x.contract, *free]]
    if not free_first:
        orders.reverse()
    for turned, order in enumerate(orders):
        if list(order) == list(range(x.value.rank)):
            return x.value, bool(turned)
    return b.transpose(x.value, orders[0]), False
