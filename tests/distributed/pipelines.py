"""torch.distributed.pipelining: a model in stages, one or two for each process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import lazyxla
from tests.distributed.cases import case
from tests.distributed.training import record_step, start_recording

MICROBATCHES = 6
STEPS_TAKEN = 6


def make_stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.LayerNorm(6))
        for _ in range(count)
    ]


def numbers(device: str, step: int) -> tuple[Tensor, Tensor]:
    """The same in all processes."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 2 * MICROBATCHES, 6, generator=generator).unbind(0)
    return x.to(device), target.to(device)


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(y, target)


def train_staged(device: str, schedule: Any, per_process: int) -> Any:
    """Losses where they are known, and this process's parameters, by training in stages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    modules = make_stages(size * per_process)
    mine = range(rank, len(modules), size)
    parts = [modules[i].to(device) for i in mine]
    stages = [
        pipelining.PipelineStage(part, i, len(modules), torch.device(device))
        for part, i in zip(parts, mine)
    ]
    run = schedule(stages if per_process > 1 else stages[0], MICROBATCHES, loss_fn=mean_square)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.2)
    results: list[Tensor] = []
    start_recording()
    for step in range(STEPS_TAKEN):
        x, target = numbers(device, step)
        losses: list[Tensor] = []
        run.step(
            *([x] if rank == 0 else []),
            **({"target": target, "losses": losses} if rank == size - 1 else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        if device != "cpu":
            lazyxla.sync()
        record_step()
        if losses:
            results.append(torch.stack(losses).mean())
    return results, [list(part.parameters()) for part in parts]


def train_whole(device: str, per_process: int) -> Any:
    """The same by one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    modules = make_stages(size * per_process)
    model = nn.Sequential(*modules).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    results = []
    for step in range(STEPS_TAKEN):
        x, target = numbers(device, step)
        loss = mean_square(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    mine = [list(modules[i].parameters()) for i in range(rank, len(modules), size)]
    return results if rank == size - 1 else [], mine


def train(device: str, schedule: Any, per_process: int = 1) -> Any:
    if device == "cpu":
        return train_whole(device, per_process)
    return train_staged(device, schedule, per_process)


@case
def pipeline_gpipe(device: str) -> Any:
    return train(device, pipelining.ScheduleGPipe)


@case
def pipeline_1f1b(device: str) -> Any:
    return train(device, pipelining.Schedule1F1B)


@case
def pipeline_interleaved(device: str) -> Any:
    """Two stages in each process."""
    return train(device, pipelining.ScheduleInterleaved1F1B, per_process=2)
