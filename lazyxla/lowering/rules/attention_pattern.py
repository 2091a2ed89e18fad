"""``flex_attention`` with a mask known when it was traced (flex_kernel.py): on TPUs by the kernel
for attention, elsewhere and over many devices by its formula."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.decompose import decompose
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import attention_tpu
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _pattern(b: Builder, query: Value, key: Value, mask: str) -> attention_tpu.Pattern | None:
    """The mask for the kernel; None if that is not for these operands."""
    from lazyxla import flex_kernel

    if b.platform != "tpu" or b.annotations is not None:
        return None
    if not attention_tpu.suits(b, query, key, None):
        return None
    return attention_tpu.Pattern(mask, flex_kernel.masks[mask].seen)


@rule("lazyxla::flex_attention")
def flex_attention(
    b: Builder, query: Value, key: Value, value: Value, mask: str, scale: Any
) -> Any:
    pattern = _pattern(b, query, key, mask)
    if pattern is None:
        return decompose(b, "lazyxla::flex_attention", (query, key, value, mask, scale))
    result, logarithms = attention_tpu.forward(b, query, key, value, False, scale, pattern)
    return result, b.scale(logarithms, 1 / math.log(2))


@rule("lazyxla::flex_attention_backward")
def flex_attention_backward(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    result: Value,
    logarithms: Value,
    grad: Value,
    mask: str,
    scale: Any,
) -> Any:
    pattern = _pattern(b, query, key, mask)
    if pattern is None:
        args = (query, key, value, result, logarithms, grad, mask, scale)
        return decompose(b, "lazyxla::flex_attention_backward", args)
    natural = b.scale(b.convert(logarithms, torch.float32), math.log(2))
    inputs = (query, key, value, result, natural)
    return attention_tpu.backward(b, grad, inputs, False, scale, pattern)
