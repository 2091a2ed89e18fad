"""Large matmuls in bfloat16 by PyTorch's own kernels, where the processor computes in that type.

XLA's compiler multiplies in float32 even there. Milliseconds of a linear layer in bfloat16, two
CPUs of an AMD EPYC with AVX512-BF16 (rows by input features by output features):

                          forward         gradient of x      of the weight
                       XLA  PyTorch       XLA  PyTorch       XLA  PyTorch
    394 x 192 x 768    0.9    0.3         0.8    0.3         0.9    0.4
    512 x 256 x 1024   1.9    0.7         1.9    0.7         2.1    0.7
    512 x 768 x 3072   16.8   6.3         13.1   6.5         13.4   6.2

After a call OpenMP's threads wait for the next one for up to a millisecond, on the processors that
the rest of the program needs: vit_tiny's training step takes 131 ms with none of its matmuls called
and 150 with all that have 60 million operations and more. So only large ones are. Two layers of a
transformer of hidden size 768 over 4 x 128 positions, a training step in autocast: 201 to 226 ms
called, 275 to 299 not, and 154 to 199 in PyTorch; inference of four such layers in bfloat16: 98 to
108, 168 to 188, and 80 to 97 (the best of 20 steps, in three rounds).
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LEAST = 3 * 10**8
"""Multiplications and additions, for each of PyTorch's threads, from which a call pays."""


def product(b: Builder, left: DotOperand, right: DotOperand) -> Value | None:
    """The dot without batch dimensions, rounded to bfloat16; None where a call does not pay."""
    if not _pays(b, left, right):
        return None
    args = (left.value, right.value, list(left.contract), list(right.contract))
    shape = (*left.free_sizes, *right.free_sizes)
    [y] = host_call.call_kernel(b, "aten::tensordot", args, [TensorSpec(torch.bfloat16, shape)])
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
    if bias is not None and (bias.dtype != torch.bfloat16 or list(bias.shape) != columns):
        return None
    args = (left.value, right.value, bias)
    outputs = [TensorSpec(torch.bfloat16, (*left.free_sizes, *columns))]
    [result] = host_call.call_kernel(b, "aten::linear", args, outputs)
    return result  # type: ignore[no-any-return]


def _pays(b: Builder, left: DotOperand, right: DotOperand) -> bool:
    """Whether a dot without batch dimensions is worth a call."""
    x, y = left.value, right.value
    if not (x.dtype == y.dtype == torch.bfloat16 and host_call.may_call_kernel(b)):
        return False
    rows, columns = math.prod(left.free_sizes), math.prod(right.free_sizes)
    work = 2 * rows * columns * math.prod(x.shape[i] for i in left.contract)
    large = rows > 1 < columns and work >= _LEAST * torch.get_num_threads()
    return large and computes_in_bfloat16()


@functools.cache
def computes_in_bfloat16() -> bool:
    """Whether this machine's processor has instructions that multiply bfloat16."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))
