"""Decorators that make a formula the rule of element-wise operators.

    @pointwise("aten::leaky_relu")
    def leaky_relu(x: Value, slope: Value) -> Value:
        return where(x > 0, x, x * slope)

`pointwise` hands every tensor and Scalar to the function as a `Value`, all of one dtype and one
shape: the dtype that PyTorch's CPU kernels compute in, which is float32 for the 16-bit floats and
the result's dtype otherwise. Arguments of another kind (bool, int, str, None) are passed on as they
are. A Scalar that varies between runs remains dynamic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Formula = Callable[..., Any]


def is_operand(arg: Any) -> bool:
    """Whether a rule's argument is a tensor or a number that may vary."""
    return isinstance(arg, (Scalar, Value))


def operands(b: Builder, *args: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """`args` with tensors and Scalars as Values of one shape and of `dtype`, by default the one
    PyTorch computes in.
    """
    dtype = dtype or b.compute_dtype(b.outputs[0].dtype)
    aligned = iter(b.align(*(a for a in args if is_operand(a)), dtype=dtype))
    return [next(aligned) if is_operand(a) else a for a in args]


def pointwise(*names: str, exact: bool = False) -> Callable[[Formula], Formula]:
    """Registers a formula as the rule of the operators `names`.

    `exact`: the operation rounds correctly (or not at all), so that tensors of the result's dtype
    need no higher precision.
    """

    def register(formula: Formula) -> Formula:
        @functools.wraps(formula)
        def lower(b: Builder, *args: Any) -> Any:
            dtype = b.outputs[0].dtype
            same = exact and all(b.dtype(a) == dtype for a in args if is_operand(a))
            return formula(*operands(b, *args, dtype=dtype if same else None))

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
            return formula(*operands(b, *args, dtype=dtype))

        rule(*names)(lower)
        return formula

    return register
