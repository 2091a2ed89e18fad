"""Trains a decoder in one process on all of its devices: parameters, gradients and the optimizer's
state are spread over them, and so is each batch (fully sharded data parallelism).

LAZYXLA_CPU_DEVICES=8 python examples/train_fsdp.py
"""

from __future__ import annotations

from collections.abc import Sequence

import mesh_trainer
import torch
from decoder_model import Decoder, next_token_loss
from trainer import Summary

import lazyxla


def main(argv: Sequence[str] | None = None) -> tuple[Summary, Decoder]:
    args = mesh_trainer.parser(__doc__).parse_args(argv)
    mesh = mesh_trainer.mesh_of(args)
    torch.manual_seed(args.seed)
    model = Decoder(mesh_trainer.config_of(args))  # on the host: each device gets only its part
    lazyxla.fully_shard(model, mesh, "data")
    batches = lazyxla.Sharding(mesh, ("data",))
    summary = mesh_trainer.train(args, model, next_token_loss, batches)
    print(lazyxla.visualize(model.layers[0].feed_forward.up.weight))
    return summary, model


if __name__ == "__main__":
    main()
