"""What one of XLA's compilers needs, or does badly, is in the programs for it alone."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from lazyxla.lowering import Program, lower_to_text
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench
from tests.lowering.harness import check, execute, record, text

PLATFORMS = ("cpu", "cuda", "tpu")


def holds(program: Program, operation: str) -> list[str]:
    """The platforms whose programs have the operation."""
    return [p for p in PLATFORMS if f"stablehlo.{operation}" in lower_to_text(program, p)]


@pytest.mark.parametrize(
    ("op", "arguments", "options"),
    [
        ("_pdist_forward", (torch.randn(4, 3), math.inf), {}),
        ("abs", (torch.randn(3, dtype=torch.complex64),), {}),
        ("segment_reduce", (torch.randn(4, 3), "max"), {"lengths": torch.tensor([1, 3])}),
    ],
)
def test_maxima_look_for_nan_where_the_compiler_drops_it(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """They tell nan by comparing a number with itself."""
    program = record(f"aten::{op}", *arguments, **options).program
    texts = {p: lower_to_text(program, p) for p in PLATFORMS}
    assert ["compare NE" in texts[p] for p in PLATFORMS] == [True, False, False]


def test_stacks_of_a_loop_are_made_apart_on_the_cpu(bench: Bench) -> None:
    def rule(b: Builder, x: Value) -> Value:
        return b.stacked_apart([x])[0]

    x = torch.ones(3, 2)
    assert holds(bench.program(rule, (x,), [x]), "optimization_barrier") == ["cpu"]


def test_bits_of_another_width_are_apart_where_the_simplifier_merges_them(bench: Bench) -> None:
    def rule(b: Builder, x: Value) -> Value:
        return b.bitcast_to_width(x, torch.int16, (3, 2))

    x = torch.ones(3)
    program = bench.program(rule, (x,), [x.view(torch.int16).reshape(3, 2)])
    assert holds(program, "optimization_barrier") == ["cpu", "cuda"]


_FOLDED: dict[str, tuple[Any, ...]] = {
    "cumsum": (1,),
    "cumprod": (1,),
    "logcumsumexp": (1,),
    "cummax": (1,),
    "amax": ([1], False),
    "prod.dim_int": (1, False),
    "any.dim": (1, False),
    "_softmax": (1, False),
    "upsample_nearest1d": ([300],),
}
"""Arguments of operators on constants that XLA's constant folding computes element by element while
it compiles."""
_CALLED_ON_THE_CPU = {"cumsum", "cumprod", "logcumsumexp"}
"""Kernels compute these of so many elements (cpu/kernels.py)."""


@pytest.mark.parametrize("op", _FOLDED)
def test_constants_are_not_folded_one_by_one(op: str, bench: Bench) -> None:
    """Behind a barrier the compiler does not see that they are constants."""
    x = torch.full((1, 128, 256), 2.0)
    name, _, overload = op.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload or "default")
    expected = call(x, *_FOLDED[op])
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    dtype = [None] * (len(call._schema.arguments) - 1 - len(_FOLDED[op]))

    def rule(made: str) -> Any:
        def lower(b: Builder, x: Value) -> Any:
            ones = b.constant(1, x.dtype, x.shape)
            computed = b.swap(ones.reshape([1, 256, 128]) + 1, 1, 2)
            value = {"constant": ones + ones, "computed": computed, "data": x, "iota": ones}[made]
            if made == "iota":
                value = value + b.iota(x.shape, 0, x.dtype)
            return b.lower_op(f"aten::{op}", value, *_FOLDED[op], *dtype)

        return lower

    def barriers(made: str, platform: str) -> int:
        program = bench.program(rule(made), (x,), expected)
        return lower_to_text(program, platform).count("optimization_barrier")

    for platform in PLATFORMS[1:] if op in _CALLED_ON_THE_CPU else PLATFORMS:
        fewest = barriers("data", platform)
        assert barriers("iota", platform) == fewest
        assert barriers("constant", platform) > fewest
        assert barriers("computed", platform) > fewest
    bench.check(rule("computed"), x, expected=expected)


@pytest.mark.parametrize(("count", "barriers"), [(100, 0), (1 << 14, 1)])
def test_scatters_of_constants_are_not_folded(count: int, barriers: int, bench: Bench) -> None:
    def rule(b: Builder, x: Value) -> Value:
        index = b.constant(0, torch.int64, (count, 1))
        return b.scatter_nd(x, index, b.constant(1, x.dtype, (count,)), [0], "add")

    x = torch.zeros(3)
    expected = torch.tensor([float(count), 0.0, 0.0])
    program = bench.program(rule, (x,), [expected])
    for platform in PLATFORMS:
        assert lower_to_text(program, platform).count("optimization_barrier") == barriers
    bench.check(rule, x, expected=expected)


OF_FEW_TERMS = [
    ("aten::mm", (2000, 3), (3, 16), True),
    ("aten::mm", (2000, 2), (2, 16), True),
    ("aten::linear", (2, 1000, 3), (16, 3), True),
    ("aten::linear", (2000, 2), (8, 2), True),
    ("aten::mm", (2000, 4), (4, 16), False),
    ("aten::mm", (2000, 1), (1, 16), False),
    ("aten::mm", (2000, 3), (3, 4), False),  # a narrow result
    ("aten::mm", (500, 3), (3, 16), False),  # of few rows
    ("aten::bmm", (2, 2000, 3), (2, 3, 16), False),
]


@pytest.mark.parametrize(("op", "left", "right", "is_sum"), OF_FEW_TERMS, ids=str)
def test_dots_of_few_terms_are_sums_on_the_cpu(
    op: str, left: tuple[int, ...], right: tuple[int, ...], is_sum: bool
) -> None:
    x, y = torch.randn(left), torch.randn(right)
    recorded = record(op, x, y)
    assert holds(recorded.program, "dot_general") == [
        p for p in PLATFORMS if p != "cpu" or not is_sum
    ]
    check(op, x, y)
    if is_sum:
        assert "dot_general" in text(op, x.double(), y.double())
        check(op, x.bfloat16(), y.bfloat16())
        x[..., 5, :] = float("inf")
        check(op, x, y)
        if op == "aten::mm":  # as XLA has a transposed operand
            check(op, x.t().contiguous().t(), y)


SMALL_PAIRS = [  # of matrices: left sizes, right sizes, whether all are multiplied in one loop
    ((16, 4, 4), (16, 4, 4), True),
    ((16, 16, 16), (16, 16, 16), True),
    ((2, 8, 2, 3), (2, 8, 3, 2), True),
    ((15, 4, 4), (15, 4, 4), False),  # few pairs
    ((16, 16, 17), (16, 17, 16), False),  # large ones
    ((16, 1, 4), (16, 4, 4), False),  # vectors
    ((16, 4, 4), (16, 4, 1), False),
    ((16, 4, 1), (16, 1, 4), False),
]


@pytest.mark.parametrize(("left", "right", "is_sum"), SMALL_PAIRS, ids=str)
def test_many_small_matrices_are_multiplied_in_one_loop_on_the_cpu(
    left: tuple[int, ...], right: tuple[int, ...], is_sum: bool
) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    for dtype in dtypes:
        x, y = torch.randn(left).to(dtype), torch.randn(right).to(dtype)
        recorded = record("aten::matmul" if x.dim() > 3 else "aten::bmm", x, y)
        assert holds(recorded.program, "dot_general") == [
            p for p in PLATFORMS if p != "cpu" or not is_sum
        ]
        check("aten::matmul" if x.dim() > 3 else "aten::bmm", x, y)
    integers = torch.ones(left, dtype=torch.int64), torch.ones(right, dtype=torch.int64)
    assert "dot_general" in text("aten::matmul", *integers)


@pytest.mark.parametrize("seed", range(12))
def test_dots_of_small_matrices_have_dimensions_in_any_order(seed: int, bench: Bench) -> None:
    """One or two each to go over the batch, to sum over, and of either operand alone."""
    draw = random.Random(seed)
    groups = [draw.randint(1, 2) for _ in range(4)]  # batch, summed, left's, right's
    names = iter("abcdefgh")
    batch, summed, left, right = ("".join(itertools.islice(names, n)) for n in groups)
    size = {n: draw.randint(4, 5) if n in batch else draw.randint(2, 3) for n in "abcdefgh"}
    size[batch[0]] = 16
    x_names, y_names = (
        "".join(draw.sample(s, len(s))) for s in (batch + summed + left, batch + summed + right)
    )
    x, y = (torch.randn([size[n] for n in names]) for names in (x_names, y_names))

    def rule(b: Builder, x: Value, y: Value) -> Any:
        places = [
            [names.index(n) for n in some]
            for some in (summed, batch)
            for names in (x_names, y_names)
        ]
        return b.dot(x, y, *places)

    # In the order that the operands have their own dimensions in.
    own = [n for n in x_names if n in left] + [n for n in y_names if n in right]
    expected = torch.einsum(f"{x_names},{y_names}->{batch}{''.join(own)}", x, y)
    bench.check(rule, x, y, expected=expected)
    assert "dot_general" not in bench.text(rule, x, y, expected=expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [True, False])
def test_greatest_values_are_not_looked_up(dtype: torch.dtype, largest: bool) -> None:
    """A TPU's compiler counts a tile of memory for each look-up. Those of 8 of 64 elements in 4,096
    rows take 2.7 ms at its bandwidth, the rest 10 us."""
    x = torch.randperm(60).reshape(4, 15).to(dtype) - 30
    x[0, 3], x[1, 2], x[2, 5] = -0.0, math.inf, math.nan
    for dim in (0, 1):
        recorded = record("aten::topk", x, 3, dim, largest, True)
        for platform in PLATFORMS:
            assert "gather" not in lower_to_text(recorded.program, platform)
            got, _ = execute(recorded.program, recorded.inputs, platform)
            torch.testing.assert_close(got, recorded.expected, rtol=0, atol=0, equal_nan=True)
