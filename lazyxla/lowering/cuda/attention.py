"""Attention on NVIDIA's GPUs by kernels of our own (flash_attention.py), which XLA compiles with
Triton, so that they need no package of JAX's for CUDA.

JAX's own module for this has no dropout and no masks, takes whole tiles only, and is deprecated.
The scale, and whether attention is causal, are known when a program is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.cuda.flash_attention import (
    LEAST_TILE,
    Form,
    Sizes,
    flash_attention,
    flash_attention_backward,
)
from lazyxla.lowering.jax_call import call_jax, find_module
from lazyxla.lowering.kernel_device import kernel_device
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_PLATFORM = "cuda"
"""The platform for which JAX lowers the kernels."""

_LEAST_SCORES = 128 * 128
"""Rows times columns from which on the kernels are taken."""

_DTYPES = (torch.bfloat16, torch.float16)
"""The kernels multiply float32 with 10 bits of the mantissa only: they are not for it."""

_MOST_NUMBERS = 128
"""Per head: two tiles of more keys and values do not fit into a multiprocessor's memory."""

_MOST_LISTED = 1 << 30
"""Scores for which an array may say what dropout or a mask does: a GiB. Of more, Triton would count
the elements in 32 bits with a sign."""

_MOST_BLOCKS = 65535
"""Of a CUDA grid, in its second and third dimension."""


def suits(b: Builder, query: Value, key: Value, mask: Value | None, dropout: bool) -> bool:
    """See `AttentionKernel`."""
    samples, heads, rows, size = query.shape
    columns = key.shape[2]
    listed = samples * heads * rows * columns if dropout or mask is not None else 0
    return (
        kernel_device(b.target) is not None
        and query.dtype in _DTYPES
        and 0 < samples <= _MOST_BLOCKS
        and heads <= _MOST_BLOCKS
        and 16 <= size <= _MOST_NUMBERS
        and rows * columns >= _LEAST_SCORES
        and listed <= _MOST_LISTED
        and _kernel() is not None
    )


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
    """See `AttentionKernel`."""
    form, extra = _form(b, is_causal, factor, mask, dropped, key.shape[2])
    static = {"form": form, "sizes": _sizes(query, key, stages=3)}
    result, sums = call_jax(b, flash_attention, (query, key, value, *extra), static, _PLATFORM)
    return result, sums


def backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    factor: Operand,
    mask: Value | None,
    dropped: Sequence[Value],
) -> tuple[Value, ...]:
    """See `AttentionKernel`."""
    query, key = inputs[:2]
    form, extra = _form(b, is_causal, factor, mask, dropped, key.shape[2])
    stages = 3 if query.shape[3] <= 64 else 2
    static = {"form": form, "sizes": _sizes(query, key, stages)}
    xs = (grad, *inputs, *extra)
    return tuple(call_jax(b, flash_attention_backward, xs, static, _PLATFORM))


def _form(
    b: Builder,
    is_causal: bool,
    factor: Operand,
    mask: Value | None,
    dropped: Sequence[Value],
    columns: int,
) -> tuple[Form, list[Value]]:
    """The kernels' form, and its arrays besides queries, keys and values."""
    assert isinstance(factor, (Scalar, int, float))
    extra = list(dropped)
    if mask is not None:
        mask = mask.reshape([*[1] * (4 - mask.rank), *mask.shape])
        extra.insert(0, b.broadcast_to(mask, [*mask.shape[:3], columns]))
    return Form(is_causal, float(factor), mask is not None, bool(dropped)), extra


def _sizes(query: Value, key: Value, stages: int) -> Sizes:
    """Of tiles, the fastest of ten that were tried on an H100 for (N, H, S, D) of (8, 12, 512, 64)
    with dropout, (32, 12, 197, 64), (16, 12, 128, 64) and causal (1, 8, 4096, 128), or within a
    tenth of it."""
    rows, columns = (
        min(64, max(1 << (length - 1).bit_length(), LEAST_TILE))
        for length in (query.shape[2], key.shape[2])
    )
    return Sizes(rows, columns, warps=4, stages=stages)


@functools.cache
def _kernel() -> Any:
    """JAX's module, or None if it lacks what the kernels use."""
    return find_module("jax.experimental.pallas.triton", "load", "store", "CompilerParams")
