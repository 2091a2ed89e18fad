"""Convolutions of one to three (or more) spatial dimensions.

A convolution y = conv(x, w), with x of shape (N, C, *in), w of shape (O, C / groups, *kernel) and
y of shape (N, O, *out), has three linear maps, and every operator here is one of them:

    forward       (x, w) -> y     y[n, o, p] = sum over c and k of
                                  x[n, c, stride * p + dilation * k - padding] * w[o, c, k]
    input_grad    (y, w) -> x     its adjoint in x
    weight_grad   (x, y) -> w     its adjoint in w

On the CPU, 16-bit floats give results in float32, for the operator to round once at its end.

A transposed convolution is `input_grad` with the weight (O, C / groups, *kernel) of the convolution
that it is the adjoint of; its gradients are `forward` and `weight_grad` with x and y exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import convolution_cpu as cpu
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


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
) -> Value:
    window = Window.of(b.shape(w)[2:], stride, padding, dilation, groups)
    if transposed:
        y = input_grad(b, x, w, b.outputs[0].shape[2:], window)
    else:
        y = forward(b, x, w, window)
    if bias is None:
        return y
    bias = b.reshape(b.convert(bias, b.dtype(y)), [1, -1] + [1] * len(window.kernel))
    return b.hlo.add(y, b.broadcast_to(bias, b.shape(y)))


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
) -> tuple[Value | None, ...]:
    window = Window.of(b.shape(w)[2:], stride, padding, dilation, groups)
    grad_x = grad_w = grad_bias = None
    if output_mask[0] and transposed:
        # Output padding of a stride or more: no input stands for the windows at the end.
        n, c, *sizes = b.shape(x)
        grad_x = b.slice(forward(b, grad, w, window), [0] * b.rank(x), [n, c, *sizes])
    elif output_mask[0]:
        grad_x = input_grad(b, grad, w, b.shape(x)[2:], window)
    if output_mask[1] and transposed:
        grad_w = weight_grad(b, grad, x, window)
    elif output_mask[1]:
        grad_w = weight_grad(b, x, grad, window)
    if output_mask[2]:
        wide = b.convert(grad, b.compute_dtype(b.dtype(grad)))
        grad_bias = b.reduce(wide, [0, *range(2, b.rank(grad))], "sum")
    return grad_x, grad_w, grad_bias


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value:
    """y of shape (N, O, *out) from x and w."""
    shape = [b.shape(x)[0], b.shape(w)[0], *window.out_sizes(b.shape(x)[2:])]
    if _empty(b.shape(x), b.shape(w), shape):
        return b.zeros(shape, b.dtype(x))
    if b.platform == "cpu":
        if (y := cpu.forward(b, x, w, window)) is not None:
            return y
        if window.groups > 1:
            return _per_group(b, forward, [(x, 1), (w, 0)], window)
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
    n, o = b.shape(y)[:2]
    shape = [n, b.shape(w)[1] * groups, *sizes]
    if _empty(b.shape(y), b.shape(w), shape):
        return b.zeros(shape, b.dtype(y))
    if b.platform == "cpu":
        if (x := cpu.input_grad(b, y, w, sizes, window)) is not None:
            return x
        if groups > 1:
            return _per_group(
                b, lambda b, y, w, one: input_grad(b, y, w, sizes, one), [(y, 1), (w, 0)], window
            )
    if groups > 1:  # (O, C / groups) -> (O / groups, C), as the group's features come in and go out
        w = b.reshape(w, [groups, o // groups, shape[1] // groups, *kernel])
        w = b.reshape(b.swap(w, 0, 1), [o // groups, shape[1], *kernel])
    spread = window.spread(b.shape(y)[2:])
    reach = [d * (k - 1) for d, k in zip(window.dilation, kernel, strict=True)]
    padding = [
        (r - p, size - s + p)
        for r, p, size, s in zip(reach, window.padding, sizes, spread, strict=True)
    ]
    return _conv(
        b,
        y,
        b.flip(w, range(2, b.rank(w))),
        [1] * len(kernel),
        padding,
        lhs_dilation=window.stride,
        rhs_dilation=window.dilation,
        groups=groups,
        layout="NC_IO_NC",
    )


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value:
    """w of shape (O, C / groups, *kernel): a convolution of x with y that sums over the batch."""
    sizes = b.shape(x)[2:]
    shape = [b.shape(y)[1], b.shape(x)[1] // window.groups, *window.kernel]
    if _empty(b.shape(x), b.shape(y), shape):
        return b.zeros(shape, b.dtype(x))
    if b.platform == "cpu":
        if (w := cpu.weight_grad(b, x, y, window)) is not None:
            return w
        if window.groups > 1:
            return _per_group(b, weight_grad, [(x, 1), (y, 1)], window, join=0)
    spread = window.spread(b.shape(y)[2:])
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
    # PyTorch's CPU kernels round 16-bit results once, after the bias.
    dtype = b.compute_dtype(b.dtype(lhs)) if b.platform == "cpu" else None
    if any(n < 0 for pair in padding for n in pair):
        interior = [0, 0] + [d - 1 for d in lhs_dilation or [1] * len(padding)]
        low, high = ([0, 0] + [p[side] for p in padding] for side in (0, 1))
        lhs = b.pad(lhs, low, high, interior)
        padding, lhs_dilation = [(0, 0)] * len(padding), None
    return b.conv(lhs, rhs, strides, padding, lhs_dilation, dtype=dtype, **options)


def _per_group(
    b: Builder,
    function: Callable[..., Value],
    operands: Sequence[tuple[Value, int]],
    window: Window,
    join: int = 1,
) -> Value:
    """`function` on every group's part of the operands, each given with the dimension to cut."""
    one = window._replace(groups=1)
    results = []
    for group in range(window.groups):
        parts = []
        for x, dim in operands:
            size = b.shape(x)[dim] // window.groups
            parts.append(b.slice_dim(x, dim, group * size, (group + 1) * size))
        results.append(function(b, *parts, one))
    return b.concat(results, join)


def _empty(*shapes: Sequence[int]) -> bool:
    return any(math.prod(shape) == 0 for shape in shapes)
