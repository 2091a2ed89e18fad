"""Products of float8 matrices that are scaled: what quantized linear layers call."""

from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any


@rule("aten::_scaled_mm")
def scaled_mm(
    b: "Builder",
    x: Value,
    y: Value,
    scale_x: Value,
    scale_y: Value,
    bias: Value | None,
    scale_result: Value | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Value:
    """(x @ y) * scale_x * scale_y + bias; a scale is one number, or one per row and per column.

    PyTorch's CPU kernel does not read `scale_result`, and so is it here.
    """
    total = b.matmul(b.convert(x, torch.float32), b.convert(y, torch.float32))
    shape = b.shape(total)
    for scale in (scale_x, scale_y):
        factor = b.value(scale, torch.float32)
        if b.rank(factor) != 2:
            factor = b.reshape(factor, [1, 1])
        total = b.hlo.multiply(total, b.broadcast_to(factor, shape))
    if bias is not None:
        total = b.hlo.add(total, b.broadcast_to(b.value(bias, torch.float32), shape))
    return total
