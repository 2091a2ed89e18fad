"""Gradients of one argument at a time: backward operators are told which ones are wanted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.common_methods_invocations import OpInfo, op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.support import DEVICE

RANDOM = {
    # What they draw differs from the CPU's.
    *("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
    *("nn.functional.rrelu", "normal", "nn.functional.gaussian_nll_loss"),
}


def samples(op: OpInfo) -> tuple[tuple, dict] | None:
    """The arguments of the first sample in which several tensors can have gradients."""
    torch.manual_seed(0)
    for _, sample in zip(range(8), op.sample_inputs("cpu", torch.float64), strict=False):
        arguments = ((sample.input, *sample.args), sample.kwargs)
        if len(differentiable(arguments)) > 1:
            return arguments
    return None


def differentiable(arguments: object) -> list[int]:
    """The numbers of the leaves that can have gradients."""
    leaves = tree_leaves(arguments)
    return [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


def gradient(op: OpInfo, arguments: object, device: str, which: int) -> torch.Tensor | None:
    leaves, spec = tree_flatten(copy.deepcopy(arguments))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.detach().to(device).requires_grad_(i == which)
    args, kwargs = tree_unflatten(leaves, spec)
    results = [
        r
        for r in tree_leaves(op(*args, **kwargs))
        if isinstance(r, torch.Tensor) and r.requires_grad
    ]
    if not results:
        return None
    torch.autograd.backward([r.abs().square().sum() for r in results])
    found = leaves[which].grad
    return None if found is None else found.cpu()


CANDIDATES = [
    op
    for op in op_db
    if op.supports_autograd
    and op.full_name not in RANDOM
    and torch.float64 in op.supported_dtypes("cpu")
]


def wrong_gradients(op: OpInfo, arguments: tuple[tuple, dict]) -> list[str]:
    """What differs from the CPU where one argument alone has a gradient."""
    wrong = []
    for which in differentiable(arguments):
        try:
            expected = gradient(op, arguments, "cpu", which)
        except RuntimeError:
            continue  # PyTorch has no gradient for it
        try:
            found = gradient(op, arguments, DEVICE, which)
            torch.testing.assert_close(found, expected, equal_nan=True)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{op.full_name}, argument {which}: {error}")
    return wrong


SHARDS = 16


@pytest.mark.parametrize("shard", range(SHARDS))
def test_each_gradient_alone(shard: int) -> None:
    tried, wrong = 0, []
    for op in CANDIDATES[shard::SHARDS]:
        arguments = samples(op)
        if arguments is not None:
            tried += 1
            wrong += wrong_gradients(op, arguments)
    assert not wrong, "\n".join(wrong)
    assert tried > 4
