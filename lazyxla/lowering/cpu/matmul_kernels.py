"""Matmuls by PyTorch's own kernels, where these are faster: cpu/kernel_limits.py.

In bfloat16 they are where the processor computes in that type: XLA's compiler multiplies in float32
even there. In float32 they are not on such a processor. Milliseconds of a linear layer in bfloat16,
two CPUs of an AMD EPYC with AVX512-BF16 (rows by input features by output features):

                          forward         gradient of x      of the weight
                       XLA  PyTorch       XLA  PyTorch       XLA  PyTorch
    394 x 192 x 768    0.9    0.3         0.8    0.3         0.9    0.4
    512 x 256 x 1024   1.9    0.7         1.9    0.7         2.1    0.7
    512 x 768 x 3072   16.8   6.3         13.1   6.5         13.4   6.2

In float64 and in complex numbers they are on all processors. The same without AVX-512 (Zen 3), of
64 x 192 x 256 and 256 x 512 x 1024, with its gradients: float64 1.8 and 1.1, 38 and 25; complex64
3.3 and 1.4, 80 and 29.

Each call is shared by the plugin's own threads. OpenMP's would wait, after it, on the processors
that the rest of the program needs: so small matmuls cost more than they gained. A training step in
autocast of two layers of a transformer over 4 x 128 positions takes, the best of 20, of hidden size
256: 32 to 33 ms, and 45 without calls (PyTorch 27), of 768: 156, 278 (160).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering import host_call
from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def product(b: Builder, left: DotOperand, right: DotOperand) -> Value | None:
    """The dot without batch dimensions, in its operands' dtype; None where a call does not pay."""
    if not _pays(b, left, right):
        return None
    args = (left.value, right.value, list(left.contract), list(right.contract))
    shape = (*left.free_sizes, *right.free_sizes)
    outputs = [TensorSpec(left.value.dtype, shape)]
    [y] = host_call.call_kernel(b, "aten::tensordot", args, outputs, _split(left, right))
    return y  # type: ignore[no-any-return]


def with_bias(b: Builder, left: DotOperand, right: DotOperand, bias: Value | None) -> Value | None:
    """A product of rows and a matrix, and a bias for each column, rounded once; None where a call
    does not pay.
    """
    left, right = b.folded(left), b.folded(right)
    along_rows = left.contract == [left.value.rank - 1] and right.contract == [1]
    if not along_rows or not _pays(b, left, right):
        return None
    columns = right.free_sizes
    if bias is not None and (bias.dtype != left.value.dtype or list(bias.shape) != columns):
        return None
    args = (left.value, right.value, bias)
    outputs = [TensorSpec(left.value.dtype, (*left.free_sizes, *columns))]
    of_x, of_weight, of_result = _split(left, right)
    of_bias = [] if bias is None else [min(of_weight, 0)]
    split = [of_x, of_weight, *of_bias, of_result]
    [result] = host_call.call_kernel(b, "aten::linear", args, outputs, split)
    return result  # type: ignore[no-any-return]


def _split(left: DotOperand, right: DotOperand) -> list[int]:
    """Along the first free dimension of the larger operand: each thread lays out the other one."""
    rows, columns = left.free[0], right.free[0]
    if left.value.shape[rows] > 1 and math.prod(left.value.shape) >= math.prod(right.value.shape):
        return [rows, -1, 0]
    return [-1, columns, len(left.free)]


def _pays(b: Builder, left: DotOperand, right: DotOperand) -> bool:
    """Whether a dot without batch dimensions is worth a call."""
    x, y = left.value, right.value
    if x.dtype != y.dtype or not host_call.may_call_kernel(b):
        return False
    rows, columns = math.prod(left.free_sizes), math.prod(right.free_sizes)
    work = 2 * rows * columns * math.prod(x.shape[i] for i in left.contract)
    return rows > 1 < columns and kernel_limits.pays("matmul", x.dtype, work)
