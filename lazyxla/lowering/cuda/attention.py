"""Attention on NVIDIA's GPUs by the kernels that JAX ships for them in Pallas: FlashAttention
(Dao 2023, arXiv:2307.08691), which computes the scores (N, H, S, S) tile by tile and never writes
them. XLA compiles them with Triton, so that they need no package of JAX's for CUDA.

Their logarithms have the base 2. Their scale and their mask, causal or none, are known when a
program is compiled.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.jax_call import call_jax, find_module
from lazyxla.lowering.kernel_device import kernel_device
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from jax import Array

    from lazyxla.lowering.builder import Builder


_PLATFORM = "cuda"
"""The platform for which JAX lowers the kernels."""

_TILE = 128
"""Rows and columns of a tile of the forward kernel; those of the gradient's kernel divide it."""

_LEAST_ROWS = 256
"""Rows from which on the kernels are taken: 64 x 8 x 256 x 128 numbers in bfloat16, forward and
backward, need 384 MiB with plain matmuls and 1 MiB with the kernels, by XLA for an H100."""

_DTYPES = (torch.bfloat16, torch.float16)
"""The kernels multiply float32 with 10 bits of the mantissa only: they are not for it."""

_MOST_NUMBERS = 128
"""Per head: two tiles of more keys and values do not fit into a multiprocessor's memory."""


def suits(b: Builder, query: Value, key: Value, mask: Value | None) -> bool:
    """Whether attention of queries (N, H, S, D) to keys (N, G, T, D) is for the kernels."""
    samples, _, rows, size = query.shape
    return (
        kernel_device(b.target) is not None
        and mask is None
        and query.dtype in _DTYPES
        and samples > 0
        and 16 <= size <= _MOST_NUMBERS
        and rows == key.shape[2]
        and rows % _TILE == 0
        and rows >= _LEAST_ROWS
        and _kernel() is not None
    )


def forward(
    b: Builder, query: Value, key: Value, value: Value, is_causal: bool, factor: Operand
) -> tuple[Value, Value]:
    """See `AttentionKernel`."""
    static = {"is_causal": is_causal, "factor": _known(factor)}
    result, sums = call_jax(b, flash_attention, (query, key, value), static, _PLATFORM)
    return result, sums


def backward(
    b: Builder, grad: Value, inputs: tuple[Value, ...], is_causal: bool, factor: Operand
) -> tuple[Value, ...]:
    """See `AttentionKernel`."""
    static = {"is_causal": is_causal, "factor": _known(factor)}
    return tuple(call_jax(b, flash_attention_backward, (grad, *inputs), static, _PLATFORM))


def _known(factor: Operand) -> float:
    """The scale as a number of the program."""
    assert isinstance(factor, (Scalar, int, float))
    return float(factor)


@functools.cache
def _kernel() -> Any:
    """JAX's module, or None if it lacks what is used here.

    The gradient from a logarithm that was kept is a private function: the public one computes the
    result once more for it.
    """
    names = ("mha", "BlockSizes", "_mha_backward")
    return find_module("jax.experimental.pallas.ops.gpu.attention", *names)


def flash_attention(
    query: Array, key: Array, value: Array, *, is_causal: bool, factor: float
) -> tuple[Array, Array]:
    """For JAX: the result, and the logarithm of each row's sum."""
    import jax

    shape = query.shape
    key, value = (_repeated(x, shape[1]) for x in (key, value))
    with jax.enable_x64(False):
        result, sums = _kernel().mha(
            *map(_one_head, (query, key, value)),
            None,
            sm_scale=factor,
            causal=is_causal,
            return_residuals=True,
        )
    return result.reshape(shape), sums.reshape(shape[:3]) * math.log(2)


def flash_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    result: Array,
    sums: Array,
    *,
    is_causal: bool,
    factor: float,
) -> tuple[Array, ...]:
    """For JAX: the gradients of query, key and value."""
    import jax

    shape, groups = query.shape, key.shape[1]
    key, value = (_repeated(x, shape[1]) for x in (key, value))
    query, key, value, result, grad = map(_one_head, (query, key, value, result, grad))
    kept = (query, key, value, None, result, sums.reshape(-1, 1, shape[2]) / math.log(2))
    with jax.enable_x64(False):
        gradients = _kernel()._mha_backward(
            sm_scale=factor,
            causal=is_causal,
            block_sizes=_kernel().BlockSizes.get_default(),
            backward_pass_impl="triton",
            num_warps=None,
            num_stages=2,
            grid=None,
            interpret=False,
            debug=False,
            return_residuals=False,
            res=kept,
            do=grad,
        )
    of_query, *others = (x.reshape(shape) for x in gradients[:3])
    return of_query, *(_summed(x, groups) for x in others)


def _one_head(x: Array) -> Array:
    """(N, H, S, D) as the kernels want it, (N * H, S, 1, D): its elements stay where they are."""
    return x.reshape(-1, x.shape[2], 1, x.shape[3])


def _repeated(x: Array, heads: int) -> Array:
    """Each head of the keys as often as there are heads of queries for it."""
    return x.repeat(heads // x.shape[1], axis=1)


def _summed(x: Array, groups: int) -> Array:
    """The gradient of `_repeated`."""
    if x.shape[1] == groups:
        return x
    samples, _, *rest = x.shape
    parts = x.reshape(samples, groups, -1, *rest)
    return parts.sum(axis=2, dtype="float32").astype(x.dtype)
