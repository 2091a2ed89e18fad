"""Attention by PyTorch's own kernels, called by the program.

Milliseconds with XLA's operations, with a call, and in PyTorch eager; samples x heads x positions x
head dimension, two CPUs of an AMD EPYC with AVX512-BF16:

                                     forward             with the gradients
    4 x 12 x 128 x 64             4.0   1.6   1.5       10.3    6.0    5.6
    8 x 8 x 64 x 32, causal       0.7   0.4   0.6        2.1    1.4    1.8
    1 x 12 x 512 x 64, causal     8.8   5.4   5.4       28.5   19.5   20.1
    2 x 8 x 1024 x 64, causal    44.3  20.4  19.7       97.6   73.1   72.7
    in bfloat16
    4 x 12 x 128 x 64             2.0   1.8   2.6        6.4   10.9   12.1
    1 x 12 x 197 x 64             1.3   1.0   1.0        3.6    4.4    4.1
    1 x 12 x 512 x 64, causal     7.7   5.7   6.5       27.2   18.6   20.5
    2 x 8 x 1024 x 64, causal    24.7  20.9  21.3      100.0   59.8   61.2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LEAST = 10**7
"""Multiplications and additions of the scores from which a call can pay."""

_NAME = "aten::_scaled_dot_product_flash_attention_for_cpu"


def suits(b: Builder, query: Value, key: Value, mask: Value | None, dropout: bool) -> bool:
    """Whether PyTorch has a kernel for this attention that is faster than XLA's operations."""
    if dropout or query.shape[1] != key.shape[1] or not host_call.may_call_kernel(b):
        return False
    if mask is not None and (mask.dtype != query.dtype or mask.rank not in (2, 4)):
        return False
    keys = key.shape[2]
    large = 2 * math.prod(query.shape) * keys >= _LEAST
    return large and kernel_limits.pays("attention", query.dtype, keys)


def forward(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    factor: Operand,
    mask: Value | None,
    dropped: Sequence[Value],
) -> tuple[Value, Value]:
    args = (query, key, value, 0.0, is_causal, mask, factor)
    sums = TensorSpec(torch.float32, query.shape[:3])
    result, logsumexp = _called(b, _NAME, args, 3, mask, [b.spec(query), sums])
    return result, logsumexp


def backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    factor: Operand,
    mask: Value | None,
    dropped: Sequence[Value],
) -> tuple[Value, ...]:
    args = (grad, *inputs, 0.0, is_causal, mask, factor)
    return _called(b, f"{_NAME}_backward", args, 6, mask, [b.spec(x) for x in inputs[:3]])


def _called(
    b: Builder,
    name: str,
    args: tuple[Operand | None, ...],
    tensors: int,
    mask: Value | None,
    outputs: Sequence[TensorSpec],
) -> tuple[Value, ...]:
    """The results of a call whose first `tensors` arguments are split as the results are: along
    samples or heads, whichever are more."""
    samples, heads = outputs[0].shape[:2]
    dim = 0 if samples >= heads else 1
    of_mask = []
    if mask is not None:
        of_mask = [dim if mask.rank == 4 and mask.shape[dim] > 1 else -1]
    split = [*[dim] * tensors, -1, *of_mask, -1, *[dim] * len(outputs)]
    return tuple(host_call.call_kernel(b, name, args, outputs, split))
