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

# Foreach operator -> operator of an element, called with the element of every list and with the
# arguments that are no lists as they are. A trailing `alpha` that the foreach schema lacks is
# added.
_MAPPED = {
    "_foreach_add.List": "add.Tensor",
    "_foreach_add.Scalar": "add.Scalar",
    "_foreach_add.ScalarList": "add.Scalar",
    "_foreach_add.Tensor": "add.Tensor",
    "_foreach_sub.List": "sub.Tensor",
    "_foreach_sub.Scalar": "sub.Scalar",
    "_foreach_sub.ScalarList": "sub.Scalar",
    "_foreach_mul.List": "mul.Tensor",
    "_foreach_mul.Scalar": "mul.Scalar",
    "_foreach_mul.ScalarList": "mul.Scalar",
    "_foreach_mul.Tensor": "mul.Tensor",
    "_foreach_div.List": "div.Tensor",
    "_foreach_div.Scalar": "div.Scalar",
    "_foreach_div.ScalarList": "div.Scalar",
    "_foreach_div.Tensor": "div.Tensor",
    "_foreach_maximum.List": "maximum",
    "_foreach_maximum.Scalar": "clamp_min",
    "_foreach_maximum.ScalarList": "clamp_min",
    "_foreach_minimum.List": "minimum",
    "_foreach_minimum.Scalar": "clamp_max",
    "_foreach_minimum.ScalarList": "clamp_max",
    "_foreach_clamp_min.List": "maximum",
    "_foreach_clamp_min.Scalar": "clamp_min",
    "_foreach_clamp_min.ScalarList": "clamp_min",
    "_foreach_clamp_max.List": "minimum",
    "_foreach_clamp_max.Scalar": "clamp_max",
    "_foreach_clamp_max.ScalarList": "clamp_max",
    "_foreach_pow.List": "pow.Tensor_Tensor",
    "_foreach_pow.Scalar": "pow.Tensor_Scalar",
    "_foreach_pow.ScalarList": "pow.Tensor_Scalar",
    "_foreach_pow.ScalarAndTensor": "pow.Scalar",
    "_foreach_lerp.List": "lerp.Tensor",
    "_foreach_lerp.Scalar": "lerp.Scalar",
    "_foreach_lerp.ScalarList": "lerp.Scalar",
    "_foreach_addcmul.Scalar": "addcmul",
    "_foreach_addcmul.ScalarList": "addcmul",
    "_foreach_addcdiv.Scalar": "addcdiv",
    "_foreach_addcdiv.ScalarList": "addcdiv",
    "_foreach_mm": "mm",
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
for _name, _element in _MAPPED.items():
    rule(f"aten::{_name}")(_each(_element))


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
