"""Tensors of other shapes than an operator takes: refused as on PyTorch's CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.sample_calls import OPERATORS, check

PARTS = 8


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.narrow(-1, 0, 1)], -1) if x.dim() and x.size(-1) else x[None]


def shorter(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(-1, 0, x.size(-1) - 1).clone() if x.dim() and x.size(-1) else x[None]


def fewer(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, 0, x.size(0) - 1) if x.dim() and x.size(0) else x[None]


CHANGES = {
    "with a dimension less": lambda x: x[0] if x.dim() and x.size(0) else x[None],
    "with a dimension more": lambda x: x[None],
    "with a longer last dimension": longer,
    "with a shorter last dimension": shorter,
    "with a shorter first dimension": fewer,
    "without elements": lambda x: x.reshape(-1, *x.shape[1:])[:0],
    "with one column": lambda x: x.narrow(-1, 0, 1).clone() if x.dim() and x.size(-1) else x,
    "of no dimensions": lambda x: x.flatten()[0] if x.numel() else x.sum(),
}

DATA = "what the indices are is not known at the call"
UNCHECKED = "PyTorch's kernel reads beyond the end of such parameters"
DIFFERENT = {
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select"), DATA),
    **dict.fromkeys(("index_copy", "index_put", "put", "take", "__getitem__"), DATA),
    **dict.fromkeys(("nn.functional.embedding", "nn.functional.embedding_bag"), DATA),
    **dict.fromkeys(("nn.functional.multi_margin_loss", "_segment_reduce"), DATA),
    **dict.fromkeys(("nn.functional.linear_cross_entropy", "masked_scatter"), DATA),
    "nn.functional.multilabel_margin_loss": DATA,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), UNCHECKED),
    **dict.fromkeys(("_batch_norm_with_update", "lu_unpack"), UNCHECKED),
    "native_group_norm": "PyTorch's meta function has another shape for more than one group size",
    "index_reduce": "of a tensor without dimensions it is another error",
    "chalf": "XLA has no complex numbers of 16-bit floats",
    "to_sparse": "there are no sparse tensors",
    "tensor_split": "it takes the positions from a tensor on the CPU only",
    "nn.functional.pixel_unshuffle": "PyTorch's result without elements has the input's sizes",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_refused_or_accepted_as_on_the_cpu(part: int) -> None:
    differ, refused = [], 0
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OPERATORS[part::PARTS]:
            if name not in DIFFERENT:
                found, count = check(name, CHANGES)
                differ += found
                refused += count
    assert not differ, "\n".join(differ)
    assert refused > 50
