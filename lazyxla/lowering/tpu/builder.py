"""The builder for XLA's TPU compiler."""

from __future__ import annotations

from typing import Any

import torch

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.builder.contract import Factor
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.tpu import matmul
from lazyxla.lowering.value import Value


class TpuBuilder(Builder):
    """See the module."""

    range_dtype = torch.float32  # float64 is emulated

    def has_bits(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float64  # which is two floats

    def product(self, left: Factor, right: Factor, dtype: torch.dtype | None) -> Value:
        return matmul.product(self, left, right, dtype)

    def conv(self, lhs: Value, rhs: Value, *args: Any, **options: Any) -> Value:
        if lhs.dtype == torch.int64:
            raise LoweringError("XLA's TPU compiler has no convolution of int64")
        return super().conv(lhs, rhs, *args, **options)

    def pick(self, x: Value, index: Value, dim: int) -> Value:
        # A TPU gathers element after element; a comparison with all of a row fuses into what makes
        # x.
        return self.select(self.one_hot(x.shape, index, dim), x, 0).sum([dim])

    def sign_bit(self, x: Value) -> Value:
        if not self.has_bits(x.dtype):
            return (x < 0) | ((x == 0) & (1 / x < 0))
        return super().sign_bit(x)
