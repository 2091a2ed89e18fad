"""Attention as one node, and the fused layers that nn.MultiheadAttention and
nn.TransformerEncoder use in inference.

Attention keeps no weights for its gradient, but the logarithm of each row's sum, from which the
gradient computes them again, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.program import PartitionSpec, TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import attention_blocks, attention_cuda, attention_tpu
from lazyxla.lowering.rules.random import masked
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Kept = tuple[Value, Value]
"""Which weights dropout keeps, and what it multiplies them with."""


def _linear(b: Builder, x: Value, weight: Value, bias: Value) -> Value:
    product = b.dot(x, weight, [b.rank(x) - 1], [1])
    return b.hlo.add(product, b.broadcast_to(bias, b.shape(product)))


def _masked(b: Builder, scores: Value, mask: Value | None, mask_type: int | None) -> Value:
    """Scores (N, H, T, T) with -inf where the mask is not 0.

    The mask's shape by its type: 0 (T, T), 1 (N, T), 2 (N, H, T, T).
    """
    if mask is None:
        return scores
    mask = b.convert(mask, torch.bool)
    mask = b.unsqueeze(mask, 1, 2) if mask_type == 1 else mask
    return b.select(b.broadcast_to(mask, b.shape(scores)), -math.inf, scores)


def _attend(
    b: Builder,
    inputs: list[Value],
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    mask: Value | None,
    mask_type: int | None,
) -> tuple[Value, Value]:
    """The heads' results (N, T, D) and the attention weights (N, H, T, T) for inputs (N, T, D)."""
    samples, steps, width = b.shape(inputs[0])
    dtype, size = b.dtype(inputs[0]), width // heads

    def project(x: Value, part: int) -> Value:
        span = (0, part * width, (part + 1) * width)
        x = _linear(b, x, b.slice_dim(qkv_weight, *span), b.slice_dim(qkv_bias, *span))
        return b.reshape(x, [samples, steps, heads, size])

    query, key, value = (project(x, part) for part, x in enumerate(inputs))
    query = b.scale(query, 1 / math.sqrt(size))
    scores = b.dot(query, key, [3], [3], [0, 2], [0, 2])
    scores = _masked(b, b.convert(scores, b.compute_dtype(dtype)), mask, mask_type)
    weights = b.lower_op("aten::_softmax", scores, -1, False, outputs=[b.spec(scores)])
    weights = b.convert(weights, dtype)
    joined = b.transpose(b.dot(weights, value, [3], [1], [0, 1], [0, 2]), [0, 2, 1, 3])
    return b.reshape(joined, [samples, steps, width]), weights


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
    inputs = [query, key, value]
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
    eps: Any,
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
        rows = TensorSpec(b.compute_dtype(b.dtype(x)), (*b.shape(x)[:-1], 1))
        specs = [b.spec(x), rows, rows]
        name = "aten::native_layer_norm"
        return b.lower_op(name, x, [embed_dim], weight, bias, eps, outputs=specs)[0]

    def attention(x: Value) -> Value:
        inputs = [x, x, x]
        result, _ = _attend(b, inputs, num_heads, qkv_weight, qkv_bias, mask, mask_type)
        return _linear(b, result, proj_weight, proj_bias)

    def feed_forward(x: Value) -> Value:
        x = _linear(b, x, ffn_weight_1, ffn_bias_1)
        if use_gelu:
            x = b.lower_op("aten::gelu", x, "none", outputs=[b.spec(x)])
        else:
            x = b.hlo.maximum(x, b.full_like(x, 0))
        return _linear(b, x, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = b.hlo.add(x, attention(norm(x, norm_weight_1, norm_bias_1)))
        return b.hlo.add(x, feed_forward(norm(x, norm_weight_2, norm_bias_2)))
    x = norm(b.hlo.add(x, attention(x)), norm_weight_1, norm_bias_1)
    return norm(b.hlo.add(x, feed_forward(x)), norm_weight_2, norm_bias_2)


def _scores(
    b: Builder, query: Value, key: Value, mask: Value | None, is_causal: bool, scale: Any
) -> Value:
    """Scaled and masked products (N, H, S, T) of queries and keys, in the dtype to compute in."""
    samples, heads, rows, size = b.shape(query)
    columns = b.shape(key)[2]
    query = _grouped(b, query, key)
    dtype = b.compute_dtype(b.dtype(query))
    scores = b.dot(query, key, [-1], [3], [0, 1], [0, 1], dtype)
    scores = b.reshape(scores, [samples, heads, rows, columns])
    scores = b.scale(scores, _factor(scale, size))
    if mask is not None and b.dtype(mask) == torch.bool:
        scores = b.select(b.broadcast_to(mask, b.shape(scores)), scores, -math.inf)
    elif mask is not None:
        scores = b.hlo.add(scores, b.broadcast_to(b.convert(mask, dtype), b.shape(scores)))
    if is_causal:
        row, column = (b.iota(b.shape(scores), dim, torch.int32) for dim in (2, 3))
        scores = b.select(b.compare(column, row, "LE"), scores, -math.inf)
    return scores


def _factor(scale: Any, size: int) -> Any:
    return 1 / math.sqrt(size) if scale is None else scale


def _grouped(b: Builder, x: Value, key: Value) -> Value:
    """(N, H, S, D) with one row of heads for each head of the keys: (N, G, H / G * S, D); in a
    program for many devices (N, G, H / G, S, D), of which the partitioner can split S."""
    samples, heads, rows, size = b.shape(x)
    groups = b.shape(key)[1]
    if b.annotations is not None and groups < heads:
        return b.reshape(x, [samples, groups, heads // groups, rows, size])
    return b.reshape(x, [samples, groups, heads // groups * rows, size])


def _finite(b: Builder, x: Value) -> Value:
    """0 for -inf: of a row that is masked as a whole."""
    return b.select(b.compare(x, b.full_like(x, -math.inf), "EQ"), 0, x)


@rule("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    dropout_p: Any,
    is_causal: bool,
    mask: Value | None,
    scale: Any,
) -> tuple[Value, Value]:
    """The result (N, H, S, D), and the logarithm of each row's sum (N, H, S)."""
    _check_no_dropout(dropout_p)
    if kernel := _kernel(b, query, key, mask):
        factor = _factor(scale, b.shape(query)[3])

        def forward(*parts: Value) -> tuple[Value, ...]:
            return kernel.forward(b, *parts, is_causal, factor)

        sums = TensorSpec(torch.float32, b.shape(query)[:3])
        return _by_samples_and_heads(b, forward, (query, key, value), [b.spec(query), sums])
    rows = (query, key, value, is_causal, mask, scale)
    return attention_blocks.forward(b, _attention, *rows, None)


def _attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    mask: Value | None,
    scale: Any,
    kept: Kept | None,
) -> tuple[Value, Value]:
    scores = _scores(b, query, key, mask, is_causal, scale)
    peak = _finite(b, b.reduce(scores, [3], "max", keepdim=True))
    weights = b.hlo.exponential(b.hlo.subtract(scores, b.broadcast_to(peak, b.shape(scores))))
    total = b.reduce(weights, [3], "sum", keepdim=True)
    grouped = _grouped(b, _kept(b, b.convert(weights, b.dtype(value)), kept), key)
    result = b.dot(grouped, value, [-1], [2], [0, 1], [0, 1], b.dtype(scores))
    result = b.reshape(result, b.shape(query))
    divisor = b.select(b.compare(total, b.full_like(total, 0), "EQ"), 1, total)
    result = b.hlo.divide(result, b.broadcast_to(divisor, b.shape(result)))
    return result, b.squeeze(b.hlo.add(peak, b.hlo.log(total)), 3)


@rule("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    b: Builder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    result: Value,
    logsumexp: Value,
    dropout_p: Any,
    is_causal: bool,
    mask: Value | None,
    scale: Any,
) -> tuple[Value, ...]:
    """The gradients of query, key and value."""
    _check_no_dropout(dropout_p)
    inputs = (query, key, value, result, logsumexp)
    if kernel := _kernel(b, query, key, mask):
        factor = _factor(scale, b.shape(query)[3])

        def backward(grad: Value, *parts: Value) -> tuple[Value, ...]:
            return kernel.backward(b, grad, parts, is_causal, factor)

        results = [b.spec(x) for x in (query, key, value)]
        return _by_samples_and_heads(b, backward, (grad, *inputs), results)
    rest = (is_causal, mask, scale, None)
    return attention_blocks.backward(b, _attention_backward, grad, inputs, *rest)


def _attention_backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    mask: Value | None,
    scale: Any,
    kept: Kept | None,
    key_dtype: torch.dtype | None = None,
) -> tuple[Value, ...]:
    query, key, value, result, logsumexp = inputs
    scores = _scores(b, query, key, mask, is_causal, scale)
    dtype, compute, shape = b.dtype(query), b.dtype(scores), b.shape(scores)
    sums = b.convert(_finite(b, logsumexp), compute)
    total = b.broadcast_to(b.unsqueeze(sums, 3), shape)
    weights = b.hlo.exponential(b.hlo.subtract(scores, total))
    above = _grouped(b, grad, key)
    rows = list(range(2, b.rank(above) - 1))
    grad_value = b.dot(
        _grouped(b, _kept(b, b.convert(weights, dtype), kept), key),
        above,
        rows,
        rows,
        [0, 1],
        [0, 1],
        compute,
    )
    grad_weights = b.reshape(b.dot(above, value, [-1], [3], [0, 1], [0, 1], compute), shape)
    grad_weights = _kept(b, grad_weights, kept)
    wide = (b.convert(x, compute) for x in (grad, result))
    mean = b.reduce(b.hlo.multiply(*wide), [3], "sum", keepdim=True)
    grad_scores = b.hlo.subtract(grad_weights, b.broadcast_to(mean, shape))
    grad_scores = b.hlo.multiply(weights, grad_scores)
    grad_scores = b.scale(grad_scores, _factor(scale, b.shape(query)[3]))
    grad_scores = _grouped(b, b.convert(grad_scores, dtype), key)
    grad_query = b.dot(grad_scores, key, [-1], [2], [0, 1], [0, 1])
    grad_key = b.dot(grad_scores, _grouped(b, query, key), rows, rows, [0, 1], [0, 1], key_dtype)
    return b.reshape(grad_query, b.shape(query)), grad_key, grad_value


def _kept(b: Builder, weights: Value, kept: Kept | None) -> Value:
    return weights if kept is None else masked(b, weights, *kept)


@rule("lazyxla::dropout_attention")
def dropout_attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout_p: Any,
    is_causal: bool,
    scale: Any,
) -> tuple[Value, ...]:
    """As `attention`, and the random stream (2,) that tells which weights were dropped."""
    rows = (query, key, value, is_causal, mask, scale)
    drop = attention_blocks.Drop(dropout_p)
    result, logsumexp = attention_blocks.forward(b, _attention, *rows, drop)
    return result, logsumexp, b.bitcast(b.stack(list(b.rng), 0), torch.int64)


@rule("lazyxla::dropout_attention_backward")
def dropout_attention_backward(
    b: Builder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    result: Value,
    logsumexp: Value,
    stream: Value,
    dropout_p: Any,
    is_causal: bool,
    scale: Any,
) -> tuple[Value, ...]:
    """The gradients of query, key and value."""
    seed, ordinal = (b.bitcast(b.select_dim(stream, 0, i), torch.uint64) for i in range(2))
    inputs = (query, key, value, result, logsumexp)
    rest = (is_causal, mask, scale, attention_blocks.Drop(dropout_p, (seed, ordinal)))
    return attention_blocks.backward(b, _attention_backward, grad, inputs, *rest)


def _kernel(b: Builder, query: Value, key: Value, mask: Value | None) -> ModuleType | None:
    """What has the platform's kernel, if it is for this attention.

    The partitioner of programs for many devices cannot split a kernel, and would give every device
    all of its operands: there it is called for each device's samples and heads, if they divide.
    """
    if b.annotations is not None and _parts(b, key) is None:
        return None
    kernel = {"cuda": attention_cuda, "tpu": attention_tpu}.get(b.platform)
    return kernel if kernel and kernel.suits(b, query, key, mask) else None


def _by_samples_and_heads(
    b: Builder,
    function: Callable[..., tuple[Value, ...]],
    xs: Sequence[Value],
    results: Sequence[TensorSpec],
) -> tuple[Value, ...]:
    """The function of values (N, H, ...) as it is, or in a program for many devices once for each
    device's part: whole groups of the heads that share a key."""
    if b.annotations is None:
        return function(*xs)
    spec = _parts(b, min(xs, key=lambda x: b.shape(x)[1]))
    assert spec is not None  # or there would be no kernel
    return tuple(b.annotations.on_each_device(function, xs, results, spec))


def _parts(b: Builder, key: Value) -> PartitionSpec | None:
    """How samples and heads are spread over the devices, so that each has whole groups of heads."""
    assert b.annotations is not None
    return b.annotations.samples_and_heads(*b.shape(key)[:2])


def _check_no_dropout(dropout_p: Any) -> None:
    if dropout_p.item() != 0:
        raise NotImplementedError("dropout within attention; PyTorch composes it of operators")
