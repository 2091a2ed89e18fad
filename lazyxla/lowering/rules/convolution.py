"""Convolutions of one to three (or more) spatial dimensions.

A convolution y = conv(x, w), with x of shape (N, C, *in), w of shape (O, C / groups, *kernel) and
y of shape (N, O, *out), has three linear maps, and every operator here is one of them:

    forward       (x, w) -> y     y[n, o, p] = sum over c and k of
                                  x[n, c, stride * p + dilation * k - padding] * w[o, c, k]
    input_grad    (y, w) -> x     its adjoint in x
    weight_grad   (x, y) -> w     its adjoint in w

A transposed convolution is `input_grad` with the weight (O, C / groups, *kernel) of the convolution
that it is the adjoint of; its gradients are `forward` and `weight_grad` with x and y exchanged.

The maps here are XLA's own convolution; a platform may have others (`Maps`). They may give 16-bit
floats in float32, for the operator to round once at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.normalization import channel_dims, of_channels
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value:
    """y of shape (N, O, *out) from x and w."""
    shape = [x.shape[0], w.shape[0], *window.out_sizes(x.shape[2:])]
    if is_empty(x.shape, w.shape, shape):
        return b.zeros(shape, x.dtype)
    return _conv(
        b,
        x,
        w,
        window.stride,
        [(p, p) for p in window.padding],
        rhs_dilation=window.dilation,
        groups=window.groups,
    )


def input_grad(b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window) -> Value:
    """x of shape (N, C, *sizes): a convolution of the spread-out y with the flipped weight."""
    groups, kernel = window.groups, window.kernel
    n, o = y.shape[:2]
    shape = [n, w.shape[1] * groups, *sizes]
    if is_empty(y.shape, w.shape, shape):
        return b.zeros(shape, y.dtype)
    if groups > 1:  # (O, C / groups) -> (O / groups, C), the group's features as inputs and outputs
        w = w.reshape([groups, o // groups, shape[1] // groups, *kernel])
        w = b.swap(w, 0, 1).reshape([o // groups, shape[1], *kernel])
    spread = window.spread(y.shape[2:])
    reach = [d * (k - 1) for d, k in zip(window.dilation, kernel, strict=True)]
    padding = [
        (r - p, size - s + p)
        for r, p, size, s in zip(reach, window.padding, sizes, spread, strict=True)
    ]
    return _conv(
        b,
        y,
        b.flip(w, range(2, w.rank)),
        [1] * len(kernel),
        padding,
        lhs_dilation=window.stride,
        rhs_dilation=window.dilation,
        groups=groups,
        layout="NC_IO_NC",
    )


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value:
    """w of shape (O, C / groups, *kernel): a convolution of x with y that sums over the batch."""
    shape = [y.shape[1], x.shape[1] // window.groups, *window.kernel]
    if is_empty(x.shape, y.shape, shape):
        return b.zeros(shape, x.dtype)
    sizes, spread = x.shape[2:], window.spread(y.shape[2:])
    padding = [
        (p, d * (k - 1) + s - size - p)
        for p, d, k, s, size in zip(
            window.padding, window.dilation, window.kernel, spread, sizes, strict=True
        )
    ]
    return _conv(
        b,
        x,
        y,
        window.dilation,
        padding,
        rhs_dilation=window.stride,
        batch_groups=window.groups,
        layout="CN_IO_CN",
    )


def is_empty(*shapes: Sequence[int]) -> bool:
    """Whether one of the shapes has no elements."""
    return any(math.prod(shape) == 0 for shape in shapes)


def _conv(
    b: Builder,
    lhs: Value,
    rhs: Value,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    **options: Any,
) -> Value:
    """`Builder.conv`; negative padding, which XLA's fast paths do not know, crops beforehand."""
    if any(n < 0 for pair in padding for n in pair):
        interior = [0, 0] + [d - 1 for d in lhs_dilation or [1] * len(padding)]
        low, high = ([0, 0] + [p[side] for p in padding] for side in (0, 1))
        lhs = b.pad(lhs, low, high, interior)
        padding, lhs_dilation = [(0, 0)] * len(padding), None
    return b.conv(lhs, rhs, strides, padding, lhs_dilation, **options)


class Maps(NamedTuple):
    """The three maps, in the forms that a platform's compiler is best at."""

    forward: Callable[[Builder, Value, Value, Window], Value] = forward
    input_grad: Callable[[Builder, Value, Value, Sequence[int], Window], Value] = input_grad
    weight_grad: Callable[[Builder, Value, Value, Window], Value] = weight_grad


_MAPS = Maps()


@rule("aten::convolution")
def convolution(
    b: Builder,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    maps: Maps = _MAPS,
) -> Value:
    window = Window.of(w.shape[2:], stride, padding, dilation, groups)
    if transposed:
        y = maps.input_grad(b, x, w, b.outputs[0].shape[2:], window)
    else:
        y = maps.forward(b, x, w, window)
    return y if bias is None else y + of_channels(y, bias.to(y.dtype))


@rule("aten::convolution_backward")
def convolution_backward(
    b: Builder,
    grad: Value,
    x: Value,
    w: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    maps: Maps = _MAPS,
) -> tuple[Value | None, ...]:
    if is_empty(grad.shape, x.shape, w.shape):  # PyTorch's result has no channels if x has none
        shapes = (x.shape, w.shape, bias_sizes or ())
        zeros = [b.zeros(shape, grad.dtype) for shape in shapes]
        return tuple(z if m else None for z, m in zip(zeros, output_mask, strict=True))
    window = Window.of(w.shape[2:], stride, padding, dilation, groups)
    grad_x = grad_w = grad_bias = None
    if output_mask[0] and transposed:
        # Output padding of a stride or more: no input corresponds to the windows at the end.
        grad_x = b.slice(maps.forward(b, grad, w, window), [0] * x.rank, x.shape)
    elif output_mask[0]:
        grad_x = maps.input_grad(b, grad, w, x.shape[2:], window)
    if output_mask[1] and transposed:
        grad_w = maps.weight_grad(b, grad, x, window)
    elif output_mask[1]:
        grad_w = maps.weight_grad(b, x, grad, window)
    if output_mask[2]:
        grad_bias = grad.accumulated().sum(channel_dims(grad))
    return grad_x, grad_w, grad_bias
