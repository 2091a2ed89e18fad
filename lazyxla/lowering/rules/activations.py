"""Activation functions and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import (
    X,
    clip,
    erf,
    exp,
    expm1,
    log1p,
    maximum,
    minimum,
    operands,
    pointwise,
    sigmoid,
    tanh,
    where,
)
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def conj(x: X) -> X:
    """The complex conjugate; a real value itself."""
    return x.call("chlo.conj") if x.is_complex else x


@pointwise("aten::relu", exact=True)
def relu(x: X) -> X:
    return maximum(x, 0)


@pointwise("aten::threshold", exact=True)
def threshold(x: X, limit: X, value: X) -> X:
    return where(x <= limit, value, x)


@pointwise("aten::threshold_backward", exact=True)
def threshold_backward(grad: X, x: X, limit: X) -> X:
    return where(x <= limit, 0, grad)


@pointwise("aten::leaky_relu")
def leaky_relu(x: X, slope: X) -> X:
    return where(x > 0, x, x * slope)


@pointwise("aten::leaky_relu_backward")
def leaky_relu_backward(grad: X, x: X, slope: X, self_is_result: bool) -> X:
    return where(x > 0, grad, grad * slope)


@pointwise("aten::_prelu_kernel")
def prelu(x: X, weight: X) -> X:
    return where(x > 0, x, x * weight)


@pointwise("aten::_prelu_kernel_backward")
def prelu_backward(grad: X, x: X, weight: X) -> tuple[X, X]:
    return where(x > 0, grad, weight * grad), where(x > 0, 0, x * grad)


@pointwise("aten::rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad: X, x: X, noise: X, lower: X, upper: X, training: bool, self_is_result: bool
) -> X:
    fixed = where(x > 0, grad, grad * ((lower + upper) / 2))
    return where(upper - lower > 1e-6, noise * grad, fixed) if training else fixed


@pointwise("aten::elu")
def elu(x: X, alpha: X, scale: X, input_scale: X) -> X:
    return where(x < 0, expm1(x * input_scale) * (alpha * scale), x * scale)


@pointwise("aten::celu")
def celu(x: X, alpha: X) -> X:
    return where(x < 0, expm1(x * (1 / alpha)) * alpha, x)


@pointwise("aten::elu_backward")
def elu_backward(grad: X, alpha: X, scale: X, input_scale: X, is_result: bool, x: X) -> X:
    coefficient = alpha * scale
    inner = x + coefficient if is_result else coefficient * exp(x * input_scale)
    return where(x <= 0, grad * input_scale * inner, grad * scale)


# ---- sigmoid, tanh, softplus ----


@pointwise("aten::sigmoid_backward")
def sigmoid_backward(grad: X, y: X) -> X:
    return grad * conj((1 - y) * y)


@pointwise("aten::tanh_backward")
def tanh_backward(grad: X, y: X) -> X:
    return grad * conj(1 - y * y)


@pointwise("aten::silu")
def silu(x: X) -> X:
    return x * sigmoid(x)


@pointwise("aten::silu_backward")
def silu_backward(grad: X, x: X) -> X:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@pointwise("aten::mish")
def mish(x: X) -> X:
    return x * tanh(_softplus(x))


@pointwise("aten::mish_backward")
def mish_backward(grad: X, x: X) -> X:
    t = tanh(_softplus(x))
    return grad * (t + x * sigmoid(x) * (1 - t * t))


def _softplus(x: X) -> X:
    """log(1 + exp(x)) without overflow."""
    return maximum(x, 0) + log1p(exp(-abs(x)))


@pointwise("aten::softplus")
def softplus(x: X, beta: X, limit: X) -> X:
    scaled = x * beta
    return where(scaled > limit, x, log1p(exp(scaled)) / beta)


@pointwise("aten::softplus_backward")
def softplus_backward(grad: X, x: X, beta: X, limit: X) -> X:
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
    scratch = decay.value if shape == b.shape(x.value) else b.zeros(shape, dtype)
    return (minimum(x, 0) - log1p(decay)).value, scratch


@rule("aten::log_sigmoid_backward")
def log_sigmoid_backward(b: Builder, grad: Value, x: Value, scratch: Value) -> Value:
    grad, x = operands(b, grad, x)
    return (grad * sigmoid(-x)).value


# ---- gelu, glu ----


@pointwise("aten::gelu")
def gelu(x: X, approximate: str) -> X:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + tanh(inner))
    return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))


@pointwise("aten::gelu_backward")
def gelu_backward(grad: X, x: X, approximate: str) -> X:
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        inner = tanh(beta * (x + kappa * (x * x * x)))
        slope = (1 - inner * inner) * (beta * (1 + 3 * kappa * (x * x)))
        return grad * (0.5 * (1 + inner) + 0.5 * x * slope)
    distribution = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad * (distribution + x * density)


def _halves(b: Builder, x: Value, dim: int) -> list[Value]:
    half = b.shape(x)[dim] // 2
    return [b.slice_dim(x, dim, 0, half), b.slice_dim(x, dim, half, 2 * half)]


@rule("aten::glu")
def glu(b: Builder, x: Value, dim: int) -> Value:
    x, gate = operands(b, *_halves(b, x, dim))
    return (x * sigmoid(gate)).value


@rule("aten::glu_backward")
def glu_backward(b: Builder, grad: Value, x: Value, dim: int) -> Value:
    grad, x, gate = operands(b, grad, *_halves(b, x, dim))
    open_ = sigmoid(gate)
    to_x = grad * open_
    return b.concat([to_x.value, (to_x * (1 - open_) * x).value], dim)


# ---- piecewise linear ----


@pointwise("aten::hardtanh_backward")
def hardtanh_backward(grad: X, x: X, low: X, high: X) -> X:
    return where((x <= low) | (x >= high), 0, grad)


@pointwise("aten::hardswish")
def hardswish(x: X) -> X:
    return x * clip(x + 3, 0, 6) / 6


@pointwise("aten::hardswish_backward")
def hardswish_backward(grad: X, x: X) -> X:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


@pointwise("aten::hardsigmoid")
def hardsigmoid(x: X) -> X:
    return clip(x + 3, 0, 6) / 6


@pointwise("aten::hardsigmoid_backward")
def hardsigmoid_backward(grad: X, x: X) -> X:
    return where((x > -3) & (x < 3), grad * (1 / 6), 0)


@pointwise("aten::hardshrink")
def hardshrink(x: X, limit: X) -> X:
    return where((x >= -limit) & (x <= limit), 0, x)


@pointwise("aten::softshrink")
def softshrink(x: X, limit: X) -> X:
    return where(x > limit, x - limit, where(x < -limit, x + limit, x * 0))


@pointwise("aten::hardshrink_backward", "aten::softshrink_backward")
def shrink_backward(grad: X, x: X, limit: X) -> X:
    return where((x >= -limit) & (x <= limit), 0, grad)
