"""Attention with dropout in a graph: lazyxla's operators, in place of those that PyTorch has for
other packages to define (csrc/dispatch/attention.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten, ours = torch.ops.aten, torch.ops.lazyxla


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    _: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    result, logsumexp, stream = ours.dropout_attention(
        query, key, value, mask, dropout_p, is_causal, scale
    )
    return result, logsumexp, None, None, query.shape[2], key.shape[2], stream, None, None


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    _grad_input_mask: list[bool],
    result: Tensor,
    logsumexp: Tensor,
    _query_lengths: Tensor | None,
    _key_lengths: Tensor | None,
    _most_queries: int,
    _most_keys: int,
    dropout_p: float,
    is_causal: bool,
    stream: Tensor,
    _offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    gradients = ours.dropout_attention_backward(
        grad, query, key, value, mask, result, logsumexp, stream, dropout_p, is_causal, scale
    )
    return *gradients, None


DECOMPOSITIONS = {
    aten._scaled_dot_product_fused_attention_overrideable.default: _forward,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _backward,
}
