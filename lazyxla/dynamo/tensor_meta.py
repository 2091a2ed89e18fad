"""What a node of a static graph says of its tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TensorMeta:
    """A description of a node's tensor: a fake tensor's attributes, with static sizes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset
