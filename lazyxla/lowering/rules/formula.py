"""The notation of element-wise rules: formulas on values, written as they are read.

    @pointwise("aten::leaky_relu")
    def leaky_relu(x, slope):
        return where(x > 0, x, x * slope)

`pointwise` hands every tensor and Scalar to the function as an `X`, all of one dtype and one
shape: the dtype that PyTorch's CPU kernels compute in, which is float32 for the 16-bit floats and
the result's dtype otherwise. Arguments of another kind (bool, int, str, None) are passed on as
they are. A Scalar that varies between runs stays dynamic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Union

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Formula = Callable[..., Any]
Term = Union["X", int, float, bool, complex]


class X:
    """A value in a formula. A number next to it takes its dtype and shape."""

    __slots__ = ("b", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, b: Builder, value: Value) -> None:
        self.b = b
        self.value = value

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype(self.value)

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

    def to(self, dtype: torch.dtype) -> X:
        return X(self.b, self.b.convert(self.value, dtype))

    def full(self, number: Any) -> X:
        """`number` in this dtype and shape."""
        return X(self.b, self.b.full_like(self.value, number))

    def call(self, operation: str, *others: Term) -> X:
        """The StableHLO operation `operation`, or the CHLO one if its name starts with "chlo."."""
        values = [self.value, *(self.term(o) for o in others)]
        if operation.startswith("chlo."):
            return X(self.b, getattr(self.b.chlo, operation[5:])(*values))
        if operation in ("maximum", "minimum") and isinstance(others[0], X):
            return X(self.b, getattr(self.b, operation)(*values))
        return X(self.b, getattr(self.b.hlo, operation)(*values))

    def term(self, other: Term) -> Value:
        return other.value if isinstance(other, X) else self.b.full_like(self.value, other)

    def __add__(self, other: Term) -> X:
        # XLA folds constants by adding bools modulo 2; PyTorch's sum of bools is their union.
        return self.call("or_" if self.b.dtype(self.value) == torch.bool else "add", other)

    def __sub__(self, other: Term) -> X:
        return self.call("subtract", other)

    def __mul__(self, other: Term) -> X:
        return self.call("multiply", other)

    def __truediv__(self, other: Term) -> X:
        """HLO's division: truncates for integers."""
        return self.call("divide", other)

    def __mod__(self, other: Term) -> X:
        """C's fmod and %: the sign of the dividend."""
        return self.call("remainder", other)

    def __pow__(self, other: Term) -> X:
        return self.call("power", other)

    def __radd__(self, other: Term) -> X:
        return self.full(other) + self

    def __rsub__(self, other: Term) -> X:
        return self.full(other) - self

    def __rmul__(self, other: Term) -> X:
        return self.full(other) * self

    def __rtruediv__(self, other: Term) -> X:
        return self.full(other) / self

    def __rpow__(self, other: Term) -> X:
        return self.full(other) ** self

    def __neg__(self) -> X:
        return self.call("negate")

    def __abs__(self) -> X:
        return self.call("abs")

    def __and__(self, other: Term) -> X:
        return self.call("and_", other)

    def __or__(self, other: Term) -> X:
        return self.call("or_", other)

    def __xor__(self, other: Term) -> X:
        return self.call("xor", other)

    def __invert__(self) -> X:
        return self.call("not_")

    def compare(self, other: Term, direction: str) -> X:
        return X(self.b, self.b.compare(self.value, self.term(other), direction))

    def __eq__(self, other: Term) -> X:  # type: ignore[override]
        return self.compare(other, "EQ")

    def __ne__(self, other: Term) -> X:  # type: ignore[override]
        return self.compare(other, "NE")

    def __lt__(self, other: Term) -> X:
        return self.compare(other, "LT")

    def __le__(self, other: Term) -> X:
        return self.compare(other, "LE")

    def __gt__(self, other: Term) -> X:
        return self.compare(other, "GT")

    def __ge__(self, other: Term) -> X:
        return self.compare(other, "GE")

    def is_nan(self) -> X:
        return self != self

    @property
    def real(self) -> X:
        return self.call("real")

    @property
    def imag(self) -> X:
        return self.call("imag")


