"""Trains a LeNet on generated images of digits and measures its accuracy on others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lenet_model import LeNet
from synthetic_data import Batches, digits
from torch import nn
from trainer import Summary, parser, train


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches, count: int, device: str) -> float:
    """The share of right answers in ``count`` batches. Right ones are counted on the device."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    for _ in range(count):
        images, labels = next(batches)
        right += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        total += len(labels)
    return right.item() / total


def main(argv: Sequence[str] | None = None) -> tuple[Summary, float]:
    options = parser(__doc__, steps=300, lr=2e-3, optimizer="adam")
    args = options.parse_args(argv)
    batch = args.batch or 64

    torch.manual_seed(args.seed)
    model = LeNet().to(args.device)
    summary = train(
        args,
        model,
        nn.functional.cross_entropy,
        digits(batch, seed=args.seed),
        unit="images",
        units_per_step=batch,
    )
    share = accuracy(model, digits(batch, seed=args.seed + 1), 8, args.device)
    print(f"accuracy on {8 * batch} new images: {share:.1%}")
    return summary, share


if __name__ == "__main__":
    main()
