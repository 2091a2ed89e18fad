"""The gradient of maximum pooling by PyTorch's own kernel, called by the program.

The form of rules/max_pooling.py asks each element of the input for all windows that it can be in;
the kernel adds each gradient where its index says. 64 planes of 112x112, batch 2, windows of 3x3 at
every other position, with the forward pass: 58 ms, and by the kernel 5; of 2x2: 8.2 and 3.8; on two
CPUs of an AMD EPYC without AVX-512. In bfloat16 XLA finds each window's maximum again in each term
of the form: a step of resnet18 at batch 2 takes 138 ms, and by the kernel 97 (with AVX-512).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    if not host_call.may_call_kernel(b) or not x.is_float or 0 in x.shape:
        return max_pooling.max_pool_backward(b, grad, x, *geometry_and_indices, rank=2)
    *geometry, indices = geometry_and_indices
    grad, planes, indices = (v.reshape([-1, *v.shape[-2:]]) for v in (grad, x, indices))
    args = (grad, planes, *geometry, indices)
    outputs = [TensorSpec(x.dtype, tuple(planes.shape))]
    [result] = host_call.call_kernel(b, _BACKWARD, args, outputs, split=[0, 0, 0, 0])
    return result.reshape(x.shape)
