"""The gradient of maximum pooling, and adaptive maximum pooling, by PyTorch's own kernels, which
the program calls.

The form of rules/max_pooling.py asks each element of the input for all windows that it can be in;
the kernel adds each gradient where its index says. 64 planes of 112x112, batch 2, windows of 3x3 at
every other position, with the forward pass: 58 ms, and by the kernel 5; of 2x2: 8.2 and 3.8; on two
CPUs of an AMD EPYC without AVX-512. In bfloat16 XLA finds each window's maximum again in each term
of the form: a step of resnet18 at batch 2 takes 138 ms, and by the kernel 97 (with AVX-512).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lazyxla.lowering import host_call
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_RANKS = {
    "max_pool2d_with_indices_backward": 2,
    "max_pool3d_with_indices_backward": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d": 3,
    "adaptive_max_pool3d_backward": 3,
}
"""How many dimensions are pooled: the last ones of each tensor."""


def _register(name: str, rank: int) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, *args: Any) -> Any:
        values = [a for a in args if isinstance(a, Value)]
        x = values[0]
        pays = kernel_limits.pays("max pooling", x.dtype, min(math.prod(v.shape) for v in values))
        if not pays or not x.is_float or not host_call.may_call_kernel(b):
            return NotImplemented
        planes = tuple(
            a.reshape([-1, *a.shape[-rank:]]) if isinstance(a, Value) else a for a in args
        )
        count = planes[0].shape[0]
        outputs = [TensorSpec(s.dtype, (count, *s.shape[-rank:])) for s in b.outputs]
        split = [0] * (len(values) + len(outputs))
        results = host_call.call_kernel(b, name, planes, outputs, split)
        return [r.reshape(s.shape) for r, s in zip(results, b.outputs, strict=True)]


for _name, _rank in _RANKS.items():
    _register(f"aten::{_name}", _rank)
