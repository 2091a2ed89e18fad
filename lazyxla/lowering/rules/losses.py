"""Element-wise loss functions and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.functions import exp, log, log1p, maximum, minimum, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.classification import MEAN, SUM
from lazyxla.lowering.rules.formula import operands
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _reduced(loss: Value, reduction: int) -> Value:
    """The loss per element, its mean or its sum."""
    dims = range(loss.rank)
    if reduction == MEAN:
        return loss.mean(dims)
    return loss.sum(dims) if reduction == SUM else loss


def _per_element(grad: Value, reduction: int) -> Value:
    """The gradient of each element of a reduced loss."""
    return grad / grad.count(range(grad.rank)) if reduction == MEAN else grad


def _loss(name: str) -> Callable[..., Any]:
    """Registers formula(x, target, *parameters); the schema's arguments are (x, target, reduction,
    *parameters).
    """

    def register(formula: Callable[..., Value]) -> Callable[..., Value]:
        def lower(b: Builder, x: Value, target: Value, reduction: int, *parameters: Any) -> Value:
            return _reduced(formula(*operands(b, x, target, *parameters)), reduction)

        rule(name)(lower)
        return formula

    return register


def _loss_backward(name: str) -> Callable[..., Any]:
    """Registers the derivative formula(x, target, *parameters) of the loss, without the incoming
    gradient.
    """

    def register(formula: Callable[..., Value]) -> Callable[..., Value]:
        def lower(
            b: Builder, grad: Value, x: Value, target: Value, reduction: int, *parameters: Any
        ) -> Value:
            grad, x, target, *numbers = operands(b, grad, x, target, *parameters)
            return _per_element(formula(x, target, *numbers) * grad, reduction)

        rule(name)(lower)
        return formula

    return register


@_loss("aten::mse_loss")
def mse_loss(x: Value, target: Value) -> Value:
    return (x - target) * (x - target)


@_loss_backward("aten::mse_loss_backward")
def mse_loss_backward(x: Value, target: Value) -> Value:
    return 2 * (x - target)


@_loss("aten::smooth_l1_loss")
def smooth_l1_loss(x: Value, target: Value, beta: Value) -> Value:
    distance = abs(x - target)
    return where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta)


@_loss_backward("aten::smooth_l1_loss_backward")
def smooth_l1_loss_backward(x: Value, target: Value, beta: Value) -> Value:
    difference = x - target
    return where(difference <= -beta, -1, where(difference >= beta, 1, difference / beta))


@_loss("aten::huber_loss")
def huber_loss(x: Value, target: Value, delta: Value) -> Value:
    distance = abs(x - target)
    return where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))


@_loss_backward("aten::huber_loss_backward")
def huber_loss_backward(x: Value, target: Value, delta: Value) -> Value:
    difference = x - target
    return where(difference <= -delta, -delta, where(difference >= delta, delta, difference))


@rule("aten::binary_cross_entropy")
def binary_cross_entropy(
    b: Builder, x: Value, target: Value, weight: Value | None, reduction: int
) -> Value:
    x, target, weight = operands(b, x, target, weight)
    # Logarithms are cut off at -100, as PyTorch does, so that no term is infinite.
    loss = (target - 1) * maximum(log1p(-x), -100) - target * maximum(log(x), -100)
    return _reduced(loss if weight is None else loss * weight, reduction)


@rule("aten::binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    b: Builder, grad: Value, x: Value, target: Value, weight: Value | None, reduction: int
) -> Value:
    grad, x, target, weight = operands(b, grad, x, target, weight)
    slope = grad * (x - target) / maximum((1 - x) * x, 1e-12)
    return _per_element(slope if weight is None else slope * weight, reduction)


@rule("aten::binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    b: Builder,
    x: Value,
    target: Value,
    weight: Value | None,
    pos_weight: Value | None,
    reduction: int,
) -> Value:
    x, target, weight, pos_weight = operands(b, x, target, weight, pos_weight)
    log_sigmoid = minimum(x, 0) - log1p(exp(-abs(x)))
    positive = log_sigmoid if pos_weight is None else (1 + (pos_weight - 1) * target) * log_sigmoid
    loss = (1 - target) * x - positive
    return _reduced(loss if weight is None else loss * weight, reduction)