def where(condition: X, x: Term, y: Term) -> X:
    """Element-wise choice; one of x and y may be a number."""
    b = condition.b
    x, y = (t.value if isinstance(t, X) else t for t in (x, y))
    return X(b, b.select(condition.value, x, y))


def maximum(x: X, y: Term) -> X:
    """The greater one; nan if one of both is nan."""
    return x.call("maximum", y)


def minimum(x: X, y: Term) -> X:
    """The smaller one; nan if one of both is nan."""
    return x.call("minimum", y)


def clip(x: X, low: Term, high: Term) -> X:
    return minimum(maximum(x, low), high)


def exp(x: X) -> X:
    return x.call("exponential")


def expm1(x: X) -> X:
    return x.call("exponential_minus_one")


def log(x: X) -> X:
    return x.call("log")


def log1p(x: X) -> X:
    """log(1 + x), exact for small x.

    XLA's CPU backend takes four times as long for its own float32 operation as for the logarithm of
    the rounded sum and the share that the rounding left out (W. Kahan), whose error is no greater.
    """
    b = x.b
    if b.platform != "cpu" or x.dtype != torch.float32:
        return x.call("log_plus_one")
    # XLA would cancel a constant that is added and subtracted again.
    scalar = b.hlo.optimization_barrier([b.constant(1, x.dtype)])
    one = X(b, b.broadcast_to(scalar, b.shape(x.value)))
    total = x + one
    excess = ((total - one) - x) / total  # nan at -1 and infinity
    return where(x == 0, x, log(total) - where(excess.is_nan(), 0, excess))


def sqrt(x: X) -> X:
    return x.call("sqrt")


def tanh(x: X) -> X:
    return x.call("tanh")


def sigmoid(x: X) -> X:
    return x.call("logistic")


def erf(x: X) -> X:
    return x.call("chlo.erf")


def trunc(x: X) -> X:
    """Rounds towards zero and keeps the sign of a zero."""
    return where(x < 0, x.call("ceil"), x.call("floor"))


def sign_bit(x: X) -> X:
    """Whether the sign bit is set, for a zero and a nan as well (not for a nan on a TPU in
    float64).
    """
    if not x.is_float:
        return x < 0
    if x.b.platform == "tpu" and x.dtype == torch.float64:  # it has no bits there, but two floats
        return (x < 0) | ((x == 0) & (1 / x < 0))
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return X(x.b, x.b.bitcast(x.value, whole)) < 0


def is_operand(arg: Any) -> bool:
    """Whether a rule's argument is a tensor or a number that may vary."""
    return isinstance(arg, Scalar) or hasattr(arg, "owner")


def operands(b: Builder, *args: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """`args` with tensors and Scalars as X of one shape and of `dtype`, by default the one PyTorch
    computes in.
    """
    dtype = dtype or b.compute_dtype(b.outputs[0].dtype)
    aligned = iter(b.align(*(a for a in args if is_operand(a)), dtype=dtype))
    return [X(b, next(aligned)) if is_operand(a) else a for a in args]


def unwrap(result: Any) -> Any:
    """X to value, also within a tuple."""
    if isinstance(result, tuple):
        return tuple(unwrap(r) for r in result)
    return result.value if isinstance(result, X) else result


def pointwise(*names: str, exact: bool = False) -> Callable[[Formula], Formula]:
    """Registers a formula on X as the rule of the operators `names`.

    `exact`: the operation rounds correctly (or not at all), so that tensors of the result's dtype
    need no wider one.
    """

    def register(formula: Formula) -> Formula:
        @functools.wraps(formula)
        def lower(b: Builder, *args: Any) -> Any:
            dtype = b.outputs[0].dtype
            same = exact and all(b.dtype(a) == dtype for a in args if is_operand(a))
            return unwrap(formula(*operands(b, *args, dtype=dtype if same else None)))

        rule(*names)(lower)
        return formula

    return register


def predicate(*names: str) -> Callable[[Formula], Formula]:
    """As `pointwise`, for bool results: the formula sees the operands in the dtype that they
    promote to.
    """

    def register(formula: Formula) -> Formula:
        @functools.wraps(formula)
        def lower(b: Builder, *args: Any) -> Any:
            dtype = b.result_type(*(a for a in args if is_operand(a)))
            return unwrap(formula(*operands(b, *args, dtype=dtype)))

        rule(*names)(lower)
        return formula

    return register
