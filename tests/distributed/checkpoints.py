"""Distributed checkpoints: saved by some processes, loaded by others."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lazyxla
from tests.distributed.cases import case
from tests.distributed.training import batch, make_model


def folder() -> str:
    """A new one, the same for all."""
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    return str(where[0])


class Members:
    """The first so many processes."""

    def __init__(self, device: str, count: int) -> None:
        self.group = dist.new_group(list(range(count)))
        self.here = dist.get_rank() < count
        self.mesh = DeviceMesh.from_group(self.group, device) if self.here else None


def pairs() -> list[tuple[int, int]]:
    """How many save, and how many load; each process takes part in the first two."""
    size = dist.get_world_size()
    return [(size, size - 1), (size - 1, size), (size, 1), (1, size)]


@case
def checkpointed_tensors(device: str) -> Any:
    results = []
    for savers, loaders in pairs():
        where = folder()
        saving, loading = Members(device, savers), Members(device, loaders)
        x = torch.arange(7 * 4.0).reshape(7, 4).to(device)
        if saving.here:
            rows = distribute_tensor(x, saving.mesh, [Shard(0)])
            state = {
                "rows": rows,
                "plain": x * 2,
                "whole": distribute_tensor(x, saving.mesh, [Replicate()]),
            }
            dcp.save(state, checkpoint_id=where, process_group=saving.group)
        dist.barrier()
        if loading.here:
            columns = distribute_tensor(torch.zeros_like(x), loading.mesh, [Shard(1)])
            other = distribute_tensor(torch.zeros_like(x), loading.mesh, [Shard(0)])
            loaded = {"rows": columns, "plain": torch.zeros_like(x), "whole": other}
            dcp.load(loaded, checkpoint_id=where, process_group=loading.group)
            results.append((columns.full_tensor(), loaded["plain"], other.to_local()))
        dist.barrier()
    return results


class Trainer:
    """A sharded model and its optimizer, on some of the processes."""

    def __init__(self, device: str, members: Members, seed: int) -> None:
        model = make_model()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)
        self.device, self.members, self.model = device, members, model.to(device)
        fully_shard(self.model[0], mesh=members.mesh)
        fully_shard(self.model, mesh=members.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> None:
        x, labels = batch(self.device, number)
        nn.functional.cross_entropy(self.model(x), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device != "cpu":
            lazyxla.sync()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, where: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=where, process_group=self.members.group)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@case
def checkpointed_training(device: str) -> Any:
    """Two steps, a checkpoint, and two steps of those who load it."""
    results = []
    for savers, loaders in pairs()[:2]:
        where = folder()
        saving, loading = Members(device, savers), Members(device, loaders)
        if saving.here:
            trainer = Trainer(device, saving, seed=1)
            trainer.step(0)
            trainer.step(1)
            dcp.save(trainer.state(), checkpoint_id=where, process_group=saving.group)
        dist.barrier()
        if loading.here:
            again = Trainer(device, loading, seed=2)
            again.load(where)
            again.step(2)
            again.step(3)
            results.append([p.full_tensor() for p in again.model.parameters()])
        dist.barrier()
    return results


@case
def checkpointed_meanwhile(device: str) -> Any:
    """What is saved is what was so at the call, though training goes on."""
    where, everybody = folder(), Members(device, dist.get_world_size())
    trainer = Trainer(device, everybody, seed=1)
    trainer.step(0)
    # What the thread that saves exchanges with others must not come between the steps' collectives.
    apart = dist.new_group(backend="gloo")
    saved = dcp.async_save(trainer.state(), checkpoint_id=where, process_group=apart)
    for number in range(1, 4):
        trainer.step(number)
    saved.result()
    again = Trainer(device, everybody, seed=2)
    again.load(where)
    return [[p.full_tensor() for p in t.model.parameters()] for t in (trainer, again)]
