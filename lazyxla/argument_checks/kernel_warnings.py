"""Warnings of PyTorch's CPU kernels that depend on sizes and numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from lazyxla.argument_checks.tables import WARNINGS, Arguments, checks


def _few_degrees_of_freedom(function: str, a: Arguments) -> Sequence[str]:
    x, dims, correction = a["self"], a["dim"], a["correction"]
    count = math.prod(x.shape[d] for d in dims) if dims and x.dim() else x.numel()
    kept = x.numel() // count if count else math.prod(x.shape[d] for d in _others(x, dims))
    if (count if kept else 0) > (1 if correction is None else correction):
        return []
    text = (
        f"{function}(): degrees of freedom is <= 0. Correction should be strictly less than the "
        "reduction factor (input numel divided by output numel)."
    )
    return [text] * (2 if x.is_complex() else 1)  # of the real parts and the imaginary ones


def _others(x: torch.Tensor, dims: Sequence[int] | None) -> list[int]:
    """The dimensions that are not reduced."""
    reduced = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    return [d for d in range(x.dim()) if d not in reduced]


for _function in ("var", "std", "var_mean", "std_mean"):
    WARNINGS[f"aten::{_function}.correction"] = functools.partial(
        _few_degrees_of_freedom, _function
    )


@checks(WARNINGS, "arange", "arange.start_step")
def _range_of_another_size(a: Arguments) -> Sequence[str]:
    """Of an out= tensor that is resized."""
    out = a.get("out")
    if out is None or out.numel() == 0:
        return []
    bounds = [a["start"], a["end"], a["step"]] if "step" in a else [a["end"]]
    count = torch.arange(*bounds, dtype=out.dtype, device="meta").numel()
    if count == out.numel():
        return []
    return [
        f"The number of elements in the out tensor of shape {list(out.shape)} is {out.numel()} "
        f"which does not match the computed number of elements {count}. Note that this may occur "
        "as a result of rounding error. The out tensor will be resized to a tensor of shape "
        f"({count},)."
    ]


_EXACT = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Up to which power of two a dtype holds every integer."""
_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
}


@checks(WARNINGS, "random.from", "random.to")
def _inexact_bounds(a: Arguments) -> Sequence[str]:
    dtype = a["self"].dtype
    if dtype not in _EXACT:
        return []
    digits = _EXACT[dtype]
    bounds = {"from": a.get("from", 0)}
    if a["to"] is not None:
        bounds["to - 1"] = a["to"] - 1
    return [
        f"{name} is out of bounds [-(2^{digits}), 2^{digits}]. Due to precision limitations "
        f"{_NAMES[dtype]} can support discrete uniform distribution only within this range. This "
        "warning will become an error in version 1.7 release, please fix the code in advance"
        for name, bound in bounds.items()
        if abs(bound) > 2**digits
    ]


@checks(WARNINGS, "where.self")
def _condition_of_bytes(a: Arguments) -> Sequence[str]:
    if a["condition"].dtype is not torch.uint8:
        return []
    return [
        "where received a uint8 condition tensor. This behavior is deprecated and will be removed "
        "in a future version of PyTorch. Use a boolean condition instead."
    ]
