"""Trains torchvision's ResNet-18 or ResNet-50 on generated images of ten classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from synthetic_data import coloured_waves
from torch import nn
from torchvision_import import import_torchvision
from trainer import Summary, parser, train

CLASSES = 10


def main(argv: Sequence[str] | None = None) -> Summary:
    options = parser(__doc__, steps=50, lr=0.02, optimizer="sgd")
    options.add_argument("--model", choices=("resnet18", "resnet50"), default="resnet18")
    options.add_argument("--size", type=int, default=64, help="height and width of the images")
    args = options.parse_args(argv)
    batch = args.batch or 16

    torchvision = import_torchvision()
    if torchvision is None:
        raise SystemExit("this example needs torchvision: pip install --no-deps torchvision")
    torch.manual_seed(args.seed)
    model = getattr(torchvision.models, args.model)(num_classes=CLASSES).to(args.device)
    return train(
        args,
        model,
        nn.functional.cross_entropy,
        coloured_waves(batch, args.size, CLASSES, seed=args.seed),
        unit="images",
        units_per_step=batch,
    )


if __name__ == "__main__":
    main()
