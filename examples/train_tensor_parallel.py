"""Trains a decoder whose layers are split over the devices by the plan classes of
torch.distributed.tensor.parallel: each device computes some heads and some features of every layer
(tensor parallelism), and between the products some positions (sequence parallelism).

LAZYXLA_CPU_DEVICES=8 python examples/train_tensor_parallel.py --data 4 --model 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mesh_trainer
import torch
from decoder_model import Decoder, next_token_loss
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from trainer import Summary

import lazyxla

TENSOR_PARALLEL: dict[str, Any] = {
    "layers.*.query": ColwiseParallel(),
    "layers.*.key": ColwiseParallel(),
    "layers.*.value": ColwiseParallel(),
    "layers.*.out": RowwiseParallel(),
    "layers.*.gate": ColwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}

# Hidden states (batch, length, hidden) are split along the length until a product needs them whole.
SPLIT, WHOLE = Shard(1), Replicate()
SEQUENCE_PARALLEL: dict[str, Any] = {
    **TENSOR_PARALLEL,
    "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=SPLIT),
    "layers.*_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(SPLIT, WHOLE, WHOLE), desired_input_layouts=(WHOLE, WHOLE, WHOLE)
    ),
    "layers.*.out": RowwiseParallel(output_layouts=SPLIT),
    "layers.*.feed_forward": PrepareModuleInput(input_layouts=SPLIT, desired_input_layouts=WHOLE),
    "layers.*.down": RowwiseParallel(output_layouts=SPLIT),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=SPLIT, output_layouts=Shard(-1)),
}


def split_layers(model: Decoder, mesh: lazyxla.Mesh) -> None:
    """Layers are split along "model", and the batch along "data"."""
    lazyxla.parallelize(model, mesh, SEQUENCE_PARALLEL)
    lazyxla.data_parallel(model, mesh, "data")


def main(argv: Sequence[str] | None = None) -> tuple[Summary, Decoder]:
    args = mesh_trainer.parser(__doc__, "model").parse_args(argv)
    mesh = mesh_trainer.mesh_of(args)
    torch.manual_seed(args.seed)
    model = Decoder(mesh_trainer.config_of(args))
    split_layers(model, mesh)
    batches = lazyxla.Sharding(mesh, ("data",))
    summary = mesh_trainer.train(args, model, next_token_loss, batches)
    print(lazyxla.visualize(model.layers[0].feed_forward.up.weight))
    return summary, model


if __name__ == "__main__":
    main()
