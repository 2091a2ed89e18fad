"""The fused layers that nn.MultiheadAttention and nn.TransformerEncoder use in inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import maximum, where
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _linear(b: Builder, x: Value, weight: Value, bias: Value) -> Value:
    return b.dot(x, weight, [-1], [1]) + bias


def _masked(b: Builder, scores: Value, mask: Value | None, mask_type: int | None) -> Value:
    """Scores (N, H, T, T) with -inf where the mask is not 0.

    The mask's shape by its type: 0 (T, T), 1 (N, T), 2 (N, H, T, T).
    """
    if mask is None:
        return scores
    mask = mask.to(torch.bool)
    return where(b.unsqueeze(mask, 1, 2) if mask_type == 1 else mask, -math.inf, scores)


def _attend(
    b: Builder,
    inputs: Sequence[Value],
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    mask: Value | None,
    mask_type: int | None,
) -> tuple[Value, Value]:
    """The heads' results (N, T, D) and the attention weights (N, H, T, T) for inputs (N, T, D)."""
    samples, length, features = inputs[0].shape
    head_dim = features // heads

    def project(x: Value, part: int) -> Value:
        span = (0, part * features, (part + 1) * features)
        x = _linear(b, x, b.slice_dim(qkv_weight, *span), b.slice_dim(qkv_bias, *span))
        return x.reshape([samples, length, heads, head_dim])

    query, key, value = (project(x, part) for part, x in enumerate(inputs))
    scores = b.dot(b.scale(query, 1 / math.sqrt(head_dim)), key, [3], [3], [0, 2], [0, 2])
    scores = _masked(b, scores.accumulated(), mask, mask_type)
    weights = b.lower_op("aten::_softmax", scores, -1, False, outputs=[b.spec(scores)])
    weights = weights.to(query.dtype)
    joined = b.transpose(b.dot(weights, value, [3], [1], [0, 1], [0, 2]), [0, 2, 1, 3])
    return joined.reshape([samples, length, features]), weights


@rule("aten::_native_multi_head_attention")
def native_multi_head_attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    num_head: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None,
    need_weights: bool,
    average_attn_weights: bool,
    mask_type: int | None,
) -> list[Value]:
    inputs = (query, key, value)
    result, weights = _attend(b, inputs, num_head, qkv_weight, qkv_bias, mask, mask_type)
    result = _linear(b, result, proj_weight, proj_bias)
    if len(b.outputs) == 1:
        return [result]
    if not need_weights:
        return [result, b.zeros(b.outputs[1].shape, b.outputs[1].dtype)]
    return [result, weights.mean([1]) if average_attn_weights else weights]


@rule("aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer(
    b: Builder,
    x: Value,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: Operand,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None,
    mask_type: int | None,
) -> Value:
    def norm(x: Value, weight: Value, bias: Value) -> Value:
        statistics = TensorSpec(b.compute_dtype(x.dtype), (*x.shape[:-1], 1))
        specs = [b.spec(x), statistics, statistics]
        args = (x, [embed_dim], weight, bias, eps)
        result: list[Value] = b.lower_op("aten::native_layer_norm", *args, outputs=specs)
        return result[0]

    def attention(x: Value) -> Value:
        inputs = (x, x, x)
        result, _ = _attend(b, inputs, num_heads, qkv_weight, qkv_bias, mask, mask_type)
        return _linear(b, result, proj_weight, proj_bias)

    def feed_forward(x: Value) -> Value:
        x = _linear(b, x, ffn_weight_1, ffn_bias_1)
        if use_gelu:
            x = b.lower_op("aten::gelu", x, "none", outputs=[b.spec(x)])
        else:
            x = maximum(x, 0)
        return _linear(b, x, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = x + attention(norm(x, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(x + attention(x), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
