"""What the kernels for TPUs share: tiles, precision, and which dtypes they multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


LANES = 128
"""Lanes of a register: tiles are multiples of it."""


def tile(length: int, most: int) -> int:
    """The greatest tile of no more than `most` that divides the length, a multiple of the lanes."""
    return max(n for n in range(LANES, most + 1, LANES) if length % n == 0)


def multiplies(b: Builder, dtype: torch.dtype) -> bool:
    """Whether kernels multiply matrices of the dtype; XLA itself emulates what a chip lacks."""
    if dtype == torch.bfloat16:
        return b.target.device_kind not in ("TPU v2", "TPU v3")
    return dtype == torch.float32


def matmul_precision(b: Builder, x: Value) -> str:
    """The precision of matmuls in kernels; they support no precision between these two."""
    exact = x.dtype == torch.float32 and b.settings.matmul_precision != "medium"
    return "highest" if exact else "default"
