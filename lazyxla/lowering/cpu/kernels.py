"""Operators that programs for the CPU leave to PyTorch's kernels, which are several times as fast
as what XLA's compiler makes of them, from the sizes in cpu/kernel_limits.py on.

- Functions that XLA computes by the C library, one number at a time, where PyTorch's kernels are
  vectorized, and those of which it computes all branches. 2**20 numbers in float32 on two CPUs of
  an AMD EPYC (Zen 3), in ms (the kernels by themselves; sin takes 1.05 in a program):

                   sin   tan   asin  atan2  remainder  exp2  trigamma  bessel_j0  bessel_y1
      XLA's        4.8   10.3  10.8  20.9   12.6       2.1   222       68         257
      a kernel's   0.9   1.2   1.2   1.7    1.1        0.4   8.0       2.5        6.9

  In a program: atanh 7.5 and 3.4, digamma 17.5 and 10.4; in float64 log 3.3 and 1.8, log2 7.5 and
  3.1.

- Order statistics, for which XLA sorts whole rows, and running results. Of 1024 rows of 1024
  numbers in float32:

                  topk, k = 10 and 200  kthvalue  median  mode  cumsum  logcumsumexp
      XLA's       3.7  40               41        47      174   4.2     213
      a kernel's  1.9  10               7.1       9.0     27    1.1     8.6

- Sorting elements of 64 bits, with their indices: these rows as int64 166 ms, and by the kernel 33,
  along dimension 0 211 and 67; 25,000 rows of 16 35 and 7.6; one row of 2**20 float64 341 and 133.
  Floats of 32 bits take XLA 42 ms, which sorts them and their indices as one number, and the kernel
  48.

- Samples of images at positions that are data (grid_sample). Of 8 images of 32 x 64 x 64 as many
  linearly 5.8 ms, and 2.0; their gradients 22.9 and 7.7, of bicubic ones 81 and 28.

- Products of two vectors, whose terms XLA adds one after the other: of 2**20 1.4 ms, and 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering import host_call
from lazyxla.lowering.cpu import kernel_limits
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NUMBERS = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_FUNCTIONS = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "exp2"),
    *("fmod.Scalar", "fmod.Tensor", "remainder.Scalar", "remainder.Tensor"),
    *("floor_divide", "floor_divide.Scalar"),
    *(f"special_bessel_{name}" for name in ("j0", "j1", "y0", "y1")),
    *(f"special_{kind}modified_bessel_{n}" for kind in ("", "scaled_") for n in ("k0", "k1")),
    "special_airy_ai",
    *("special_chebyshev_polynomial_t.n_scalar", "special_hermite_polynomial_h.n_scalar"),
    *("special_laguerre_polynomial_l.n_scalar", "special_legendre_polynomial_p.n_scalar"),
)

_OF_DTYPES = {
    "log": (torch.float64,),
    **dict.fromkeys(("log2", "log10", "atanh", "digamma"), (torch.float32, torch.float64)),
}
"""Functions of which XLA's forms are slow in these dtypes alone."""

_OF_ROWS = {
    "topk": ("topk", 2),
    "kthvalue": ("order statistic", 2),
    "median.dim": ("order statistic", 1),
    "nanmedian.dim": ("order statistic", 1),
    "mode": ("order statistic", 1),
    "cumsum": ("running result", 1),
    "cumprod": ("running result", 1),
    "logcumsumexp": ("running result", 1),
}
"""The kind of work, and which argument is the dimension."""

_OF_WHOLES = {
    "median": "order statistic",
    "nanmedian": "order statistic",
    "dot": "vector product",
}
"""The kind of work."""


def _register_function(name: str, dtypes: Sequence[torch.dtype] = _FLOATS) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, *args: Any) -> Any:
        return _function(b, name, args) if b.outputs[0].dtype in dtypes else NotImplemented


