"""A small convolutional network for 28x28 grey images."""

from __future__ import annotations

from torch import nn


class LeNet(nn.Sequential):
    """Images (batch, 1, 28, 28) to logits (batch, classes)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 8, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, classes),
        )
