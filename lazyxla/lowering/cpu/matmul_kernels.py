"""Matmuls by PyTorch's own kernels, where these are faster: cpu/kernel_limits.py.

In bfloat16 they are where the processor multiplies more of it than of float32: XLA's compiler
multiplies in float32 even there. Milliseconds of a linear layer in bfloat16, two CPUs of an AMD
EPYC with AVX512-BF16 (rows by input features by output features):

                          forward         gradient of x      of the weight
                       XLA  PyTorch       XLA  PyTorch       XLA  PyTorch
    394 x 192 x 768    0.9    0.3         0.8    0.3         0.9    0.4
    512 x 256 x 1024   1.9    0.7         1.9    0.7         2.1    0.7
    512 x 768 x 3072   16.8   6.3         13.1   6.5         13.4   6.2

In float32, and in bfloat16 by way of float32, they are on Intel's processors with AVX-512. Whole
networks on two CPUs of an Intel Xeon without AMX, in milliseconds:

                                            float32           bfloat16
                                        XLA   PyTorch       XLA  PyTorch
    two layers of a transformer of
      hidden size 256, training step    30.7   28.4         42     36
      hidden size 768                   207    178          222    198
    BERT of four layers, training step  151    136          161    145
    the same, inference                 43.9   35.4
    ViT of four layers, inference       66     55
    mixer_s32, training step            92     82

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
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_LEAST = 64
"""The least size of a dimension in float32. A product of 48 x 4096 x 4096 takes 5.8 ms, by a call
8.0, from 64 rows on 11.3 and 9.5. Of fewer terms XLA computes sums within what reads them, as an
optimizer's update. Two CPUs of an Intel Xeon with AVX-512."""


_FEW_ROWS = 3
"""Of a linear layer, up to which the kernel reads the weight once, on all threads. XLA computes one
row with a bias on one thread, and lays out the weight for two. Milliseconds of a layer with a bias,
two CPUs of an Intel Xeon, XLA and called:

                     1 row       2 rows      3 rows      4 rows
    9216 to 4096     9.4   3.4   7.8   3.3   8.2   3.7   8.3   6.8
    4096 to 4096     2.4   1.3   2.6   1.3   2.7   1.4   2.7   2.5
    768 to 3072      0.39  0.26  0.58  0.26  0.56  0.27  0.56  0.41
    256 to 1024      0.03  0.06  0.13  0.05  0.14  0.06  0.14  0.07

Without a bias one row of 4096 to 4096 takes 1.3, called 1.3, and a token of a Llama of 8 layers of
hidden size 1024 24.5, called 26.4.
"""


class _Matrix(NamedTuple):
    """A dot's operand in two dimensions: the free ones as one, and the contracted ones."""

    value: Value
    free: int


def product(b: Builder, left: DotOperand, right: DotOperand) -> Value | None:
    """The dot without batch dimensions, in its operands' dtype; None where a call does not pay."""
    return _product(b, left, right, None)


def with_bias(b: Builder, left: DotOperand, right: DotOperand, bias: Value | None) -> Value | None:
    """The dot, and a bias for each element of the right operand's free dimension, rounded once."""
    left, right = b.folded(left), b.folded(right)
    suits = bias is None or (bias.dtype == left.value.dtype and [*bias.shape] == right.free_sizes)
    return _product(b, left, right, bias) if suits else None


def _product(b: Builder, left: DotOperand, right: DotOperand, bias: Value | None) -> Value | None:
    """In the operands' dtype or, of narrow floats, in float32, as XLA computes it."""
    dtype = left.value.dtype
    for computed in dict.fromkeys((dtype, b.compute_dtype(dtype))):
        if _pays(b, left, right, bias, computed):
            x, y = (_matrix(b, side, computed) for side in (left, right))
            product = _called(b, x, y, None if bias is None else bias.to(computed))
            return product.reshape([*left.free_sizes, *right.free_sizes]).to(dtype)
    return None


def _called(b: Builder, x: _Matrix, y: _Matrix, bias: Value | None) -> Value:
    """The plugin's threads share the rows or the columns of the result, those of the larger
    operand: each reads the other one as a whole."""
    if math.prod(x.value.shape) >= math.prod(y.value.shape):
        split = [x.free, -1, -1, 0]
    else:
        split = [-1, y.free, 0, 1]
    if bias is None:
        del split[2]
    transposed = [i for i, operand in enumerate((x, y)) if operand.free != 0]
    args = (x.value, y.value, bias)
    outputs = [TensorSpec(x.value.dtype, (x.value.shape[x.free], y.value.shape[y.free]))]
    [product] = host_call.call_kernel(
        b, "aten::linear", args, outputs, split, transposed=transposed
    )
    return product  # type: ignore[no-any-return]


def _matrix(b: Builder, operand: DotOperand, dtype: torch.dtype) -> _Matrix:
    value, contract, free = operand.value.to(dtype), [*operand.contract], operand.free
    inner = math.prod(value.shape[d] for d in contract)
    if [*contract, *free] == [*range(value.rank)]:
        return _Matrix(value.reshape([inner, -1]), 1)
    return _Matrix(b.transpose(value, [*free, *contract]).reshape([-1, inner]), 0)


def _pays(
    b: Builder, left: DotOperand, right: DotOperand, bias: Value | None, dtype: torch.dtype
) -> bool:
    """Whether a dot without batch dimensions is worth a call in a dtype."""
    x, y = left.value, right.value
    if x.dtype != y.dtype or not host_call.may_call_kernel(b):
        return False
    inner = math.prod(x.shape[i] for i in left.contract)
    rows, columns = math.prod(left.free_sizes), math.prod(right.free_sizes)
    work = 2 * rows * columns * inner
    is_layer = dtype == x.dtype and columns > 1 and [*right.contract] == [y.rank - 1]
    few = is_layer and (1 if bias is not None else 2) <= rows <= _FEW_ROWS
    if few and kernel_limits.pays("matmul of few rows", dtype, work):
        return True
    if min(rows, columns, inner) < (_LEAST if dtype == torch.float32 else 2):
        return False
    return kernel_limits.pays("matmul", dtype, work)
