"""Windows to columns and back: unfold and fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.windows import Window, add_columns, columns
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::im2col")
def im2col(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    window = Window.of(kernel, stride, padding, dilation)
    x = x.reshape([-1, *x.shape[-3:]])
    return columns(b, x, window, window.out_sizes(x.shape[2:])).reshape(b.outputs[0].shape)


@rule("aten::col2im")
def col2im(
    b: Builder,
    x: Value,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    window = Window.of(kernel, stride, padding, dilation)
    out = window.out_sizes(output_size)
    x = x.reshape([1, -1, window.taps, *out])
    return add_columns(b, x, output_size, window).reshape(b.outputs[0].shape)
