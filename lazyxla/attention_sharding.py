"""How PyTorch's DTensor may spread attention over devices.

DTensor knows the operators that ``scaled_dot_product_attention`` becomes on CUDA. On the device it
becomes another pair (csrc/dispatch/attention.cpp), which may be spread alike: samples and heads are
independent of each other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_SAMPLES, _HEADS = 0, 1  # dimensions of queries, keys, values, the result, and the logarithms
_Placements = list[Any]


@functools.cache
def install() -> None:
    """Registers the rules with DTensor, which it imports; once per process."""
    from torch.distributed.tensor.experimental import register_sharding

    aten = torch.ops.aten
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[tuple[_Placements, _Placements]]:
    return _placements(2, 3, attn_mask, query.ndim)


def _backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[tuple[_Placements, _Placements]]:
    return _placements(3, 6, attn_mask, query.ndim)


def _placements(
    results: int, inputs: int, mask: Any, rank: int
) -> list[tuple[_Placements, _Placements]]:
    """For one dimension of a mesh: placements of the results, and of the inputs followed by the
    mask.

    DTensor moves no keyword arguments, so the mask must already have its placement.
    """
    from torch.distributed.tensor import Replicate, Shard

    found: list[tuple[_Placements, _Placements]] = []
    for placement in (Replicate(), Shard(_SAMPLES), Shard(_HEADS)):
        behind = []
        if mask is not None:
            needed = placement
            if isinstance(placement, Shard) and _is_equal_along(mask, placement.dim, rank):
                needed = Replicate()
            if any(given != needed for given in mask.placements):
                continue
            behind.append(needed)
        found.append(([placement] * results, [placement] * inputs + behind))
    if not found:
        raise NotImplementedError(
            f"lazyxla: attention cannot be spread with a mask that is spread as {mask.placements}"
        )
    return found


def _is_equal_along(mask: Any, dim: int, rank: int) -> bool:
    """Whether a mask is the same for all samples, or heads."""
    return bool(mask.ndim < rank or mask.shape[dim] == 1)
