"""The builder's reductions, products and windows against their PyTorch counterparts."""

from typing import Any

import pytest
import torch

from lazyxla.lowering.builder import Builder
from tests.lowering.bench import Bench

MATRIX = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[0], [-1], [0, 2], [0, 1, 2]])
def test_reduce(bench: Bench, dims: list[int], keepdim: bool) -> None:
    x = torch.randn(3, 4, 5)
    for kind, expected in [
        ("sum", x.sum(dims, keepdim)),
        ("max", x.amax(dims, keepdim)),
        ("min", x.amin(dims, keepdim)),
    ]:
        bench.check(lambda b, x, k=kind: b.reduce(x, dims, k, keepdim), x, expected=expected)
    bench.check(lambda b, x: x.mean(dims, keepdim), x, expected=x.mean(dims, keepdim))
    flags = x > 1
    for kind, all_of in [("and", torch.all), ("or", torch.any)]:
        expected = flags
        for dim in sorted((d % 3 for d in dims), reverse=True):
            expected = all_of(expected, dim, keepdim)
        bench.check(lambda b, x, k=kind: b.reduce(x, dims, k, keepdim), flags, expected=expected)


def test_reduce_nothing(bench: Bench) -> None:
    bench.check(lambda b, x: b.reduce(x, [], "sum"), MATRIX, expected=MATRIX)
    bench.check(lambda b, x: b.reduce(x, [0], "sum"), MATRIX[0, 0], expected=MATRIX[0, 0])


def test_arg_reduce(bench: Bench) -> None:
    nan = float("nan")
    x = torch.tensor([[1.0, 5.0, 5.0], [nan, 2.0, nan], [-float("inf")] * 3, [0.0, -0.0, 0.0]])
    for kind, function in [("max", torch.max), ("min", torch.min)]:
        for dim in (0, 1):
            bench.check(
                lambda b, x, k=kind, d=dim: b.arg_reduce(x, d, k), x, expected=function(x, dim)
            )


def test_reduce_window(bench: Bench) -> None:
    x = torch.randn(1, 1, 8, 9)
    expected = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    window = lambda b, x: b.reduce_window(  # noqa: E731
        x, "max", [1, 1, 3, 3], [1, 1, 2, 2], [(0, 0), (0, 0), (1, 1), (1, 1)]
    )
    bench.check(window, x, expected=expected)
    dilated = torch.nn.functional.max_pool2d(x, 2, 1, 0, 3)
    window = lambda b, x: b.reduce_window(  # noqa: E731
        x, "max", [1, 1, 2, 2], window_dilation=[1, 1, 3, 3]
    )
    bench.check(window, x, expected=dilated)


def test_dot_folds_transposes_of_either_operand(bench: Bench) -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    product = lambda b, x, w: b.matmul(x, b.swap(w, 0, 1))  # noqa: E731
    bench.check(product, x, w, expected=x @ w.t())
    assert "dot_general %arg0, %arg1," in bench.text(product, x, w, expected=x @ w.t())
    product = lambda b, x, w: b.matmul(b.swap(x, 0, 1), b.swap(w, 0, 1))  # noqa: E731
    bench.check(product, x.t().contiguous(), w, expected=x @ w.t())
    text = bench.text(product, x.t().contiguous(), w, expected=x @ w.t())
    assert "dot_general %arg0, %arg1," in text


def test_batched_dot_folds_transposes(bench: Bench) -> None:
    q, k = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 5, 4)
    product = lambda b, q, k: b.matmul(q, b.swap(k, 2, 3))  # noqa: E731
    expected = q @ k.transpose(2, 3)
    bench.check(product, q, k, expected=expected)
    assert "dot_general %arg0, %arg1," in bench.text(product, q, k, expected=expected)
    # Heads behind positions: [B, S, H, D].
    product = lambda b, q, k: b.matmul(  # noqa: E731
        b.transpose(q, (0, 2, 1, 3)), b.transpose(k, (0, 2, 3, 1))
    )
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    bench.check(product, q, k, expected=expected)
    assert "dot_general %arg0, %arg1," in bench.text(product, q, k, expected=expected)


def test_dot_folds_a_transpose_behind_a_reshape_that_drops_size_1(bench: Bench) -> None:
    def product(b: Builder, q: Any, k: Any) -> Any:
        keys = b.transpose(k, (0, 2, 3, 1))
        return b.matmul(q, b.reshape(keys, b.shape(keys)[1:]))

    q, k = torch.randn(6, 3, 4), torch.randn(1, 5, 6, 4)
    expected = q @ k[0].permute(1, 2, 0)
    bench.check(product, q, k, expected=expected)
    text = bench.text(product, q, k, expected=expected)
    assert "(tensor<6x3x4xf32>, tensor<5x6x4xf32>)" in text


def test_dot_keeps_a_transpose_that_orders_the_result(bench: Bench) -> None:
    x, w = torch.randn(3, 4, 5), torch.randn(5, 2)
    product = lambda b, x, w: b.dot(b.swap(x, 0, 1), w, [2], [0])  # noqa: E731
    bench.check(product, x, w, expected=x.transpose(0, 1) @ w)


def test_dot_of_other_dtypes(bench: Bench) -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    bench.check(lambda b, x: b.matmul(x, x), x, expected=x @ x)
    n = torch.arange(9).reshape(3, 3)
    bench.check(lambda b, x: b.matmul(x, x), n, expected=n @ n)
    half = torch.randn(3, 3).bfloat16()
    to_float = lambda b, x: b.matmul(x, x, dtype=torch.float32)  # noqa: E731
    bench.check(to_float, half, expected=half.float() @ half.float())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "pad", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_conv(bench: Bench, stride: int, pad: int, dilation: int, groups: int) -> None:
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4 // groups, 3, 3)
    expected = torch.nn.functional.conv2d(x, w, None, stride, pad, dilation, groups)
    conv = lambda b, x, w: b.conv(  # noqa: E731
        x, w, [stride] * 2, [(pad, pad)] * 2, rhs_dilation=[dilation] * 2, groups=groups
    )
    bench.check(conv, x, w, expected=expected)
