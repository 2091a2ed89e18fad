"""Windows to columns and back: unfold and fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.windows import Window, add_shifted, shifted
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
    columns = b.stack(shifted(b, x, window, window.out_sizes(x.shape[2:])), 2)
    return columns.reshape(b.outputs[0].shape)


@rule("aten::col2im")
def col2im(
    b: Builder,
    columns: Value,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    window = Window.of(kernel, stride, padding, dilation)
    out = window.out_sizes(output_size)
    columns = columns.reshape([1, -1, window.taps, *out])
    parts = [b.select_dim(columns, 2, tap) for tap in range(window.taps)]
    return add_shifted(b, parts, output_size, window).reshape(b.outputs[0].shape)
