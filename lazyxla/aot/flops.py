"""FLOPs of matmuls, convolutions and kernels in the bodies of loops, which the compiler counts once
though they run often."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lazyxla.aot import hlo
from lazyxla.lowering import wire


def repeated(program: hlo.Program) -> int:
    """FLOPs of the second and later runs of loops' bodies: of their matmuls and kernels alone."""
    total = 0
    for number, computation in program.computations.items():
        if more := program.runs[number] - program.calls[number]:
            total += more * (products(computation) + kernels(computation))
    return total


def kernels(computation: hlo.Computation) -> int:
    """The declared FLOPs of the kernels that are directly in a computation."""
    total = 0
    for instruction in computation.instructions.values():
        if instruction.opcode == "custom-call":
            kernel = instruction.backend_config.get("custom_call_config", {})
            total += int(kernel.get("cost_estimate", {}).get("flops", 0))
    return total


def products(computation: hlo.Computation) -> int:
    """FLOPs of the matmuls and convolutions that are directly in a computation."""
    return sum(_product(computation, each) for each in computation.instructions.values())


def at_highest_precision(program: hlo.Program) -> int:
    """FLOPs of the float32 matmuls and convolutions for which the highest precision is set."""
    total = 0
    for number, computation in program.computations.items():
        for instruction in computation.instructions.values():
            operands = (computation.instructions[i] for i in instruction.operands[:2])
            # A PrecisionConfig lists those of the operands, packed.
            precisions = dict(wire.fields(instruction.raw.get(51, b""))).get(1, b"")
            if _HIGHEST in wire.numbers(precisions) and _FLOAT32 in {
                operand.shape.element_type for operand in operands
            }:
                total += program.runs[number] * _product(computation, instruction)
    return total


_HIGHEST, _FLOAT32 = 2, 11  # of PrecisionConfig.Precision and PrimitiveType


def _product(computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """FLOPs of a matmul or convolution; 0 of anything else."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    lhs, rhs = (computation.instructions[i].shape.dims for i in instruction.operands[:2])
    if instruction.opcode == "convolution":
        return _convolution(instruction, lhs, rhs)
    numbers = dict(wire.fields(instruction.raw.get(30, b"")))
    contracted = math.prod(lhs[i] for i in wire.numbers(numbers.get(1, b"")))
    return 2 * math.prod(instruction.shape.dims) * contracted


def _convolution(instruction: hlo.Instruction, lhs: Sequence[int], rhs: Sequence[int]) -> int:
    numbers = dict(wire.fields(instruction.raw[16]))
    windows = [dict(wire.fields(value)) for _, value in wire.fields(instruction.raw.get(15, b""))]
    spatial = zip(*(wire.numbers(numbers.get(i, b"")) for i in (11, 12)), windows, strict=True)
    out = instruction.shape.dims
    places = math.prod(_places(lhs[i], out[o], window) for i, o, window in spatial)
    batch = lhs[numbers.get(7, 0)] // instruction.raw.get(58, 1)
    features = rhs[numbers.get(3, 0)] * out[numbers.get(10, 0)]
    return 2 * places * batch * features


def _places(size: int, out: int, window: dict[int, int]) -> int:
    """How often, along a dimension and over all positions of the window, an element of the window
    meets one of the input."""
    low = window.get(3, 0)
    low -= (1 << 64) if low >> 63 else 0
    dilation = window.get(6, 1)
    starts = np.arange(out)[:, None] * window.get(2, 1) - low
    at = starts + np.arange(window[1])[None, :] * window.get(5, 1)
    meets = (at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)
    return int(meets.sum())
