"""Operators on lists of tensors: every `_foreach_x` is the rule of `x` applied to each element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.registry import rule
from lazyxla.lowering.scalar import wrap_number
from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


# Foreach operators of one list -> operator of an element.
_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1"),
    *("floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "max", "neg", "reciprocal"),
    *("round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero"),
)

# Foreach operator -> operators of an element, for a list and for numbers. They are called with the
# element of every list and with the arguments that are no lists as they are, and with an `alpha`
# at the end that the foreach schema lacks.
_BINARY = {
    "add": ("add.Tensor", "add.Scalar"),
    "sub": ("sub.Tensor", "sub.Scalar"),
    "mul": ("mul.Tensor", "mul.Scalar"),
    "div": ("div.Tensor", "div.Scalar"),
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "clamp_min": ("maximum", "clamp_min"),
    "clamp_max": ("minimum", "clamp_max"),
    "pow": ("pow.Tensor_Tensor", "pow.Tensor_Scalar"),
    "lerp": ("lerp.Tensor", "lerp.Scalar"),
}

_OTHERS = {
    "add.Tensor": "add.Tensor",
    "mul.Tensor": "mul.Tensor",
    "div.Tensor": "div.Tensor",
    "pow.ScalarAndTensor": "pow.Scalar",
    "addcmul.Scalar": "addcmul",
    "addcmul.ScalarList": "addcmul",
    "addcdiv.Scalar": "addcdiv",
    "addcdiv.ScalarList": "addcdiv",
    "mm": "mm",
}

_WITH_ALPHA = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")


def _elements(args: tuple[Any, ...], count: int) -> Iterator[list[Any]]:
    """The arguments of every element's call: a list gives its elements, all else is the same."""
    for number in range(count):
        yield [arg[number] if isinstance(arg, (list, tuple)) else arg for arg in args]


def _each(element: str) -> Callable[..., list[Value]]:
    def lower(b: Builder, *args: Any) -> list[Value]:
        outputs = b.outputs
        extra = [wrap_number(1)] if element in _WITH_ALPHA and len(args) == 2 else []
        return [
            b.lower_op(f"aten::{element}", *call, *extra, outputs=[output])
            for call, output in zip(_elements(args, len(outputs)), outputs, strict=True)
        ]

    return lower


for _name in _UNARY:
    rule(f"aten::_foreach_{_name}")(_each(_name))
for _name, (_of_list, _of_number) in _BINARY.items():
    rule(f"aten::_foreach_{_name}.List")(_each(_of_list))
    rule(f"aten::_foreach_{_name}.Scalar", f"aten::_foreach_{_name}.ScalarList")(_each(_of_number))
for _name, _element in _OTHERS.items():
    rule(f"aten::_foreach_{_name}")(_each(_element))


@rule("aten::_foreach_clone")
def clone(b: Builder, xs: list[Value], memory_format: Any = None) -> list[Value]:
    return list(xs)


@rule("aten::_foreach_copy")
def copy(b: Builder, xs: list[Value], sources: list[Value], non_blocking: bool) -> list[Value]:
    return [
        b.broadcast_to(b.value(s, o.dtype), o.shape)
        for s, o in zip(sources, b.outputs, strict=True)
    ]


def _norm(element: str) -> Callable[..., list[Value]]:
    def lower(b: Builder, xs: list[Value], ord: Operand, dtype: torch.dtype | None) -> list[Value]:
        return [
            b.lower_op(element, x, ord, None, False, dtype, outputs=[output])
            for x, output in zip(xs, b.outputs, strict=True)
        ]

    return lower


rule("aten::_foreach_norm.Scalar")(_norm("aten::linalg_vector_norm"))
rule("aten::_foreach_powsum.Scalar")(_norm("aten::linalg__powsum"))
