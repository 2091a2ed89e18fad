"""Convolutions by PyTorch's own kernels, those of oneDNN, called by the program.

With AVX-512 they are faster than what XLA makes of a convolution, and are compiled already. Times
of our forms (convolution.py), divided by those of the calls with the copies that these need;
float32, batch 2, two CPUs of an AMD EPYC, when each call ran on any of the plugin's threads:

                                         forward    input's gradient    weight's gradient
    64 features, 56x56, kernel 3x3           2.1                 1.5                  3.3
    256 to 1,024 features, 14x14, 1x1        1.8                 2.4                  2.2
    depthwise, 96 features, 56x56, 7x7       8.6                 8.7                  0.5

Without it oneDNN's kernels are half as wide, and XLA's forms mostly as good or better. Times of
training steps with the calls, divided by those without; batch 2 at 224x224, two CPUs of an AMD EPYC
without AVX-512: convnext_atto 0.85, resnet18 0.99, coatnet_pico 1.34, mobilenetv3_small 1.37;
ResNet-50, batch 4 at 64x64: 1.7.

Both the depthwise row and convnext_atto were measured when terms were summed once for each reader.

A grouped convolution for which XLA has only one convolution per group is a call on either, if there
are many groups (`forward`, `input_grad`, `weight_grad`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.rules.convolution import is_empty
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_FEW = 1 << 14
"""Multiplications up to which a call takes longer than they do."""
_MANY_GROUPS = 16
"""Groups from which a call takes the place of one convolution for each. Without AVX-512, batch 2:
depthwise, 32 features, 32x32, 9x9: 0.5 ms and 9.3 (now a sum of terms: 0.4). The first training
step of ResNeXt-50, which has 32, takes 13 s instead of 30, the next ones no longer; RegNet-X
(200 MF), which has 3 and 7, takes 110 ms with calls and 89 without."""
_FEW_TAPS = 9
"""Weights of a depthwise kernel up to which its gradient is oneDNN's."""


def convolution(b: Builder, x: Value, w: Value, bias: Value | None, *geometry: Any) -> Value | None:
    """The result of aten::convolution; None if another form is better."""
    spec = b.outputs[0]
    if not _serves(b, x, w, spec.shape):
        return None
    args = (x, w, bias, *geometry)
    [y] = host_call.call_kernel(b, "aten::convolution", args, [TensorSpec(x.dtype, spec.shape)])
    return y  # type: ignore[no-any-return]


def convolution_backward(
    b: Builder, grad: Value, x: Value, w: Value, bias_sizes: Any, *geometry_and_mask: Any
) -> tuple[Value | None, Value | None, None]:
    """The results of aten::convolution_backward; None for those that the mask leaves out, and where
    another form is better, as for the bias."""
    *geometry, mask = geometry_and_mask
    is_depthwise = geometry[-1] == x.shape[1] > 1
    many_taps = math.prod(w.shape[2:]) > _FEW_TAPS
    wanted = [mask[0], mask[1] and not (is_depthwise and many_taps)]
    if not any(wanted) or not _serves(b, x, w, grad.shape):
        return None, None, None
    specs = [
        TensorSpec(v.dtype, v.shape) for v, is_one in zip((x, w), wanted, strict=True) if is_one
    ]
    args = (grad, x, w, None, *geometry, [*wanted, False])
    found = iter(host_call.call_kernel(b, "aten::convolution_backward", args, specs))
    return next(found) if wanted[0] else None, next(found) if wanted[1] else None, None


# ---- the three maps (rules/convolution.py) for many groups; None where no call is possible ----


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


# ---- when the operator is one call ----


def _serves(b: Builder, x: Value, w: Value, out: Sequence[int]) -> bool:
    """Whether a kernel can be called, and is worth it. `out`: of the convolution's result."""
    if not (faster_here() and host_call.may_call_kernel(b)):
        return False
    if x.dtype != w.dtype or x.dtype not in _dtypes() or is_empty(x.shape, w.shape, out):
        return False
    if x.rank != w.rank or not 3 <= x.rank <= 5:
        return False
    larger = max(math.prod(x.shape[2:]), math.prod(out[2:]))
    return x.shape[0] * larger * math.prod(w.shape) > _FEW


def faster_here() -> bool:
    """Whether this machine's processor is of those on which the calls are faster."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@functools.cache
def _dtypes() -> frozenset[torch.dtype]:
    """Those that oneDNN computes on this machine."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    return frozenset(dtypes)
