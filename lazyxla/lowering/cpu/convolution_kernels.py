"""Convolutions by PyTorch's own kernels, those of oneDNN, called by the program.

XLA has one convolution for each group. If there are many, that takes longer, to compile, too.

Of the others the kernels are faster than what XLA makes of windows of more than one element, and of
all in bfloat16, which it multiplies in float32, where the processor multiplies more of it than of
float32. The plugin's own threads share each call: OpenMP's would wait, after it, on the processors
that the rest of the program needs. Training steps in milliseconds, batch 2 at 224x224, the best of
20 (two CPUs of an AMD EPYC with AVX512-BF16; before and after alternated where there are two):

                    called       not      PyTorch eager
    resnet18      144, 154  183, 190                156
    resnet50      344, 359  367, 371                424
    vgg11         644, 668  717, 727                775
    densenet121   295, 315  327, 333                349
    in bfloat16
    resnet18       97, 100       195             88, 90
    resnet50      237, 271       432           223, 251

With neither library above AVX2 resnet18 takes 147 and 148, not called 155 and 157. In bfloat16 on
two CPUs of an Intel Xeon without AMX:

                    called in float32   in bfloat16   not   PyTorch eager
    resnet18                      149           191   178             166
    resnet50                      369           470   395             409
    vgg11                         593           797   698             922
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_MANY_GROUPS = 16
"""Groups from which a call takes the place of one convolution for each, because of the time that it
takes to compile them: with 2 to 32 groups of 4 features a call takes as long as XLA's or up to 1.9
times as long. The first training step of ResNeXt-50, which has 32, takes 13 s instead of 30, the
next ones no longer; RegNet-X (200 MF), which has 3 and 7, takes 110 ms with calls and 89 without.
Without AVX-512, batch 2."""

_FEW_CHANNELS = 4
"""Of the input or the result, up to which XLA's map from the one to the other is slow. 16 images of
56x56: from 1 feature to 2 by 3x3 2.2 ms, and called 0.5; from 3 to 3 by 5x5 4.4 and 1.1; without
AVX-512. So it is in three dimensions with any number: 4 volumes of 16x32x32 from 1 to 8 26 and 1.1,
the weight's gradient 16 and 4.2; the gradient of 16 features from positions two apart 18.6 and
0.5."""

_LEAST_POSITIONS, _POSITIONS_OF_FEATURE = 256, 4
"""The least positions of the result, in float32, and for each feature those of a weight's gradient,
for the kernels lay out the weight anew. Times of calls relative to XLA's, of images of C features
by C x 3 x 3 on two CPUs of an Intel Xeon:

       C   images      forward   of the input   of the weight
     128   32 x 2 x 2      1.8            1.5             1.7
     256    4 x 4 x 4      2.1            1.5             1.9
     512    2 x 7 x 7      0.9            1.3             1.8
     256    8 x 7 x 7      0.7            0.9             1.0
     128   32 x 4 x 4      0.6            0.7             0.8
     256    8 x 14 x 14    0.7            0.8             0.8
