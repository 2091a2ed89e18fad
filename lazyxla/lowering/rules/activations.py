"""Activation functions and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering.functions import (
    clip,
    conj,
    erf,
    exp,
    expm1,
    log1p,
    maximum,
    minimum,
    sigmoid,
    tanh,
    where,
)
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands, pointwise
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@pointwise("aten::relu", exact=True)
def relu(x: Value) -> Value:
    return maximum(x, 0)


@pointwise("aten::threshold", exact=True)
def threshold(x: Value, limit: Value, value: Value) -> Value:
    return where(x <= limit, value, x)


@pointwise("aten::threshold_backward", exact=True)
def threshold_backward(grad: Value, x: Value, limit: Value) -> Value:
    return where(x <= limit, 0, grad)


@pointwise("aten::leaky_relu")
def leaky_relu(x: Value, slope: Value) -> Value:
    return where(x > 0, x, x * slope)


@pointwise("aten::leaky_relu_backward")
def leaky_relu_backward(grad: Value, x: Value, slope: Value, self_is_result: bool) -> Value:
    return where(x > 0, grad, grad * slope)


@pointwise("aten::_prelu_kernel")
def prelu(x: Value, weight: Value) -> Value:
    return where(x > 0, x, x * weight)


@pointwise("aten::_prelu_kernel_backward")
def prelu_backward(grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    return where(x > 0, grad, weight * grad), where(x > 0, 0, x * grad)


@pointwise("aten::rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad: Value,
    x: Value,
    noise: Value,
    lower: Value,
    upper: Value,
    training: bool,
    self_is_result: bool,
) -> Value:
    fixed = where(x > 0, grad, grad * ((lower + upper) / 2))
    return where(upper - lower > 1e-6, noise * grad, fixed) if training else fixed


@pointwise("aten::elu")
def elu(x: Value, alpha: Value, scale: Value, input_scale: Value) -> Value:
    return where(x < 0, expm1(x * input_scale) * (alpha * scale), x * scale)


@pointwise("aten::celu")
def celu(x: Value, alpha: Value) -> Value:
    return where(x < 0, expm1(x * (1 / alpha)) * alpha, x)


@pointwise("aten::elu_backward")
def elu_backward(
    grad: Value, alpha: Value, scale: Value, input_scale: Value, is_result: bool, x: Value
) -> Value:
    coefficient = alpha * scale
    inner = x + coefficient if is_result else coefficient * exp(x * input_scale)
    return where(x <= 0, grad * input_scale * inner, grad * scale)


# ---- sigmoid, tanh, softplus ----


@pointwise("aten::sigmoid_backward")
def sigmoid_backward(grad: Value, y: Value) -> Value:
    return grad * conj((1 - y) * y)


@pointwise("aten::tanh_backward")
def tanh_backward(grad: Value, y: Value) -> Value:
    return grad * conj(1 - y * y)


@pointwise("aten::silu")
def silu(x: Value) -> Value:
    return x * sigmoid(x)


@pointwise("aten::silu_backward")
def silu_backward(grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@pointwise("aten::mish")
def mish(x: Value) -> Value:
    return x * tanh(_softplus(x))


@pointwise("aten::mish_backward")
def mish_backward(grad: Value, x: Value) -> Value:
    t = tanh(_softplus(x))
    return grad * (t + x * sigmoid(x) * (1 - t * t))


def _softplus(x: Value) -> Value:
    """log(1 + exp(x)) without overflow."""
    return maximum(x, 0) + log1p(exp(-abs(x)))


@pointwise("aten::softplus")
def softplus(x: Value, beta: Value, limit: Value) -> Value:
    scaled = x * beta
    return where(scaled > limit, x, log1p(exp(scaled)) / beta)


@pointwise("aten::softplus_backward")
def softplus_backward(grad: Value, x: Value, beta: Value, limit: Value) -> Value:
    scaled = x * beta
    return where(scaled > limit, grad, grad * sigmoid(scaled))


@rule("aten::log_sigmoid_forward")
def log_sigmoid_forward(b: Builder, x: Value) -> tuple[Value, Value]:
    """The second result is scratch for the gradient, which is not used here; devices other than
    the CPU have it empty.
    """
    (x,) = operands(b, x)
    decay = exp(-abs(x))
    dtype, shape = b.outputs[1]
    scratch = decay if shape == x.shape else b.zeros(shape, dtype)
    return minimum(x, 0) - log1p(decay), scratch


@rule("aten::log_sigmoid_backward")
def log_sigmoid_backward(b: Builder, grad: Value, x: Value, scratch: Value) -> Value:
    grad, x = operands(b, grad, x)
    return grad * sigmoid(-x)


# ---- gelu, glu ----


@pointwise("aten::gelu")
def gelu(x: Value, approximate: str) -> Value:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + tanh(inner))
    return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))


@pointwise("aten::gelu_backward")
def gelu_backward(grad: Value, x: Value, approximate: str) -> Value:
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        inner = tanh(beta * (x + kappa * (x * x * x)))
        slope = (1 - inner * inner) * (beta * (1 + 3 * kappa * (x * x)))
        return grad * (0.5 * (1 + inner) + 0.5 * x * slope)
    distribution = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad * (distribution + x * density)


def _halves(x: Value, dim: int) -> list[Value]:
    half = x.shape[dim] // 2
    return [x.b.slice_dim(x, dim, 0, half), x.b.slice_dim(x, dim, half, 2 * half)]


@rule("aten::glu")
def glu(b: Builder, x: Value, dim: int) -> Value:
    x, gate = operands(b, *_halves(x, dim))
    return x * sigmoid(gate)


@rule("aten::glu_backward")
def glu_backward(b: Builder, grad: Value, x: Value, dim: int) -> Value:
    grad, x, gate = operands(b, grad, *_halves(x, dim))
    s = sigmoid(gate)
    grad_x = grad * s
    return b.concat([grad_x, grad_x * (1 - s) * x], dim)


# ---- piecewise linear ----


@pointwise("aten::hardtanh_backward")
def hardtanh_backward(grad: Value, x: Value, low: Value, high: Value) -> Value:
    return where((x <= low) | (x >= high), 0, grad)


@pointwise("aten::hardswish")
def hardswish(x: Value) -> Value:
    return x * clip(x + 3, 0, 6) / 6


@pointwise("aten::hardswish_backward")
def hardswish_backward(grad: Value, x: Value) -> Value:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


@pointwise("aten::hardsigmoid")
def hardsigmoid(x: Value) -> Value:
    return clip(x + 3, 0, 6) / 6


@pointwise("aten::hardsigmoid_backward")
def hardsigmoid_backward(grad: Value, x: Value) -> Value:
    return where((x > -3) & (x < 3), grad * (1 / 6), 0)


@pointwise("aten::hardshrink")
def hardshrink(x: Value, limit: Value) -> Value:
    return where((x >= -limit) & (x <= limit), 0, x)


@pointwise("aten::softshrink")
def softshrink(x: Value, limit: Value) -> Value:
    return where(x > limit, x - limit, where(x < -limit, x + limit, x * 0))


@pointwise("aten::hardshrink_backward", "aten::softshrink_backward")
def shrink_backward(grad: Value, x: Value, limit: Value) -> Value:
    return where((x >= -limit) & (x <= limit), 0, grad)
