"""Tensors of more dimensions than the CPU's library for reductions has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import DEVICE

SHAPE = (3, 3, 3, 3, 4, 4, 4, 4, 4)

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x.sum(),
    "last": lambda x: x.sum(-1),
    "first": lambda x: x.mean(0),
    "alternating": lambda x: x.sum((0, 2, 4, 6, 8)),
    "of a reshape": lambda x: x.reshape(-1).amax(),
    "maximum": lambda x: x.amax((1, 5), keepdim=True),
    "dimension of its own": lambda x: (x.reshape(9, 9, *SHAPE[4:]).unsqueeze(-2) * 2).sum(-1),
    "index": lambda x: x.argmax(3),
    "softmax": lambda x: x.softmax(4),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(SHAPE).to(dtype)
    torch.testing.assert_close(CALLS[name](x.to(DEVICE)).cpu(), CALLS[name](x))
