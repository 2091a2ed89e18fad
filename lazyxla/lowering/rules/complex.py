"""Complex numbers: building them, their parts and angles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering.functions import conj, cos, sin, where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands, pointwise
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# PyTorch decomposes the second; its in-place form has no kernel for other devices than its own.
pointwise("aten::_conj_physical", "aten::conj_physical", exact=True)(conj)


@rule("aten::complex")
def make_complex(b: Builder, real: Value, imag: Value) -> Value:
    real, imag = operands(b, real, imag, dtype=b.real_dtype(b.outputs[0].dtype))
    return b.complex(real, imag)


@rule("aten::polar")
def polar(b: Builder, length: Value, angle: Value) -> Value:
    length, angle = operands(b, length, angle, dtype=b.real_dtype(b.outputs[0].dtype))
    return b.complex(length * cos(angle), length * sin(angle))


@rule("aten::angle")
def angle(b: Builder, x: Value) -> Value:
    if x.is_complex:
        return b.lower_op("aten::atan2", x.imag, x.real)  # type: ignore[no-any-return]
    (x,) = operands(b, x, dtype=b.outputs[0].dtype)
    return where(x < 0, math.pi, where(x.is_nan(), x, 0))
