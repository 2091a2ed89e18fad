"""Convolutions, pooling and resampling."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from lazyxla.argument_checks.tables import (
    AFTER,
    BEFORE,
    Arguments,
    checks,
    named,
    require,
)
from lazyxla.lowering.operators import find_op


def without_memory(x: Tensor | None) -> Tensor | None:
    """A tensor on the CPU of the same sizes that takes no memory."""
    return None if x is None else torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape)


def _refuse_as_cpu(name: str, a: Arguments) -> None:
    """Has the CPU's kernel refuse a call that is known to be wrong."""
    op = find_op(name)
    known = (argument.name for argument in op._schema.arguments)
    call = {each: a[each] for each in known if each in a}
    op(**{k: without_memory(v) if isinstance(v, Tensor) else v for k, v in call.items()})


@checks(BEFORE, "convolution")
def _convolution(a: Arguments) -> None:
    """PyTorch checks shapes where it chooses the library that computes a convolution."""
    x, weight, bias = a["input"], a["weight"], a["bias"]
    require(weight.dim() > 2, "weight should have at least three dimensions")
    stride, dilation, padding = a["stride"], a["dilation"], a["output_padding"]
    if a["groups"] <= 0 or (x.numel() > 0 and min(dilation, default=1) <= 0):
        _refuse_as_cpu("aten::convolution", a)
    torch._C._select_conv_backend(
        *(without_memory(each) for each in (x, weight, bias)),
        *(stride, a["padding"], dilation, a["transposed"], padding, a["groups"], None),
    )
    if a["transposed"] and x.numel() > 0:
        fits = all(p < s or p < d for p, s, d in zip(padding, stride, dilation))
        if not fits:
            _refuse_as_cpu("aten::convolution", a)
        require(
            fits,
            "output padding must be smaller than either stride or dilation, but got "
            f"output_padding: {padding} stride: {stride} dilation: {dilation}",
        )


@checks(AFTER, "convolution")
def _convolved(a: Arguments, sizes: Sequence[int]) -> None:
    fits = all(size > 0 for size in sizes[2:])
    if not fits:
        _refuse_as_cpu("aten::convolution", a)
    if a["input"].numel() > 0:
        require(
            fits,
            f"Calculated output size per channel: {list(sizes[2:])}. Output size is too small",
        )


@checks(BEFORE, "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def _windows(a: Arguments) -> None:
    """The windows of PyTorch's kernels are counted in 32 bits."""
    for name, value in a.items():
        for number in value if isinstance(value, list) else ():
            require(
                -(2**31) <= number < 2**31,
                f"{name}: value cannot be converted to type int without overflow: {number}",
            )


@checks(BEFORE, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _averages(a: Arguments) -> None:
    """Integers, whose weights would be zeros, are refused as by the CPU's kernel: it is asked with
    one element. Where there is none, it accepts them."""
    x, sizes = a["self"], [1] * len(a["output_size"])
    if x.numel() and not (x.is_floating_point() or x.is_complex()):
        one = torch.zeros([1] * x.dim(), dtype=x.dtype, device="cpu")
        find_op(f"aten::_adaptive_avg_pool{len(sizes)}d")(one, sizes)


def _of_no_windows(name: str, a: Arguments) -> None:
    """The CPU's kernel says in which dimensions there may be none: it computes nothing then."""
    if a["grad_output"].numel() == 0:
        find_op(name)(*(without_memory(x) for x in a.values()))


for _rank in (2, 3):
    for _name in (f"aten::_adaptive_avg_pool{_rank}d", f"aten::adaptive_max_pool{_rank}d"):
        BEFORE[f"{_name}_backward"] = functools.partial(_of_no_windows, f"{_name}_backward")


def _fractional_windows(name: str, rank: int, a: Arguments) -> None:
    """The CPU's kernel is asked with small inputs: it compares the samples."""
    kernel, x, samples = a["kernel_size"], a["self"], a["random_samples"]
    for size in kernel:
        require(size > 0, f"a window of size {size} has no greatest element")
    if x.numel() == 0 or len(kernel) != rank or x.dim() not in (rank + 1, rank + 2):
        return  # the CPU's kernel is asked about the first, the meta function refuses the others
    sizes = [size + 1 for size in kernel]  # in three dimensions it wants more than a window
    window = torch.zeros((), dtype=x.dtype, device="cpu").expand(*x.shape[:-rank], *sizes)
    find_op(name)(window, kernel, [1] * rank, without_memory(samples))


for _rank in (2, 3):
    _name = f"aten::fractional_max_pool{_rank}d"
    BEFORE[_name] = functools.partial(_fractional_windows, _name, _rank)


def _padding(rank: int, a: Arguments) -> None:
    """PyTorch's meta functions take the first dimensions of more as those of batches."""
    x = a["self"]
    require(
        x.dim() in (rank + 1, rank + 2),
        f"Expected {rank + 1}D or {rank + 2}D (batch mode) tensor with possibly 0 batch size and "
        f"other non-zero dimensions for input, but got: {list(x.shape)}",
    )


for _rank in (1, 2, 3):
    for _name in ("reflection", "replication"):
        BEFORE[f"aten::{_name}_pad{_rank}d"] = functools.partial(_padding, _rank)


def _upsampling(name: str, a: Arguments) -> None:
    """Which dtypes but floats can be resampled, the CPU's kernels say: asked with one element."""
    x = next(iter(a.values()))
    (rank,) = re.findall(r"(\d)d", name)
    require(
        x.dim() == int(rank) + 2,
        f"It is expected input_size equals to {int(rank) + 2}, but got size {x.dim()}",
    )
    if x.is_floating_point():
        return
    call = dict(a)
    for argument, value in a.items():
        if argument == "output_size" and value is not None:
            call[argument] = [2] * len(value)
        elif isinstance(value, Tensor):
            call[argument] = torch.zeros([1] * x.dim(), dtype=value.dtype, device="cpu")
        elif argument.startswith("scales"):
            call[argument] = None
    find_op(name)(**call)


def _upsampled(name: str, a: Arguments, sizes: Sequence[int]) -> None:
    fits = all(size > 0 for size in sizes[2:])
    if not fits:
        _refuse_as_cpu(name, a)
    require(
        fits,
        f"Input and output sizes should be greater than 0, but got output {list(sizes[2:])}",
    )


for _name in named("upsample_"):
    BEFORE[f"aten::{_name}"] = functools.partial(_upsampling, f"aten::{_name}")
    AFTER[f"aten::{_name}"] = functools.partial(_upsampled, f"aten::{_name}")
