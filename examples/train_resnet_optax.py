"""Trains torchvision's ResNet-18 in JAX, with an optimizer of optax's and without a tensor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import optax
import torch
from synthetic_data import coloured_waves
from torchvision_import import import_torchvision

import lazyxla

CLASSES = 10


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Returns the losses."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--size", type=int, default=64, help="height and width of the images")
    options.add_argument("--lr", type=float, default=0.02)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)

    torchvision = import_torchvision()
    if torchvision is None:
        raise SystemExit("this example needs torchvision: pip install --no-deps torchvision")
    torch.manual_seed(args.seed)
    view = lazyxla.jax_view(torchvision.models.resnet18(num_classes=CLASSES))
    optimizer = optax.sgd(args.lr, momentum=0.9)

    def loss(parameters, buffers, images, labels):
        # The statistics of the batch norms come back as new buffers.
        logits, buffers = view(parameters, images, buffers=buffers)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), buffers

    @jax.jit
    def step(parameters, buffers, state, images, labels):
        differentiate = jax.value_and_grad(loss, has_aux=True)
        (value, buffers), gradients = differentiate(parameters, buffers, images, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), buffers, state, value

    parameters, buffers = view.parameters, view.buffers
    state = optimizer.init(parameters)
    losses = []
    batches = coloured_waves(args.batch, args.size, CLASSES, seed=args.seed)
    start = time.perf_counter()
    for number in range(1, args.steps + 1):
        images, labels = (lazyxla.to_jax(x) for x in next(batches))
        parameters, buffers, state, value = step(parameters, buffers, state, images, labels)
        losses.append(float(value))
        if number == 1 or number == args.steps or number % 10 == 0:
            print(f"step {number:4}  loss {losses[-1]:.4f}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{args.steps * args.batch / seconds:.1f} images/s, compilation included")
    return losses


if __name__ == "__main__":
    main()
