"""Gradients of and through tensors without elements: an empty batch, no channels, no length."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazyxla
from tests.support import DEVICE, assert_same

pytestmark = pytest.mark.cuda


def gradients(function, device: str, *tensors: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """The result, and the gradients of its sum."""
    given = [x.to(device).requires_grad_() for x in tensors]
    result = function(*given)
    return [result.detach(), *torch.autograd.grad(result.sum(), given)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims: int, transposed: bool) -> None:
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    found, expected = [], []
    # PyTorch refuses a transposed convolution without channels.
    for batch, channels, groups in itertools.product(
        (0, 2), (6,) if transposed else (0, 6), (1, 3)
    ):
        sizes = (channels, 12 // groups) if transposed else (12, channels // groups)
        x, weight, bias = (
            torch.randn(shape, dtype=torch.float64)
            for shape in ((batch, channels, *[5] * dims), (*sizes, *[3] * dims), (12,))
        )

        def run(x: Tensor, weight: Tensor, bias: Tensor, groups: int = groups) -> Tensor:
            made: Tensor = getattr(F, name)(x, weight, bias, groups=groups)
            return made

        expected += gradients(run, "cpu", x, weight, bias)
        found += gradients(run, DEVICE, x, weight, bias)
    assert_same(found, expected, strides=False)  # PyTorch leaves them to the kernel
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0)])
def test_batch_norm_in_evaluation(shape: tuple[int, ...]) -> None:
    """PyTorch's kernel on the CPU divides by zero, which ends the process."""
    statistics = torch.zeros(shape[1], device=DEVICE), torch.ones(shape[1], device=DEVICE)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(x, *statistics, weight, bias)

    inputs = torch.empty(shape), torch.ones(shape[1]), torch.ones(shape[1])
    zeros = [torch.empty(shape), *(torch.zeros(x.shape) for x in inputs)]
    assert_same(gradients(run, DEVICE, *inputs), zeros)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, torch.inf])
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (0, 0)])
def test_distances_between_less_than_two_rows(shape: tuple[int, int], p: float) -> None:
    """PyTorch's kernel on the CPU reads beyond its memory, which ends the process."""
    found = gradients(lambda x: F.pdist(x, p), DEVICE, torch.ones(shape))
    assert_same(found, [torch.empty(0), torch.zeros(shape)])
