"""Scaled matmul of float8 matrices: what quantized linear layers call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# torch.nn.functional.ScalingType
_TENSORWISE, _ROWWISE = 0, 1


@rule("aten::_scaled_mm")
def scaled_mm(
    b: Builder,
    x: Value,
    y: Value,
    scale_x: Operand,
    scale_y: Operand,
    bias: Value | None,
    scale_result: Value | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Value:
    """(x @ y) * scale_x * scale_y + bias; a scale is one number, or one per row and per column.

    PyTorch's CPU kernel does not read `scale_result`, and so is it here.
    """
    return _scaled(b, x, y, (scale_x, scale_y), bias)


@rule("aten::_scaled_mm_v2")
def scaled_mm_v2(
    b: Builder,
    x: Value,
    y: Value,
    scales_x: list[Operand],
    recipe_x: list[int],
    swizzle_x: list[int],
    scales_y: list[Operand],
    recipe_y: list[int],
    swizzle_y: list[int],
    bias: Value | None,
    out_dtype: torch.dtype | None,
    contraction_dims: list[int],
    use_fast_accum: bool,
) -> Value:
    """The recipes that PyTorch's CPU has: one scale, or one per row and per column."""
    if {*recipe_x, *recipe_y} - {_TENSORWISE, _ROWWISE} or any((*swizzle_x, *swizzle_y)):
        raise NotImplementedError("scales of blocks, or such that are swizzled")
    (scale_x,), (scale_y,) = scales_x, scales_y
    return _scaled(b, x, y, (scale_x, scale_y), bias)


def _scaled(
    b: Builder, x: Value, y: Value, scales: tuple[Operand, Operand], bias: Value | None
) -> Value:
    result = b.matmul(x.to(torch.float32), y.to(torch.float32))
    for scale in scales:
        factor = b.value(scale, torch.float32)
        result = result * (factor if factor.rank == 2 else factor.reshape([1, 1]))
    return result if bias is None else result + bias.to(torch.float32)
