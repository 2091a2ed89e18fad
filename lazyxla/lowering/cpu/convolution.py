"""Convolutions on the CPU, in forms that XLA runs well.

XLA's own convolution is fast when there are many more positions than features. It rewrites the
weight on every call, which is most of the work for a large weight and a small image, and it is slow
by factors of ten to a thousand on grouped convolutions and their gradients. The forms here do
neither:

- matmul: the input's windows as a matrix (C * kernel, N * positions) by im2col, then one matmul;
  the adjoint ends in col2im. Always for windows that do not overlap, 1x1 ones included, and for
  most gradients of few input features.
- terms: one multiplication of a shifted input for each weight of a group, all in one loop, in a
  function of its own (apart.py); for depthwise convolutions and others with few features per group.

Large convolutions without groups, and those with many, are calls of PyTorch's kernels. Where none
of these is better it is the plain convolution, one for each group. 16-bit floats may give results
in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.cpu import convolution_kernels as kernels
from lazyxla.lowering.cpu.apart import compute_apart
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules import convolution as plain
from lazyxla.lowering.rules.convolution import Maps, is_empty
from lazyxla.lowering.rules.windows import (
    MOST_SLICES,
    Window,
    add_columns,
    add_shifted,
    columns,
    shifted,
    sum_terms,
)
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_Form = Callable[..., "Value | None"]
"""One of the three maps, or None where it is not better than others."""

_MOST_FEATURES = 3
"""Features per group up to which a sum of terms beats a convolution per group ..."""
_MOST_TERMS = 128
"""... and weights per output feature up to which it is one loop of reasonable size. By 9 x 9, two
images of 168 features and 8 x 8 take 0.2 ms, as a matmul over im2col 1.4; of 40 features and
56 x 56 1.2 ms, with PyTorch's kernel 0.7."""
_GROUPED_POSITIONS = 1024
"""Positions up to which one batched matmul beats a convolution per group."""
_FEW_COLUMNS = 64
"""Windows' elements that are few whatever the result's features are."""
_MOST_SUMS = 16
"""Sums that one reduction computes side by side; more spill registers and compile slowly."""
_MOST_TAPS = 128
"""Weights per pair of features up to which a matmul over im2col was compared with XLA's own form,
and up to which the sums of a depthwise gradient, one for each of them, compile quickly."""
_LARGE_IMAGE = 1024
"""Positions of a weight's gradient from which the input is better padded beforehand: 2 x 64 x 56 x
56 by 3 x 3 takes 4.3 ms instead of 9.0; 28 x 28 and less gain nothing."""
_FEW_INPUTS = 8
"""Input features, as an image's colours, up to which im2col and col2im cost less than XLA's own
gradients: of the input a fifth to two thirds of the time (2 x 3 x 224 x 224 by 64 x 3 x 3: 6.4 ms
and 30), of the weight, where windows are apart, half (by 32 x 3 x 3, stride 2: 2.2 ms and 5.6)."""


# ---- the three maps, see rules/convolution.py ----


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value:
    if not is_empty(x.shape, w.shape, window.out_sizes(x.shape[2:])):
        for form in _in_order(window, _better_forward, kernels.forward):
            if (y := form(b, x, w, window)) is not None:
                return y
        if window.groups > 1:
            return _per_group(b, forward, [(x, 1), (w, 0)], window)
    return plain.forward(b, x, w, window)


def input_grad(b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window) -> Value:
    def of_group(b: Builder, y: Value, w: Value, one: Window) -> Value:
        return input_grad(b, y, w, sizes, one)

    if not is_empty(y.shape, w.shape, sizes):
        for form in _in_order(window, _better_input_grad, kernels.input_grad):
            if (x := form(b, y, w, sizes, window)) is not None:
                return x
        if window.groups > 1:
            return _per_group(b, of_group, [(y, 1), (w, 0)], window)
    return plain.input_grad(b, y, w, sizes, window)


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value:
    if not is_empty(x.shape, y.shape, window.kernel):
        for form in _in_order(window, _better_weight_grad, kernels.weight_grad):
            if (w := form(b, x, y, window)) is not None:
                return w
        if window.groups > 1:
            return _per_group(b, weight_grad, [(x, 1), (y, 1)], window, join=0)
        if any(window.padding) and window.is_dense and math.prod(y.shape[2:]) >= _LARGE_IMAGE:
            # XLA would undo the padding without the second barrier, and without the first one
            # compute x once more: ResNet-50 took four seconds longer to compile.
            margins = [0, 0, *window.padding]
            x = b.pad(b.hlo.optimization_barrier([x]), margins, margins)
            x = b.hlo.optimization_barrier([x])
            window = window._replace(padding=(0,) * len(window.padding))
    return plain.weight_grad(b, x, y, window)


