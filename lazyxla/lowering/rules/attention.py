"""Attention as one node.

It keeps no weights for its gradient, but the logarithm of each row's sum, from which the gradient
computes them again, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135). Where the platform
has a kernel for it (`Builder.attention`), that computes both.

Queries are of shape (N, H, S, D), keys and values (N, G, T, D): samples, heads, sequence length and
head dimension. H / G heads of queries share a head of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.builder.attention import AttentionKernel
from lazyxla.lowering.functions import exp, log, where
from lazyxla.lowering.program import PartitionSpec, TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import attention_blocks
from lazyxla.lowering.rules.attention_blocks import Drop, Kept
from lazyxla.lowering.rules.random import masked
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    dropout_p: Scalar,
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
) -> tuple[Value, ...]:
    """The result (N, H, S, D), and the logarithm of each row's sum (N, H, S)."""
    _check_no_dropout(dropout_p)
    return _forward(b, query, key, value, is_causal, mask, scale, None)


def _forward(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    drop: Drop | None,
) -> tuple[Value, ...]:
    kernel = _kernel(b, query, key, mask, drop)
    if kernel is None:
        rows = (query, key, value, is_causal, mask, scale, drop)
        return attention_blocks.forward(b, _attention, *rows)
    factor = _factor(scale, query)

    def forward(query: Value, key: Value, value: Value, *dropped: Value) -> tuple[Value, ...]:
        return kernel.forward(b, query, key, value, is_causal, factor, mask, dropped)

    xs = (query, key, value, *_kept_of_heads(b, query, key, drop))
    sums = TensorSpec(torch.float32, query.shape[:3])
    return _by_samples_and_heads(b, forward, xs, [b.spec(query), sums])


def _attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    kept: Kept | None,
) -> tuple[Value, Value]:
    scores = _scores(b, query, key, mask, is_causal, scale)
    peak = _finite(b.reduce(scores, [3], "max", keepdim=True))
    weights = exp(scores - peak)
    total = weights.sum([3], keepdim=True)
    grouped = _grouped(b, _dropped(b, weights.to(value.dtype), kept), key)
    result = b.dot(grouped, value, [-1], [2], [0, 1], [0, 1], scores.dtype)
    result = result.reshape(query.shape) / where(total == 0, 1, total)
    return result, b.squeeze(peak + log(total), 3)


def _scores(
    b: Builder,
    query: Value,
    key: Value,
    mask: Value | None,
    is_causal: bool,
    scale: Operand | None,
) -> Value:
    """Scaled and masked scores (N, H, S, T) of queries and keys, in the dtype to compute in."""
    dtype, factor = b.compute_dtype(query.dtype), _factor(scale, query)
    scores = b.dot(_grouped(b, query, key), key, [-1], [3], [0, 1], [0, 1], dtype)
    scores = b.scale(scores.reshape([*query.shape[:3], key.shape[2]]), factor)
    if mask is not None and mask.dtype == torch.bool:
        scores = where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(dtype)
    if is_causal:
        row, column = (b.iota(scores.shape, dim, torch.int32) for dim in (2, 3))
        scores = where(column <= row, scores, -math.inf)
    return scores


def _factor(scale: Operand | None, query: Value) -> Operand:
    return 1 / math.sqrt(query.shape[3]) if scale is None else scale


