"""Trains a decoder in one process on sequences that are spread over its devices: each computes a
part of every sequence's positions, and gathers only the keys and values of the others (context
parallelism).

LAZYXLA_CPU_DEVICES=8 python examples/train_context_parallel.py --data 2 --sequence 4
"""

from __future__ import annotations

from collections.abc import Sequence

import mesh_trainer
import torch
from decoder_model import Decoder
from mesh_trainer import constrain_result
from torch import Tensor
from torch.nn import functional
from trainer import Summary

import lazyxla


def split_sequences(model: Decoder, mesh: lazyxla.Mesh) -> None:
    """Each device gets all parameters. Hidden states (batch, length, hidden) stay split as the
    tokens are; attention alone needs more, and the partitioner gathers keys and values there."""
    lazyxla.replicate(model, mesh)
    for part in (model.embedding, *model.layers):
        constrain_result(part, mesh, ("data", "sequence"))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, length, vocab) against targets (batch, length).

    Flattened, as in the other examples, batch and length could not both stay split.
    """
    return functional.cross_entropy(logits.transpose(1, 2), targets)


def main(argv: Sequence[str] | None = None) -> tuple[Summary, Decoder]:
    args = mesh_trainer.parser(__doc__, "sequence").parse_args(argv)
    mesh = mesh_trainer.mesh_of(args)
    torch.manual_seed(args.seed)
    model = Decoder(mesh_trainer.config_of(args))
    split_sequences(model, mesh)
    batches = lazyxla.Sharding(mesh, ("data", "sequence"))
    summary = mesh_trainer.train(args, model, next_token_loss, batches)
    tokens = torch.zeros(args.batch, args.length, dtype=torch.int64)
    logits = model(lazyxla.shard(tokens, mesh, batches.spec))
    print(lazyxla.visualize(logits))
    return summary, model


if __name__ == "__main__":
    main()
