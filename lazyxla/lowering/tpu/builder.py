"""The builder for XLA's TPU compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.builder.attention import Attention
from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.tpu import attention, look_ups, matmul, overlapping_windows
from lazyxla.lowering.value import Value

_LONG_ROW = 512
"""Between the lengths that were measured."""


class TpuBuilder(Builder):
    """See the module."""

    attention = Attention(kernel=attention, most_scores=1 << 26)
    """The compiler fuses what is made of all scores with their matmul; over blocks it cannot. There
    blocks are for memory alone: 2**26 scores take 256 MiB in float32. A training step of two of
    ViT-B/16's layers (32 x 12 x 197 x 197 scores) takes 11.4 million cycles by libtpu's estimate
    for v5e with all scores at once, and 12.6 over blocks; 580 and 460 MiB of temporary memory. It
    takes many seconds for each loop, so that there is one."""

    range_dtype = torch.float32  # float64 is emulated

    def has_bits(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float64  # which is two floats

    def interleaves_by_stacking(self, shape: Sequence[int]) -> bool:
        # A last dimension of 4 is padded to 128 in memory, unless a fusion avoids that, as it does
        # for long rows. libtpu's estimate for a v5e's 2**21 normal numbers of 2**24, stacked and
        # padded: 1,219,000 and 144,000 cycles in one dimension, with 256 MiB of temporary memory
        # and with none; 216,000 and 152,000 in rows of 64, 151,000 and 235,000 in rows of 4,096.
        return len(shape) > 1 and shape[-1] >= _LONG_ROW

    def bitcast_to_width(self, x: Value, dtype: torch.dtype, shape: Sequence[int]) -> Value:
        return self.hlo.bitcast_convert(self.type(dtype, shape), x)  # none is merged with another

    def platform_dot(self, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
        return matmul.dot(self, left, right, dtype)

    def conv(self, lhs: Value, rhs: Value, *args: Any, **options: Any) -> Value:
        if lhs.dtype == torch.int64:
            raise LoweringError("XLA's TPU compiler has no convolution of int64")
        return super().conv(lhs, rhs, *args, **options)

    def fft(self, function: Callable[..., Any], x: Value, **static: Any) -> Any:
        if x.dtype in (torch.float64, torch.complex128):
            raise LoweringError("XLA's TPU compiler has no Fourier transform of float64")
        return super().fft(function, x, **static)

    def computed_once(self, x: Value) -> Value:
        # In attention the gradient of softmax is read by two matmuls: XLA would compute the sums in
        # both of them again, and the weights for them.
        return self.hlo.optimization_barrier([x])

    def pick(self, x: Value, index: Value, dim: int) -> Value:
        # A TPU gathers element after element; a comparison with all of a row fuses into what makes
        # x.
        return self.select(self.one_hot(x.shape, index, dim), x, 0).sum([dim])

    def take(self, x: Value, index: Value, dim: int) -> Value:
        if look_ups.suit_table(self, x, index, dim):
            return look_ups.in_table(self, x, index, dim)
        return super().take(x, index, dim)

    def take_along(self, x: Value, index: Value, dim: int) -> Value:
        if look_ups.suit_rows(self, x, index, dim):
            return look_ups.in_rows(self, *self._crop(x, index, dim), index)
        return super().take_along(x, index, dim)

    def windows(
        self, x: Value, dim: int, start: int, sizes: Sequence[int], strides: Sequence[int]
    ) -> Value | None:
        return overlapping_windows.sliced(self, x, dim, start, sizes, strides)

    def sign_bit(self, x: Value) -> Value:
        if not self.has_bits(x.dtype):
            return (x < 0) | ((x == 0) & (1 / x < 0))
        return super().sign_bit(x)
