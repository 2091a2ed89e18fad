"""Meta functions of fake quantization, as the CPU's kernels do it.

``lazyxla/meta_functions.py`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _fake_quantize(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    # The mask marks the elements that were not clipped.
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learnable(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _learnable_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, zero: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero)
    of_x = torch.empty_like(x, dtype=torch.float32)  # also those of bfloat16
    return of_x, of_x.new_empty(scale.numel()), of_x.new_empty(zero.numel())


QUANTIZATION: dict[str, Callable[..., Any]] = {
    "fake_quantize_per_tensor_affine_cachemask": _fake_quantize,
    "fake_quantize_per_channel_affine_cachemask": _fake_quantize,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _fake_quantize,
    "_fake_quantize_learnable_per_tensor_affine": _learnable,
    "_fake_quantize_learnable_per_channel_affine": _learnable,
    "_fake_quantize_learnable_per_tensor_affine_backward": _learnable_gradients,
    "_fake_quantize_learnable_per_channel_affine_backward": _learnable_gradients,
}
