"""The part of PyTorch's operator table that is checked with every change.

One sample of every entry, and all samples of some entries with gradients, in-place and out=
variants and errors. `make test-opinfo` checks everything.
"""

from __future__ import annotations

import pytest
import torch

from tests.opinfo.checks import check_entry
from tests.opinfo.entries import entries, supports
from tests.opinfo.expected import EXPECTED, unexpected
from tests.opinfo.outcome import PARTS

# Of each kind of operator one or two that much depends on.
THOROUGH = [
    "add",
    "addmm",
    "amax",
    "bmm",
    "cat",
    "clamp",
    "cumsum",
    "div.floor_rounding",
    "exp",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "kron",
    "log_softmax",
    "masked_fill",
    "matmul",
    "max.reduction_with_dim",
    "mean",
    "mul",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
    "permute",
    "pow",
    "scatter_add",
    "sigmoid",
    "slice_scatter",
    "softmax",
    "sort",
    "sqrt",
    "sub",
    "sum",
    "tanh",
    "topk",
    "tril",
    "var",
    "where",
]
FLOAT32 = [n for n, op in entries().items() if supports(op, torch.float32, "forward")]


@pytest.mark.parametrize("name", FLOAT32)
def test_first_sample(name: str) -> None:
    assert unexpected(check_entry(name, torch.float32, "forward", 1), complete=False) == []


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", THOROUGH)
def test_all_samples(name: str, part: str) -> None:
    outcome = check_entry(name, torch.float32, part)
    assert unexpected(outcome, complete=True) == []
    # A call that is an error anyway may be tried on the host.
    assert part == "errors" or outcome.fallbacks == {}


def test_expected_failures_name_entries() -> None:
    """Else a name that PyTorch changes would go unnoticed."""
    assert {n for e in EXPECTED for n in e.entries} - set(entries()) == set()
