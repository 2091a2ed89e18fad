"""Values, which rules take and return: tensors of the program that is built.

A rule is the formula that it computes::

    @pointwise("aten::leaky_relu")
    def leaky_relu(x: Value, slope: Value) -> Value:
        return where(x > 0, x, x * slope)

The operators broadcast and promote as PyTorch's do. Functions of values (``where``, ``exp``,
``maximum``) are in functions.py; what needs more than formulas (reductions, matmul, indexing) is a
method of the builder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import torch

from lazyxla.lowering.scalar import Scalar

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_OF_REAL_NUMBERS = {
    *("maximum", "minimum", "remainder"),
    *(f"chlo.{name}" for name in ("digamma", "erf", "erf_inv", "erfc", "lgamma", "next_after")),
}
"""Operations that StableHLO and CHLO accept for complex numbers, too. Compilers do not, and some of
them end the process then."""

Number = bool | int | float | complex
Operand = Union["Value", Scalar, Number]
"""An operation's operand: a tensor, a number that may vary between runs, or a number."""


class Value:
    """A tensor of the program that is built.

    Attributes:
        b: the builder of its program.
        ir: the same as MLIR has it, a ``jaxlib.mlir.ir.Value``.
        dtype, shape: as PyTorch has them.
    """

    __slots__ = ("b", "dtype", "ir", "shape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, b: Builder, ir: Any) -> None:
        self.b = b
        self.ir = ir
        self.dtype, self.shape = b.mlir.spec(ir.type)

    def __repr__(self) -> str:
        return f"Value({self.dtype}, {list(self.shape)})"

    def __bool__(self) -> bool:
        raise TypeError("a value of the program is not known when the program is built")

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def type(self) -> Any:
        """Its MLIR type."""
        return self.ir.type

    @property
    def owner(self) -> Any:
        """The MLIR operation, or block, that defines it."""
        return self.ir.owner

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def is_exact(self) -> bool:
        """An integer or bool."""
        return not self.is_float and not self.is_complex

    def to(self, dtype: torch.dtype) -> Value:
        return self.b.convert(self, dtype)

    def accumulated(self) -> Value:
        """In the dtype that PyTorch accumulates in: float32 for narrower floats."""
        return self.to(self.b.compute_dtype(self.dtype))

    def reshape(self, shape: Sequence[int]) -> Value:
        """Row-major; one size may be -1."""
        return self.b.reshape(self, shape)

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """The sum over `dims` in its own dtype."""
        return self.b.reduce(self, dims, "sum", keepdim)

    def mean(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """The mean over `dims` in its own dtype (nan over nothing)."""
        return self.sum(dims, keepdim) / self.count(dims)

    def count(self, dims: Sequence[int]) -> int:
        """How many elements a reduction over `dims` combines."""
        return math.prod(self.shape[d] for d in dims)

    def full(self, number: Operand) -> Value:
        """A number in this dtype and shape."""
        return self.b.full(self.shape, number, self.dtype)

    def call(self, operation: str, *others: Operand) -> Value:
        """The StableHLO operation of this name, or the CHLO one if the name starts with "chlo."."""
        values = [self]
        for other in others:
            values[0], aligned = values[0].aligned(other)
            values.append(aligned)
        if operation in _OF_REAL_NUMBERS and values[0].dtype.is_complex:
            raise NotImplementedError(f"{operation} is not defined for {values[0].dtype}")
        if operation.startswith("chlo."):
            return getattr(self.b.chlo, operation[5:])(*values)  # type: ignore[no-any-return]
        return getattr(self.b.hlo, operation)(*values)  # type: ignore[no-any-return]

    def aligned(self, other: Operand) -> tuple[Value, Value]:
        """Both in one dtype and one shape, by PyTorch's rules."""
        if isinstance(other, Value):
            if other.dtype == self.dtype and other.shape == self.shape:
                return self, other
            x, y = self.b.align(self, other)
            return x, y
        x = self.b.convert(self, self.b.result_type(self, other))
        return x, self.b.full(x.shape, other, x.dtype)

    def __add__(self, other: Operand) -> Value:
        x, y = self.aligned(other)
        # XLA folds constants by adding bools modulo 2; PyTorch's sum of bools is their union.
        return x.call("or_" if x.dtype == torch.bool else "add", y)

    def __sub__(self, other: Operand) -> Value:
        return self.call("subtract", other)

    def __mul__(self, other: Operand) -> Value:
        return self.call("multiply", other)

    def __truediv__(self, other: Operand) -> Value:
        """HLO's division: truncates for integers."""
        return self.call("divide", other)

    def __mod__(self, other: Operand) -> Value:
        """C's fmod and %: the sign of the dividend."""
        return self.call("remainder", other)

    def __pow__(self, other: Operand) -> Value:
        return self.call("power", other)

    def _turned(self, other: Operand) -> tuple[Value, Value]:
        x, y = self.aligned(other)
        return y, x

    def __radd__(self, other: Operand) -> Value:
        x, y = self._turned(other)
        return x + y

    def __rsub__(self, other: Operand) -> Value:
        x, y = self._turned(other)
        return x - y

    def __rmul__(self, other: Operand) -> Value:
        x, y = self._turned(other)
        return x * y

    def __rtruediv__(self, other: Operand) -> Value:
        x, y = self._turned(other)
        return x / y

    def __rpow__(self, other: Operand) -> Value:
        x, y = self._turned(other)
        return x**y

    def __neg__(self) -> Value:
        return self.call("negate")

    def __abs__(self) -> Value:
        return self.b.absolute(self)

    def __and__(self, other: Operand) -> Value:
        return self.call("and_", other)

    def __or__(self, other: Operand) -> Value:
        return self.call("or_", other)

    def __xor__(self, other: Operand) -> Value:
        return self.call("xor", other)

    def __invert__(self) -> Value:
        return self.call("not_")

    def __lshift__(self, other: Operand) -> Value:
        return self.call("shift_left", other)

    def __rshift__(self, other: Operand) -> Value:
        """For signed integers it copies the sign."""
        return self.call(
            f"shift_right_{'arithmetic' if self.dtype.is_signed else 'logical'}", other
        )

    def compare(self, other: Operand, direction: str) -> Value:
        """`direction`: EQ, NE, LT, LE, GT or GE."""
        return self.b.compare(*self.aligned(other), direction)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.compare(other, "EQ")

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.compare(other, "NE")

    def __lt__(self, other: Operand) -> Value:
        return self.compare(other, "LT")

    def __le__(self, other: Operand) -> Value:
        return self.compare(other, "LE")

    def __gt__(self, other: Operand) -> Value:
        return self.compare(other, "GT")

    def __ge__(self, other: Operand) -> Value:
        return self.compare(other, "GE")

    def is_nan(self) -> Value:
        return self != self

    @property
    def real(self) -> Value:
        return self.call("real")

    @property
    def imag(self) -> Value:
        return self.call("imag")


def unwrapped(x: Any) -> Any:
    """A Value as MLIR has it, also within a list or tuple; anything else as it is."""
    if isinstance(x, Value):
        return x.ir
    if type(x) in (list, tuple):
        return [unwrapped(part) for part in x]
    return x


class Dialect:
    """The operations of one of MLIR's dialects on Values: ``b.hlo.add(x, y)``.

    An operation of one result returns a Value, of several a list of them. Names of attributes and
    of operations with regions ("DotDimensionNumbers", "ReduceOp") are MLIR's own.
    """

    def __init__(self, b: Builder, module: Any) -> None:
        self._b = b
        self._module = module
        self._ir = b.mlir.ir

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._module, name)
        if isinstance(operation, type) and not issubclass(operation, self._ir.OpView):
            return operation
        b, value_type = self._b, self._ir.Value

        def call(*args: Any, **kwargs: Any) -> Any:
            found = operation(
                *map(unwrapped, args), **{key: unwrapped(arg) for key, arg in kwargs.items()}
            )
            if isinstance(found, value_type):
                return Value(b, found)
            return b.wrap(found) if isinstance(found, Sequence) else found

        setattr(self, name, call)
        return call
