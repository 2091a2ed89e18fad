"""nn.SyncBatchNorm, against batch norm over the batches of all processes in one.

PyTorch refuses synchronized ones on the CPU, so that there each process computes everything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lazyxla
from tests.distributed.cases import case
from tests.distributed.training import record_step, start_recording


def batches(step: int, sizes: list[int], shape: tuple[int, ...]) -> list[Tensor]:
    """The batch of each process: of other sizes and other numbers."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(size, *shape, generator=generator) * (i + 1) for i, size in enumerate(sizes)
    ]


def uneven() -> list[int]:
    return [3 + 2 * rank for rank in range(dist.get_world_size())]


def one_is_empty() -> list[int]:
    return [4 * rank for rank in range(dist.get_world_size())]


def make_model(spatial: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if spatial:
        return nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5, **options),
            nn.ReLU(),
            nn.Conv2d(5, 2, 2),
            nn.BatchNorm2d(2, **options),
        )
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 3))


def train(device: str, sizes: list[int], spatial: bool = False, **options: Any) -> Any:
    """Eight steps, then evaluation; the loss is the mean over all processes' batches."""
    shape = (3, 6, 6) if spatial else (6,)
    model = make_model(spatial, **options).to(device)
    inner = model
    if device != "cpu":
        inner = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start_recording()
    for step in range(8):
        parts = batches(step, sizes, shape)
        if device == "cpu":
            loss = model(torch.cat(parts)).square().sum() / sum(sizes)
        else:
            x = parts[dist.get_rank()].to(device)
            # DDP divides the gradients by the number of processes.
            loss = model(x).square().sum() * dist.get_world_size() / sum(sizes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device != "cpu":
            lazyxla.sync()
            record_step()
    inner.eval()
    evaluated = inner(torch.ones(2, *shape).to(device))
    return list(inner.parameters()), list(inner.buffers()), evaluated


@case
def sync_batch_norm(device: str) -> Any:
    return train(device, uneven())


@case
def sync_batch_norm_2d(device: str) -> Any:
    return train(device, uneven(), spatial=True)


@case
def sync_batch_norm_empty(device: str) -> Any:
    """One process has nothing in its batch."""
    return train(device, one_is_empty())


@case
def sync_batch_norm_options(device: str) -> Any:
    plain = train(device, uneven(), affine=False)
    averaged = train(device, uneven(), spatial=True, momentum=None)
    return plain, averaged, train(device, uneven(), track_running_stats=False)


@case
def sync_batch_norm_narrow(device: str) -> Any:
    """A batch in bfloat16, parameters in float32; output, and gradients of all."""
    sizes = uneven()
    norm = nn.BatchNorm1d(6)
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    norm = norm.to(device)
    parts = [x.bfloat16().to(device) for x in batches(0, sizes, (6, 7))]
    rank = dist.get_rank()
    x = (torch.cat(parts) if device == "cpu" else parts[rank]).requires_grad_()
    if device != "cpu":
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    y = norm(x)
    y.float().pow(3).sum().backward()
    grads = [norm.weight.grad, norm.bias.grad]
    if device == "cpu":
        return y.split(sizes)[rank], x.grad.split(sizes)[rank], grads, list(norm.buffers())
    for grad in grads:
        dist.all_reduce(grad)
    return y, x.grad, grads, list(norm.buffers())
