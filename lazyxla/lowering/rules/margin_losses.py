"""Margin losses over classes, of one label or of several for each sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.classification import MEAN, NONE, by_class
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _reduced(b: Builder, losses: Value, reduction: int) -> Value:
    """The losses (N,) of all samples, or their mean or sum."""
    if reduction == NONE:
        return losses.reshape(b.outputs[0].shape)
    return losses.mean([0]) if reduction == MEAN else losses.sum([0])


def _sample_gradients(b: Builder, grad: Operand, like: Value, reduction: int) -> Value:
    """The loss's gradient as what each sample's own loss gets: (N, 1), or (1, 1) for all."""
    samples = like.shape[0]
    grad = b.value(grad, like.dtype)
    if reduction == MEAN:
        grad = b.scale(grad, 1 / samples)
    return grad.reshape([samples, 1] if grad.rank else [1, 1])


# ---- one label ----


def _margins(
    b: Builder, x: Value, target: Operand, margin: Operand, weight: Value | None
) -> tuple[Value, Value, Value]:
    """The margins, the weights / C, and where the target is; all of shape (N, C).

    A margin is margin - x[target] + x where that is positive, and else 0 (also of nan), as at the
    target.
    """
    x = x if x.rank == 2 else x.reshape([1, -1])
    x, index = by_class(b, x, b.value(target, torch.int64).reshape([-1]))
    gap = margin + (x - b.unsqueeze(b.pick(x, index, 1), 1))
    chosen = b.one_hot(x.shape, index, 1)
    gap = where(~chosen & (gap > 0), gap, 0)
    factor = x.full(1 / x.shape[1])
    if weight is not None:
        factor *= b.unsqueeze(b.take(weight.to(x.dtype), index, 0), 1)
    return gap, factor, chosen


@rule("aten::multi_margin_loss")
def multi_margin_loss(
    b: Builder,
    x: Value,
    target: Operand,
    p: Scalar,
    margin: Operand,
    weight: Value | None,
    reduction: int,
) -> Value:
    gap, factor, _ = _margins(b, x, target, margin, weight)
    gap = gap * gap if int(p) == 2 else gap
    return _reduced(b, (gap * factor).sum([1]), reduction)


@rule("aten::multi_margin_loss_backward")
def multi_margin_loss_backward(
    b: Builder,
    grad: Operand,
    x: Value,
    target: Operand,
    p: Scalar,
    margin: Operand,
    weight: Value | None,
    reduction: int,
) -> Value:
    gap, factor, chosen = _margins(b, x, target, margin, weight)
    slope = gap * 2 if int(p) == 2 else gap.full(1)
    others = where(gap > 0, slope, 0) * factor
    own = -others.sum([1], keepdim=True)
    result = where(chosen, own, others)
    return (result * _sample_gradients(b, grad, result, reduction)).reshape(x.shape)


# ---- several labels ----


def _batch(x: Value, target: Value) -> tuple[Value, Value]:
    """x and target of shape (N, C) or (C,) as (N, C), x in the dtype to compute in."""
    x = x.accumulated()
    x = x if x.rank == 2 else x.reshape([1, -1])
    return x, target.reshape(x.shape)


def _label_margins(b: Builder, x: Value, target: Value) -> tuple[Value, Value, Value]:
    """Of x and target (N, C): labels, C for none; where x is labelled; margins (N, label, class).

    A margin is 1 - x[label] + x[class] where that is positive, the label exists and the class is
    not labelled, and 0 elsewhere.
    """
    samples, classes = shape = x.shape
    order = b.iota(shape, 1, torch.int64)
    end = b.reduce(where(target < 0, order, classes), [1], "min", keepdim=True)
    given = order < end
    labels = where(given, target, classes)
    ones = b.full(shape, 1, torch.int32)
    labelled = b.scatter_along(b.zeros(shape, torch.int32), labels, ones, 1).to(torch.bool)
    own = b.take_along(x, where(given, target, 0), 1)
    cube = [samples, classes, classes]
    gap = 1 - b.broadcast_to(b.unsqueeze(own, 2), cube) + b.unsqueeze(x, 1)
    counts = b.unsqueeze(given, 2) & ~b.broadcast_to(b.unsqueeze(labelled, 1), cube)
    return labels, labelled, where(counts & (gap > 0), gap, 0)


@rule("aten::multilabel_margin_loss_forward")
def multilabel_margin_loss(b: Builder, x: Value, target: Value, reduction: int) -> list[Value]:
    x, target = _batch(x, target)
    _, labelled, gaps = _label_margins(b, x, target)
    losses = b.scale(gaps.sum([1, 2]), 1 / x.shape[1])
    return [_reduced(b, losses, reduction), labelled.reshape(b.outputs[1].shape)]


@rule("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    b: Builder, grad: Operand, x: Value, target: Value, reduction: int, is_target: Value
) -> Value:
    rows, target = _batch(x, target)
    labels, _, gaps = _label_margins(b, rows, target)
    hits = (gaps > 0).to(rows.dtype)
    rise, fall = hits.sum([1]), -hits.sum([2])
    result = b.scale(b.scatter_along(rise, labels, fall, 1, "add"), 1 / rows.shape[1])
    return (result * _sample_gradients(b, grad, result, reduction)).reshape(x.shape)
