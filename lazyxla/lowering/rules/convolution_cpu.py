"""Convolutions for XLA's CPU backend, in the forms that it runs well.

Its own convolution is fast when there are many more positions than features. It rewrites the weight
on every call, which is most of the work for a large weight and a small image, and it is slow by
factors of ten to a thousand on grouped convolutions and their gradients. The forms here do neither:

- products: the input's windows as a matrix (C * kernel, N * positions), then one product; the
  adjoint adds the windows back up. Always for windows that do not overlap, 1x1 ones included.
- terms: one multiplication of a shifted input for each weight of a group, all in one loop; for
  depthwise convolutions and others with few features per group.
- flat: grouped convolutions that keep the image's sizes, see convolution_flat.

Each function returns None where the plain convolution (one per group) is the better form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.rules import convolution_flat as flat
from lazyxla.lowering.rules.windows import Window, add_shifted, shifted, sum_terms
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


_MOST_FEATURES = 3
"""Features per group up to which a sum of terms beats a convolution per group ..."""
_MOST_TERMS = 80
"""... and weights per output feature up to which it is one loop of reasonable size."""
_GROUPED_POSITIONS = 1024
"""Positions up to which one batched product beats a convolution per group."""
_MOST_SUMS = 16
"""Sums that one reduction computes side by side; more spill registers and compile slowly."""


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value | None:
    """y of shape (N, O, *out); see the convolution module for the three maps."""
    groups = window.groups
    n, (o, inner) = b.shape(x)[0], b.shape(w)[:2]
    sizes = b.shape(x)[2:]
    out = window.out_sizes(sizes)
    if flat.applies(window, sizes) and (y := flat.forward(b, x, w, window)) is not None:
        return y
    if groups > 1 and _few_terms(inner, window):
        return _forward_terms(b, x, w, window, out)
    if not _as_product(b, n, sizes, o, window, b.dtype(x)):
        return None
    batch, i = _batch(groups)
    windows = b.reshape(_windows(b, x, window, out), [*batch, inner * window.taps, -1])
    w = b.reshape(w, [*batch, o // groups, inner * window.taps])
    y = b.dot(w, windows, [i + 1], [i], range(i), range(i), b.compute_dtype(b.dtype(x)))
    return b.swap(b.reshape(y, [o, n, *out]), 0, 1)


def input_grad(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value | None:
    """x of shape (N, C, *sizes)."""
    n, o = b.shape(y)[:2]
    # A transposed convolution with output padding has more sizes than positions.
    kept = b.shape(y)[2:] == tuple(sizes) and flat.applies(window, sizes)
    if kept and (x := flat.input_grad(b, y, w, window)) is not None:
        return x
    if window.groups > 1 and _few_terms(o // window.groups, window):
        return _input_grad_terms(b, y, w, sizes, window)
    if _as_product(b, n, sizes, o, window, b.dtype(y)):
        return _input_grad_product(b, y, w, sizes, window)
    return None


def _input_grad_product(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value:
    groups, taps = window.groups, window.taps
    (n, o, *out), inner = b.shape(y), b.shape(w)[1]
    batch, i = _batch(groups)
    w = b.reshape(w, [*batch, o // groups, inner * taps])
    y = b.reshape(b.swap(y, 0, 1), [*batch, o // groups, -1])
    wide = b.compute_dtype(b.dtype(y))
    # A product whose sum runs over rows transposes its first operand: let it be the smaller one.
    if math.prod(b.shape(w)) <= math.prod(b.shape(y)):
        columns = b.dot(w, y, [i], [i], range(i), range(i), wide)
    else:
        # Transposed in more than two dimensions, for XLA turns the transpose of a product around.
        columns = b.dot(y, w, [i], [i], range(i), range(i), wide)
        columns = b.reshape(columns, [*batch, n, *out, inner, taps])
        rank = b.rank(columns)
        columns = b.transpose(columns, [*range(i), rank - 2, rank - 1, *range(i, rank - 2)])
    columns = b.reshape(columns, [groups * inner, taps, n, *out])
    return _add_windows(b, columns, sizes, window)


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value | None:
    """w of shape (O, C / groups, *kernel)."""
    groups, taps = window.groups, window.taps
    (n, c), o = b.shape(x)[:2], b.shape(y)[1]
    out, inner = b.shape(y)[2:], c // groups
    if groups == c > 1:
        return _weight_grad_terms(b, x, y, window)
    if not _as_product(b, n, b.shape(x)[2:], o, window, b.dtype(x)):
        return None
    batch, i = _batch(groups)
    windows = b.reshape(_windows(b, x, window, out), [*batch, inner * taps, -1])
    y = b.reshape(b.swap(y, 0, 1), [*batch, o // groups, -1])
    w = b.dot(y, windows, [i + 1], [i + 1], range(i), range(i), b.compute_dtype(b.dtype(x)))
    return b.reshape(w, [o, inner, *window.kernel])


def _batch(groups: int) -> tuple[list[int], int]:
    """The batch dimensions of the products, and how many they are: one of groups, if there are any.

    Beyond them the operands are plain matrices; XLA would lay others out anew.
    """
    return ([groups], 1) if groups > 1 else ([], 0)


def _few_terms(features: int, window: Window) -> bool:
    return features <= _MOST_FEATURES and features * window.taps <= _MOST_TERMS


def _as_product(
    b: Builder, n: int, sizes: Sequence[int], features: int, window: Window, dtype: torch.dtype
) -> bool:
    """Whether laying out the windows costs less than what plain convolution does to the weight."""
    positions = n * math.prod(window.out_sizes(sizes))
    if window.groups > 1:
        return positions <= _GROUPED_POSITIONS
    if window.taps == 1 or window.tiles(sizes):
        return True
    # The backend has a fast convolution for 16 and 32-bit floats only.
    return positions <= 2 * features or b.compute_dtype(dtype) != torch.float32


def _windows(b: Builder, x: Value, window: Window, out: Sequence[int]) -> Value:
    """What each weight of the kernel reads: shape (C, taps, N, *out)."""
    n, c, *sizes = b.shape(x)
    x, rank = b.swap(x, 0, 1), len(out)
    if not _side_by_side(window, sizes, out):
        return b.stack(shifted(b, x, window, out), 1)
    pairs = [k for pair in zip(out, window.kernel, strict=True) for k in pair]
    order = [0, *range(3, 2 + 2 * rank, 2), 1, *range(2, 2 + 2 * rank, 2)]
    x = b.transpose(b.reshape(x, [c, n, *pairs]), order)
    return b.reshape(x, [c, window.taps, n, *out])


def _add_windows(b: Builder, columns: Value, sizes: Sequence[int], window: Window) -> Value:
    """The adjoint of `_windows`: (C, taps, N, *out) to (N, C, *sizes)."""
    c, taps, n, *out = b.shape(columns)
    if not _side_by_side(window, sizes, out):
        parts = [b.select_dim(columns, 1, tap) for tap in range(taps)]
        return b.swap(add_shifted(b, parts, sizes, window), 0, 1)
    rank = len(out)
    columns = b.reshape(columns, [c, *window.kernel, n, *out])
    order = [k for i in range(rank) for k in (rank + 2 + i, 1 + i)]
    return b.reshape(b.transpose(columns, [rank + 1, 0, *order]), [n, c, *sizes])


def _side_by_side(window: Window, sizes: Sequence[int], out: Sequence[int]) -> bool:
    """Whether the windows at the positions `out` cover an input of `sizes` once."""
    return window.tiles(sizes) and tuple(out) == window.out_sizes(sizes)


# ---- terms ----


def _forward_terms(b: Builder, x: Value, w: Value, window: Window, out: Sequence[int]) -> Value:
    (n, c), o = b.shape(x)[:2], b.shape(w)[0]
    wide = b.compute_dtype(b.dtype(x))
    groups, inner = window.groups, c // window.groups
    inputs = [b.convert(s, wide) for s in shifted(b, x, window, out)]
    weight = b.reshape(b.convert(w, wide), [groups, o // groups, inner, window.taps])
    parts = [b.reshape(s, [n, groups, inner, *out]) for s in inputs]
    total = sum_terms(b, parts, weight, [n, groups, o // groups, *out])
    return b.reshape(total, [n, o, *out])


def _input_grad_terms(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value:
    (n, o), inner = b.shape(y)[:2], b.shape(w)[1]
    groups, wide = window.groups, b.compute_dtype(b.dtype(y))
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    spread = window.spread(b.shape(y)[2:])
    low = [r - p for r, p in zip(reach, window.padding, strict=True)]
    high = [m + p - s for m, p, s in zip(sizes, window.padding, spread, strict=True)]
    y = b.pad(y, [0, 0, *low], [0, 0, *high], [0, 0, *(s - 1 for s in window.stride)])
    y = b.convert(b.hlo.optimization_barrier([y]), wide)
    parts = []
    for at in window.offsets():
        starts = [r - a for r, a in zip(reach, at, strict=True)]
        limits = [n, o, *(s + m for s, m in zip(starts, sizes, strict=True))]
        part = b.slice(y, [0, 0, *starts], limits)
        parts.append(b.reshape(part, [n, groups, o // groups, *sizes]))
    weight = b.reshape(b.convert(w, wide), [groups, o // groups, inner, window.taps])
    total = sum_terms(b, parts, b.swap(weight, 1, 2), [n, groups, inner, *sizes])
    return b.reshape(total, [n, groups * inner, *sizes])


def _weight_grad_terms(b: Builder, x: Value, y: Value, window: Window) -> Value:
    """The gradient with one input feature per group: a sum over all positions per weight."""
    (n, c), o, out = b.shape(x)[:2], b.shape(y)[1], b.shape(y)[2:]
    wide = b.compute_dtype(b.dtype(x))
    shape = [n, c, o // c, *out]
    y = b.reshape(b.convert(y, wide), shape)
    places = [i for i in range(len(shape)) if i != 2]
    products = [
        b.hlo.multiply(b.hlo.broadcast_in_dim(b.type(wide, shape), b.convert(s, wide), places), y)
        for s in shifted(b, x, window, out)
    ]
    sums: list[Value] = []
    for first in range(0, len(products), _MOST_SUMS):
        some = products[first : first + _MOST_SUMS]
        zeros = [b.constant(0, wide)] * len(some)
        sums += b.reduce_multi(
            some,
            zeros,
            [0, *range(3, len(shape))],
            lambda a, e: [b.hlo.add(i, j) for i, j in zip(a, e, strict=True)],
        )
    return b.reshape(b.stack(sums, 2), [o, 1, *window.kernel])