"""

_ANY, _FEW, _OF_VOLUMES = (f"convolution{of}" for of in ("", " of few channels", " of volumes"))
"""Kinds of work in kernel_limits."""

_CONVOLUTION, _BACKWARD = "aten::convolution", "aten::convolution_backward"

_OF_ONEDNN = "aten::mkldnn_convolution"
"""aten::convolution takes another kernel for a single small volume, and so for a part of one:
from 8 to 16 features of 16x28x28 by 3x3x3 8.3 ms, and 0.57 (one CPU of an Intel Xeon)."""

# ---- the operator, and the three maps of rules/convolution.py; None where a call cannot be or does
# not pay ----


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
) -> Value | None:
    """One without groups, rounded once, with its bias."""
    window = Window.of(w.shape[2:], stride, padding, dilation, groups)
    if groups > 1:
        return None
    if transposed:
        return input_grad(b, x, w, b.outputs[0].shape[2:], window, bias)
    return forward(b, x, w, window, bias)


def forward(
    b: Builder, x: Value, w: Value, window: Window, bias: Value | None = None
) -> Value | None:
    shape = [x.shape[0], w.shape[0], *window.out_sizes(x.shape[2:])]
    few = min(shape[1], x.shape[1]) <= _FEW_CHANNELS
    dtype = _dtype_of_call(b, x, w, (shape, w.shape), window, x.shape[2:], _LEAST_POSITIONS, few)
    if dtype is None:
        return None
    name, args = _CONVOLUTION, [x, w, bias, *_geometry(window)]
    volumes = x.rank == 5 and window.groups == 1 and dtype == torch.float32
    if volumes and torch.backends.mkldnn.is_available():
        name = _OF_ONEDNN
        args = [x, w, bias, *(list(v) for v in (window.padding, window.stride, window.dilation)), 1]
    return _called(b, name, args, shape, window, _split(x, w, window, 0, bias), dtype)


def input_grad(
    b: Builder,
    y: Value,
    w: Value,
    sizes: Sequence[int],
    window: Window,
    bias: Value | None = None,
) -> Value | None:
    fits = tuple(y.shape[2:]) == window.out_sizes(sizes)
    dtype = _dtype_of_call(b, y, w, (y.shape, w.shape), window, sizes, _LEAST_POSITIONS)
    if not fits or dtype is None:
        return None
    reach = [
        s + d * (k - 1) - 2 * p
        for s, d, k, p in zip(
            window.spread(y.shape[2:]),
            window.dilation,
            window.kernel,
            window.padding,
            strict=True,
        )
    ]
    beyond = [n - r for n, r in zip(sizes, reach, strict=True)]
    shape = [y.shape[0], w.shape[1] * window.groups, *sizes]
    args = [y, w, bias, *_geometry(window, transposed=True, output_padding=beyond)]
    return _called(b, _CONVOLUTION, args, shape, window, _split(y, w, window, 1, bias), dtype)


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value | None:
    sizes = x.shape[2:]
    shape = [y.shape[1], x.shape[1] // window.groups, *window.kernel]
    fits = tuple(y.shape[2:]) == window.out_sizes(sizes)
    least = max(_LEAST_POSITIONS, _POSITIONS_OF_FEATURE * min(shape[:2]))
    dtype = _dtype_of_call(b, x, y, (y.shape, shape), window, sizes, least)
    if not fits or dtype is None:
        return None
    options = [None, *_geometry(window), [False, True, False]]
    args = [y, x, b.zeros(shape, x.dtype), *options]  # the kernel asks for the weight's shape only
    if window.groups > 1:
        split = [1, 1, 0, 0]
    else:
        split = [1, -1, 0, 0] if math.prod(y.shape) >= math.prod(x.shape) else [-1, 1, 1, 1]
    return _called(b, _BACKWARD, args, shape, window, split, dtype)


def _split(x: Value, w: Value, window: Window, outputs: int, bias: Value | None) -> list[int]:
    """Along the batch, or along the output features, which are the dimension `outputs` of the
    weight: each thread lays out the operand that is not split, which so is the smaller one. Or
    along the groups."""
    has_bias = bias is not None
    if x.shape[0] > 1 and math.prod(x.shape) >= math.prod(w.shape):
        return [0, -1, *[-1] * has_bias, 0]
    if window.groups > 1:
        return [1, 0, 1]
    return [-1, outputs, *[0] * has_bias, 1]


def _geometry(
    window: Window, transposed: bool = False, output_padding: Sequence[int] | None = None
) -> list[Any]:
    none = [0] * len(window.kernel)
    lists = [list(v) for v in (window.stride, window.padding, window.dilation)]
    return [*lists, transposed, list(output_padding or none), window.groups]


def _dtype_of_call(
    b: Builder,
    left: Value,
    right: Value,
    shapes: tuple[Sequence[int], Sequence[int]],
    window: Window,
    sizes: Sequence[int],
    least: int,
    few_channels: bool = False,
) -> torch.dtype | None:
    """In which dtype a map of two operands is worth a call, None if in none: in their own or, of
    narrow floats, in float32, as XLA computes it. `shapes` are the result's and the weight's of the
    convolution, `sizes` those of the input that has the windows, `least` is how many positions the
    result must have in float32.
    """
    suits = left.is_float and right.is_float and 3 <= left.rank <= 5
    if not suits or not host_call.may_call_kernel(b):
        return None
    wide = b.compute_dtype(left.dtype)
    if window.groups > 1:
        return wide if window.groups >= _MANY_GROUPS else None
    if left.dtype != right.dtype:
        return None
    positions = shapes[0][0] * math.prod(shapes[0][2:])
    work = 2 * positions * math.prod(shapes[1])
    is_matmul = window.taps == 1 or window.tiles(sizes)
    kind = _FEW if few_channels else _OF_VOLUMES if left.rank == 5 else _ANY
    for dtype in dict.fromkeys((left.dtype, wide)):
        in_bfloat16 = dtype == torch.bfloat16
        if is_matmul and not in_bfloat16:
            continue
        kinds = {kind, _ANY} if in_bfloat16 or positions >= least else {kind} - {_ANY}
        if any(kernel_limits.pays(name, dtype, work) for name in kinds):
            return dtype
    return None


def _called(
    b: Builder,
    name: str,
    args: Sequence[Any],
    shape: Sequence[int],
    window: Window,
    split: Sequence[int],
    dtype: torch.dtype,
) -> Value:
    """The result of `shape`, in `dtype`."""
    args = [a.to(dtype) if isinstance(a, Value) else a for a in args]
    divided = "groups" if window.groups > 1 and split[0] == 1 else None
    outputs = [TensorSpec(dtype, tuple(shape))]
    [y] = host_call.call_kernel(b, name, tuple(args), outputs, split, divided)
    return y  # type: ignore[no-any-return]
