"""What the device-generic tests share: the same trees on the CPU and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE = "lazyxla"


def moved(tree: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Copies of all tensors as leaves of autograd; floats in `dtype`, if given, or its complex."""

    def move(x: Tensor) -> Tensor:
        to = x.dtype
        if dtype is not None and (to.is_floating_point or to.is_complex):
            to = dtype.to_complex() if to.is_complex else dtype
        copy = x.detach().to(device, to, copy=True)
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(copy, x.requires_grad)
        return copy.requires_grad_(x.requires_grad)

    return tree_map(lambda x: move(x) if isinstance(x, Tensor) else x, tree)


def on_host(tree: Any) -> Any:
    """All tensors detached, on the CPU."""
    return tree_map_only(Tensor, lambda x: x.detach().cpu(), tree)


def backward(tree: Any) -> None:
    """Gradients of a weighted sum of all tensors of a result; the weights are from -1 to 1."""
    outputs = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x) for x in outputs]
        torch.autograd.backward(outputs, weights)


def check(actual: Any, expected: Any, exact: Callable[[], Any]) -> None:
    """Compares results with the CPU's, at PyTorch's default tolerances.

    Where that fails, `exact` computes them in double precision: in many of these samples large
    terms cancel, so that the CPU's own result is off by more than the tolerance. The device may
    then be off by the tolerance and twice the CPU's greatest error.
    """
    ours, theirs = on_host(actual), on_host(expected)
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        for x, y, z in zip(*(tree_leaves(tree) for tree in (ours, theirs, on_host(exact())))):
            number = isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
            if not number or x.shape != y.shape or x.dtype != y.dtype:
                torch.testing.assert_close(x, y)
                continue
            rtol, atol = torch.testing._comparison.default_tolerances(y.dtype)
            atol += 2 * (y - z).abs().nan_to_num(0, posinf=0).max().item()
            try:
                torch.testing.assert_close(x.to(z.dtype), z, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError:
                raise error from None
