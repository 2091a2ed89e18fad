"""Meta functions of attention that correct torch's own; see `meta_functions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _attention_for_cpu(
    query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # Before torch 2.13 its own has the logarithms of float64 in float32.
    samples, heads, rows, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    sums = query.new_empty(samples, rows, heads, dtype=dtype).transpose(1, 2)
    return torch.empty_like(query), sums


def _attention_layer(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Torch's own makes an empty tensor of weights that are not wanted, the CPU's kernel none.
    result, weights = torch._native_multi_head_attention(*args)
    need_weights = args[10] if len(args) > 10 else True
    return result, weights if need_weights and result.numel() > 0 else None


ATTENTION: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": _attention_layer,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_for_cpu,
}
"""By operator, without its namespace."""
