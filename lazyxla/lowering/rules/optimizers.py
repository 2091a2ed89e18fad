"""Fused optimizer steps and gradient scaling, functional forms.

Every fused operator takes lists with one element per parameter and returns the updated lists one
after the other. Numbers such as the learning rate stay dynamic. Parameters are computed in float32
(float64 for float64 ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.functions import expm1, log1p, maximum, sqrt, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


class _Step:
    """What the parameters of one call share: the numbers, the gradients' scale, and whether the
    step is skipped.
    """

    def __init__(
        self, b: Builder, grad_scale: Value | None, found_inf: Value | None, maximize: bool
    ) -> None:
        self.b = b
        self.grad_scale = grad_scale
        self.found_inf = found_inf
        self.maximize = maximize
        self._numbers: dict[Any, Value] = {}

    def number(self, x: Any, like: Value) -> Value:
        """A number, Scalar or one-element tensor, in the dtype of `like`, 0-dim; written once for
        all parameters.
        """
        key = (id(x), like.dtype)
        if key not in self._numbers:
            value = self.b.value(x, like.dtype)
            self._numbers[key] = self.b.reshape(value, ())
        return self._numbers[key]

    def spread(self, number: Value, like: Value) -> Value:
        """A 0-dim Value in the shape of `like`."""
        return self.b.broadcast_to(number, self.b.shape(like))

    def wide(self, x: Value) -> Value:
        return self.b.convert(x, self.b.compute_dtype(self.b.dtype(x)))

    def gradient(self, grad: Value, like: Value) -> tuple[Value, Value]:
        """The unscaled gradient as it is stored, and as it is used."""
        wide = self.b.convert(grad, like.dtype)
        if self.grad_scale is None:
            return grad, (-wide if self.maximize else wide)
        wide = wide / self.spread(self.number(self.grad_scale, wide), wide)
        return self.keep(wide, grad), (-wide if self.maximize else wide)

    def keep(self, new: Value, old: Value) -> Value:
        """The new state, or the old one if a gradient was not finite."""
        new = self.b.convert(new, self.b.dtype(old))
        if self.found_inf is None:
            return new
        skip = self.b.reshape(self.b.value(self.found_inf, torch.bool), ())
        return self.b.select(skip, old, new)

    def less_than_one(self, x: Any, like: Value) -> Value:
        """1 - x as 0-dim of like's dtype, subtracted in float64: for 0.999 float32 has but four
        digits left.
        """
        key = (id(x), like.dtype, "less than one")
        if key not in self._numbers:
            number = self.b.reshape(self.b.value(x, torch.float64), ())
            left = self.b.hlo.subtract(self.b.constant(1, torch.float64), number)
            self._numbers[key] = self.b.convert(left, like.dtype)
        return self._numbers[key]

    def bias_correction(self, beta: Any, step: Value, like: Value) -> Value:
        """1 - beta ** step, 0-dim."""
        return -expm1(self.number(step, like) * log1p(-self.less_than_one(beta, like)))


def _flatten(rows: Sequence[Sequence[Value]]) -> list[Value]:
    """Per parameter -> per output list; what a parameter has not got is left out."""
    return [x for column in zip(*rows, strict=True) for x in column if x is not None]


def _adam(decoupled: bool) -> Callable[..., list[Value]]:
    """Adam (weight decay added to the gradient) or AdamW (`decoupled`: parameters decay by
    themselves).
    """

    def lower(
        b: Builder,
        params: list[Value],
        grads: list[Value],
        exp_avgs: list[Value],
        exp_avg_sqs: list[Value],
        max_exp_avg_sqs: list[Value],
        steps: list[Value],
        lr: Value,
        beta1: Value,
        beta2: Value,
        weight_decay: Value,
        eps: Value,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Value | None,
        found_inf: Value | None,
    ) -> list[Value]:
        step = _Step(b, grad_scale, found_inf, maximize)
        rows = []
        for i, old in enumerate(params):
            p, m, v = step.wide(old), step.wide(exp_avgs[i]), step.wide(exp_avg_sqs[i])
            stored, g = step.gradient(grads[i], p)
            rate = step.number(lr, p)
            if not b.is_const(weight_decay, 0):
                decay = step.number(weight_decay, p)
                if decoupled:
                    p = p * step.spread(1 - rate * decay, p)
                else:
                    g = g + p * step.spread(decay, p)
            m = m + (g - m) * step.spread(step.less_than_one(beta1, p), p)
            fresh = g * g * step.spread(step.less_than_one(beta2, p), p)
            v = v * step.spread(step.number(beta2, p), p) + fresh
            root, highest = v, None
            if amsgrad:
                root = maximum(step.wide(max_exp_avg_sqs[i]), v)
                highest = step.keep(root, max_exp_avg_sqs[i])
            size = rate / step.bias_correction(beta1, steps[i], p)
            scale = 1 / sqrt(step.bias_correction(beta2, steps[i], p))
            denominator = sqrt(root) * step.spread(scale, p)
            denominator = denominator + step.spread(step.number(eps, p), p)
            p = p - m / denominator * step.spread(size, p)
            new = (step.keep(p, old), stored, step.keep(m, exp_avgs[i]))
            rows.append((*new, step.keep(v, exp_avg_sqs[i]), highest))
        return _flatten(rows)

    return lower


rule("aten::_fused_adam", "aten::_fused_adam.tensor_lr")(_adam(decoupled=False))
rule("aten::_fused_adamw", "aten::_fused_adamw.tensor_lr")(_adam(decoupled=True))


@rule("aten::_fused_sgd", "aten::_fused_sgd.tensor_lr")
def fused_sgd(
    b: Builder,
    params: list[Value],
    grads: list[Value],
    momenta: list[Value],
    weight_decay: Value,
    momentum: Value,
    lr: Value,
    dampening: Value,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Value | None,
    found_inf: Value | None,
) -> list[Value]:
    step = _Step(b, grad_scale, found_inf, maximize)
    rows = []
    for i, old in enumerate(params):
        p = step.wide(old)
        stored, g = step.gradient(grads[i], p)
        if not b.is_const(weight_decay, 0):
            g = g + p * step.spread(step.number(weight_decay, p), p)
        kept = None
        if momenta:
            factor = step.spread(step.number(momentum, p), p)
            velocity = g
            if not is_first_step:
                fresh = g * step.spread(step.less_than_one(dampening, p), p)
                velocity = step.wide(momenta[i]) * factor + fresh
            kept = step.keep(velocity, momenta[i])
            g = g + velocity * factor if nesterov else velocity
        p = p - g * step.spread(step.number(lr, p), p)
        rows.append((step.keep(p, old), stored, kept))
    return _flatten(rows)


def _adagrad_rows(
    step: _Step,
    params: list[Value],
    grads: list[Value],
    sums: list[Value],
    steps: list[Value],
    lr: Value,
    lr_decay: Value,
    weight_decay: Value,
    eps: Value,
) -> list[tuple[Value, ...]]:
    b, rows = step.b, []
    for i, old in enumerate(params):
        p = step.wide(old)
        stored, g = step.gradient(grads[i], p)
        if not b.is_const(weight_decay, 0):
            g = g + p * step.spread(step.number(weight_decay, p), p)
        elapsed = step.number(steps[i], p) - 1
        rate = step.number(lr, p) / (1 + elapsed * step.number(lr_decay, p))
        total = step.wide(sums[i]) + g * g
        p = p - g / (sqrt(total) + step.spread(step.number(eps, p), p)) * step.spread(rate, p)
        rows.append((step.keep(p, old), stored, step.keep(total, sums[i])))
    return rows


@rule("aten::_fused_adagrad", "aten::_fused_adagrad.tensor_lr")
def fused_adagrad(
    b: Builder,
    params: list[Value],
    grads: list[Value],
    sums: list[Value],
    steps: list[Value],
    lr: Value,
    lr_decay: Value,
    weight_decay: Value,
    eps: Value,
    maximize: bool,
    grad_scale: Value | None,
    found_inf: Value | None,
) -> list[Value]:
    step = _Step(b, grad_scale, found_inf, maximize)
    rows = _adagrad_rows(step, params, grads, sums, steps, lr, lr_decay, weight_decay, eps)
    results = _flatten(rows)
    # One of the two overloads returns the step counts as well, which it does not change.
    return results + (list(steps) if len(b.outputs) == 4 * len(params) else [])


# ---- gradient scaling ----


@rule("aten::_amp_foreach_non_finite_check_and_unscale")
def unscale(b: Builder, grads: list[Value], found_inf: Value, inv_scale: Value) -> list[Value]:
    results, found = [], b.compare(found_inf, b.full_like(found_inf, 0), "NE")
    for grad in grads:
        wide = b.convert(grad, b.compute_dtype(b.dtype(grad)))
        finite = b.reduce(b.hlo.is_finite(wide), range(b.rank(wide)), "and")
        found = b.hlo.or_(found, b.broadcast_to(b.hlo.not_(finite), b.shape(found_inf)))
        factor = b.reshape(b.value(inv_scale, b.dtype(wide)), ())
        scaled = b.hlo.multiply(wide, b.broadcast_to(factor, b.shape(wide)))
        results.append(b.convert(scaled, b.dtype(grad)))
    return [*results, b.select(found, b.full_like(found_inf, 1), found_inf)]


@rule("aten::_amp_update_scale")
def update_scale(
    b: Builder,
    scale: Value,
    tracker: Value,
    found_inf: Value,
    growth_factor: Value,
    backoff_factor: Value,
    growth_interval: int,
) -> tuple[Value, Value]:
    s, count = scale, tracker + 1
    found = b.reshape(b.value(found_inf, torch.bool), b.shape(scale))
    grow, shrink = (b.full(b.shape(scale), f, s.dtype) for f in (growth_factor, backoff_factor))
    due = count == growth_interval
    grown = s * grow
    # A scale that would become infinite stays.
    may_grow = b.hlo.is_finite(grown)
    due_here = b.reshape(due, b.shape(scale))
    new = where(found, s * shrink, where(due_here & may_grow, grown, s))
    reset = b.reshape(found, b.shape(tracker)) | due
    return new, where(reset, 0, count)
