"""Observers of channels: their buffers are empty until the first call.

PyTorch's kernel gives them their size, and the rest is one operator. A recorded operator writes
tensors of the sizes they have, so that the size is given first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_aten = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Registers the device's implementation. Once per process."""
    op = torch.ops.aten.fused_moving_avg_obs_fake_quant.default
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _aten.impl(op, _fused_moving_avg_obs_fake_quant, key)


def _fused_moving_avg_obs_fake_quant(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Tensor:
    if per_row_fake_quant and running_min.numel() == 0 and ch_axis < x.dim():
        channels = x.size(ch_axis)
        running_min.resize_(channels).fill_(math.inf)
        running_max.resize_(channels).fill_(-math.inf)
        scale.resize_(channels)
        zero_point.resize_(channels)
    results: tuple[Tensor, Tensor] = torch.ops.aten._fused_moving_avg_obs_fq_helper(
        x,
        observer_on,
        fake_quant_on,
        running_min,
        running_max,
        scale,
        zero_point,
        averaging_const,
        quant_min,
        quant_max,
        ch_axis,
        per_row_fake_quant,
        symmetric_quant,
    )
    return results[0]
