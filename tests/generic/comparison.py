"""What the device-generic tests share: the same trees on the CPU and on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.tables import forget_test_functions

forget_test_functions()

DEVICE = "lazyxla"


@dataclass(frozen=True)
class Judged:
    """What these compute may be beyond the tolerances, if the device is as exact as the CPU.

    Entries are names of torch.nn's modules, or of operators with the dtype.
    """

    reason: str
    entries: tuple[str, ...]


# Errors are fractions of an output's largest element, the greatest among all samples.
JUDGED: tuple[Judged, ...] = (
    Judged(
        "sums of products that cancel, in another order: the device errs by at most 5.8e-7, "
        "PyTorch's CPU by 2.5e-6",
        (
            *("_foreach_mm complex64", "_foreach_mm float32"),
            "nn.ConvTranspose3d",
            "nn.LazyConvTranspose3d",
            "nn.MultiheadAttention",
        ),
    ),
    Judged(
        "the weight's gradient is a sum of products that cancel: the device errs by at most "
        "4.0e-5, PyTorch's CPU by 1.5e-6",
        ("nn.PReLU",),
    ),
    Judged(
        "the logarithm's error is multiplied by the exponent: the device errs by at most 2.4e-6, "
        "PyTorch's CPU by 8.8e-7",
        ("_foreach_pow complex64",),
    ),
    Judged(
        "PyTorch's CPU rounds alpha * other to bfloat16 before it subtracts, the device only the "
        "difference: the device errs by 1.9e-3, PyTorch's CPU by 2.7e-3",
        ("_foreach_sub bfloat16",),
    ),
    Judged(
        "sums of probabilities as logarithms: the device errs by 4.8e-6, PyTorch's CPU by 4.9e-5",
        ("nn.CTCLoss",),
    ),
    Judged(
        "differences from a mean cancel: the device errs by 2.6e-5, PyTorch's CPU by 4.2e-5",
        ("nn.LayerNorm",),
    ),
)


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


def check(entry: str, actual: Any, expected: Any, exact: Callable[[], Any]) -> None:
    """Compares results with the CPU's, at PyTorch's default tolerances.

    Where that fails for an entry of JUDGED, `exact` computes them in double precision, since the
    CPU's own result may be off by more than the tolerance. The device may then be off by the
    tolerance and twice the CPU's greatest error.
    """
    ours, theirs = on_host(actual), on_host(expected)
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        trees = [tree_leaves(tree) for tree in (ours, theirs, on_host(exact()))]
        if not any(entry in judged.entries for judged in JUDGED):
            errors = "; ".join(errors_of(*leaves) for leaves in zip(*trees))
            raise AssertionError(f"{entry} is not in JUDGED: {errors}\n{error}") from None
        for x, y, z in zip(*trees):
            if not is_inexact(x, y):
                torch.testing.assert_close(x, y)
                continue
            rtol, atol = torch.testing._comparison.default_tolerances(y.dtype)
            atol += 2 * greatest(y - z)
            try:
                torch.testing.assert_close(x.to(z.dtype), z, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError:
                raise error from None


def is_inexact(x: Any, y: Any) -> bool:
    """Whether both are tensors of inexact numbers, of one shape and dtype."""
    number = isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
    return number and x.shape == y.shape and x.dtype == y.dtype


def greatest(x: Tensor) -> float:
    """The greatest magnitude among finite elements."""
    return x.abs().nan_to_num(0, posinf=0).max().item() if x.numel() else 0.0


def errors_of(x: Any, y: Any, z: Any) -> str:
    """How far the device's and the CPU's result are from the exact one."""
    if not is_inexact(x, y):
        return "not of inexact numbers"
    return f"errors of {greatest(x - z):.2g} and {greatest(y - z):.2g} in {greatest(z):.2g}"
