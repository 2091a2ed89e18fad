"""torch.utils.checkpoint within torch.compile: what is computed again, and what is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lazyxla.dynamo import backend
from tests.support import DEVICE, counted

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_dynamo")]


def checkpointed(function: Any) -> Any:
    def call(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False)

    return call


def compiled(function: Any) -> Any:
    return torch.compile(checkpointed(function), backend=backend, fullgraph=True)


def test_what_is_dropped_is_not_drawn_again(traced_operators: list[str]) -> None:
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    with counted() as n:
        result = compiled(lambda x: F.dropout(x.sin().exp(), 0.5))(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    dropped = result.detach().cpu() == 0
    assert 400 < dropped.sum() < 600
    assert torch.equal(gradient.cpu() == 0, dropped)
    assert traced_operators.count("aten.native_dropout.default") == 1
    assert traced_operators.count("aten.exp.default") == 2
    assert n.fallbacks == 0


def test_weights_that_attention_drops(traced_operators: list[str]) -> None:
    """The gradient of the values, which are the unit matrix, has the columns of the weights."""
    zeros = torch.zeros(1, 2, 16, 16).to(DEVICE)
    value = torch.eye(16).expand(1, 2, 16, 16).to(DEVICE).requires_grad_()

    def attention(value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(zeros, zeros, value.exp().log(), dropout_p=0.5)

    weights = compiled(attention)(value)
    (gradient,) = torch.autograd.grad(weights.sum(), value)
    expected = weights.detach().cpu().sum(2)[..., None].expand(1, 2, 16, 16)
    torch.testing.assert_close(gradient.cpu(), expected)
    assert traced_operators.count("lazyxla.dropout_attention.default") == 1
    assert traced_operators.count("aten.exp.default") == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_as_on_the_cpu(norm_first: bool, traced_operators: list[str]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 5, 16)
    mine = copy.deepcopy(layer).to(DEVICE)
    expected = layer(x)
    expected.sin().sum().backward()
    with counted() as n:
        result = compiled(mine)(x.to(DEVICE))
        result.sin().sum().backward()
    torch.testing.assert_close(result.cpu(), expected)
    for ours, theirs in zip(mine.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert traced_operators.count("aten.native_layer_norm.default") > 2  # again, in the backward
    assert n.fallbacks == 0
