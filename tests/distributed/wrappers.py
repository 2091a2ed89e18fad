"""Options of DDP, what else PyTorch has around it, and FSDP2's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lazyxla
from tests.distributed.cases import case
from tests.distributed.training import (
    batch,
    make_model,
    record_step,
    start_recording,
    train_counted,
    train_step,
)

DDP = nn.parallel.DistributedDataParallel


def loss_of(model: nn.Module, device: str, step: int) -> Tensor:
    x, labels = batch(device, step)
    return nn.functional.cross_entropy(model(x), labels)


def sync(device: str) -> None:
    if device != "cpu":
        lazyxla.sync()


@case
def ddp_static(device: str) -> Any:
    model = DDP(make_model().to(device), static_graph=True, gradient_as_bucket_view=True)
    return train_counted(model, device), list(model.parameters())


class Branches(nn.Module):
    """The second branch takes part in every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.calls = make_model(), nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.inner(x)
        return result + self.other(x) if self.calls % 2 else result


@case
def ddp_unused(device: str) -> Any:
    torch.manual_seed(0)
    model = DDP(Branches().to(device), find_unused_parameters=True, gradient_as_bucket_view=True)
    return train_counted(model, device), list(model.parameters())


@case
def ddp_hooks(device: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    results = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        model = DDP(make_model().to(device))
        model.register_comm_hook(None, hook)
        # Adam would make much of a rounding to 16 bits.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append((train_counted(model, device, optimizer), list(model.parameters())))
    return results


@case
def ddp_join(device: str) -> Any:
    """Processes have other numbers of batches."""
    from torch.distributed.algorithms.join import Join

    model = DDP(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Join([model]):
        for step in range(3 + 2 * dist.get_rank()):
            losses.append(train_step(model, optimizer, *batch(device, step)))
    return losses, list(model.parameters())


@case
def ddp_accumulates(device: str) -> Any:
    """Gradients of three batches, of which the last is reduced with the sum."""
    model = DDP(make_model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start_recording()
    for step in range(8):
        with model.no_sync():
            for part in range(2):
                (loss_of(model, device, 3 * step + part) / 3).backward()
        (loss_of(model, device, 3 * step + 2) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync(device)
        record_step()
    return list(model.parameters())


def zero(device: str, kind: type[torch.optim.Optimizer], views: bool, **options: Any) -> Any:
    """Ten steps; then the optimizer's state goes to a new one, and two more."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(model: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            model.parameters(), kind, parameters_as_bucket_view=views, **options
        )

    model = DDP(make_model().to(device))
    optimizer = make(model)
    losses = train_counted(model, device, optimizer)
    state: dict[str, Any] = {}
    for to in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to)
        if to == dist.get_rank():
            state = copy.deepcopy(optimizer.state_dict())
    kept = [list(copy.deepcopy(of_one).values()) for _, of_one in sorted(state["state"].items())]
    again = make(model)
    again.load_state_dict(state)
    for step in range(2):
        loss_of(model, device, 20 + step).backward()
        again.step()
        again.zero_grad()
    return losses, list(model.parameters()), kept


@case
def zero_adam(device: str) -> Any:
    return zero(device, torch.optim.Adam, False, lr=1e-2)


@case
def zero_sgd(device: str) -> Any:
    return zero(device, torch.optim.SGD, True, lr=0.1, momentum=0.9)


@case
def fully_sharded_options(device: str) -> Any:
    """Gradients of three batches, reduced with the last, and clipped by their norm over all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = make_model().to(device)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    start_recording()
    for step in range(8):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            (loss_of(model, device, 3 * step + part) / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        sync(device)
        record_step()
        norms.append(norm.full_tensor().detach())
    return norms, [p.full_tensor() for p in model.parameters()]


@case
def sampled(device: str) -> Any:
    """A loader whose sampler gives each process its part, shuffled anew in each epoch."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(50, 6, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    )
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader: Any = DataLoader(data, batch_size=8, sampler=sampler)
    if device != "cpu":
        loader = lazyxla.DeviceLoader(loader)
    model = DDP(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            losses.append(train_step(model, optimizer, x, labels))
    return losses, list(model.parameters())
