"""Training by PyTorch's own wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lazyxla
from tests.distributed.cases import case


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 3),
    )


def batch(device: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator)
    return x.to(device), torch.randint(0, 3, (8,), generator=generator).to(device)


def train_step(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Trains on a batch, and returns the loss."""
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if x.device.type != "cpu":
        lazyxla.sync()
    return loss.detach()


def train(model: nn.Module, device: str, optimizer: Any = None) -> Iterator[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        yield train_step(model, optimizer, *batch(device, step))


STEPS: list[dict[str, int]] = []  # what each step of the last training counted
_before: dict[str, int] = {}


def start_recording() -> None:
    STEPS.clear()
    _before.update(lazyxla.counters())


def record_step() -> None:
    lazyxla.sync(wait=True)  # a program of several stages counts each of them as it is enqueued
    after = lazyxla.counters()
    STEPS.append({name: after[name] - _before[name] for name in after})
    _before.update(after)


def train_counted(model: nn.Module, device: str, optimizer: Any = None) -> list[Tensor]:
    start_recording()
    losses = []
    for loss in train(model, device, optimizer):
        record_step()
        losses.append(loss)
    return losses


@case
def ddp(device: str) -> Any:
    model = nn.parallel.DistributedDataParallel(make_model().to(device))
    return train_counted(model, device), list(model.parameters())


@case
def ddp_options(device: str) -> Any:
    """A parameter that takes no part, buffers, and gradients that are summed over two batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()
            self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(self.norm(x))
            return result

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        Model().to(device), find_unused_parameters=True, bucket_cap_mb=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, labels = batch(device, step)
        if step % 2 == 0:
            with model.no_sync():
                nn.functional.cross_entropy(model(x), labels).backward()
            continue
        nn.functional.cross_entropy(model(x), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            lazyxla.sync()
    return list(model.state_dict().values())


@case
def fully_sharded(device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = make_model().to(device)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train_counted(model, device)
    return losses, [p.full_tensor() for p in model.parameters()]


@case
def dtensors(device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    x, w = torch.randn(4, 6).to(device), torch.randn(6, 5).to(device)
    rows, columns = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Shard(1)])
    product = rows @ distribute_tensor(w, mesh, [Replicate()])
    other = distribute_tensor(x, mesh, [Replicate()]) @ columns
    moved = product.redistribute(mesh, [Shard(1)])
    return product.full_tensor(), other.full_tensor(), moved.to_local(), rows.sum().full_tensor()


@case
def dtensors_in_attention(device: str) -> Any:
    """Of which PyTorch's CPU cannot spread any: there it is computed whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size,))
    attention = torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(1)
    mask = torch.rand(2 * size, 2 * size, 5, 5) > 0.2
    found = []
    for dim, heads, options in [
        (1, 2 * size, {}),
        (1, 2 * size, {"is_causal": True}),
        (0, 2 * size, {"attn_mask": mask}),
        (1, 2 * size, {"attn_mask": mask[:, :1]}),
        (0, 2 * size, {"attn_mask": mask[0, 0]}),
        (1, size, {"enable_gqa": True}),
    ]:
        torch.manual_seed(0)
        shapes = [(2 * size, n, 5, 4) for n in (2 * size, heads, heads)]
        whole = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
        given = {
            name: option.to(device) if isinstance(option, Tensor) else option
            for name, option in options.items()
        }
        if device != "cpu":
            whole = [distribute_tensor(x, mesh, [Shard(dim)]) for x in whole]
            if "attn_mask" in given:
                each = mask.ndim == given["attn_mask"].ndim and given["attn_mask"].shape[dim] > 1
                placement = Shard(dim) if each else Replicate()
                given["attn_mask"] = distribute_tensor(given["attn_mask"], mesh, [placement])
        result: Any = attention(*whole, **given)
        results = [result, *torch.autograd.grad(result.square().sum(), whole)]
        if device != "cpu":
            assert all(x.placements == (Shard(dim),) for x in results)
            results = [x.full_tensor() for x in results]
        found += [x.detach() for x in results]
    return found


@case
def tensor_parallel(device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).to(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(1)
    x = torch.randn(5, 6).to(device)
    for _ in range(4):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.full_tensor() for p in model.parameters()]
