"""Autocast and its gradient scaler, against the CPU."""

from __future__ import annotations

from operator import methodcaller

import pytest
import torch
from torch import nn

from tests.support import DEVICE, assert_same, fractions, on_device

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    module = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(DEVICE)
    x = on_device(fractions(3, 6))
    with torch.autocast(DEVICE, dtype=dtype):
        hidden = module[0](x)
        out = module(x)
        assert hidden.dtype == dtype
        assert module[1](hidden).dtype == torch.float32
        assert (hidden + x[:, :4]).dtype == torch.float32
        assert torch.softmax(hidden, -1).dtype == torch.float32
        assert (hidden @ hidden.t()).dtype == dtype
        with torch.autocast(DEVICE, enabled=False):
            assert module[0](x).dtype == torch.float32
        value = nn.functional.cross_entropy(out, torch.tensor([0, 1, 0], device=DEVICE))
        assert value.dtype == torch.float32
    value.backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
    weight, bias, scale, shift, *last = (p.detach().cpu() for p in module.parameters())
    linear, half = nn.functional.linear, methodcaller("to", dtype)
    hidden = linear(half(x.cpu()), half(weight), half(bias)).float()
    hidden = half(nn.functional.layer_norm(hidden, [4], scale, shift))
    torch.testing.assert_close(out.detach().cpu(), linear(hidden, *map(half, last)))


def test_autocast_refuses_unsafe_losses():
    x = torch.rand(3, device=DEVICE)
    with (
        torch.autocast(DEVICE),
        pytest.raises(RuntimeError, match=r"binary_cross_entropy_with_logits"),
    ):
        nn.functional.binary_cross_entropy(x, x)


def test_grad_scaler():
    w = on_device(fractions(3)).requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.5)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    scaler.scale((w * 2).sum()).backward()
    assert w.grad.tolist() == [16] * 3
    scaler.unscale_(optimizer)
    assert w.grad.tolist() == [2] * 3
    scaler.step(optimizer)
    scaler.update()
    assert_same(w, fractions(3) - 1)
    optimizer.zero_grad()
    scaler.scale((w * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(w, fractions(3) - 1)  # the step was left out
    assert scaler.get_scale() == 4.0
