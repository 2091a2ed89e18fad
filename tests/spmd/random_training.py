"""Training whose tensors are spread at random, beside the same on the CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from random_sharded import MESHES, check_sharding, random_spec
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import lazyxla
from tests.support import DEVICE

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
}
SIZES = [3, 4, 6, 7, 8]


class Model(nn.Module):
    """Layers of several kinds, of random sizes; a value in between may be constrained."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        hidden = rng.choice(SIZES)
        self.first, self.last = nn.Linear(6, hidden), nn.Linear(hidden, 4, bias=rng.random() < 0.5)
        self.norm = rng.choice([nn.LayerNorm, nn.BatchNorm1d, nn.Identity])(hidden)
        self.act = rng.choice([nn.Tanh(), nn.GELU(), nn.ReLU(inplace=True)])
        self.scale = nn.Parameter(torch.ones(hidden))
        self.register_buffer("seen", torch.zeros(hidden))
        self.checkpointed = rng.random() < 0.3
        self.constraint: Any = None

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.first(x)) * self.scale)
        if self.constraint and y.device.type == DEVICE:
            y = lazyxla.constrain(y, *self.constraint)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x)
        with torch.no_grad():
            self.seen.lerp_(y.sum(0), 0.5)
        return self.last(y)


class Doubled(nn.Module):
    """A parametrization whose own tensor is half of what it stands for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class RandomTraining:
    optimizer_kinds: ClassVar = OPTIMIZERS

    def __init__(self, rng: random.Random) -> None:
        """On the thread's current device, and the mesh."""
        self.rng = rng
        self.lines: list[str] = []
        self.mesh = rng.choice(MESHES)
        torch.manual_seed(rng.randrange(100))
        self.numbers = torch.Generator().manual_seed(rng.randrange(100))
        self.cpu = Model(rng)
        self.device = copy.deepcopy(self.cpu).to(DEVICE)
        make = self.optimizer_kinds[kind := rng.choice(sorted(self.optimizer_kinds))]
        self.optimizers = [make(model.parameters()) for model in (self.cpu, self.device)]
        self.make = make
        self.specs: dict[str, tuple[Any, ...]] = {}
        self.call: Any = self.device
        self.are_new = False  # the leaves, and no optimizer has seen them
        self.lines.append(f"{self.mesh}, {kind}, {self.cpu}")
        self.shard()
        if rng.random() < 0.5:
            self.device.constraint = self.mesh, self.spec_for(torch.empty(2, 2), "?")

    def spec_for(self, tensor: torch.Tensor, *more: Any) -> tuple[Any, ...]:
        # For XLA's fault in cases_meshes.py's test_a_matmul_that_xla_gets_wrong.
        joins = len(self.mesh.axis_names) < 3
        return random_spec(self.rng.choice, self.mesh, tensor, *more, joins=joins)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.device.named_parameters(), *self.device.named_buffers()]

    # --- What may happen between steps -----------------------------------------------------------

    def shard(self) -> None:
        for name, tensor in self.named():
            if self.rng.random() < 0.7 or name not in self.specs:
                self.specs[name] = self.spec_for(tensor)
                lazyxla.shard(tensor, self.mesh, self.specs[name])

    def write(self) -> None:
        for model in (self.cpu, self.device):
            with torch.no_grad():
                model.first.weight[1:].mul_(0.5)
                model.scale.view(-1)[:2].copy_(torch.ones(2))

    def copy(self) -> None:
        """The copies go on; they share no memory."""
        gradients = [p.grad for p in self.device.parameters()]  # which are not copied
        self.call = self.device = copy.deepcopy(self.device)
        for p, gradient in zip(self.device.parameters(), gradients):
            p.grad = gradient
        self.take_parameters()

    def load(self) -> None:
        state = {name: tensor.cpu() for name, tensor in self.device.state_dict().items()}
        self.device.load_state_dict(state)
        optimizer = self.optimizers[1]
        optimizer.load_state_dict(on_host(optimizer.state_dict()))

    # --- Events that give the tensors other memory -----------------------------------------------

    def spread_again(self, name: str) -> torch.Tensor:
        """A copy of a tensor, spread in another way, and the optimizer's state with it."""
        p = self.device.get_parameter(name)
        self.specs[name] = spec = self.spec_for(p)
        for value in self.optimizers[1].state.get(p, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.dim():
                lazyxla.shard(value, self.mesh, spec)
        return lazyxla.shard(p.detach().cpu().clone(), self.mesh, spec)

    def data(self) -> None:
        for name in ("first.weight", "scale"):
            self.device.get_parameter(name).data = self.spread_again(name)

    def swap(self) -> None:
        """What is spread before takes its gradients' spreading along."""
        for name in ("last.weight", "first.bias"):
            p = self.device.get_parameter(name)
            other = nn.Parameter(self.spread_again(name))
            torch.utils.swap_tensors(p, lazyxla.shard(other, self.mesh, self.specs[name]))

    def convert(self) -> None:
        swaps = self.rng.random() < 0.5
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            self.device.double().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        for name, tensor in self.named():
            check_sharding(tensor, self.mesh, self.specs[name], name)
        self.are_new = swaps

    def assign(self) -> None:
        self.device.load_state_dict(
            {
                name: lazyxla.shard(tensor.cpu().clone(), self.mesh, self.specs[name])
                for name, tensor in self.device.state_dict().items()
            },
            assign=True,
        )
        for name, tensor in self.named():
            check_sharding(tensor, self.mesh, self.specs[name], name)
        self.take_parameters()

    def parametrize(self) -> None:
        parametrize.register_parametrization(self.device.last, "weight", Doubled())
        parametrize.remove_parametrizations(self.device.last, "weight")
        # It has the memory of a result now, and comes after the bias.
        lazyxla.shard(self.device.last.weight, self.mesh, self.specs["last.weight"])
        parameters = self.device.last._parameters
        parameters["bias"] = parameters.pop("bias")

    def take_parameters(self) -> None:
        """Has the optimizer go on with other parameters."""
        before, self.optimizers[1] = self.optimizers[1], self.make(self.device.parameters())
        self.optimizers[1].load_state_dict(copy.deepcopy(before.state_dict()))
        self.are_new = True

    def compile(self) -> None:
        if not self.device.checkpointed:
            self.call = torch.compile(self.device, backend="lazyxla")

    def nothing(self) -> None:
        pass

    # --- A step ----------------------------------------------------------------------------------

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, the same spread, and targets."""
        size = self.rng.choice([8, 8, 8, 5])
        x, y = (torch.randn(size, n, generator=self.numbers) for n in (6, 4))
        spread = lazyxla.shard(x.clone(), self.mesh, self.spec_for(x))
        return x, spread, y

    def step(self, region: AbstractContextManager[Any]) -> None:
        x, spread, y = self.batch()
        accumulate = self.rng.random() < 0.2 and not self.are_new
        losses = []
        with region:
            for model, a, b in ((self.cpu, x, y), (self.call, spread, y.to(DEVICE))):
                loss = F.mse_loss(model(a), b)
                loss.backward()
                losses.append(loss.detach())
        if not accumulate:
            for optimizer in self.optimizers:
                optimizer.step()
            self.are_new = False
        self.check(losses, has_updated=not accumulate)
        if not accumulate:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def check(self, losses: list[torch.Tensor], has_updated: bool = True) -> None:
        lazyxla.sync()
        torch.testing.assert_close(losses[1].cpu(), losses[0])
        theirs = dict([*self.cpu.named_parameters(), *self.cpu.named_buffers()])
        for name, tensor in self.named():
            torch.testing.assert_close(tensor.detach().cpu(), theirs[name].detach(), msg=name)
            check_sharding(tensor, self.mesh, self.specs[name], name)
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad.cpu(), theirs[name].grad)
                check_sharding(tensor.grad, self.mesh, self.specs[name], f"gradient of {name}")
            state = self.optimizers[1].state.get(tensor, {})
            for key, value in state.items() if has_updated else ():  # before, it may be loaded only
                if value is not None and value.shape == tensor.shape and key != "step":
                    check_sharding(value, self.mesh, self.specs[name], f"{key} of {name}")

    def events(self) -> list[Callable[[], None]]:
        events = [self.nothing, self.nothing, self.write, self.copy, self.load, self.compile]
        if self.call is self.device and all(p.grad is None for p in self.device.parameters()):
            # Else gradients stay as they were, and compiled code refers to the tensors.
            events += [self.data, self.swap, self.convert, self.assign, self.parametrize]
        return events

    def run(self, steps: int) -> None:
        for _ in range(steps):
            event = self.rng.choice(self.events())
            mode = self.rng.choice([False, False, True, "fused"])
            region = self.rng.choice([nullcontext, lazyxla.compile])()
            self.lines.append(f"{event.__name__}, step in mode {mode}, {type(region).__name__}")
            event()
            with lazyxla.eager_mode(mode):
                self.step(region)


def on_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: on_host(each) for key, each in tree.items()}
    return [on_host(each) for each in tree] if isinstance(tree, list) else tree
