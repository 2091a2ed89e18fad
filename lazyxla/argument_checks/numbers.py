"""Numbers that a dtype cannot hold, and those that a kernel refuses."""

from __future__ import annotations

import contextlib
import functools
import math

import torch

from lazyxla.argument_checks.tables import (
    BEFORE,
    OF_NUMBERS,
    Arguments,
    checks,
    dtype_name,
    require,
)


def _check_holds(dtype: torch.dtype, *numbers: complex, count: int = 2) -> None:
    """`count`: how many elements are filled. A single one of few bits is rounded to infinity, as it
    is by `x[i] = number` and `where(condition, x, number)`."""
    for number in numbers:
        with contextlib.suppress(NotImplementedError):  # float4, which the CPU cannot fill
            torch.full((1 if count == 1 else 2,), number, dtype=dtype, device="cpu")


def _requested_dtype(a: Arguments) -> torch.dtype | None:
    """The dtype of a factory's result, from its argument or from the tensor that it is to fill."""
    if a.get("dtype") is not None:
        return a["dtype"]
    return a["out"].dtype if a.get("out") is not None else None


@checks(OF_NUMBERS, "full")
def _full(a: Arguments) -> None:
    if dtype := _requested_dtype(a):
        _check_holds(dtype, a["fill_value"], count=math.prod(a["size"]))


@checks(OF_NUMBERS, "scalar_tensor")
def _scalar_tensor(a: Arguments) -> None:
    if dtype := _requested_dtype(a):
        _check_holds(dtype, a["s"], count=1)


@checks(OF_NUMBERS, "new_full")
def _new_full(a: Arguments) -> None:
    dtype = _requested_dtype(a) or a["self"].dtype
    _check_holds(dtype, a["fill_value"], count=math.prod(a["size"]))


@checks(OF_NUMBERS, "linspace", "logspace")
def _linspace(a: Arguments) -> None:
    """The bounds of a range of no or one element are not all looked at."""
    ends = [a["start"], a["end"]][: max(a["steps"], 0)]
    if not any(isinstance(end, complex) for end in (a["start"], a["end"])):
        dtype = _requested_dtype(a) or torch.get_default_dtype()
        _check_holds(dtype, *ends, count=a["steps"])


@checks(OF_NUMBERS, "constant_pad_nd")
def _pad(a: Arguments) -> None:
    """The CPU's kernel says it itself, but cannot crop a tensor that was shrunk."""
    if any(size > 0 for size in a["pad"]):
        _check_holds(a["self"].dtype, a["value"])


@checks(OF_NUMBERS, "histc")
def _histc(a: Arguments) -> None:
    """The CPU has no kernel for integers, GPUs do: it is asked with floats then."""
    x = a["self"]
    is_integral = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    dtype = torch.float32 if is_integral else x.dtype
    ones = torch.ones(min(x.numel(), 1), dtype=dtype, device="cpu")
    out = a.get("out")
    if out is not None:
        out = torch.empty(0, dtype=dtype if out.dtype is x.dtype else out.dtype, device="cpu")
    torch.histc(ones, a["bins"], a["min"], a["max"], out=out)
    if is_integral and a["min"] != a["max"]:
        _check_holds(x.dtype, float(a["min"]), float(a["max"]))


@checks(OF_NUMBERS, "native_dropout")
def _dropout(a: Arguments) -> None:
    """The CPU's kernel would draw from the CPU's own generator."""
    x = a["input"]
    if a["train"] is False or x.numel() == 0:
        return
    mask = torch.empty(1, dtype=torch.bool, device="cpu")
    mask.bernoulli_(1 - a["p"], generator=torch.Generator("cpu"))
    with contextlib.suppress(NotImplementedError):
        (torch.ones(1, dtype=x.dtype, device="cpu") * mask).mul_(1.0)


@checks(BEFORE, "randperm", "randperm.generator")
def _randperm(a: Arguments) -> None:
    """A dtype holds all the numbers, and floats hold each of them exactly."""
    n, dtype = a["n"], _requested_dtype(a)
    negative = f"Trying to create tensor with negative dimension {n}: [{n}]"
    require(n >= 0, negative if a.get("out") is None else f"n must be non-negative, got{n}")
    if dtype is None:
        return
    if dtype is torch.bool or dtype.is_complex:
        raise NotImplementedError(f"\"randperm\" not implemented for '{dtype_name(dtype)}'")
    exact = {torch.float16: 11, torch.float32: 24, torch.float64: 53}
    if bits := exact.get(dtype):
        most = "2049" if bits == 11 else f"2^{bits}+1"
        require(
            n <= 2**bits + 1,
            f"n cannot be greater than {most} for {dtype_name(dtype)} type.",
        )
    else:
        _check_holds(dtype, max(n - 1, 0))


def _of_floats(kernel: str, a: Arguments) -> None:
    """Of kernels that draw, which the CPU is not asked about."""
    dtype = a["self"].dtype
    if not dtype.is_floating_point:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{dtype_name(dtype)}'")


_KERNELS = {
    "_sample_dirichlet": "dirichlet",
    "_standard_gamma": "gamma_cpu",
    "rrelu_with_noise": "rrelu_with_noise_out_cpu",
    "rrelu_with_noise_functional": "rrelu_with_noise_out_cpu",
}
for _name, _kernel in _KERNELS.items():
    BEFORE[f"aten::{_name}"] = functools.partial(_of_floats, _kernel)
