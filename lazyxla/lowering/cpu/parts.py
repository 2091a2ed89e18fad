"""Sums of rows in parts: what is summed is computed in the shape that has the parts.

XLA's CPU compiler fuses a reshape with what computes its operand. Where dimensions are neither just
joined nor just divided there, it numbers the elements from the first to the last and divides each
number to find what an operand that is repeated has for it, so that it computes element by element:
logsumexp of 512 x 32,000 takes 75 ms, and 11 if the differences from the rows' maxima are computed
as 512 x 8 x 4,000 (two CPUs of an Intel Xeon with AVX-512).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.cpu.stored import elementwise_operands
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_DEPTH = 64
"""Operations after each other that are followed; XLA fuses no more."""


def compute_in_parts(b: Builder) -> None:
    """Moves the reshapes of what matmuls sum (`sums.py`) before what computes it, in all functions
    of the module."""
    for function in b.module.body.operations:
        for view in list(function.regions[0].blocks[0].operations):
            reshape = view.operation
            if reshape.name == "stablehlo.reshape" and _is_summed(reshape):
                with b.mlir.ir.InsertionPoint(reshape), reshape.location:
                    (result,) = b.wrap(reshape.results)
                    moved = _Reshaped(b, result.shape).compute(b.operand(reshape))
                result.ir.replace_all_uses_with(moved.ir)
                reshape.erase()


def _is_summed(operation: Any) -> bool:
    """Whether a matmul with ones reads the result, and nothing else. Other matmuls have it in
    memory, and may share it with what reads its operand."""
    readers = [use.owner for use in operation.results[0].uses]
    return [_is_sum(reader) for reader in readers] == [True]


def _is_sum(operation: Any) -> bool:
    if operation.name != "stablehlo.dot_general":
        return False
    return getattr(operation.operands[1].owner, "name", None) == "stablehlo.constant"


class _Reshaped:
    """Values in another shape: the operations that compute them, with operands of that shape."""

    def __init__(self, b: Builder, shape: Sequence[int]) -> None:
        self._b = b
        self._shape = shape
        self._computed: dict[Any, Value] = {}

    def compute(self, x: Value, depth: int = 0) -> Value:
        if x.ir not in self._computed:
            self._computed[x.ir] = self._compute(x, depth)
        return self._computed[x.ir]

    def _compute(self, x: Value, depth: int) -> Value:
        name = getattr(x.owner, "name", None)
        if depth < _DEPTH:
            if elementwise_operands(self._b, x) is not None:
                return self._pointwise(x, depth + 1)
            if name == "stablehlo.reshape":
                return self.compute(self._b.operand(x.owner), depth + 1)
        if name == "stablehlo.broadcast_in_dim":
            return self._repeated(x)
        return x.reshape(self._shape)

    def _pointwise(self, x: Value, depth: int) -> Value:
        operands = [
            self.compute(operand, depth) if operand.rank else operand
            for operand in self._b.wrap(x.owner.operands)
        ]
        operation = x.owner.clone()
        for position, operand in enumerate(operands):
            operation.operands[position] = operand.ir
        operation.results[0].set_type(self._b.type(x.dtype, self._shape))
        return self._b.wrap(operation.results)[0]

    def _repeated(self, x: Value) -> Value:
        """A broadcast; of an operand that has all of the dimensions that become others, or none."""
        operand, given = self._b.operand(x.owner), x.owner.attributes["broadcast_dimensions"]
        sizes = dict(zip(given, operand.shape, strict=True))
        dims: list[int] = []
        for old, new in _same_elements(x.shape, self._shape):
            has = {sizes.get(d, 1) == x.shape[d] for d in old if x.shape[d] > 1}
            if len(has) > 1:
                return x.reshape(self._shape)
            dims += new if has == {True} else []
        if sorted(sizes) != list(sizes):
            return x.reshape(self._shape)
        kind = self._b.type(x.dtype, self._shape)
        operand = operand.reshape([self._shape[d] for d in dims])
        return self._b.hlo.broadcast_in_dim(kind, operand, dims)


def _same_elements(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dimensions of two shapes of equally many elements, as few as can be at a time, that have
    the same elements in the same order."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, count = (i, j), [1, 1]
        while count[0] != count[1] or (i, j) == first:
            if j == len(new) or (i < len(old) and count[0] <= count[1]):
                count[0] *= old[i]
                i += 1
            else:
                count[1] *= new[j]
                j += 1
        yield range(first[0], i), range(first[1], j)
