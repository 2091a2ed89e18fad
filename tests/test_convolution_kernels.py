"""Convolutions without groups that programs for the CPU leave to PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import convolution_kernels, kernel_limits
from tests.support import assert_same, counted, on_device

FORWARD = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@pytest.fixture(autouse=True)
def all_pay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On every processor, and small ones, too. The sizes here are of no other test's programs."""
    monkeypatch.setattr(convolution_kernels, "_LEAST_POSITIONS", 0)
    monkeypatch.setattr(convolution_kernels, "_POSITIONS_OF_FEATURE", 0)
    with kernel_limits.using({"convolution float32": 1, "convolution bfloat16": 1}):
        yield


def randn(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers: the order of sums does not show, but how often a sum is rounded does."""
    return torch.randn(*sizes).mul(3).round().to(dtype)


def compare(
    transposed: bool,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    calls: int = 3,
    **options: int,
) -> None:
    """Values, strides and gradients."""
    function = (TRANSPOSED if transposed else FORWARD)[x.dim() - 3]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = function(*leaves, **options)
        grad = torch.arange(y.numel(), dtype=torch.float32).remainder(5).sub(2).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.view(y.shape).to(y.device))]

    given = [t for t in (x, w, bias) if t is not None]
    ours = [on_device(t) for t in given]
    with counted() as n:
        got = run(*ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (calls, 0, 0, 1)
    for a, b in zip(got, run(*given), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("features", [(7, 5), (2, 31)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_what_is_split(
    dtype: torch.dtype, batch: int, features: tuple[int, int], with_bias: bool, transposed: bool
) -> None:
    """Batches and features that two threads share unequally; the larger operand is either."""
    inputs, outputs = features
    x = randn(batch, inputs, 5, 6, dtype=dtype)
    pair = (inputs, outputs) if transposed else (outputs, inputs)
    w = randn(*pair, 3, 2, dtype=dtype)
    bias = randn(outputs, dtype=dtype) if with_bias else None
    compare(transposed, x, w, bias, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": 2},
        {"stride": 3},
        {"stride": 3, "padding": 1, "dilation": 2},
    ],
    ids=str,
)
def test_windows(dtype: torch.dtype, rank: int, options: dict[str, int]) -> None:
    x = randn(2, 4, *(13, 11, 12)[:rank], dtype=dtype)
    w, bias = randn(6, 4, *[3] * rank, dtype=dtype), randn(6, dtype=dtype)
    compare(False, x, w, bias, **options)
    more = {"output_padding": 1} if "stride" in options else {}
    compare(True, randn(2, 6, *(4, 5, 3)[:rank], dtype=dtype), w, None, **options, **more)


def test_volumes_take_one_kernel_at_any_batch() -> None:
    """aten::convolution takes a slow one for a single small volume."""
    w = randn(6, 4, 3, 3, 3, dtype=torch.float32)
    for batch in (1, 2):
        x = randn(batch, 4, 7, 9, 10, dtype=torch.float32)
        text = lazyxla.stablehlo(F.conv3d, on_device(x), on_device(w))
        assert "aten::mkldnn_convolution" in text
        compare(False, x, w, randn(6, dtype=torch.float32), padding=1)


def test_single_elements_are_called_in_bfloat16_only() -> None:
    for dtype, calls in ((torch.float32, 0), (torch.bfloat16, 3)):
        x, w = randn(2, 8, 9, 7, dtype=dtype), randn(6, 8, 1, 1, dtype=dtype)
        compare(False, x, w, randn(6, dtype=dtype), calls)


def test_other_dtypes_are_not_called() -> None:
    x, w = (randn(*sizes, dtype=torch.float64) for sizes in ((2, 3, 9, 8), (6, 3, 3, 3)))
    compare(False, x, w, randn(6, dtype=torch.float64), calls=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_narrow_floats_are_called_in_float32(dtype: torch.dtype, transposed: bool) -> None:
    x, w = randn(2, 6, 9, 10, dtype=dtype), randn(6, 6, 3, 3, dtype=dtype)
    with kernel_limits.using({"convolution float32": 1}):
        compare(transposed, x, w, randn(6, dtype=dtype))


@pytest.mark.parametrize(
    ("features", "sizes", "calls"),
    [(6, (2, 11, 11), 0), (6, (2, 11, 12), 3), (67, (2, 11, 12), 2), (67, (2, 11, 13), 3)],
)
def test_images_of_few_positions(
    features: int, sizes: tuple[int, int, int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, for which the kernels lay out the weight anew; in bfloat16 they gain more."""
    monkeypatch.undo()
    batch, *image = sizes
    for dtype, expected in ((torch.float32, calls), (torch.bfloat16, 3)):
        x, w = (
            randn(batch, features, *image, dtype=dtype),
            randn(features, features, 3, 3, dtype=dtype),
        )
        compare(False, x, w, None, expected, padding=1)


def test_processors_without_a_limit_call_none() -> None:
    dtype = torch.bfloat16
    x, w = randn(2, 3, 9, 10, dtype=dtype), randn(6, 3, 3, 3, dtype=dtype)
    with kernel_limits.using({"convolution float64": 1}):
        compare(False, x, w, randn(6, dtype=dtype), calls=0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [16, 17, 18])
def test_groups_are_shared(groups: int, batch: int) -> None:
    """Where the threads are no divisor of them, one computes all."""
    x = randn(batch, 4 * groups, 31, 33 + batch, dtype=torch.float32)
    w = randn(4 * groups, 4, 3, 3, dtype=torch.float32)
    compare(False, x, w, None, padding=1, groups=groups, calls=3)
