"""Values that the CPU's compiler is made to store.

XLA's CPU compiler (jaxlib 0.10.2, xla-cpu-pjrt 0.0.1) fuses an operation with each operation that
reads its result: each of the fusions computes it again, and reads what it is computed from. It
stores the result of an operation of two large operands instead if a reader cannot be fused; but if
the only reader has one large operand (a reshape; a transposition, which it adds to convolutions; a
conversion, which it adds to bfloat16) it looks no further, and duplicates both. Networks have that
at residual connections, if they change between (N, H, W, C) and (N, H * W, C) there or compute in
bfloat16, and where they concatenate: each normalization, and the gradient of each, adds the results
of all layers before it again.

Here memory traffic decides. A value that is computed from r bytes by w fusions costs them w * r to
read. Stored, it costs r once, and its own size s to write and w times to read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from lazyxla.lowering.cpu.apart import compute_apart
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_LARGE = 4096
"""Elements from which on a value counts: computing fewer again costs less than a call."""

_POINTWISE = (
    *("abs", "add", "and", "atan2", "bitcast_convert", "cbrt", "ceil", "clamp", "compare"),
    *("complex", "convert", "cosine", "divide", "exponential", "exponential_minus_one", "floor"),
    *("imag", "is_finite", "log", "log_plus_one", "logistic", "maximum", "minimum", "multiply"),
    *("negate", "not", "or", "power", "real", "remainder", "round_nearest_afz"),
    *("round_nearest_even", "rsqrt", "select", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor"),
)
_LAYOUT = ("broadcast_in_dim", "concatenate", "pad", "reshape", "reverse", "slice", "transpose")
POINTWISE = {"chlo.erf", *(f"stablehlo.{name}" for name in _POINTWISE)}
_FUSED = {
    *POINTWISE,
    "stablehlo.optimization_barrier",  # it is gone by then
    *(f"stablehlo.{name}" for name in _LAYOUT),
}
"""Operations of one result that are fused with what reads it."""

_MOST = 16
"""Members of a set from which on others change no decision; a program has thousands of values."""

_Values = frozenset[int]

_NONE: _Values = frozenset()


def elementwise_operands(b: Builder, x: Value) -> list[Value] | None:
    """What an operation computes `x` from element by element, numbers left out; None if it computes
    it otherwise, as a bitcast to a narrower dtype."""
    if getattr(x.owner, "name", None) not in POINTWISE:
        return None
    operands = [operand for operand in b.wrap(x.owner.operands) if operand.rank]
    return operands if all(operand.shape == x.shape for operand in operands) else None


def store_shared_values(b: Builder) -> None:
    """Stores values where that saves memory traffic, in all functions of the builder's module."""
    for function in list(b.module.body.operations):
        block = _Block(function.regions[0].blocks[0].operations)
        for operation in block.worth_storing():
            value = operation.results[0]
            with b.mlir.ir.InsertionPoint.after(operation):
                stored = compute_apart(b, ("stored",), lambda x: x, b.wrap([value])).ir
            value.replace_all_uses_except(stored, [stored.owner.operation])


class _Step(NamedTuple):
    """An operation, its large operands, and its result if that is large and fused with readers."""

    operation: Any
    operands: list[int]
    result: int | None


class _Block:
    """A function's large values, numbered."""

    def __init__(self, operations: Iterable[Any]) -> None:
        self._sizes: list[int] = []  # in bytes
        self._numbers: dict[Any, int | None] = {}  # of all values
        self._in_memory: set[int] = set()  # what operations read that are not fused
        self._steps = [self._step(each.operation) for each in operations]

    def worth_storing(self) -> Iterator[Any]:
        """The operations whose results to store.

        What is read for a value depends on what is stored before it, by how many fusions on what is
        stored after it: the last values are chosen first, as if nothing were stored before them,
        and those that are not worth it after all are then left out.
        """
        fusions, chosen = self._choose(self._sources())
        sources: dict[int, _Values] = {}
        for step in self._steps:
            value = step.result
            if value is None:
                continue
            sources[value] = self._sources_of(step, sources, chosen)
            if value in chosen:
                if self._saves(value, fusions[value], sources[value]):
                    yield step.operation
                else:
                    chosen.remove(value)

    def _step(self, operation: Any) -> _Step:
        operands = [number for x in operation.operands if (number := self._number(x)) is not None]
        fused = operation.name in _FUSED and len(operation.results) == 1
        return _Step(operation, operands, self._number(operation.results[0]) if fused else None)

    def _number(self, value: Any) -> int | None:
        """None for what is not large."""
        if value not in self._numbers:
            kind = value.type
            elements = math.prod(getattr(kind, "shape", ()))  # a token, say, has no shape
            self._numbers[value] = None
            if elements >= _LARGE:
                bits = getattr(kind.element_type, "width", 64)  # a complex type has none
                self._numbers[value] = self._add(elements * max(bits // 8, 1))
        return self._numbers[value]

    def _add(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _sources(self) -> dict[int, _Values]:
        """What a fusion reads to compute each value, if none of them is stored."""
        sources: dict[int, _Values] = {}
        for step in self._steps:
            if step.result is not None:
                sources[step.result] = self._sources_of(step, sources, ())
        return sources

    def _sources_of(
        self, step: _Step, sources: dict[int, _Values], stored: Container[int]
    ) -> _Values:
        found = _NONE
        for value in step.operands:
            found = _union(found, {value} if value in stored else sources.get(value, {value}))
        return found

    def _choose(self, sources: dict[int, _Values]) -> tuple[dict[int, _Values], set[int]]:
        """For each value, the fusions that compute it, by what they store; and which values to
        store."""
        fusions: dict[int, _Values] = defaultdict(frozenset)
        chosen = set()
        for step in reversed(self._steps):
            value = step.result
            if value is None:
                for read, fusion in self._fusions_that_end_at(step):
                    fusions[read] = _union(fusions[read], {fusion})
                continue
            if self._saves(value, fusions[value], sources[value]):
                chosen.add(value)
            for read in step.operands:
                into = {value} if value in chosen else fusions[value]
                fusions[read] = _union(fusions[read], into)
        return fusions, chosen

    def _fusions_that_end_at(self, step: _Step) -> Iterator[tuple[int, int]]:
        """For each operand of an operation that is not fused with its readers, the fusion."""
        if step.operation.name == "stablehlo.reduce":  # it is fused with what it reads
            end = self._add(0)
            for read in step.operands:
                yield read, end
        elif step.operation.name == "stablehlo.convolution":  # it reads transposed operands
            for read in step.operands:
                yield read, self._add(0)
        else:
            self._in_memory.update(step.operands)
            for read in step.operands:
                yield read, read

    def _saves(self, value: int, fusions: _Values, sources: _Values) -> bool:
        """Whether storing a value saves memory traffic."""
        count, size = len(fusions), self._sizes[value]
        read = sum(min(self._sizes[source], size) for source in sources)
        if value in self._in_memory:  # it is stored in either case
            return (count - 1) * read > (count - 1) * size
        return count * read > read + size + count * size


def _union(a: _Values, b: Set[int]) -> _Values:
    both = a | b
    return both if len(both) <= _MOST else frozenset(sorted(both)[:_MOST])
