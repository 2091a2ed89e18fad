"""What a compiled program reads from a device's main memory and writes to it.

The compiler's own count, ``bytes_accessed``, has what stays within the chip, too: operands and
results of operations in its vector memory, and what is copied there ahead. Here only arrays in
main memory count: once for each operation that reads or writes them. Of kernels, too, though they
may read an operand several times: what they say of that themselves is in ``kernels``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from lazyxla.aot import CompiledProgram, hlo

# They compute nothing, or are counted where they start.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("copy-done", "async-done", "slice-done", "while", "call", "conditional"),
)
_CONTROL = ("while", "call", "conditional")
_SLICES = ("slice", "dynamic-slice")
_TARGET = 28  # the field of an instruction with a custom call's target
_PLACE = 9  # and that with a parameter's number


class Kernel(NamedTuple):
    """What a custom call that is a kernel says of itself: its FLOPs, None if it does not, and the
    bytes that it accesses, those of its operands and results if it does not."""

    name: str
    flops: int | None
    nbytes: int


def moved(program: CompiledProgram) -> int:
    """Bytes from and to main memory in one run. Loops count as often as they run."""
    optimized = program._optimized
    return sum(
        optimized.runs[number] * _moved(optimized, computation, instruction)
        for number, computation, instruction in _executed(optimized)
    )


def kernels(program: CompiledProgram) -> list[Kernel]:
    """The kernels that it runs, in no order; those in loops as often as these run."""
    optimized, found = program._optimized, []
    for number, computation, instruction in _executed(optimized):
        if _is_kernel(instruction):
            operands = [computation.instructions[i].shape for i in instruction.operands]
            nbytes = sum(shape.nbytes for shape in (*operands, instruction.shape))
            said = _said(instruction)
            said_bytes = said.get("bytes_accessed", nbytes)
            kernel = Kernel(instruction.name, said.get("flops"), said_bytes)
            found += [kernel] * optimized.runs[number]
    return found


def _executed(program: hlo.Program) -> Iterator[tuple[int, hlo.Computation, hlo.Instruction]]:
    """Instructions that are operations of their own: not those within fusions and reductions."""
    within = {
        called
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode not in _CONTROL
        for called in instruction.called
    }
    for number, computation in program.computations.items():
        if number not in within:
            for instruction in computation.instructions.values():
                if instruction.opcode not in _FREE:
                    yield number, computation, instruction


def _moved(
    program: hlo.Program, computation: hlo.Computation, instruction: hlo.Instruction
) -> float:
    opcode = instruction.opcode
    results = list(_arrays(instruction.shape))
    if opcode in ("copy-start", "async-start"):
        # The result is a tuple with the array read and, of the same size or a part, that written.
        written = results[0] if opcode == "copy-start" else _written(results)
        operand = computation.instructions[instruction.operands[0]].shape
        read_bytes = written.nbytes if operand.memory_space == 0 else 0
        return _in_memory(written) + read_bytes
    if opcode == "custom-call" and not _is_kernel(instruction):
        return 0.0
    operands = [computation.instructions[number] for number in instruction.operands]
    read = [sum(map(_in_memory, _arrays(operand.shape))) for operand in operands]
    if opcode == "fusion":
        inner = program.computations[instruction.called[0]]
        read = [min(size, _used(inner, place)) for place, size in enumerate(read)]
    elif opcode in _SLICES:
        read = [min(read[0], instruction.shape.nbytes)]
    return sum(read) + sum(map(_in_memory, results))


def _written(results: list[hlo.Shape]) -> hlo.Shape:
    """Of an asynchronous slice: the last of its arrays that is one."""
    return [shape for shape in results if shape.dims][-1]


def _used(fused: hlo.Computation, place: int) -> float:
    """How much of a parameter a fusion reads: if it is only sliced, the slices."""
    instructions = fused.instructions.values()
    (own,) = (i for i in instructions if i.opcode == "parameter" and i.raw.get(_PLACE, 0) == place)
    users = [i for i in instructions if own.number in i.operands]
    if users and all(user.opcode in _SLICES for user in users):
        return sum(user.shape.nbytes for user in users)
    return math.inf


def _arrays(shape: hlo.Shape) -> Iterator[hlo.Shape]:
    if not shape.parts:
        yield shape
    for part in shape.parts:
        yield from _arrays(part)


def _in_memory(shape: hlo.Shape) -> int:
    return shape.nbytes if shape.memory_space == 0 else 0


def _is_kernel(instruction: hlo.Instruction) -> bool:
    return instruction.raw.get(_TARGET) in (b"tpu_custom_call", b"__gpu$xla.gpu.triton")


def _said(instruction: hlo.Instruction) -> dict[str, int]:
    config = instruction.backend_config.get("custom_call_config", {})
    return {name: int(value) for name, value in config.get("cost_estimate", {}).items()}
