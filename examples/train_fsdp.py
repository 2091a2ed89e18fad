"""Trains a decoder in one process on all of its devices: parameters, gradients and the optimizer's
state are spread over them, and so is each batch (fully sharded data parallelism); with --model the
layers themselves are split, too (tensor parallelism).

LAZYXLA_CPU_DEVICES=8 python examples/train_fsdp.py --data 4 --model 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from decoder_model import SMALL, Decoder, next_token_loss
from synthetic_data import markov_text

import lazyxla

TENSOR_PARALLEL = {
    "layers.*.query": lazyxla.ColwiseParallel("model"),
    "layers.*.key": lazyxla.ColwiseParallel("model"),
    "layers.*.value": lazyxla.ColwiseParallel("model"),
    "layers.*.out": lazyxla.RowwiseParallel("model"),
    "layers.*.gate": lazyxla.ColwiseParallel("model"),
    "layers.*.up": lazyxla.ColwiseParallel("model"),
    "layers.*.down": lazyxla.RowwiseParallel("model"),
}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The losses that were read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, help="over how many devices batches are split")
    parser.add_argument("--model", type=int, default=1, help="over how many devices layers are")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--log-every", type=int, default=5)
    args = parser.parse_args(argv)

    data = args.data or lazyxla.device_count() // args.model
    mesh = lazyxla.Mesh((data, args.model), ("data", "model"))
    torch.manual_seed(0)
    model = Decoder(SMALL)  # on the host: each device gets its part of it only
    if args.model > 1:
        lazyxla.parallelize(model, mesh, TENSOR_PARALLEL)
    lazyxla.fully_shard(model, mesh, "data")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = markov_text(SMALL.vocab, args.batch, SMALL.max_length)
    batches = lazyxla.DeviceLoader(
        (next(text) for _ in range(args.steps)), sharding=lazyxla.Sharding(mesh, ("data",))
    )
    losses = []
    for step, (tokens, targets) in enumerate(batches, 1):
        loss = next_token_loss(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lazyxla.sync()
        if step % args.log_every == 0 or step == 1:
            losses.append(loss.item())
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(lazyxla.visualize(model.layers[0].feed_forward.up.weight))
    counted = lazyxla.counters()
    programs = counted["executions"] / args.steps
    print(f"{counted['compiles']} compiles, {programs:.2f} programs a step")
    return losses


if __name__ == "__main__":
    main()
