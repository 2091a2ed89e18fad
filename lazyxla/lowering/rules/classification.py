"""Losses over classes: negative log likelihood, margin losses, CTC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import jax_rule, rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_NONE, _MEAN, _SUM = range(3)  # at::Reduction


# ---- negative log likelihood ----


def _classes(b: Builder, x: Value, target: Value) -> tuple[Value, Value, int]:
    """x as (N, C, ...) in the dtype to compute in, target as (N, ...) of int64, and C."""
    x = b.convert(x, b.compute_dtype(b.dtype(x)))
    target = b.value(target, torch.int64)
    if b.rank(x) == 1:
        x, target = b.unsqueeze(x, 0), b.reshape(target, [1])
    return x, target, b.shape(x)[1]


def _pick(b: Builder, x: Value, target: Value) -> Value:
    """x[n, target[n, ...], ...]."""
    target = b.unsqueeze(target, 1)
    if b.platform != "tpu":
        return b.squeeze(b.take_along(x, target, 1), 1)
    # A TPU gathers element after element; comparing with all classes fuses into what makes x.
    chosen = _one_hot(b, x, target)
    return b.reduce(b.select(chosen, x, 0), [1], "sum")


def _one_hot(b: Builder, x: Value, target: Value) -> Value:
    """Where x (N, C, ...) belongs to the class in target (N, 1, ...)."""
    shape = b.shape(x)
    # 64-bit comparisons are two for a TPU. What is no class stays none in 32 bits.
    limit = b.full_like(target, shape[1])
    inside = b.compare(b.bitcast(target, torch.uint64), b.bitcast(limit, torch.uint64), "LT")
    target = b.convert(b.select(inside, target, -1), torch.int32)
    return b.compare(b.iota(shape, 1, torch.int32), b.broadcast_to(target, shape), "EQ")


def _target_weights(
    b: Builder, x: Value, target: Value, weight: Value | None, ignore_index: int
) -> tuple[Value, Value, Value]:
    """The weight of every target, 0 for ignored ones; where it is not 0; and the targets, 0 for
    ignored ones too.
    """
    ignored = b.compare(target, b.full_like(target, ignore_index), "EQ")
    safe = b.select(ignored, 0, target)
    if weight is None:
        weights = b.full(b.shape(target), 1, b.dtype(x))
    else:
        weights = b.take(b.convert(weight, b.dtype(x)), safe, 0)
    weights = b.select(ignored, 0, weights)
    return weights, b.compare(weights, b.full_like(weights, 0), "NE"), safe


def _summed(b: Builder, losses: Value, weights: Value, reduction: int) -> list[Value]:
    """The losses, their sum or their weighted mean; and the sum of the weights."""
    dims = range(b.rank(losses))
    total = b.reduce(weights, dims, "sum")
    if reduction == _NONE:
        return [losses, total]
    loss = b.reduce(losses, dims, "sum")
    return [b.hlo.divide(loss, total) if reduction == _MEAN else loss, total]


def _unsummed(
    b: Builder, grad: Value, weights: Value, counted: Value, reduction: int, total: Value
) -> Value:
    """From the gradient of what _summed gives to those of the unweighted losses (N, 1, ...)."""
    grad = b.value(grad, b.dtype(weights))
    if reduction == _MEAN:
        grad = b.hlo.divide(grad, b.value(total, b.dtype(weights)))
    grad = b.hlo.multiply(weights, b.broadcast_to(grad, b.shape(weights)))
    # An ignored target has weight 0, yet 0 / 0 is possible if all are.
    return b.unsqueeze(b.select(counted, grad, 0), 1)


@rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(
    b: Builder,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> list[Value]:
    single = b.rank(x) == 1
    x, target, _ = _classes(b, x, target)
    weights, counted, safe = _target_weights(b, x, target, weight, ignore_index)
    losses = b.hlo.negate(b.hlo.multiply(b.select(counted, _pick(b, x, safe), 0), weights))
    if reduction == _NONE and not single:
        return [losses, b.zeros([], b.dtype(x))]
    return _summed(b, losses, weights, _SUM if reduction == _NONE else reduction)


@rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    shape = b.shape(x)
    x, target, _ = _classes(b, x, target)
    weights, counted, safe = _target_weights(b, x, target, weight, ignore_index)
    grad = _unsummed(b, grad, weights, counted, reduction, total_weight)
    chosen = _one_hot(b, x, b.unsqueeze(safe, 1))
    grad = b.broadcast_to(b.hlo.negate(grad), b.shape(x))
    return b.reshape(b.select(chosen, grad, 0), shape)


# ---- cross-entropy of logits ----


def _shifted(b: Builder, x: Value, shift: Value) -> Value:
    """x (N, C, ...) less shift (N, ...)."""
    return b.hlo.subtract(x, b.broadcast_to(b.unsqueeze(shift, 1), b.shape(x)))


@rule("lazyxla::cross_entropy")
def cross_entropy(
    b: Builder,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> list[Value]:
    """The loss; per sample the maximum and the logarithm of the sum of the exponentials above it;
    the sum of the weights.
    """
    x, target, _ = _classes(b, x, target)
    maximum = b.reduce(x, [1], "max")
    shifted = _shifted(b, x, maximum)
    log_sum = b.hlo.log(b.reduce(b.hlo.exponential(shifted), [1], "sum"))
    weights, counted, safe = _target_weights(b, x, target, weight, ignore_index)
    losses = b.hlo.add(b.hlo.subtract(maximum, _pick(b, x, safe)), log_sum)
    losses = b.select(counted, b.hlo.multiply(losses, weights), 0)
    loss, total = _summed(b, losses, weights, reduction)
    return [loss, maximum, log_sum, total]


@rule("lazyxla::cross_entropy_backward")
def cross_entropy_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    maximum: Value,
    log_sum: Value,
    total_weight: Value,
) -> Value:
    x, target, _ = _classes(b, x, target)
    weights, counted, safe = _target_weights(b, x, target, weight, ignore_index)
    grad = _unsummed(b, grad, weights, counted, reduction, total_weight)
    grad = b.broadcast_to(grad, b.shape(x))
    probabilities = b.hlo.exponential(_shifted(b, _shifted(b, x, maximum), log_sum))
    chosen = _one_hot(b, x, b.unsqueeze(safe, 1))
    rest = b.hlo.subtract(probabilities, b.full_like(x, 1))
    return b.hlo.multiply(grad, b.select(chosen, rest, probabilities))


# ---- margin losses ----


def _reduced(b: Builder, losses: Value, reduction: int) -> Value:
    """The losses (N,) of all samples, or their mean or sum."""
    if reduction == _NONE:
        return b.reshape(losses, b.outputs[0].shape)
    return losses.mean([0]) if reduction == _MEAN else b.reduce(losses, [0], "sum")


def _sample_gradients(b: Builder, grad: Value, like: Value, reduction: int) -> Value:
    """The loss's gradient as a value (N, C): what each sample's own loss gets."""
    dtype, shape = b.spec(like)
    grad = b.value(grad, dtype)
    if reduction == _MEAN:
        grad = b.scale(grad, 1 / shape[0])
    grad = b.reshape(grad, [1, 1] if not b.rank(grad) else [shape[0], 1])
    return b.broadcast_to(grad, shape)


def _margins(
    b: Builder, x: Value, target: Value, margin: Value, weight: Value | None
) -> tuple[Value, Value, Value]:
    """The margins, the weights / C, and where the target is; all of shape (N, C).

    A margin is margin - x[target] + x where that is positive, and 0 at the target.
    """
    x = b.reshape(x, [1, -1]) if b.rank(x) < 2 else x
    x, target, classes = _classes(b, x, b.reshape(b.value(target, torch.int64), [-1]))
    shape, dtype = b.shape(x), b.dtype(x)
    own = b.broadcast_to(b.unsqueeze(_pick(b, x, target), 1), shape)
    gap = b.hlo.add(b.full(shape, margin, dtype), b.hlo.subtract(x, own))
    chosen = _one_hot(b, x, b.unsqueeze(target, 1))
    gap = b.select(chosen, 0, b.hlo.maximum(gap, b.full_like(gap, 0)))
    factor = b.full(shape, 1 / classes, dtype)
    if weight is not None:
        weights = b.unsqueeze(b.take(b.convert(weight, dtype), target, 0), 1)
        factor = b.hlo.multiply(factor, b.broadcast_to(weights, shape))
    return gap, factor, chosen


@rule("aten::multi_margin_loss")
def multi_margin_loss(
    b: Builder,
    x: Value,
    target: Value,
    p: Value,
    margin: Value,
    weight: Value | None,
    reduction: int,
) -> Value:
    gap, factor, _ = _margins(b, x, target, margin, weight)
    gap = b.hlo.multiply(gap, gap) if int(p) == 2 else gap
    return _reduced(b, b.reduce(b.hlo.multiply(gap, factor), [1], "sum"), reduction)


@rule("aten::multi_margin_loss_backward")
def multi_margin_loss_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    p: Value,
    margin: Value,
    weight: Value | None,
    reduction: int,
) -> Value:
    gap, factor, chosen = _margins(b, x, target, margin, weight)
    positive = b.compare(gap, b.full_like(gap, 0), "GT")
    slope = b.scale(gap, 2) if int(p) == 2 else b.full_like(gap, 1)
    others = b.hlo.multiply(b.select(positive, slope, 0), factor)
    own = b.hlo.negate(b.reduce(others, [1], "sum", keepdim=True))
    result = b.select(chosen, b.broadcast_to(own, b.shape(others)), others)
    result = b.hlo.multiply(result, _sample_gradients(b, grad, result, reduction))
    return b.reshape(result, b.shape(x))


def _label_margins(b: Builder, x: Value, target: Value) -> tuple[Value, Value, Value]:
    """Of x and target (N, C): labels, C for none; where x is labelled; margins (N, label, class).

    A margin is 1 - x[label] + x[class] where that is positive, the label exists and the class is
    not labelled, and 0 elsewhere.
    """
    samples, classes = shape = b.shape(x)
    none = b.compare(target, b.full_like(target, 0), "LT")
    order = b.iota(shape, 1, torch.int64)
    end = b.reduce(b.select(none, order, classes), [1], "min", keepdim=True)
    given = b.compare(order, b.broadcast_to(end, shape), "LT")
    labels = b.select(given, target, classes)
    ones = b.full(shape, 1, torch.int32)
    labelled = b.scatter_along(b.zeros(shape, torch.int32), labels, ones, 1)
    labelled = b.convert(labelled, torch.bool)
    own = b.take_along(x, b.select(given, target, 0), 1)
    cube = [samples, classes, classes]
    own = b.broadcast_to(b.unsqueeze(own, 2), cube)
    others = b.broadcast_to(b.unsqueeze(x, 1), cube)
    gap = b.hlo.add(b.hlo.subtract(b.full_like(own, 1), own), others)
    counts = b.hlo.and_(
        b.broadcast_to(b.unsqueeze(given, 2), cube),
        b.hlo.not_(b.broadcast_to(b.unsqueeze(labelled, 1), cube)),
    )
    return labels, labelled, b.select(counts, b.hlo.maximum(gap, b.full_like(gap, 0)), 0)


@rule("aten::multilabel_margin_loss_forward")
def multilabel_margin_loss(b: Builder, x: Value, target: Value, reduction: int) -> list[Value]:
    wide, target = _batch(b, x), b.reshape(target, b.shape(_batch(b, x)))
    _, labelled, gaps = _label_margins(b, wide, target)
    losses = b.scale(b.reduce(gaps, [1, 2], "sum"), 1 / b.shape(wide)[1])
    return [_reduced(b, losses, reduction), b.reshape(labelled, b.outputs[1].shape)]


@rule("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    b: Builder, grad: Value, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    wide, target = _batch(b, x), b.reshape(target, b.shape(_batch(b, x)))
    labels, _, gaps = _label_margins(b, wide, target)
    hits = b.convert(b.compare(gaps, b.full_like(gaps, 0), "GT"), b.dtype(wide))
    rise, fall = b.reduce(hits, [1], "sum"), b.hlo.negate(b.reduce(hits, [2], "sum"))
    result = b.scale(b.scatter_along(rise, labels, fall, 1, "add"), 1 / b.shape(wide)[1])
    result = b.hlo.multiply(result, _sample_gradients(b, grad, result, reduction))
    return b.reshape(result, b.shape(x))


def _batch(b: Builder, x: Value) -> Value:
    """x of shape (N, C) or (C,) as (N, C), in the dtype to compute in."""
    x = b.convert(x, b.compute_dtype(b.dtype(x)))
    return x if b.rank(x) == 2 else b.reshape(x, [1, -1])


# ---- connectionist temporal classification ----


def _log_alpha(log_probs: Any, labels: Any, blank: int) -> Any:
    """log alpha (T, N, 2 L + 1) of log_probs (T, N, C) and labels (N, L).

    The recursion is that of Graves et al., Connectionist Temporal Classification, 2006.
    """
    import jax
    import jax.numpy as jnp

    count, length = labels.shape
    path = jnp.full((count, 2 * length + 1), blank, labels.dtype).at[:, 1::2].set(labels)
    scores = jnp.take_along_axis(log_probs, path[None], axis=2)
    new = jnp.pad(path[:, 2:] != path[:, :-2], ((0, 0), (2, 0)))[:, : path.shape[1]]
    skips = new & (path != blank)
    low = jnp.array(-jnp.inf, log_probs.dtype)

    def shifted(alpha: Any, by: int) -> Any:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=low)[:, : alpha.shape[1]]

    def step(alpha: Any, score: Any) -> Any:
        options = [alpha, shifted(alpha, 1), jnp.where(skips, shifted(alpha, 2), low)]
        best = jnp.maximum(jnp.maximum(*options[:2]), options[2])
        best = jax.lax.stop_gradient(jnp.where(jnp.isneginf(best), 0, best))
        total = sum(jnp.exp(o - best) for o in options)
        reached = total > 0
        alpha = jnp.where(reached, jnp.log(jnp.where(reached, total, 1)) + best, low) + score
        return alpha, alpha

    start = jnp.where(jnp.arange(path.shape[1]) < 2, scores[0], low)
    _, rest = jax.lax.scan(step, start, scores[1:])
    return jnp.concatenate([start[None], rest])


def _path_ends(log_alpha: Any, input_lengths: Any, target_lengths: Any) -> Any:
    """The negative log likelihoods (N,): paths end in the last label or in the blank after it."""
    import jax.numpy as jnp

    last = log_alpha[jnp.maximum(input_lengths - 1, 0), jnp.arange(log_alpha.shape[1])]
    ends = jnp.stack([2 * target_lengths, jnp.maximum(2 * target_lengths - 1, 0)], 1)
    scores = jnp.take_along_axis(last, ends, axis=1)
    scores = scores.at[:, 1].set(jnp.where(target_lengths > 0, scores[:, 1], -jnp.inf))
    best = jnp.max(scores, 1)
    safe = jnp.where(jnp.isneginf(best), 0, best)
    total = jnp.sum(jnp.exp(scores - safe[:, None]), 1)
    found = total > 0
    loss = -(jnp.log(jnp.where(found, total, 1)) + safe)
    loss = jnp.where(found, loss, jnp.inf)
    # Of no input at all there is one labelling, the empty one.
    return jnp.where(input_lengths > 0, loss, jnp.where(target_lengths > 0, jnp.inf, 0))


def _label_rows(targets: Any, target_lengths: Any, length: int) -> Any:
    """Labels (N, length) from padded (N, S) or concatenated (sum of lengths,) ones."""
    import jax.numpy as jnp

    places = jnp.arange(length)
    if targets.ndim == 2:
        return targets[:, jnp.minimum(places, max(targets.shape[1] - 1, 0))]
    starts = jnp.cumsum(target_lengths) - target_lengths
    return targets[jnp.minimum(starts[:, None] + places, max(targets.shape[0] - 1, 0))]


def _ctc(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, length: int
) -> tuple[Any, Any]:
    """The losses (N,) and log alpha (T, N, 2 L + 1)."""
    import jax.numpy as jnp

    inputs, lengths = jnp.asarray(input_lengths), jnp.asarray(target_lengths)
    alpha = _log_alpha(log_probs, _label_rows(targets, lengths, length), blank)
    return _path_ends(alpha, inputs, lengths), alpha


@jax_rule("aten::_ctc_loss")
def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: tuple[int, ...],
    target_lengths: tuple[int, ...],
    blank: int,
    zero_infinity: bool,
    *,
    outputs: Any,
) -> tuple[Any, Any]:
    length = (outputs[1].shape[2] - 1) // 2
    losses, alpha = _ctc(log_probs, targets, input_lengths, target_lengths, blank, length)
    return losses, alpha.swapaxes(0, 1)


@jax_rule("aten::_ctc_loss_backward")
def ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: tuple[int, ...],
    target_lengths: tuple[int, ...],
    neg_log_likelihood: Any,
    log_alpha: Any,
    blank: int,
    zero_infinity: bool,
) -> Any:
    """As in PyTorch, the gradient anticipates the log_softmax behind: hence exp(log_probs)."""
    import jax
    import jax.numpy as jnp

    length = (log_alpha.shape[2] - 1) // 2

    def losses(log_probs: Any) -> Any:
        return _ctc(log_probs, targets, input_lengths, target_lengths, blank, length)[0]

    own = jax.vjp(losses, log_probs)[1](grad)[0] + jnp.exp(log_probs) * grad[None, :, None]
    before_end = jnp.arange(log_probs.shape[0])[:, None] < jnp.asarray(input_lengths)
    own = jnp.where(before_end[:, :, None], own, 0)
    unreachable = jnp.isinf(neg_log_likelihood)[None, :, None]
    return jnp.where(unreachable, 0.0 if zero_infinity else jnp.nan, own)
