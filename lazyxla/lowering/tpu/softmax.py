"""Softmax on a TPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::_softmax_backward_data", platforms=("tpu",))
def softmax_backward(
    b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """In attention the gradient is read by two matmuls. Without the barrier XLA computes the sums
    in both of them again, and the weights for them.
    """
    grad, output = operands(b, grad, output)
    total = b.hlo.optimization_barrier([(grad * output).sum([dim], keepdim=True)])
    return output * (grad - total)
