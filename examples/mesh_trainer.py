"""What the examples on a mesh of devices share: options for the mesh, and training on text that is
spread over it.

They differ in two things: how they spread the model, and how its batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable

import trainer
from decoder_model import SMALL, DecoderConfig
from synthetic_data import markov_text
from torch import Tensor, nn

import lazyxla


def parser(description: str, *axes: str) -> argparse.ArgumentParser:
    """The options of an example whose mesh has an axis "data" and these."""
    options = trainer.parser(description, steps=20, lr=1e-3, optimizer="adamw", on_mesh=True)
    options.set_defaults(batch=16, axes=axes)
    options.add_argument("--length", type=int, default=SMALL.max_length, help="tokens per example")
    options.add_argument("--vocab", type=int, default=SMALL.vocab, help="number of tokens")
    options.add_argument("--data", type=int, help='devices along "data" (default: all there are)')
    for axis in axes:
        options.add_argument(f"--{axis}", type=int, default=2, help=f'devices along "{axis}"')
    return options


def config_of(args: argparse.Namespace) -> DecoderConfig:
    """A small decoder."""
    return dataclasses.replace(SMALL, vocab=args.vocab, max_length=args.length)


def mesh_of(args: argparse.Namespace) -> lazyxla.Mesh:
    """The mesh that the options ask for."""
    others = [getattr(args, axis) for axis in args.axes]
    data = args.data or lazyxla.global_device_count() // math.prod(others)
    return lazyxla.Mesh((data, *others), ("data", *args.axes))


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    sharding: lazyxla.Sharding,
) -> trainer.Summary:
    """Trains a model, which is spread already, on text (batch, length) that is spread as
    ``sharding`` says; each device gets its part only, ahead of its use."""
    text = markov_text(args.vocab, args.batch, args.length, seed=args.seed)
    return trainer.train(
        args,
        model,
        loss_function,
        iter(lazyxla.DeviceLoader(text, sharding=sharding)),
        unit="tokens",
        units_per_step=args.batch * args.length,
    )


def constrain_result(module: nn.Module, mesh: lazyxla.Mesh, spec: lazyxla.Spec) -> None:
    """What the module yields is spread in this way within the program."""
    module.register_forward_hook(lambda _module, _args, y: lazyxla.constrain(y, mesh, spec))
