"""Pooling and its gradients."""

from typing import Any

import pytest
import torch

from lazyxla.lowering import Node, Program, Ref, TensorSpec, lower_to_text
from tests.lowering.harness import check, execute, record

# input, kernel, stride, padding, dilation, ceil_mode
_MAX = [
    ((2, 3, 8, 8), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((2, 3, 7, 9), [2, 3], [2, 1], [0, 1], [1, 2], False),
    ((3, 7, 7), [2, 2], [], [0, 0], [1, 1], True),
    ((1, 2, 6, 5), [3], [2], [1], [2], True),
    ((1, 2, 5, 5), [1, 1], [2, 2], [0, 0], [1, 1], False),
    ((2, 3, 5, 6, 4), [2, 3, 2], [2, 1, 1], [1, 1, 0], [1, 1, 2], False),
    ((2, 5, 5, 5), [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], True),
]
# input, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override
_AVERAGE = [
    ((2, 3, 8, 8), [3, 3], [2, 2], [1, 1], False, True, None),
    ((2, 3, 7, 9), [2, 3], [2, 1], [0, 1], True, False, None),
    ((3, 7, 7), [3], [], [1], True, True, None),
    ((1, 2, 6, 6), [2, 2], [3, 3], [0, 0], False, True, 3),
    ((2, 3, 5, 6, 4), [2, 3, 2], [2, 1, 1], [1, 1, 0], True, False, None),
    ((2, 5, 6, 4), [2, 2, 2], [], [0, 0, 0], False, True, 5),
]
_ADAPTIVE = [
    ((2, 3, 8, 6), [1, 1]),
    ((2, 3, 8, 6), [4, 3]),
    ((2, 3, 7, 5), [3, 2]),
    ((3, 4, 4), [7, 5]),
    ((2, 3, 4, 6, 5), [2, 3, 5]),
    ((2, 3, 5, 7, 4), [2, 3, 1]),
]


def _random(shape, dtype=torch.float32):
    """Few different values, so that windows have several maxima."""
    return torch.randint(-4, 5, shape).to(dtype)


def _rank(shape, *lists):
    longest = max(map(len, lists))
    return longest if longest > 1 else len(shape) - (1 if len(shape) == 3 else 2)


@pytest.mark.parametrize("case", _MAX, ids=str)
def test_max_pool(case):
    shape, *rest = case
    op = f"max_pool{_rank(shape, *rest[:4])}d_with_indices"
    x = _random(shape)
    check(f"aten::{op}", x, *rest)
    out, indices = getattr(torch.ops.aten, op)(x, *rest)
    rest[1] = rest[1] or rest[0]
    check(f"aten::{op}_backward", torch.randn_like(out), x, *rest, indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_max_pool_dtypes(dtype):
    check("aten::max_pool2d_with_indices", _random((2, 3, 8, 8), dtype), [3, 3], [2, 2], [1, 1])


def test_max_pool_of_nan_and_infinity():
    x = torch.randn(2, 3, 6, 6)
    x[:, :, 1:4, 2] = float("nan")
    x[:, 0] = -float("inf")
    check("aten::max_pool2d_with_indices", x, [3, 3], [2, 2], [1, 1], [2, 2])
    check("aten::adaptive_max_pool2d", x[:, 1:], [4, 3])


@pytest.mark.parametrize("case", _AVERAGE, ids=str)
def test_avg_pool(case):
    shape, *rest = case
    op = f"aten::avg_pool{_rank(shape, *rest[:3])}d"
    x = torch.randn(shape)
    check(op, x, *rest)
    grad = torch.randn_like(getattr(torch.ops.aten, op[6:])(x, *rest))
    rest[1] = rest[1] or rest[0]
    check(f"{op}_backward", grad, x, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_avg_pool_dtypes(dtype):
    check("aten::avg_pool2d", torch.randn(2, 3, 8, 8).to(dtype), [3, 3], [2, 2], [1, 1])


@pytest.mark.parametrize("case", _ADAPTIVE, ids=str)
def test_adaptive_pool(case):
    shape, out = case
    x = torch.randn(shape)
    op = f"_adaptive_avg_pool{len(out)}d"
    check(f"aten::{op}", x, out)
    grad = torch.randn_like(getattr(torch.ops.aten, op)(x, out))
    check(f"aten::{op}_backward", grad, x)
    op, x = f"adaptive_max_pool{len(out)}d", _random(shape)
    check(f"aten::{op}", x, out)
    _, indices = getattr(torch.ops.aten, op)(x, out)
    check(f"aten::{op}_backward", grad, x, indices)


def test_max_unpool():
    x, indices = torch.ops.aten.max_pool2d_with_indices(torch.randn(2, 3, 6, 6), [2, 2])
    check("aten::max_unpool2d", x, indices, [6, 6])
    x, indices = torch.ops.aten.max_pool3d_with_indices(torch.randn(2, 4, 4, 4), [2, 2, 2])
    check("aten::max_unpool3d", x, indices, [4, 4, 4], [2, 2, 2], [0, 0, 0])


# ---- TPUs: forward and backward in one program ----


def _forward_and_backward(
    x: torch.Tensor, *geometry: Any, other: torch.Tensor | None = None
) -> tuple[Program, list[torch.Tensor], list[torch.Tensor]]:
    """The program of maximum pooling and its gradient, its inputs and PyTorch's results.

    With `other` the gradient is given this in the place of the input.
    """
    rank = x.ndim - 2
    *sizes, ceil_mode = geometry
    arguments = (*([n] * rank for n in sizes), ceil_mode)
    name = f"max_pool{rank}d_with_indices"
    best, index = getattr(torch.ops.aten, name)(x, *arguments)
    grad = torch.randn(best.shape).to(x.dtype)
    given = x if other is None else other
    # Rounded once: PyTorch's CPU kernel rounds to 16 bits after each gradient that it adds.
    exact = (grad.double(), given.double(), *arguments, index)
    result = getattr(torch.ops.aten, f"{name}_backward")(*exact).to(x.dtype)

    def spec(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(tensor.dtype, tuple(tensor.shape))

    source = Ref(0) if other is None else Ref(2)
    first = 2 if other is None else 3
    nodes = [
        Node(f"aten::{name}", (Ref(0), *arguments), (spec(best), spec(index))),
        Node(
            f"aten::{name}_backward",
            (Ref(1), source, *arguments, Ref(first + 1)),
            (spec(result),),
        ),
    ]
    inputs = [x, grad] if other is None else [x, grad, other]
    outputs = [Ref(first), Ref(first + 2)]
    return Program([*map(spec, inputs)], nodes, outputs, [], {}), inputs, [best, result]


def _with_ties_and_nan() -> torch.Tensor:
    x = torch.randint(0, 3, (1, 3, 9, 9)).float()
    x[0, 0, 2, 3] = x[0, 0, 2, 4] = torch.nan
    x[0, 1, :4] = -torch.inf
    return x


@pytest.mark.parametrize(
    ("x", "geometry"),
    [
        (torch.randn(2, 3, 8, 8), (2, 2, 0, 1, False)),
        (torch.randn(2, 3, 9, 9).bfloat16(), (3, 2, 1, 1, False)),
        (torch.randn(2, 3, 10, 9), (3, 2, 1, 1, True)),
        (_with_ties_and_nan(), (3, 2, 1, 1, False)),
        (torch.randn(1, 2, 5, 6, 7), (3, 2, 1, 1, False)),
    ],
    ids=["tiles", "bfloat16", "ceil", "ties and nan", "3d"],
)
def test_gradients_select_the_maxima_on_a_tpu(x: torch.Tensor, geometry: Any) -> None:
    """And nothing reads the indices."""
    program, inputs, expected = _forward_and_backward(x, *geometry)
    text = lower_to_text(program, "tpu")
    assert "select_and_scatter" in text
    assert "select_and_scatter" not in lower_to_text(program, "cpu")
    results, _ = execute(program, inputs, "tpu")
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("case", ["dilation", "another input"])
def test_gradients_by_their_indices_on_a_tpu(case: str) -> None:
    """Where the maxima are not those of the gradient's windows."""
    x = torch.randn(2, 3, 9, 9)
    other = torch.randn(2, 3, 9, 9) if case == "another input" else None
    geometry = (3, 1, 0, 2, False) if case == "dilation" else (3, 2, 1, 1, False)
    program, inputs, expected = _forward_and_backward(x, *geometry, other=other)
    assert "select_and_scatter" not in lower_to_text(program, "tpu")
    results, _ = execute(program, inputs, "tpu")
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rank", [1, 2])
def test_average_pooling_of_large_windows(rank):
    """Windows of more than 64 elements along a dimension; programs do not grow with them."""

    def calls(kernel):
        x = torch.randn(2, 3, *[3 * kernel] * (rank - 1), 3 * kernel + 5)
        window = [[2] * (rank - 1) + [kernel], [1] * (rank - 1) + [kernel // 3]]
        window += [[1] * (rank - 1) + [kernel // 2], True, False]
        name = f"aten::avg_pool{rank}d"
        if rank == 1:
            return [(name, x, *window)]
        grad = torch.randn_like(torch.ops.aten.avg_pool2d(x, *window))
        return [(name, x, *window), (name + "_backward", grad, x, *window, None)]

    def size(call):
        return lower_to_text(record(*call).program, "cpu").count("stablehlo.")

    for call, larger in zip(calls(72), calls(144), strict=True):
        check(*call)
        assert size(call) == size(larger)


def test_adaptive_means_do_not_grow_with_the_input():
    def program(size):
        x = torch.randn(1, 2, size)
        call = "aten::_adaptive_avg_pool2d", x.unsqueeze(2), [1, 3]
        return lower_to_text(record(*call).program, "cpu").count("stablehlo.")

    assert program(61) == program(601)
