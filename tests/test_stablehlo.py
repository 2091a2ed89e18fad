"""`lazyxla.stablehlo`: the text of what a call records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lazyxla
from tests.support import needs_libtpu


def test_of_a_function() -> None:
    x = torch.ones(2, 3, device="lazyxla")
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    text = lazyxla.stablehlo(lambda a, *, by: (a * by).tanh(), x, by=3.0)
    assert "stablehlo.tanh" in text
    assert "tensor<2x3xf32>" in text
    after = lazyxla.counters()
    assert after["executions"] == before["executions"]
    assert after["compiles"] == before["compiles"]


def test_of_a_training_step() -> None:
    model = nn.Linear(4, 2)  # on the CPU, where it stays

    def step(x: Tensor) -> Tensor:
        loss = (x @ x.mT).square().sum()
        return torch.autograd.grad(loss, x)[0]

    text = lazyxla.stablehlo(step, torch.ones(3, 4, requires_grad=True))
    assert text.count("stablehlo.dot_general") >= 2
    assert "stablehlo.dot_general" in lazyxla.stablehlo(model, torch.ones(3, 4))
    assert model.weight.device.type == "cpu"


@needs_libtpu
def test_for_a_tpu() -> None:
    text = lazyxla.stablehlo(torch.rand_like, torch.ones(8, 128), topology="v5e:1x1")
    assert "PHILOX" in text
    assert "PHILOX" not in lazyxla.stablehlo(torch.rand_like, torch.ones(8, 128))


def test_several_programs() -> None:
    def call(x: Tensor) -> Tensor:
        y = x.sin()
        lazyxla.sync()
        return y.cos()

    text = lazyxla.stablehlo(call, torch.ones(3))
    assert text.count("module @") + text.count("module {") == 2


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="computes nothing on the device"):
        lazyxla.stablehlo(lambda x: 3, torch.ones(2))
    with pytest.raises(RuntimeError):
        lazyxla.stablehlo(lambda x: x.sum().item(), torch.ones(2))
    with pytest.raises(TypeError, match="expected a function or a module"):
        lazyxla.stablehlo(3)  # type: ignore[arg-type]
