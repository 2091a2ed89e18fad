"""Operators that programs for the CPU leave to PyTorch's kernels, which are several times as fast
as what XLA's compiler makes of them.

- Functions that XLA computes by the C library, one number at a time, where PyTorch's kernels are
  vectorized. 2**20 numbers in float32 on two CPUs of an AMD EPYC (Zen 3), in ms (the kernels by
  themselves, whose results a program copies: sin takes 0.96 there):

                   sin   tan   asin  atan2  remainder  exp2  polygamma
      XLA's        4.8   10.3  10.8  20.9   12.6       2.1   222
      a kernel's   0.9   1.2   1.2   1.7    1.1        0.4   8.0

- Order statistics, for which XLA sorts whole rows, and running results. Of 1024 rows of 1024
  numbers in float32:

                  topk, k = 10 and 200  kthvalue  median  mode  cumsum  logcumsumexp
      XLA's       3.7  40               41        47      174   4.2     213
      a kernel's  1.9  10               7.1       9.0     27    1.1     8.6

- Sorting rows: 41 ms for these and by the kernel 32, along dimension 0 144 and 54, for the order of
  integers 164 and 23. Of a single row of 2**20 floats XLA's sort takes 75 ms, the kernel 121.

- Products of two vectors, whose terms XLA adds one after the other: of 2**20 1.4 ms, and 0.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LEAST = 1 << 14
"""Elements from which a call pays: it takes some 20 us more than an operation of XLA's."""

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NUMBERS = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_FUNCTIONS = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "exp2", "polygamma"),
    *("fmod.Scalar", "fmod.Tensor", "remainder.Scalar", "remainder.Tensor"),
    *("floor_divide", "floor_divide.Scalar"),
)

_OF_ROWS = {
    "topk": 2,
    "kthvalue": 2,
    "median.dim": 1,
    "nanmedian.dim": 1,
    "mode": 1,
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
}
"""Which argument is the dimension."""

_OF_WHOLES = ("median", "nanmedian", "dot")


def _register_function(name: str) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, *args: Any) -> Any:
        [result] = b.outputs
        size = math.prod(result.shape)
        values = [a for a in args if isinstance(a, Value)]
        are_floats = all(dtype in _FLOATS for dtype in (result.dtype, *(x.dtype for x in values)))
        if size < _LEAST or not are_floats or not host_call.may_call_kernel(b):
            return NotImplemented
        flat = [
            b.broadcast_to(a, result.shape).reshape([-1]) if isinstance(a, Value) and a.rank else a
            for a in args
        ]
        operands = host_call.operands_of(name, flat)
        split = [0 if isinstance(a, Value) and a.rank else -1 for a in operands]
        outputs = [TensorSpec(result.dtype, (size,))]
        [y] = host_call.call_kernel(b, name, tuple(flat), outputs, [*split, 0])
        return y.reshape(result.shape)


def _pays(b: Builder, x: Value) -> bool:
    """Whether to call a kernel on the rows of `x`."""
    suits = math.prod(x.shape) >= _LEAST and x.dtype in _NUMBERS
    return suits and host_call.may_call_kernel(b)


def _register_of_rows(name: str, position: int) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, x: Value, *args: Any) -> Any:
        if not _pays(b, x):
            return NotImplemented
        return _called_on_rows(b, name, (x, *args), position)


def _called_on_rows(b: Builder, name: str, args: tuple[Any, ...], position: int) -> list[Value]:
    """The kernel's results on rows along dimension `args[position]` of `args[0]`."""
    rank, shape = args[0].rank, args[0].shape
    dim = args[position] % rank
    cut = max((d for d in range(rank) if d != dim), key=lambda d: shape[d], default=-1)
    cut_of_results = cut - (cut > dim and len(b.outputs[0].shape) < rank)
    split = [cut, *[cut_of_results] * len(b.outputs)]
    return host_call.call_kernel(b, name, args, b.outputs, split)


@rule("aten::sort", "aten::sort.stable", platforms=("cpu",))
def sort(b: Builder, x: Value, *how: Any) -> Any:
    """Always stable, as other platforms sort."""
    dim, descending = how[-2:]
    is_one_row = x.is_float and x.rank == 1
    if is_one_row or not _pays(b, x):
        return NotImplemented
    return _called_on_rows(b, "aten::sort.stable", (x, True, dim, descending), 2)


def _register_of_wholes(name: str) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, *values: Value) -> Any:
        if not all(_pays(b, x) for x in values):
            return NotImplemented
        return host_call.call_kernel(b, name, values, b.outputs, [-1] * (len(values) + 1))


for _name in _FUNCTIONS:
    _register_function(f"aten::{_name}")
for _name, _position in _OF_ROWS.items():
    _register_of_rows(f"aten::{_name}", _position)
for _name in _OF_WHOLES:
    _register_of_wholes(f"aten::{_name}")
