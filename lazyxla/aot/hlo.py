"""The optimized program, read: its computations, their instructions, and how often each runs.

jaxlib reads the compiler's program and writes it as an HloModuleProto of its own version, whose
fields are numbered as in xla/service/hlo.proto and xla/xla_data.proto.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lazyxla.lowering import wire

# Of PrimitiveType, by number: bytes of an element. What is not here (tokens) has none.
_ELEMENT_BYTES: dict[int, float] = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 2,
    8: 4,
    9: 8,
    10: 2,
    11: 4,
    12: 8,
}
_ELEMENT_BYTES |= {15: 8, 16: 2, 18: 16, 19: 1, 20: 1, 21: 0.5, 22: 0.5, 23: 1, 24: 1, 25: 1}
_ELEMENT_BYTES |= {28: 1, 29: 1}

_UNKNOWN = 2**63 - 1  # what the compiler notes where its cost model has no cycles


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's dimensions and element type, or a tuple of shapes."""

    element_type: int
    dims: tuple[int, ...]
    parts: tuple[Shape, ...]
    memory_space: int = 0
    """0 is the device's main memory; others, such as 1 on TPUs, are on the chip itself."""

    @property
    def nbytes(self) -> int:
        """Without the padding that layouts add."""
        own = math.prod(self.dims) * _ELEMENT_BYTES.get(self.element_type, 0)
        return math.ceil(own) + sum(part.nbytes for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation; `called` are the computations that it runs, by number."""

    name: str
    opcode: str
    number: int
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    raw: dict[int, Any]
    """The other fields of its message: the last value of each, by number."""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """The compiler's backend config; empty if it is not JSON."""
        try:
            noted = json.loads(self.raw.get(43, b"") or b"{}")
        except ValueError:
            return {}
        return noted if isinstance(noted, dict) else {}

    @property
    def estimated_cycles(self) -> int | None:
        """The estimate of the compiler's cost model for one run; None if it has none."""
        cycles = int(self.backend_config.get("window_config", {}).get("estimated_cycles", _UNKNOWN))
        return None if cycles == _UNKNOWN else cycles

    @property
    def channel(self) -> int:
        """The channel that identifies the parts of one collective; 0 if there is none."""
        return int(self.raw.get(26, 0))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by number, and which one is its result."""

    name: str
    instructions: dict[int, Instruction]
    root: int


class Program:
    """All computations by number, and the one that runs first."""

    def __init__(self, serialized: bytes) -> None:
        self.computations: dict[int, Computation] = {}
        self.entry = 0
        for number, value in wire.fields(serialized):
            if number == 3:
                key, computation = _computation(value)
                self.computations[key] = computation
            elif number == 6:
                self.entry = value

    @functools.cached_property
    def runs(self) -> dict[int, int]:
        """How often each computation runs, loops by their counts. A loop whose trip count the
        program does not state counts once (:attr:`unknown_loops`)."""
        runs = dict.fromkeys(self.computations, 0)
        self._count(self.entry, 1, runs, loops=True)
        return runs

    @functools.cached_property
    def calls(self) -> dict[int, int]:
        """The same with each loop counted once."""
        calls = dict.fromkeys(self.computations, 0)
        self._count(self.entry, 1, calls, loops=False)
        return calls

    @functools.cached_property
    def unknown_loops(self) -> list[str]:
        """Loops whose trip counts the program does not state."""
        return [
            instruction.name
            for computation in self.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "while" and trip_count(self, computation, instruction) is None
        ]

    def _count(self, number: int, times: int, runs: dict[int, int], loops: bool) -> None:
        runs[number] += times
        computation = self.computations[number]
        for instruction in computation.instructions.values():
            inner = times
            if instruction.opcode == "while" and loops:
                count = trip_count(self, computation, instruction)
                inner *= 1 if count is None else count
            for called in instruction.called:
                self._count(called, inner, runs, loops)


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs: as the compiler notes it, or from its condition, if that
    compares a counter of the body with a constant. None otherwise."""
    noted = loop.backend_config.get("known_trip_count", {})
    if isinstance(noted, dict) and "n" in noted:
        return int(noted["n"])
    body, condition = (program.computations[number] for number in _body_and_condition(loop))
    ends = _Trace(program, condition)
    compare, inside = ends.origin(condition.root)
    if compare.opcode != "compare" or compare.raw.get(63) not in (b"LT", b"NE"):
        return None
    (counter, end) = (inside.origin(operand)[0] for operand in compare.operands)
    if counter.opcode != "get-tuple-element" or (last := _constant(end)) is None:
        return None
    place = int(counter.raw.get(13, 0))
    outside = _Trace(program, computation)
    state, _ = outside.origin(loop.operands[0])
    result = body.instructions[body.root]
    if state.opcode != "tuple" or result.opcode != "tuple":
        return None
    first = _constant(outside.origin(state.operands[place])[0])
    step = _step(_Trace(program, body), result.operands[place], place)
    if first is None or not step:
        return None
    return max(0, math.ceil((last - first) / step))


class _Trace:
    """Where values of a computation come from, through copies and fusions."""

    def __init__(
        self,
        program: Program,
        computation: Computation,
        parameters: tuple[_Trace, Sequence[int]] | None = None,
    ) -> None:
        self._program = program
        self._computation = computation
        self._parameters = parameters

    def origin(self, number: int) -> tuple[Instruction, _Trace]:
        """The instruction that makes a value, and where its operands are."""
        instruction = self._computation.instructions[number]
        if instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
            return self.origin(instruction.operands[0])
        if instruction.opcode == "fusion":
            called = self._program.computations[instruction.called[0]]
            inner = _Trace(self._program, called, (self, instruction.operands))
            return inner.origin(called.root)
        if instruction.opcode == "parameter" and self._parameters is not None:
            outer, operands = self._parameters
            return outer.origin(operands[int(instruction.raw.get(9, 0))])
        return instruction, self


def _step(trace: _Trace, number: int, place: int) -> int | None:
    """By how much a loop's body increments the element of its state at this index."""
    add, inside = trace.origin(number)
    if add.opcode != "add":
        return None
    terms = [inside.origin(operand)[0] for operand in add.operands]
    steps = [_constant(term) for term in terms if term.opcode == "constant"]
    counters = [t for t in terms if t.opcode == "get-tuple-element" and t.raw.get(13, 0) == place]
    return steps[0] if len(steps) == len(counters) == 1 else None


def _constant(instruction: Instruction) -> int | None:
    """The value of an integer constant."""
    if instruction.opcode != "constant" or instruction.shape.dims:
        return None
    literal = dict(wire.fields(instruction.raw.get(8, b"")))
    for field, bits in ((4, 32), (5, 64), (6, 32), (7, 64)):
        if field in literal:
            (value,) = wire.numbers(literal[field])
            return value - (1 << 64) if value >> 63 and field in (4, 5) else value % (1 << bits)
    return 0 if 1 in literal else None


def _body_and_condition(loop: Instruction) -> tuple[int, int]:
    body, condition = loop.called
    return body, condition


def device_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Which positions among a program's devices take part in a collective together."""
    raw = instruction.raw
    if 93 in raw:
        return _mesh_groups(raw[93])
    if 92 in raw:
        return _iota_groups(raw[92])
    if 87 in raw:
        listed = list(wire.fields(raw[87]))
        iota = [value for number, value in listed if number == 2]
        if iota:
            return _iota_groups(iota[0])
        groups = [_ids(value) for number, value in listed if number == 1]
    else:
        groups = [_ids(value) for value in raw.get(-49, [])]
    return groups or [list(range(devices))]


def source_target_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """The source and target positions of a collective-permute."""
    pairs = [dict(wire.fields(value)) for value in instruction.raw.get(-52, [])]
    return [(pair.get(1, 0), pair.get(2, 0)) for pair in pairs]


def _ids(group: bytes) -> list[int]:
    return [i for _, value in wire.fields(group) for i in wire.numbers(value)]


def _iota_groups(message: bytes) -> list[list[int]]:
    fields = dict(wire.fields(message))
    dims, order = wire.numbers(fields[3]), wire.numbers(fields[4])
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    groups: list[list[int]] = ids.reshape(fields[1], fields[2]).tolist()
    return groups


def _mesh_groups(message: bytes) -> list[list[int]]:
    """Groups along some axes of a mesh, or parts of them."""
    mesh: dict[int, list[bytes]] = {1: [], 2: []}
    axes: list[dict[int, Any]] = []
    for number, value in wire.fields(message):
        if number == 1:
            for inner, part in wire.fields(value):
                mesh.setdefault(inner, []).append(part)
        elif number == 2:
            axes.append(dict(wire.fields(value)))
    sizes = [dict(wire.fields(axis)).get(2, 1) for axis in mesh[1]]
    ids = [i for value in mesh[2] for i in wire.numbers(value)]
    grid = np.array(ids) if len(ids) == math.prod(sizes) else np.arange(math.prod(sizes))
    # Each axis as three: what is before the part that is meant, the part, what is behind it.
    split, chosen = [], []
    for axis, size in enumerate(sizes):
        before, own = 1, 1
        for ref in axes:
            if ref.get(1, 0) == axis:
                part = dict(wire.fields(ref[2])) if 2 in ref else {}
                before, own = part.get(1, 1), part.get(2, size)
                chosen.append(3 * axis + 1)
        split += [before, own, size // (before * own)]
    others = [i for i in range(len(split)) if i not in chosen]
    grid = grid.reshape(split).transpose([*others, *chosen])
    groups: list[list[int]] = grid.reshape(-1, math.prod(split[i] for i in chosen)).tolist()
    return groups


def _computation(message: bytes) -> tuple[int, Computation]:
    name, number, root, instructions = "", 0, 0, {}
    for field, value in wire.fields(message):
        if field == 1:
            name = value.decode()
        elif field == 2:
            instruction = _instruction(value)
            instructions[instruction.number] = instruction
        elif field == 5:
            number = value
        elif field == 6:
            root = value
    return number, Computation(name, instructions, root)


_REPEATED = (49, 52)  # fields of which all values are kept, under their number's negative


def _instruction(message: bytes) -> Instruction:
    raw: dict[int, Any] = {}
    operands: list[int] = []
    called: list[int] = []
    for number, value in wire.fields(message):
        if number == 36:
            operands += wire.numbers(value)
        elif number == 38:
            called += wire.numbers(value)
        else:
            raw[number] = value
            if number in _REPEATED:
                raw.setdefault(-number, []).append(value)
    name, opcode, shape = raw[1].decode(), raw[2].decode(), _shape(raw[3])
    return Instruction(name, opcode, raw.get(35, 0), shape, tuple(operands), tuple(called), raw)


def _shape(message: bytes) -> Shape:
    element_type, dims, parts, memory_space = 0, [], [], 0
    for number, value in wire.fields(message):
        if number == 2:
            element_type = value
        elif number == 3:
            dims += wire.numbers(value)
        elif number == 4:
            parts.append(_shape(value))
        elif number == 5:  # the layout
            memory_space = dict(wire.fields(value)).get(8, 0)
    return Shape(element_type, tuple(dims), tuple(parts), memory_space)
