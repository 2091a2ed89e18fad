"""Three training steps from a distributed checkpoint to the next: a script.

Usage: resumed.py RANK SIZE WHERE FIRST: the steps FIRST, FIRST + 1 and FIRST + 2. With SIZE 1 the
model is spread over all devices of this process; otherwise over SIZE processes, by FSDP2. Loads
WHERE/FIRST unless FIRST is 0, and saves as WHERE/(FIRST + 3). Prints the losses, and
whether memory is spread.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import lazyxla

STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of all processes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), labels)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class OverDevices:
    """This process's devices share the model and each batch."""

    def __init__(self) -> None:
        self.mesh = lazyxla.Mesh((lazyxla.device_count(),), ("data",))
        self.model = make_model()
        lazyxla.fully_shard(self.model, self.mesh, "data")

    def mine(self, x: Tensor) -> Tensor:
        return lazyxla.shard(x, self.mesh, ("data",))

    def mean(self, loss: Tensor) -> float:
        return loss.item()

    def is_spread(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no device has the whole of the weights and the optimizer's state."""
        tensors = [p for p in self.model.parameters() if p.ndim == 2]
        tensors += [optimizer.state[p]["exp_avg"] for p in tensors]
        spread = [lazyxla.sharding(x) for x in tensors]
        return all(found is not None and any(found.spec) for found in spread)


class OverProcesses:
    """Each process has its part of the model and of each batch."""

    def __init__(self, rank: int, size: int, where: str) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group(
            "lazyxla", init_method=f"file://{where}/meet", rank=rank, world_size=size
        )
        mesh = dist.init_device_mesh("lazyxla", (size,))
        self.rank, self.size = rank, size
        self.model = make_model().to("lazyxla")
        fully_shard(self.model, mesh=mesh)

    def mine(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[self.rank].to("lazyxla")

    def mean(self, loss: Tensor) -> float:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.size

    def is_spread(self, optimizer: torch.optim.Optimizer) -> bool:
        tensors = [p for p in self.model.parameters() if p.ndim == 2]
        tensors += [optimizer.state[p]["exp_avg"] for p in tensors]
        return all(isinstance(x, DTensor) for x in tensors)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def main(rank: int, size: int, where: str, first: int) -> None:
    place = OverProcesses(rank, size, where) if size > 1 else OverDevices()
    model, optimizer = place.model, make_optimizer(place.model)
    if first > 0:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{where}/{first}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    losses = []
    for step in range(first, first + STEPS):
        loss = loss_of(model, *map(place.mine, batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(place.mean(loss))
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{where}/{first + STEPS}")
    print(json.dumps({"losses": losses, "spread": place.is_spread(optimizer)}))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
