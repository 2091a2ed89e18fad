"""Training over many devices is training on one: losses, gradients and parameters agree; a step is
one program, and no parameter, gradient or state is ever whole on a device."""

from __future__ import annotations

import copy
import io
import math
from functools import cache
from typing import Any

import pytest
import torch
from helpers import OWN_DEVICES, spec_of
from models import MESH, PLANS, Mlp, Transformer, batches
from torch import nn

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, counted

STEPS = 10

# These optimizers divide a gradient by its own size: one that is 0 but for its rounding, as
# float32's, would move a parameter this way or that.
DTYPE = torch.float64


class Run:
    """Ten steps: what came of them, and what each step compiled and ran."""

    def __init__(self, model: type[nn.Module], plan: str | None, mode: Any = False) -> None:
        torch.manual_seed(0)
        self.model = model().to(DTYPE)
        if plan is None:
            self.model.to(DEVICE)
        else:
            lazyxla.shard(self.model, MESH, PLANS[plan])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[torch.Tensor] = []
        self.grads: dict[str, torch.Tensor] = {}
        self.compiles: list[int] = []
        self.executions: list[int] = []
        with lazyxla.eager_mode(mode):
            for x, y in batches(model, STEPS, DTYPE):
                self._step(x, y, spread=plan is not None)
            self.losses = [loss.cpu() for loss in self.losses]
            self.parameters = {n: p.detach().cpu() for n, p in self.model.named_parameters()}

    def _step(self, x: torch.Tensor, y: torch.Tensor, spread: bool) -> None:
        x, y = x.to(DEVICE), y.to(DEVICE)
        if spread:
            lazyxla.shard(x, MESH, ("data",))
            lazyxla.shard(y, MESH, ("data",))
        lazyxla.sync()
        with counted() as n:
            loss = self.model.loss(x, y)
            loss.backward()
            self.optimizer.step()
            lazyxla.sync()
        self.compiles.append(n.compiles)
        self.executions.append(n.executions)
        self.losses.append(loss.detach())
        if len(self.losses) == STEPS:
            self.grads = {n: p.grad.cpu() for n, p in self.model.named_parameters()}
        else:
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Of each parameter: itself, its gradient, and what the optimizer keeps for it."""
        return {
            name: [p, p.grad, *(v for v in self.optimizer.state[p].values() if v.dim() > 0)]
            for name, p in self.model.named_parameters()
        }


@cache
def alone(model: type[nn.Module]) -> Run:
    return Run(model, None)


def assert_as_alone(run: Run, model: type[nn.Module]) -> None:
    expected = alone(model)
    torch.testing.assert_close(run.losses, expected.losses)
    torch.testing.assert_close(run.grads, expected.grads)
    torch.testing.assert_close(run.parameters, expected.parameters)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [Mlp, Transformer])
def test_training(model: type[nn.Module], plan: str) -> None:
    run = Run(model, plan)
    assert_as_alone(run, model)
    assert run.executions[1:] == [1] * (STEPS - 1)
    assert run.compiles[2:] == [0] * (STEPS - 2)


@pytest.mark.parametrize("plan", PLANS)
def test_all_that_belongs_to_a_parameter_is_spread_as_it_is(plan: str) -> None:
    run = Run(Transformer, plan)
    for name, tensors in run.tensors().items():
        parts = [PLANS[plan](name, tensors[0])]
        wanted = _C.declared_sharding(tensors[0])
        split = math.prod(MESH.axis_size(axis) for entry in parts[0] if entry for axis in (entry,))
        assert len(tensors) == 4
        for tensor in tensors:
            found = _C.sharding_of(tensor)
            assert found.text == wanted.text, name
            assert math.prod(found.shard_shape(list(tensor.shape))) * split == tensor.numel()


def test_no_device_ever_holds_a_whole_parameter() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(512, 1024)

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    for index in range(OWN_DEVICES):
        torch.lazyxla.reset_peak_memory_stats(index)
    before = [torch.lazyxla.memory_allocated(i) for i in range(OWN_DEVICES)]
    model = lazyxla.shard(Wide(), MESH, PLANS["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        x = torch.empty(8, 512, device=DEVICE)
        lazyxla.shard(x, MESH, ("data",)).normal_()
        model.loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync(wait=True)
    whole = 512 * 1024 * 4
    for index in range(OWN_DEVICES):
        peak = torch.lazyxla.max_memory_allocated(index) - before[index]
        # A quarter of parameter, gradient and two states, and of each update on its way.
        assert peak < 2 * whole


@pytest.mark.parametrize("mode", [True, "fused"])
def test_modes(mode: Any) -> None:
    assert_as_alone(Run(Mlp, "fsdp x tensor", mode), Mlp)


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop", "Adagrad", "NAdam"])
def test_other_optimizers(optimizer: str) -> None:
    results = []
    for plan in (None, "fsdp x tensor"):
        torch.manual_seed(0)
        model = Mlp().to(DTYPE).to(DEVICE)
        if plan:
            lazyxla.shard(model, MESH, PLANS[plan])
        options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        update = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **options)
        for x, y in batches(Mlp, 5, DTYPE):
            model.loss(x.to(DEVICE), y.to(DEVICE)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            update.step()
            update.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
        for p in model.parameters():
            for value in update.state[p].values():
                if plan and isinstance(value, torch.Tensor) and value.dim() > 0:
                    assert lazyxla.sharding(value) == lazyxla.sharding(p)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("spread", [(), ("model",), (None, "model")], ids=str)
@pytest.mark.parametrize("of_gradient", [(), ("model",), (None, "model")], ids=str)
def test_momentum_is_spread_as_its_parameter(spread: Any, of_gradient: Any) -> None:
    """Whatever the first gradient is."""
    value = torch.linspace(-1, 1, 64).reshape(8, 8)
    parameter = nn.Parameter(lazyxla.shard(value.to(DEVICE), MESH, spread))
    parameter.grad = lazyxla.shard(value.to(DEVICE), MESH, of_gradient)
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    for _ in range(2):
        optimizer.step()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    assert lazyxla.sharding(momentum) == lazyxla.sharding(parameter)
    torch.testing.assert_close(momentum.cpu(), 1.9 * value)
    torch.testing.assert_close(parameter.detach().cpu(), value - 0.5 * 2.9 * value)


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_optimizer_s_state_that_is_loaded_is_spread(where: str) -> None:
    """Before the first step, and later."""
    torch.manual_seed(0)
    original = nn.Linear(6, 8)

    def train(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    reference = torch.optim.AdamW(original.parameters(), lr=0.1)
    model = lazyxla.shard(copy.deepcopy(original), MESH, ("model",))
    x, optimizer = torch.randn(4, 6), torch.optim.AdamW(model.parameters(), lr=0.1)
    train(original, reference, x)
    train(model, optimizer, x.to(DEVICE))
    for fresh in (True, False):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, map_location="cpu" if where == "host" else None)
        if fresh:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.load_state_dict(state)
        train(original, reference, x)
        train(model, optimizer, x.to(DEVICE))
        lazyxla.sync()
        assert spec_of(optimizer.state[model.weight]["exp_avg"]) == ("model", None)
        assert spec_of(optimizer.state[model.bias]["exp_avg_sq"]) == ("model",)
    torch.testing.assert_close(model.weight.detach().cpu(), original.weight.detach())
