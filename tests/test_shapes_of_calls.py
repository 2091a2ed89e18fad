"""Tensors of other shapes than an operator takes: refused as on PyTorch's CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.support import DEVICE

ONE, TWO, MATRIX = torch.ones(()), torch.ones(2), torch.ones(2, 2)
FIRST = torch.tensor([0])

CALLS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "addmv of a number": (torch.addmv, (ONE, MATRIX, TWO)),
    "addmv of a matrix": (torch.addmv, (MATRIX[:1], MATRIX, TWO)),
    "cummax of a number": (lambda x: torch.cummax(x, 1), (ONE,)),
    "cummin of a number": (lambda x: torch.cummin(x, -2), (ONE,)),
    "index_reduce of a row": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (TWO, FIRST, MATRIX),
    ),
    "index_reduce, a matrix of indices": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (TWO, FIRST[None], TWO[:1]),
    ),
    "index_reduce of a number at two places": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (ONE, torch.tensor([0, 0]), ONE),
    ),
    "index_reduce along a dimension that is not there": (
        lambda x, i, y: torch.index_reduce(x, -2, i, y, "prod"),
        (TWO, torch.tensor([0, 1]), TWO),
    ),
    "index_copy, indices of floats": (
        lambda x, i, y: torch.index_copy(x, 0, i, y),
        (TWO, FIRST.float(), ONE),
    ),
    "transposed convolution of nothing": (
        lambda x, weight: F.conv_transpose1d(x, weight, output_padding=1),
        (torch.ones(0, 2, 2), torch.ones(2, 1, 1)),
    ),
    "histogram without bins": (lambda x: torch.histogram(x, 0)[0], (TWO,)),
    "multilabel_margin_loss, labels of floats": (F.multilabel_margin_loss, (MATRIX, MATRIX)),
    "pad that only crops, with a number that does not fit": (
        lambda x: F.pad(x, [-1, 0], value=1e40),
        (TWO,),
    ),
    "a bool that is filled with an imaginary number": (
        lambda x: torch.full_like(x, 1j, dtype=torch.bool),
        (TWO,),
    ),
    "searchsorted in a number": (torch.searchsorted, (ONE, ONE)),
    "linear, a bias of two dimensions": (F.linear, (TWO, MATRIX, MATRIX[:1])),
    "linear, a bias that is too long": (F.linear, (MATRIX, MATRIX, torch.ones(3))),
    "index_put, too many indices": (
        lambda x, i: torch.ops.aten.index_put(x, [i, i], torch.ones_like(x)[:1]),
        (TWO, FIRST),
    ),
    "index_put, indices of floats": (
        lambda x, i: torch.ops.aten.index_put(x, [i.float()], torch.ones_like(x)[:1]),
        (TWO, FIRST),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_or_accepted_as_on_the_cpu(name: str) -> None:
    call, arguments = CALLS[name]
    try:
        expected = call(*arguments)
    except Exception as error:
        with pytest.raises(type(error)):
            call(*(x.to(DEVICE) for x in arguments))
    else:
        assert isinstance(expected, torch.Tensor)
        found = call(*(x.to(DEVICE) for x in arguments))
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.cpu(), expected)
