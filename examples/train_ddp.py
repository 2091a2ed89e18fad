"""Trains a LeNet in several processes, each on batches of its own (DistributedDataParallel).

torchrun --nproc-per-node 2 examples/train_ddp.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lenet_model import LeNet
from synthetic_data import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazyxla


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses that were read: means over all processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="images per process")
    parser.add_argument("--log-every", type=int, default=20)
    args = parser.parse_args(argv)

    dist.init_process_group("lazyxla")
    torch.manual_seed(0)
    model = DistributedDataParallel(LeNet().to("lazyxla"))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = digits(args.batch, seed=dist.get_rank())
    losses = []
    for step in range(1, args.steps + 1):
        images, labels = next(batches)
        loss = nn.functional.cross_entropy(model(images.to("lazyxla")), labels.to("lazyxla"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0 or step == 1:
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {losses[-1]:.3f}")
        lazyxla.sync()
    if dist.get_rank() == 0:
        counted = lazyxla.counters()
        programs = counted["executions"] / args.steps
        print(f"{counted['compiles']} compiles, {programs:.2f} programs a step")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
