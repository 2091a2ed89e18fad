"""Losses over classes: negative log likelihood, and cross-entropy of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import exp, log, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


NONE, MEAN, SUM = range(3)  # at::Reduction


def by_class(b: Builder, x: Value, target: Operand) -> tuple[Value, Value]:
    """x as (N, C, ...) in the dtype to compute in, target as (N, ...) of int64."""
    if not x.rank:  # PyTorch's meta function takes it, its kernels refuse it
        raise ValueError("there is no dimension of classes")
    x, target = x.accumulated(), b.value(target, torch.int64)
    return (b.unsqueeze(x, 0), target.reshape([1])) if x.rank == 1 else (x, target)


def _target_weights(
    b: Builder, x: Value, target: Value, weight: Value | None, ignore_index: int
) -> tuple[Value, Value, Value]:
    """The weight of every target, 0 for ignored ones; which are not ignored; and the targets, 0 for
    ignored ones too.
    """
    ignored = target == ignore_index
    safe = where(ignored, 0, target)
    if weight is None:
        weights = b.full(target.shape, 1, x.dtype)
    else:
        weights = b.take(weight.to(x.dtype), safe, 0)
    weights = where(ignored, 0, weights)
    return weights, ~ignored, safe


def _summed(losses: Value, weights: Value, reduction: int) -> list[Value]:
    """The losses, their sum or their weighted mean; and the sum of the weights."""
    dims = range(losses.rank)
    total = weights.sum(dims)
    if reduction == NONE:
        return [losses, total]
    loss = losses.sum(dims)
    return [loss / total if reduction == MEAN else loss, total]


def _unsummed(
    b: Builder, grad: Operand, weights: Value, counted: Value, reduction: int, total: Operand
) -> Value:
    """From the gradient of _summed's result to those of the unweighted losses (N, 1, ...)."""
    grad = b.value(grad, weights.dtype)
    if reduction == MEAN:
        grad = grad / b.value(total, weights.dtype)
    # An ignored target has weight 0, yet 0 / 0 is possible if all are.
    return b.unsqueeze(where(counted, weights * grad, 0), 1)


# ---- negative log likelihood ----


@rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(
    b: Builder,
    x: Value,
    target: Operand,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> list[Value]:
    single = x.rank == 1
    x, index = by_class(b, x, target)
    weights, counted, safe = _target_weights(b, x, index, weight, ignore_index)
    losses = -(where(counted, b.pick(x, safe, 1), 0) * weights)
    if reduction == NONE and not single:
        return [losses, b.zeros([], x.dtype)]
    return _summed(losses, weights, SUM if reduction == NONE else reduction)


@rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(
    b: Builder,
    grad: Operand,
    x: Value,
    target: Operand,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Operand,
) -> Value:
    shape = x.shape
    x, index = by_class(b, x, target)
    weights, counted, safe = _target_weights(b, x, index, weight, ignore_index)
    grad = _unsummed(b, grad, weights, counted, reduction, total_weight)
    return where(b.one_hot(x.shape, safe, 1), -grad, 0).reshape(shape)


# ---- cross-entropy of logits ----


@rule("lazyxla::cross_entropy")
def cross_entropy(
    b: Builder,
    x: Value,
    target: Operand,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> list[Value]:
    """The loss; per sample the maximum and the logarithm of the sum of the exponentials above it;
    the sum of the weights.
    """
    x, index = by_class(b, x, target)
    maximum = b.reduce(x, [1], "max")
    log_sum = log(exp(x - b.unsqueeze(maximum, 1)).sum([1]))
    weights, counted, safe = _target_weights(b, x, index, weight, ignore_index)
    losses = maximum - b.pick(x, safe, 1) + log_sum
    loss, total = _summed(where(counted, losses * weights, 0), weights, reduction)
    return [loss, maximum, log_sum, total]


@rule("lazyxla::cross_entropy_backward")
def cross_entropy_backward(
    b: Builder,
    grad: Operand,
    x: Value,
    target: Operand,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    maximum: Value,
    log_sum: Value,
    total_weight: Operand,
) -> Value:
    x, index = by_class(b, x, target)
    weights, counted, safe = _target_weights(b, x, index, weight, ignore_index)
    grad = _unsummed(b, grad, weights, counted, reduction, total_weight)
    probabilities = exp(x - b.unsqueeze(maximum, 1) - b.unsqueeze(log_sum, 1))
    chosen = b.one_hot(x.shape, safe, 1)
    return grad * where(chosen, probabilities - 1, probabilities)
