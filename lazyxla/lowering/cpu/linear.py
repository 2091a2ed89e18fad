"""Linear layers for XLA's CPU compiler: rules/matmul.py, or a kernel's call that adds the bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyxla.lowering.builder.contract import DotOperand
from lazyxla.lowering.cpu.matmul_kernels import with_bias
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("aten::linear", platforms=("cpu",))
def linear(b: Builder, x: Value, weight: Value, bias: Value | None) -> Any:
    called = with_bias(b, DotOperand(x, [-1], []), DotOperand(weight, [1], []), bias)
    return NotImplemented if called is None else called.reshape(b.outputs[0].shape)


@rule("aten::addmm", platforms=("cpu",))
def addmm(b: Builder, bias: Value, x: Value, y: Value, beta: Operand, alpha: Operand) -> Any:
    if b.is_const(beta, 1) and b.is_const(alpha, 1):
        called = with_bias(b, DotOperand(x, [1], []), DotOperand(y, [0], []), bias)
        if called is not None:
            return called
    return NotImplemented