def _in_order(window: Window, better: _Form, call: _Form) -> tuple[_Form, _Form]:
    """What is tried first: with groups, what needs no call."""
    return (better, call) if window.groups > 1 else (call, better)


_MAPS = Maps(forward, input_grad, weight_grad)


@rule("aten::convolution", platforms=("cpu",))
def convolution(b: Builder, *args: Any) -> Value:
    called = kernels.convolution(b, *args)
    return plain.convolution(b, *args, maps=_MAPS) if called is None else called


@rule("aten::convolution_backward", platforms=("cpu",))
def convolution_backward(b: Builder, *args: Any) -> tuple[Value | None, ...]:
    return plain.convolution_backward(b, *args, maps=_MAPS)


def _per_group(
    b: Builder,
    function: Callable[[Builder, Value, Value, Window], Value],
    operands: Sequence[tuple[Value, int]],
    window: Window,
    join: int = 1,
) -> Value:
    """`function` on every group's part of the operands, each given with the dimension to cut."""
    one = window._replace(groups=1)

    def part(x: Value, dim: int, group: int) -> Value:
        size = x.shape[dim] // window.groups
        return b.slice_dim(x, dim, group * size, (group + 1) * size)

    lhs, rhs = operands
    groups = range(window.groups)
    return b.concat([function(b, part(*lhs, g), part(*rhs, g), one) for g in groups], join)


# ---- the better forms; None where the plain convolution is the better one ----


