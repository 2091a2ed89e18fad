"""Pooling and its gradients."""

import pytest
import torch

from tests.lowering.harness import check

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
