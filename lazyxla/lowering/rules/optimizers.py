"""Fused optimizer steps and gradient scaling, functional forms.

Every fused operator takes lists with one element per parameter and returns the updated lists one
after the other. Numbers such as the learning rate stay dynamic. Parameters are computed in float32
(float64 for float64 ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.functions import expm1, is_finite, log1p, maximum, sqrt, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

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
        self._numbers: dict[tuple[object, ...], Value] = {}

    def number(self, x: Operand, like: Value) -> Value:
        """A number, Scalar or one-element tensor, in the dtype of `like`, 0-dim; written once for
        all parameters.
        """
        key = (id(x), like.dtype)
        if key not in self._numbers:
            self._numbers[key] = self.b.value(x, like.dtype).reshape(())
        return self._numbers[key]

    def gradient(self, grad: Value, like: Value) -> tuple[Value, Value]:
        """The unscaled gradient as it is stored, and as it is used."""
        stored, g = grad, grad.to(like.dtype)
        if self.grad_scale is not None:
            g = g / self.number(self.grad_scale, g)
            stored = self.keep(g, grad)
        return stored, (-g if self.maximize else g)

    def keep(self, new: Value, old: Value) -> Value:
        """The new state, or the old one if a gradient was not finite."""
        new = new.to(old.dtype)
        if self.found_inf is None:
            return new
        skip = self.b.value(self.found_inf, torch.bool).reshape(())
        return where(skip, old, new)

    def complement(self, x: Operand, like: Value) -> Value:
        """1 - x as 0-dim of like's dtype, subtracted in float64: for 0.999 float32 has but four
        digits left.
        """
        key = (id(x), like.dtype, "complement")
        if key not in self._numbers:
            left = 1 - self.b.value(x, torch.float64).reshape(())
            self._numbers[key] = left.to(like.dtype)
        return self._numbers[key]

    def bias_correction(self, beta: Operand, step: Value, like: Value) -> Value:
        """1 - beta ** step, 0-dim."""
        return -expm1(self.number(step, like) * log1p(-self.complement(beta, like)))


def _flatten(rows: Sequence[Sequence[Value | None]]) -> list[Value]:
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
        lr: Operand,
        beta1: Operand,
        beta2: Operand,
        weight_decay: Operand,
        eps: Operand,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Value | None,
        found_inf: Value | None,
    ) -> list[Value]:
        step = _Step(b, grad_scale, found_inf, maximize)
        rows: list[tuple[Value | None, ...]] = []
        for i, old in enumerate(params):
            p = old.accumulated()
            m, v = exp_avgs[i].accumulated(), exp_avg_sqs[i].accumulated()
            stored, g = step.gradient(grads[i], p)
            rate = step.number(lr, p)
            if not b.is_const(weight_decay, 0):
                decay = step.number(weight_decay, p)
                if decoupled:
                    p = p * (1 - rate * decay)
                else:
                    g = g + p * decay
            m = m + (g - m) * step.complement(beta1, p)
            v = v * step.number(beta2, p) + g * g * step.complement(beta2, p)
            second, highest = v, None
            if amsgrad:
                second = maximum(max_exp_avg_sqs[i].accumulated(), v)
                highest = step.keep(second, max_exp_avg_sqs[i])
            step_size = rate / step.bias_correction(beta1, steps[i], p)
            scale = 1 / sqrt(step.bias_correction(beta2, steps[i], p))
            p = p - m / (sqrt(second) * scale + step.number(eps, p)) * step_size
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
    weight_decay: Operand,
    momentum: Operand,
    lr: Operand,
    dampening: Operand,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Value | None,
    found_inf: Value | None,
) -> list[Value]:
    step = _Step(b, grad_scale, found_inf, maximize)
    rows: list[tuple[Value | None, ...]] = []
    for i, old in enumerate(params):
        p = old.accumulated()
        stored, g = step.gradient(grads[i], p)
        if not b.is_const(weight_decay, 0):
            g = g + p * step.number(weight_decay, p)
        kept = None
        if momenta:
            factor, velocity = step.number(momentum, p), g
            if not is_first_step:
                fresh = g * step.complement(dampening, p)
                velocity = momenta[i].accumulated() * factor + fresh
            kept = step.keep(velocity, momenta[i])
            g = g + velocity * factor if nesterov else velocity
        p = p - g * step.number(lr, p)
        rows.append((step.keep(p, old), stored, kept))
    return _flatten(rows)


def _adagrad_rows(
    step: _Step,
    params: list[Value],
    grads: list[Value],
    sums: list[Value],
    steps: list[Value],
    lr: Operand,
    lr_decay: Operand,
    weight_decay: Operand,
    eps: Operand,
) -> list[tuple[Value, ...]]:
    b = step.b
    rows: list[tuple[Value, ...]] = []
    for i, old in enumerate(params):
        p = old.accumulated()
        stored, g = step.gradient(grads[i], p)
        if not b.is_const(weight_decay, 0):
            g = g + p * step.number(weight_decay, p)
        elapsed = step.number(steps[i], p) - 1
        rate = step.number(lr, p) / (1 + elapsed * step.number(lr_decay, p))
        total = sums[i].accumulated() + g * g
        p = p - g / (sqrt(total) + step.number(eps, p)) * rate
        rows.append((step.keep(p, old), stored, step.keep(total, sums[i])))
    return rows


@rule("aten::_fused_adagrad", "aten::_fused_adagrad.tensor_lr")
def fused_adagrad(
    b: Builder,
    params: list[Value],
    grads: list[Value],
    sums: list[Value],
    steps: list[Value],
    lr: Operand,
    lr_decay: Operand,
    weight_decay: Operand,
    eps: Operand,
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
    results, found = [], found_inf != 0
    for grad in grads:
        g = grad.accumulated()
        found = found | ~b.reduce(is_finite(g), range(g.rank), "and")
        factor = b.value(inv_scale, g.dtype).reshape(())
        results.append((g * factor).to(grad.dtype))
    return [*results, where(found, 1, found_inf)]


@rule("aten::_amp_update_scale")
def update_scale(
    b: Builder,
    scale: Value,
    tracker: Value,
    found_inf: Value,
    growth_factor: Operand,
    backoff_factor: Operand,
    growth_interval: int,
) -> tuple[Value, Value]:
    count = tracker + 1
    found = found_inf.to(torch.bool).reshape(scale.shape)
    due = count == growth_interval
    grown = scale * growth_factor
    # A scale that would become infinite is kept.
    grows = due.reshape(scale.shape) & is_finite(grown)
    new = where(found, scale * backoff_factor, where(grows, grown, scale))
    return new, where(found.reshape(tracker.shape) | due, 0, count)