def _better_forward(b: Builder, x: Value, w: Value, window: Window) -> Value | None:
    groups = window.groups
    n, (o, inner) = x.shape[0], w.shape[:2]
    sizes = x.shape[2:]
    out = window.out_sizes(sizes)
    if groups > 1 and _few_terms(inner, window):
        return _apart(b, _forward_terms, x, w, window, out)
    if not _as_matmul(b, n, sizes, o, window, x.dtype):
        return None
    batch, i = _batch(groups)
    matrix = _im2col(b, x, window, out).reshape([*batch, inner * window.taps, -1])
    w = w.reshape([*batch, o // groups, inner * window.taps])
    y = b.dot(w, matrix, [i + 1], [i], range(i), range(i), b.compute_dtype(x.dtype))
    return b.swap(y.reshape([o, n, *out]), 0, 1)


def _better_input_grad(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value | None:
    n, o = y.shape[:2]
    if window.groups > 1 and _few_terms(o // window.groups, window):
        return _apart(b, _input_grad_terms, y, w, window, sizes)
    if _few_inputs(w.shape, window) or _as_matmul(b, n, sizes, o, window, y.dtype):
        return _input_grad_matmul(b, y, w, sizes, window)
    return None


def _better_weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value | None:
    groups, taps = window.groups, window.taps
    (n, c), o = x.shape[:2], y.shape[1]
    out, inner = y.shape[2:], c // groups
    if groups == c > 1 and taps <= _MOST_TAPS:
        return _weight_grad_terms(b, x, y, window)
    few_inputs = _few_inputs([o, c], window) and not window.is_dense
    if not (few_inputs or _as_matmul(b, n, x.shape[2:], o, window, x.dtype)):
        return None
    batch, i = _batch(groups)
    matrix = _im2col(b, x, window, out).reshape([*batch, inner * taps, -1])
    y = b.swap(y, 0, 1).reshape([*batch, o // groups, -1])
    w = b.dot(y, matrix, [i + 1], [i + 1], range(i), range(i), b.compute_dtype(x.dtype))
    return w.reshape([o, inner, *window.kernel])


def _few_terms(features: int, window: Window) -> bool:
    return features <= _MOST_FEATURES and features * window.taps <= _MOST_TERMS


def _few_inputs(w: Sequence[int], window: Window) -> bool:
    """Whether the gradients with a weight of shape `w` are matmuls as it has few input features,
    and the matrix of windows is small beside the convolution's result."""
    features, inputs, columns = w[0], w[1], w[1] * window.taps
    few = window.groups == 1 and inputs <= _FEW_INPUTS and window.taps <= _MOST_TAPS
    return few and columns <= max(4 * features, _FEW_COLUMNS)


def _as_matmul(
    b: Builder, n: int, sizes: Sequence[int], features: int, window: Window, dtype: torch.dtype
) -> bool:
    """Whether im2col costs less than what plain convolution does to the weight."""
    positions = n * math.prod(window.out_sizes(sizes))
    if window.groups > 1:
        return positions <= _GROUPED_POSITIONS
    if window.taps == 1 or window.tiles(sizes):
        return True
    # The compiler has a fast convolution for 16 and 32-bit floats only.
    has_fast = b.compute_dtype(dtype) == torch.float32
    return not has_fast or (positions <= 2 * features and window.taps <= _MOST_TAPS)


# ---- matmul ----


def _batch(groups: int) -> tuple[list[int], int]:
    """The batch dimensions of a matmul, and how many they are: one of groups, if there are any.

    Beyond them the operands are plain matrices; XLA would lay others out anew.
    """
    return ([groups], 1) if groups > 1 else ([], 0)


def _input_grad_matmul(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value:
    groups, taps = window.groups, window.taps
    (n, o, *out), inner = y.shape, w.shape[1]
    batch, i = _batch(groups)
    w = w.reshape([*batch, o // groups, inner * taps])
    y = b.swap(y, 0, 1).reshape([*batch, o // groups, -1])
    dtype = b.compute_dtype(y.dtype)
    # A matmul whose sum runs over rows transposes its first operand: let it be the smaller one.
    if math.prod(w.shape) <= math.prod(y.shape):
        matrix = b.dot(w, y, [i], [i], range(i), range(i), dtype)
    else:
        # Transposed in more than two dimensions: XLA would turn a plain transpose of a matmul into
        # one with swapped operands.
        matrix = b.dot(y, w, [i], [i], range(i), range(i), dtype)
        matrix = matrix.reshape([*batch, n, *out, inner, taps])
        rank = matrix.rank
        matrix = b.transpose(matrix, [*range(i), rank - 2, rank - 1, *range(i, rank - 2)])
    matrix = matrix.reshape([groups * inner, taps, n, *out])
    if o > groups:
        return _col2im(b, matrix, sizes, window)
    # With one output per group the matmul is a product, which XLA fuses with what it reads: in a
    # chain of such convolutions each window would compute all windows of the one before again.
    key = (_col2im.__name__, window, tuple(sizes))
    return compute_apart(b, key, lambda x: _col2im(b, x, sizes, window), [matrix])


def _im2col(b: Builder, x: Value, window: Window, out: Sequence[int]) -> Value:
    """What each weight of the kernel reads: shape (C, taps, N, *out)."""
    n, c, *sizes = x.shape
    x, rank = b.swap(x, 0, 1), len(out)
    if not _side_by_side(window, sizes, out):
        if window.taps > MOST_SLICES:
            return b.swap(columns(b, x, window, out), 1, 2)
        return b.stack(shifted(b, x, window, out), 1)
    pairs = [k for pair in zip(out, window.kernel, strict=True) for k in pair]
    order = [0, *range(3, 2 + 2 * rank, 2), 1, *range(2, 2 + 2 * rank, 2)]
    return b.transpose(x.reshape([c, n, *pairs]), order).reshape([c, window.taps, n, *out])


def _col2im(b: Builder, x: Value, sizes: Sequence[int], window: Window) -> Value:
    """The adjoint of `_im2col`: (C, taps, N, *out) to (N, C, *sizes)."""
    c, taps, n, *out = x.shape
    if not _side_by_side(window, sizes, out):
        if taps > MOST_SLICES:
            return b.swap(add_columns(b, b.swap(x, 1, 2), sizes, window), 0, 1)
        parts = [b.select_dim(x, 1, tap) for tap in range(taps)]
        return b.swap(add_shifted(b, parts, sizes, window), 0, 1)
    rank = len(out)
    x = x.reshape([c, *window.kernel, n, *out])
    order = [k for i in range(rank) for k in (rank + 2 + i, 1 + i)]
    return b.transpose(x, [rank + 1, 0, *order]).reshape([n, c, *sizes])


def _side_by_side(window: Window, sizes: Sequence[int], out: Sequence[int]) -> bool:
    """Whether the windows at the positions `out` cover an input of `sizes` once."""
    return window.tiles(sizes) and tuple(out) == window.out_sizes(sizes)


# ---- terms ----


def _apart(
    b: Builder,
    function: Callable[..., Value],
    x: Value,
    w: Value,
    window: Window,
    sizes: Sequence[int],
) -> Value:
    """Whatever reads the result would sum the terms again: a step of ConvNeXt (timm's
    convnext_atto, batch 2) took 212 ms instead of 108."""

    def compute(x: Value, w: Value) -> Value:
        return function(b, x, w, window, sizes)

    return compute_apart(b, (function.__name__, window, tuple(sizes)), compute, [x, w])


def _forward_terms(b: Builder, x: Value, w: Value, window: Window, out: Sequence[int]) -> Value:
    (n, c), o = x.shape[:2], w.shape[0]
    groups, inner = window.groups, c // window.groups
    inputs = [s.accumulated() for s in shifted(b, x, window, out)]
    weight = w.to(inputs[0].dtype).reshape([groups, o // groups, inner, window.taps])
    parts = [s.reshape([n, groups, inner, *out]) for s in inputs]
    return sum_terms(b, parts, weight, [n, groups, o // groups, *out]).reshape([n, o, *out])


def _input_grad_terms(
    b: Builder, y: Value, w: Value, window: Window, sizes: Sequence[int]
) -> Value:
    (n, o), inner, groups = y.shape[:2], w.shape[1], window.groups
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    spread = window.spread(y.shape[2:])
    low = [r - p for r, p in zip(reach, window.padding, strict=True)]
    high = [m + p - s for m, p, s in zip(sizes, window.padding, spread, strict=True)]
    y = b.pad(y, [0, 0, *low], [0, 0, *high], [0, 0, *(s - 1 for s in window.stride)])
    y = b.hlo.optimization_barrier([y]).accumulated()
    parts = []
    for at in window.offsets():
        starts = [r - a for r, a in zip(reach, at, strict=True)]
        limits = [n, o, *(s + m for s, m in zip(starts, sizes, strict=True))]
        part = b.slice(y, [0, 0, *starts], limits)
        parts.append(part.reshape([n, groups, o // groups, *sizes]))
    weight = w.to(y.dtype).reshape([groups, o // groups, inner, window.taps])
    x = sum_terms(b, parts, b.swap(weight, 1, 2), [n, groups, inner, *sizes])
    return x.reshape([n, groups * inner, *sizes])


def _weight_grad_terms(b: Builder, x: Value, y: Value, window: Window) -> Value:
    """The gradient with one input feature per group: a sum over all positions per weight."""
    (n, c), o, out = x.shape[:2], y.shape[1], y.shape[2:]
    shape = [n, c, o // c, *out]
    y = y.accumulated().reshape(shape)
    dims = [i for i in range(len(shape)) if i != 2]
    products = [
        b.broadcast_in_dim(s.accumulated(), shape, dims) * y for s in shifted(b, x, window, out)
    ]
    sums: list[Value] = []
    for first in range(0, len(products), _MOST_SUMS):
        some = products[first : first + _MOST_SUMS]
        sums += b.reduce_multi(
            some,
            [b.constant(0, y.dtype)] * len(some),
            [0, *range(3, len(shape))],
            lambda a, e: [i + j for i, j in zip(a, e, strict=True)],
        )
    return b.stack(sums, 2).reshape([o, 1, *window.kernel])