def _function(b: Builder, name: str, args: Sequence[Any]) -> Any:
    [result] = b.outputs
    size = math.prod(result.shape)
    dtypes = {result.dtype, *(a.dtype for a in args if isinstance(a, Value))}
    pays = kernel_limits.pays("function", result.dtype, size)
    if not pays or not dtypes.issubset(_FLOATS) or not host_call.may_call_kernel(b):
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


@rule("aten::pow.Tensor_Scalar", platforms=("cpu",))
def power(b: Builder, x: Value, exponent: Operand) -> Any:
    """Of an exponent that varies, an input of the program, which has to be looked at: eager mode
    has one program for all of 2**20 numbers, which takes XLA 3.3 ms, and the kernel 0.2 for most.
    """
    if b.known(exponent) is not None:
        return NotImplemented
    return _function(b, "aten::pow.Tensor_Scalar", (x, exponent))


@rule("aten::polygamma", platforms=("cpu",))
def polygamma(b: Builder, n: int, x: Value) -> Any:
    """The first; of the others the kernel takes three times as long as XLA."""
    return _function(b, "aten::polygamma", (n, x)) if n == 1 else NotImplemented


def _pays(b: Builder, kind: str, x: Value) -> bool:
    """Whether to call a kernel on all of `x`."""
    pays = kernel_limits.pays(kind, x.dtype, math.prod(x.shape))
    return pays and x.dtype in _NUMBERS and host_call.may_call_kernel(b)


def _register_of_rows(name: str, kind: str, position: int) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, x: Value, *args: Any) -> Any:
        if not _pays(b, kind, x):
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
    """Always stable, as other platforms sort. Elements of up to 32 bits are sorted with their
    indices as one number, see cpu/sorting.py."""
    dim, descending = how[-2:]
    if x.dtype.itemsize <= 4 or not _pays(b, "sort", x):
        return NotImplemented
    return _called_on_rows(b, "aten::sort.stable", (x, True, dim, descending), 2)


def _register_of_wholes(name: str, kind: str) -> None:
    @rule(name, platforms=("cpu",))
    def lower(b: Builder, *values: Value) -> Any:
        if not all(_pays(b, kind, x) for x in values):
            return NotImplemented
        return host_call.call_kernel(b, name, values, b.outputs, [-1] * (len(values) + 1))


_LINEAR, _NEAREST, _CUBIC = range(3)  # modes of grid_sample
_SAMPLING = {
    "grid_sampler_2d": (_LINEAR, _NEAREST),
    "grid_sampler_2d_backward": (_LINEAR, _NEAREST, _CUBIC),
    "grid_sampler_3d_backward": (_LINEAR,),
}
"""In which modes the kernels are faster."""


def _register_sampling(name: str, modes: tuple[int, ...]) -> None:
    @rule(f"aten::{name}", platforms=("cpu",))
    def lower(b: Builder, *args: Any) -> Any:
        """`args` are tensors whose first dimension is the batch, then numbers."""
        operands = [a for a in args if isinstance(a, Value)]
        image, grid = operands[-2:]
        size = math.prod(grid.shape[:-1]) * image.shape[1]
        pays = args[len(operands)] in modes and kernel_limits.pays("sampling", image.dtype, size)
        # The kernels take no narrow floats.
        if not pays or image.dtype.itemsize < 4 or not host_call.may_call_kernel(b):
            return NotImplemented
        cut = 0 if image.shape[0] > 1 else -1
        split = [cut] * (len(operands) + len(b.outputs))
        return host_call.call_kernel(b, f"aten::{name}", args, b.outputs, split)


for _name in _FUNCTIONS:
    _register_function(f"aten::{_name}")
for _name, _dtypes in _OF_DTYPES.items():
    _register_function(f"aten::{_name}", _dtypes)
for _name, (_kind, _position) in _OF_ROWS.items():
    _register_of_rows(f"aten::{_name}", _kind, _position)
for _name, _kind in _OF_WHOLES.items():
    _register_of_wholes(f"aten::{_name}", _kind)
for _name, _modes in _SAMPLING.items():
    _register_sampling(_name, _modes)
