"""Operators of values: they promote and broadcast as PyTorch's."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyxla import compat
from lazyxla.lowering import Node, Program, Ref, Target, TensorSpec, lower_to_text, registry
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.functions import clip, maximum, minimum, rsqrt, where
from lazyxla.lowering.rules import arithmetic
from lazyxla.lowering.scalar import wrap_number
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench

DTYPES = [
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
BITS = [operator.and_, operator.or_, operator.xor]
SHAPES = [((2, 1), (3,)), ((2, 3), ()), ((), (4,))]
NUMBERS = [True, 2, 1.5, 0.5 + 1j]


def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def is_here(x: torch.Tensor, y: Any) -> bool:
    """Whether the device has the common dtype. It has no complex numbers of 16-bit parts."""
    dtype = torch.result_type(x, y)
    return not dtype.is_complex or dtype.itemsize > 4


def checked(function: Callable[..., Any], expected: torch.Tensor, *args: Any) -> Value:
    """The operator's result, which is not only fitted to what is expected."""
    result = function(*args)
    assert (result.dtype, result.shape) == (expected.dtype, tuple(expected.shape))
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_promotion(bench: Bench, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    xs = [tensor(dtype, shapes[0]) for dtype in DTYPES]
    ys = [tensor(dtype, shapes[1]) for dtype in DTYPES]
    pairs = itertools.product(enumerate(xs), enumerate(ys))
    calls = [(i, j, x * y) for (i, x), (j, y) in pairs if is_here(x, y)]

    def rule(b: Builder, *values: Value) -> list[Value]:
        return [checked(operator.mul, e, values[i], values[len(xs) + j]) for i, j, e in calls]

    bench.check(rule, *xs, *ys, expected=[expected for *_, expected in calls])


def test_promotion_with_numbers(bench: Bench) -> None:
    """On either side."""
    xs = [tensor(dtype, (3,)) for dtype in DTYPES]
    pairs = itertools.product(enumerate(xs), NUMBERS)
    calls = [(i, number, x + number) for (i, x), number in pairs if is_here(x, number)]

    def rule(b: Builder, *values: Value) -> list[Value]:
        right = [checked(operator.add, e, values[i], number) for i, number, e in calls]
        left = [checked(operator.add, e, number, values[i]) for i, number, e in calls]
        return right + left

    bench.check(rule, *xs, expected=[expected for *_, expected in calls] * 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32], ids=str)
def test_comparisons_and_bits(bench: Bench, dtype: torch.dtype) -> None:
    x, y = tensor(dtype, (2, 3)), tensor(dtype, (2, 1)).flip(0)
    functions = COMPARISONS if dtype.is_floating_point else COMPARISONS + BITS
    expected = [function(x, y) for function in functions]

    def rule(b: Builder, x: Value, y: Value) -> list[Value]:
        return [checked(f, e, x, y) for f, e in zip(functions, expected, strict=True)]

    bench.check(rule, x, y, expected=expected)


def test_what_is_not_commutative(bench: Bench) -> None:
    x = torch.tensor([-2.5, -1.0, 0.5, 4.0])

    def rule(b: Builder, x: Value) -> list[Value]:
        return [3 - x, 3 / x, 2**x, -x, abs(x), x % 2, ~(x > 0), x - 3, x / 2, x**2]

    expected = [3 - x, 3 / x, 2**x, -x, x.abs(), torch.fmod(x, 2), ~(x > 0), x - 3, x / 2, x**2]
    bench.check(rule, x, expected=expected)


def test_functions(bench: Bench) -> None:
    x = torch.tensor([[1.0, torch.nan, 4.0], [0.25, 2.0, torch.inf]])
    y = torch.tensor([2.0, 1.0, torch.nan])

    def rule(b: Builder, x: Value, y: Value) -> list[Value]:
        row = [x.sum([1]), x.mean([0], keepdim=True), x.reshape([3, -1]), x.full(2), x.is_nan()]
        chosen = [where(x > y, x, y), where(x > y, x, 0), maximum(x, y), minimum(x, y)]
        return [*row, *chosen, clip(x, 0.5, 3), rsqrt(x), x.to(torch.float64)]

    row = [x.sum(1), x.mean(0, keepdim=True), x.reshape(3, -1), torch.full_like(x, 2), x.isnan()]
    chosen = [torch.where(x > y, x, y), torch.where(x > y, x, 0), x.maximum(y), x.minimum(y)]
    bench.check(rule, x, y, expected=[*row, *chosen, x.clip(0.5, 3), x.rsqrt(), x.double()])


def test_accumulated(bench: Bench) -> None:
    found = {}

    def rule(b: Builder, *values: Value) -> list[Value]:
        found.update({x.dtype: x.accumulated().dtype for x in values})
        return list(values)

    xs = [tensor(dtype, (2,)) for dtype in DTYPES]
    bench.check(rule, *xs, expected=xs)
    narrow = (torch.float16, torch.bfloat16)
    assert found == {d: torch.float32 if d in narrow else d for d in DTYPES}


def test_it_is_not_a_number(bench: Bench) -> None:
    """Nothing depends on the data while the program is built."""
    raised = []

    def rule(b: Builder, x: Value) -> Value:
        for question in (bool, hash, lambda x: x in [1.0], lambda x: x and 1):
            with pytest.raises(TypeError) as error:
                question(x)
            raised.append(str(error.value))
        return x

    x = torch.ones(2)
    bench.check(rule, x, expected=x)
    assert len(raised) == 4


def test_rules_of_a_platform() -> None:
    """Take the place of the general rule there, and give it back."""
    name = "aten::floor"
    program = Program(
        [TensorSpec(torch.float32, (2,))],
        [Node(name, (Ref(0),), (TensorSpec(torch.float32, (2,)),))],
        [Ref(1)],
        [],
        {},
    )

    def texts() -> dict[str, bool]:
        return {
            p: "stablehlo.ceil" in lower_to_text(program, Target(p)) for p in ("cpu", "cuda", "tpu")
        }

    assert not any(texts().values())
    with registry.temporary():

        @registry.rule(name, platforms=("tpu", "cuda"))
        def on_two(b: Builder, x: Value) -> Value:
            return x.call("ceil")

        assert texts() == {"cpu": False, "cuda": True, "tpu": True}
        assert registry.has_user_rules()

        @registry.rule(name)
        def everywhere(b: Builder, x: Value) -> Value:
            return x

        assert not any(texts().values())
    assert not any(texts().values())
    assert not registry.has_user_rules()


def test_bounds_beyond_an_integers_range(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bound nothing in newer versions of torch."""
    monkeypatch.setattr(compat, "CLAMP_SATURATES", True)
    x = torch.tensor([0, 7, 255], dtype=torch.uint8)

    def rule(b: Builder, x: Value) -> list[Value]:
        bounds = [(-5, 300), (3, 260), (None, 100), (400, None)]
        numbers = [[None if n is None else wrap_number(n) for n in pair] for pair in bounds]
        return [arithmetic.clamp(b, x, low, high) for low, high in numbers]

    expected = [x, x.clamp(3, 255), x.clamp(max=100), torch.full_like(x, 255)]
    bench.check(rule, x, expected=expected)
