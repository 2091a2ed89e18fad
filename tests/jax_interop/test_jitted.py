"""PyTorch's functions as nodes of the graph, by way of JAX."""

from __future__ import annotations

import copy
from typing import Any

import jax
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lazyxla

jax.config.update("jax_platforms", "cpu")

DEVICE = "lazyxla"


def test_a_pytorch_function_is_one_node() -> None:
    function = lazyxla.jax_jit(lambda x, y, n: (x @ y).relu() * n)
    x, y = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((3, 4), (4, 2)))
    lazyxla.sync(wait=True)
    for _ in range(2):
        before = lazyxla.counters()
        loss = function(x, y, 2).square().sum()
        gradients = torch.autograd.grad(loss, [x, y])
        lazyxla.sync()
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + 1
    assert after["compiles"] == before["compiles"]
    assert after["fallbacks"] == before["fallbacks"]
    a, b = (v.detach().cpu().requires_grad_() for v in (x, y))
    expected = ((a @ b).relu() * 2).square().sum()
    compare_tensors([loss, *gradients], [expected, *torch.autograd.grad(expected, [a, b])])


def compare_tensors(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach())


def test_a_module_trains_by_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5))
    theirs = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, labels = torch.randint(5, (6, 3)), torch.randint(5, (6,))

    def train(module: Any, call: Any, device: str) -> list[Tensor]:
        module.load_state_dict(state)
        module.to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            loss = call(tokens.to(device), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device != "cpu":
                lazyxla.sync()
        return [loss, *module.state_dict().values()]

    def loss_with(module: Any) -> Any:
        return lambda x, y: F.cross_entropy(module(x), y)

    expected = train(theirs, loss_with(theirs), "cpu")
    ours = train(model, loss_with(lazyxla.jax_jit(model)), DEVICE)
    compare_tensors(ours, expected)


def test_its_random_numbers_are_the_devices() -> None:
    drop = lazyxla.jax_jit(nn.Dropout(0.5))
    x = torch.ones(100, device=DEVICE)
    drop(x)
    lazyxla.manual_seed(3)
    first, second = drop(x), drop(x)
    lazyxla.manual_seed(3)
    assert first.equal(drop(x))
    assert not first.equal(second)


def test_arguments_named_as_the_views_own() -> None:
    attend = lazyxla.jax_jit(F.scaled_dot_product_attention)
    query, key, value = (torch.randn(1, 2, 4, 3, device=DEVICE) for _ in range(3))
    got = attend(query=query, key=key, value=value)
    compare_tensors([got], [F.scaled_dot_product_attention(query, key, value).cpu()])


def test_settings_are_those_of_the_call() -> None:
    double = lazyxla.jax_jit(lambda x: (x @ x, torch.zeros(2)))
    x = torch.randn(2, 2, device=DEVICE)
    dtypes = []
    for enabled, default in ((False, torch.float32), (True, torch.float64), (False, torch.float32)):
        torch.set_default_dtype(default)
        try:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                dtypes.append([y.dtype for y in double(x)])
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes[0] == dtypes[2] == [torch.float32, torch.float32]
    assert dtypes[1] == [torch.bfloat16, torch.float64]


def test_a_buffer_that_is_only_read_may_be_needed_by_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.scale * self.mask

    module = Scaled().to(DEVICE)
    result = module(torch.ones(3, device=DEVICE))
    lazyxla.jax_jit(module)(torch.ones(3, device=DEVICE))
    result.sum().backward()
    assert module.scale.grad.tolist() == [1, 0, 2]
    assert module.calls.item() == 2
