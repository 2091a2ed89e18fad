"""Grouped convolutions by PyTorch's own kernels, those of oneDNN, called by the program.

XLA has one convolution for each group. If there are many, that takes longer, to compile, too.

Calls of other convolutions do not pay. With AVX-512 a single one is faster than what XLA makes of
it: forward and backward together take 8.9 ms instead of 12.6 (2 x 64 x 56 x 56 by 64 x 3 x 3,
float32), in bfloat16 5.1 instead of 9.7. But in a whole program oneDNN takes longer than in
PyTorch's eager step (resnet18: 134 ms and 114), and a fifth of the processors' time is its threads'
waiting. Training steps in milliseconds (batch 2 at 224x224, ResNet-50 batch 4 at 64x64; two CPUs of
an AMD EPYC with AVX-512, one process each):

                           all called    none called    PyTorch eager
    resnet18                      185            176              171
    resnet26                      310            248              238
    efficientnet_b0               170            111              185
    convnext_atto                 141             80               94
    ResNet-50                     177             96              181
    resnet18, bfloat16            173            245               95
    efficientnet, bfloat16        249            193              142
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lazyxla.lowering import host_call
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_MANY_GROUPS = 16
"""Groups from which a call takes the place of one convolution for each. Without AVX-512, batch 2:
depthwise, 32 features, 32x32, 9x9: 0.5 ms and 9.3 (now a sum of terms: 0.4). The first training
step of ResNeXt-50, which has 32, takes 13 s instead of 30, the next ones no longer; RegNet-X
(200 MF), which has 3 and 7, takes 110 ms with calls and 89 without."""

# ---- the three maps, see rules/convolution.py; None where a call cannot be or does not pay ----


def forward(b: Builder, x: Value, w: Value, window: Window) -> Value | None:
    shape = [x.shape[0], w.shape[0], *window.out_sizes(x.shape[2:])]
    return _called(b, "aten::convolution", [x, w, None, *_geometry(window)], shape, window)


def input_grad(
    b: Builder, y: Value, w: Value, sizes: Sequence[int], window: Window
) -> Value | None:
    if tuple(y.shape[2:]) != window.out_sizes(sizes):
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
    args = [y, w, None, *_geometry(window, transposed=True, output_padding=beyond)]
    return _called(b, "aten::convolution", args, shape, window)


def weight_grad(b: Builder, x: Value, y: Value, window: Window) -> Value | None:
    if tuple(y.shape[2:]) != window.out_sizes(x.shape[2:]):
        return None
    shape = [y.shape[1], x.shape[1] // window.groups, *window.kernel]
    args = [y, x, b.zeros(shape, x.dtype), None, *_geometry(window), [False, True, False]]
    return _called(b, "aten::convolution_backward", args, shape, window)


def _geometry(
    window: Window, transposed: bool = False, output_padding: Sequence[int] | None = None
) -> list[Any]:
    none = [0] * len(window.kernel)
    lists = [list(v) for v in (window.stride, window.padding, window.dilation)]
    return [*lists, transposed, list(output_padding or none), window.groups]


def _called(
    b: Builder, name: str, args: Sequence[Any], shape: Sequence[int], window: Window
) -> Value | None:
    """The result of `shape`; of 16-bit floats in float32."""
    values = [a for a in args if isinstance(a, Value)]
    suits = all(v.is_float for v in values) and 3 <= values[0].rank <= 5
    if not suits or window.groups < _MANY_GROUPS or not host_call.may_call_kernel(b):
        return None
    given = tuple(a.accumulated() if isinstance(a, Value) else a for a in args)
    dtype = b.compute_dtype(values[0].dtype)
    [y] = host_call.call_kernel(b, name, given, [TensorSpec(dtype, tuple(shape))])
    return y  # type: ignore[no-any-return]
