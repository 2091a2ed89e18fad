"""Complex numbers: building them, their parts and angles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lazyxla.lowering.functions import where
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.formula import operands, pointwise
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@pointwise("aten::_conj_physical", exact=True)
def conj_physical(x: Value) -> Value:
    return x.call("chlo.conj") if x.is_complex else x


@rule("aten::complex")
def make_complex(b: Builder, real: Value, imag: Value) -> Value:
    real, imag = b.align(real, imag, dtype=b.real_dtype(b.outputs[0].dtype))
    return b.complex(real, imag)


@rule("aten::polar")
def polar(b: Builder, length: Value, angle: Value) -> Value:
    length, angle = operands(b, length, angle, dtype=b.real_dtype(b.outputs[0].dtype))
    real, imag = length * angle.call("cosine"), length * angle.call("sine")
    return b.complex(real, imag)


@rule("aten::angle")
def angle(b: Builder, x: Value) -> Value:
    if b.dtype(x).is_complex:
        return b.hlo.atan2(b.hlo.imag(x), b.hlo.real(x))
    (x,) = operands(b, x, dtype=b.outputs[0].dtype)
    return where(x < 0, math.pi, where(x.is_nan(), x, 0))