def _grouped(b: Builder, x: Value, key: Value) -> Value:
    """(N, H, S, D) with one row of heads for each head of the keys: (N, G, H / G * S, D); in a
    program for many devices (N, G, H / G, S, D), of which the partitioner can split S."""
    samples, heads, rows, head_dim = x.shape
    groups = key.shape[1]
    if b.annotations is not None and groups < heads:
        return x.reshape([samples, groups, heads // groups, rows, head_dim])
    return x.reshape([samples, groups, heads // groups * rows, head_dim])


def _finite(x: Value) -> Value:
    """0 for -inf: of a row that is masked as a whole."""
    return where(x == -math.inf, 0, x)


def _dropped(b: Builder, weights: Value, kept: Kept | None) -> Value:
    return weights if kept is None else masked(b, weights, *kept)


@rule("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    b: Builder,
    grad: Value,
    query: Value,
    key: Value,
    value: Value,
    result: Value,
    logsumexp: Value,
    dropout_p: Scalar,
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
) -> tuple[Value, ...]:
    """The gradients of query, key and value."""
    _check_no_dropout(dropout_p)
    inputs = (query, key, value, result, logsumexp)
    return _backward(b, grad, inputs, is_causal, mask, scale, None)


def _backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    drop: Drop | None,
) -> tuple[Value, ...]:
    query, key, value = inputs[:3]
    kernel = _kernel(b, query, key, mask, drop)
    if kernel is None:
        rest = (is_causal, mask, scale, drop)
        return attention_blocks.backward(b, _attention_backward, grad, inputs, *rest)
    factor = _factor(scale, query)

    def backward(grad: Value, *parts: Value) -> tuple[Value, ...]:
        inputs, dropped = parts[:5], parts[5:]
        return kernel.backward(b, grad, inputs, is_causal, factor, mask, dropped)

    xs = (grad, *inputs, *_kept_of_heads(b, query, key, drop))
    return _by_samples_and_heads(b, backward, xs, [b.spec(x) for x in (query, key, value)])


def _attention_backward(
    b: Builder,
    grad: Value,
    inputs: tuple[Value, ...],
    is_causal: bool,
    mask: Value | None,
    scale: Operand | None,
    kept: Kept | None,
    key_dtype: torch.dtype | None = None,
) -> tuple[Value, ...]:
    query, key, value, result, logsumexp = inputs
    scores = _scores(b, query, key, mask, is_causal, scale)
    compute = scores.dtype
    weights = exp(scores - b.unsqueeze(_finite(logsumexp).to(compute), 3))
    above = _grouped(b, grad, key)
    rows = list(range(2, above.rank - 1))
    grouped = _grouped(b, _dropped(b, weights.to(query.dtype), kept), key)
    grad_value = b.dot(grouped, above, rows, rows, [0, 1], [0, 1], compute)
    grad_weights = b.dot(above, value, [-1], [3], [0, 1], [0, 1], compute)
    grad_weights = _dropped(b, grad_weights.reshape(scores.shape), kept)
    along = (grad.to(compute) * result.to(compute)).sum([3], keepdim=True)
    grad_scores = b.scale(weights * (grad_weights - along), _factor(scale, query))
    grad_scores = _grouped(b, grad_scores.to(query.dtype), key)
    grad_query = b.dot(grad_scores, key, [-1], [2], [0, 1], [0, 1])
    grad_key = b.dot(grad_scores, _grouped(b, query, key), rows, rows, [0, 1], [0, 1], key_dtype)
    return grad_query.reshape(query.shape), grad_key, grad_value


@rule("lazyxla::dropout_attention")
def dropout_attention(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout_p: Operand,
    is_causal: bool,
    scale: Operand | None,
) -> tuple[Value, ...]:
    """As `attention`, and the random stream (2,) from which the dropped weights follow."""
    drop = Drop(dropout_p)
    result, logsumexp = _forward(b, query, key, value, is_causal, mask, scale, drop)
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
    dropout_p: Operand,
    is_causal: bool,
    scale: Operand | None,
) -> tuple[Value, ...]:
    """The gradients of query, key and value."""
    seed, ordinal = (b.bitcast(b.select_dim(stream, 0, i), torch.uint64) for i in range(2))
    inputs = (query, key, value, result, logsumexp)
    return _backward(b, grad, inputs, is_causal, mask, scale, Drop(dropout_p, (seed, ordinal)))


def _kept_of_heads(b: Builder, query: Value, key: Value, drop: Drop | None) -> tuple[Value, ...]:
    """What a kernel gets as `dropped`."""
    if drop is None:
        return ()
    kept, factor = drop.kept(b, attention_blocks.scores_shape(query, key))
    return kept, b.broadcast_to(factor.to(torch.float32), query.shape[:2])


def _kernel(
    b: Builder, query: Value, key: Value, mask: Value | None, drop: Drop | None
) -> AttentionKernel | None:
    """The platform's kernel, if it has one for this attention.

    The partitioner of programs for many devices cannot split a kernel, and would give every device
    all of its operands: there it is called for each device's samples and heads, if they divide.
    """
    if b.annotations is not None and (mask is not None or _parts(b, key) is None):
        return None
    kernel = b.attention.kernel
    return kernel if kernel and kernel.suits(b, query, key, mask, drop is not None) else None


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
    spec = _parts(b, min(xs, key=lambda x: x.shape[1]))
    assert spec is not None  # or there would be no kernel
    return tuple(b.annotations.on_each_device(function, xs, results, spec))


def _parts(b: Builder, key: Value) -> PartitionSpec | None:
    """How samples and heads are spread over the devices, so that each has whole groups of heads."""
    assert b.annotations is not None
    return b.annotations.samples_and_heads(*key.shape[:2])


def _check_no_dropout(dropout_p: Scalar) -> None:
    if dropout_p.item() != 0:
        raise NotImplementedError("dropout within attention; PyTorch composes it of operators")
