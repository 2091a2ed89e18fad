"""``flex_attention`` with a mask known when it was traced (flex_kernel.py), by the kernel for
attention. Where that is not for the operands, and over many devices, it is the formula.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.decompose import decompose
from lazyxla.lowering.registry import rule
from lazyxla.lowering.tpu import attention
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _pattern(b: Builder, query: Value, key: Value, mask: str) -> attention.Pattern | None:
    """The mask for the kernel; None if that is not for these operands."""
    from lazyxla import flex_kernel

    if b.annotations is not None or not attention.suits(b, query, key):
        return None
    return attention.Pattern(mask, flex_kernel.masks[mask].seen)


@rule("lazyxla::flex_attention", platforms=("tpu",))
def flex_attention(
    b: Builder, query: Value, key: Value, value: Value, mask: str, scale: Operand
) -> Any:
    pattern = _pattern(b, query, key, mask)
    if pattern is None:
        return decompose(b, "lazyxla::flex_attention", (query, key, value, mask, scale))
    result, logarithms = attention.forward(b, query, key, value, pattern, scale)
    return result, b.scale(logarithms, 1 / math.log(2))


@rule("lazyxla::flex_attention_backward", platforms=("tpu",))
def flex_attention_backward(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    result: Value,
    logarithms: Value,
    grad: Value,
    mask: str,
    scale: Operand,
) -> Any:
    pattern = _pattern(b, query, key, mask)
    if pattern is None:
        args = (query, key, value, result, logarithms, grad, mask, scale)
        return decompose(b, "lazyxla::flex_attention_backward", args)
    natural = b.scale(logarithms.to(torch.float32), math.log(2))
    inputs = (query, key, value, result, natural)
    return attention.backward(b, grad, inputs, pattern, scale)
