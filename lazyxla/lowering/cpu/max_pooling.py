"""The gradient of maximum pooling by PyTorch's own kernel, called by the program.

The form of rules/max_pooling.py asks each element of the input for all windows that it can be in;
the kernel adds each gradient where its index says. 64 planes of 112x112, batch 2, windows of 3x3 at
every other position, with the forward pass: 58 ms, and by the kernel 5; of 2x2: 8.2 and 3.8; on two
CPUs of an AMD EPYC without AVX-512.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import max_pooling
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_BACKWARD = "aten::max_pool2d_with_indices_backward"


@rule(_BACKWARD, platforms=("cpu",))
def max_pool2d_backward(b: Builder, grad: Value, x: Value, *geometry_and_indices: Any) -> Value:
    if not host_call.may_call_kernel(b) or grad.dtype != torch.float32 or 0 in x.shape:
        return max_pooling.max_pool_backward(b, grad, x, *geometry_and_indices, rank=2)
    args = (grad, x, *geometry_and_indices)
    [result] = host_call.call_kernel(b, _BACKWARD, args, [TensorSpec(x.dtype, tuple(x.shape))])
    return result
