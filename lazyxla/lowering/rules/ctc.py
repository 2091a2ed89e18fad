"""Connectionist temporal classification: the loss and its gradient.

The recursion is that of Graves et al., Connectionist Temporal Classification, 2006.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import jax_rule

if TYPE_CHECKING:
    from jax import Array


def _log_alpha(log_probs: Array, labels: Array, blank: int) -> Array:
    """log alpha (T, N, 2 L + 1) of log_probs (T, N, C) and labels (N, L)."""
    import jax
    import jax.numpy as jnp

    count, length = labels.shape
    path = jnp.full((count, 2 * length + 1), blank, labels.dtype).at[:, 1::2].set(labels)
    scores = jnp.take_along_axis(log_probs, path[None], axis=2)
    new = jnp.pad(path[:, 2:] != path[:, :-2], ((0, 0), (2, 0)))[:, : path.shape[1]]
    skips = new & (path != blank)
    low = jnp.array(-jnp.inf, log_probs.dtype)

    def shifted(alpha: Array, by: int) -> Array:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=low)[:, : alpha.shape[1]]

    def step(alpha: Array, score: Array) -> tuple[Array, Array]:
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


def _path_ends(log_alpha: Array, input_lengths: Array, target_lengths: Array) -> Array:
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
    # An empty input has one labelling, the empty one.
    return jnp.where(input_lengths > 0, loss, jnp.where(target_lengths > 0, jnp.inf, 0))


def _label_rows(targets: Array, target_lengths: Array, length: int) -> Array:
    """Labels (N, length) from padded (N, S) or concatenated (sum of lengths,) ones."""
    import jax.numpy as jnp

    steps = jnp.arange(length)
    if targets.ndim == 2:
        return targets[:, jnp.minimum(steps, max(targets.shape[1] - 1, 0))]
    starts = jnp.cumsum(target_lengths) - target_lengths
    return targets[jnp.minimum(starts[:, None] + steps, max(targets.shape[0] - 1, 0))]


def _ctc(
    log_probs: Array,
    targets: Array,
    input_lengths: tuple[int, ...],
    target_lengths: tuple[int, ...],
    blank: int,
    length: int,
) -> tuple[Array, Array]:
    """The losses (N,) and log alpha (T, N, 2 L + 1)."""
    import jax.numpy as jnp

    inputs, lengths = jnp.asarray(input_lengths), jnp.asarray(target_lengths)
    alpha = _log_alpha(log_probs, _label_rows(targets, lengths, length), blank)
    return _path_ends(alpha, inputs, lengths), alpha


@jax_rule("aten::_ctc_loss")
def ctc_loss(
    log_probs: Array,
    targets: Array,
    input_lengths: tuple[int, ...],
    target_lengths: tuple[int, ...],
    blank: int,
    zero_infinity: bool,
    *,
    outputs: tuple[TensorSpec, ...],
) -> tuple[Array, Array]:
    length = (outputs[1].shape[2] - 1) // 2
    losses, alpha = _ctc(log_probs, targets, input_lengths, target_lengths, blank, length)
    return losses, alpha.swapaxes(0, 1)


@jax_rule("aten::_ctc_loss_backward")
def ctc_loss_backward(
    grad: Array,
    log_probs: Array,
    targets: Array,
    input_lengths: tuple[int, ...],
    target_lengths: tuple[int, ...],
    neg_log_likelihood: Array,
    log_alpha: Array,
    blank: int,
    zero_infinity: bool,
) -> Array:
    """As in PyTorch, the gradient includes that of the preceding log_softmax: hence
    exp(log_probs)."""
    import jax
    import jax.numpy as jnp

    length = (log_alpha.shape[2] - 1) // 2

    def losses(log_probs: Array) -> Array:
        return _ctc(log_probs, targets, input_lengths, target_lengths, blank, length)[0]

    own = jax.vjp(losses, log_probs)[1](grad)[0] + jnp.exp(log_probs) * grad[None, :, None]
    unreachable = jnp.isinf(neg_log_likelihood)[None, :, None]
    own = jnp.where(unreachable, 0.0 if zero_infinity else jnp.nan, own)
    before_end = jnp.arange(log_probs.shape[0])[:, None] < jnp.asarray(input_lengths)
    return jnp.where(before_end[:, :, None], own, 0)
