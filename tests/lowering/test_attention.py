"""Attention's softmax and the fused inference layers, against PyTorch's CPU kernels."""

import math
from itertools import product

import pytest
import torch

from tests.lowering.batch import Batch

SAMPLES, STEPS, WIDTH, HEADS = 2, 5, 8, 2
MASKS = {
    "none": (None, None),
    "causal": (torch.ones(STEPS, STEPS).triu(1).bool(), 0),
    "padding": (torch.tensor([[False] * 5, [False, False, True, True, True]]), 1),
    "full": (torch.ones(SAMPLES, HEADS, STEPS, STEPS).triu(2).bool(), 2),
}


def weight(out_features: int, in_features: int) -> torch.Tensor:
    """Of the size that layers start with: a softmax of great values amplifies any rounding."""
    return normal(out_features, in_features) / math.sqrt(in_features)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_safe_softmax(dtype: torch.dtype) -> None:
    batch = Batch()
    for dim in [0, -1]:
        x = normal(3, 4, dtype=dtype)
        x[1], x[:, 2], x[0, 0] = -math.inf, -math.inf, -math.inf
        batch.add("aten::_safe_softmax", x, dim)
        batch.add("aten::_safe_softmax", x, dim, torch.float64)
    batch.check()


def test_safe_softmax_of_special_values() -> None:
    batch = Batch()
    x = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [-math.inf, 700.0]])
    batch.add("aten::_safe_softmax", x, 1)
    batch.add("aten::_safe_softmax", torch.tensor(3.0), 0)
    batch.add("aten::_safe_softmax", torch.zeros(2, 0), 0)
    batch.check()


@pytest.mark.parametrize("mask", MASKS)
def test_multi_head_attention(mask: str) -> None:
    batch = Batch()
    for need_weights in [False, True]:
        inputs = [normal(SAMPLES, STEPS, WIDTH) * i for i in (1, 2, 3)]
        weights = [weight(3 * WIDTH, WIDTH), normal(3 * WIDTH), weight(WIDTH, WIDTH), normal(WIDTH)]
        values, kind = MASKS[mask]
        for average in (False, True):
            batch.add(
                "aten::_native_multi_head_attention",
                *inputs,
                WIDTH,
                HEADS,
                *weights,
                values,
                need_weights,
                average,
                kind,
            )
    batch.check()


@pytest.mark.parametrize("mask", MASKS)
def test_encoder_layer(mask: str) -> None:
    batch = Batch()
    for norm_first, use_gelu in product([False, True], [False, True]):
        hidden = 2 * WIDTH
        batch.add(
            "aten::_transformer_encoder_layer_fwd",
            normal(SAMPLES, STEPS, WIDTH),
            WIDTH,
            HEADS,
            *(weight(3 * WIDTH, WIDTH), normal(3 * WIDTH), weight(WIDTH, WIDTH), normal(WIDTH)),
            *(use_gelu, norm_first, 1e-5),
            *(normal(WIDTH), normal(WIDTH + 1)[1:], normal(WIDTH), normal(WIDTH)),
            *(weight(hidden, WIDTH), normal(hidden), weight(WIDTH, hidden), normal(WIDTH)),
            *MASKS[mask],
        )
    batch.check()
