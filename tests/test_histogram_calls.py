"""Histograms that PyTorch's CPU refuses are refused at the call, in its words."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import DEVICE, error_of

Operand = tuple[torch.dtype, tuple[int, ...]]

OPERANDS: list[Operand] = [
    (dtype, sizes)
    for dtype in (torch.float32, torch.float64)
    for sizes in ((), (0,), (1,), (3,), (2, 2))
]
OPERANDS += [(torch.float16, (3,)), (torch.int64, (3,))]
WEIGHTS: list[Operand | None] = [
    None,
    (torch.float32, (3,)),
    (torch.float64, (3,)),
    (torch.float32, (2,)),
]


def _same(d: str, operand: Operand) -> Tensor:
    dtype, sizes = operand
    return torch.arange(torch.Size(sizes).numel()).view(sizes).to(dtype).to(d)


def _refused(call: Any, *args: Any) -> bool:
    kind, text = error_of(call, "cpu", *args)
    assert error_of(call, DEVICE, *args) == (kind, text), args
    return kind is not type(None)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_edges(weight: Operand | None) -> None:
    def call(d: str, input: Operand, bins: Operand) -> object:
        weights = None if weight is None else _same(d, weight)
        return torch.histogram(_same(d, input), _same(d, bins), weight=weights)

    # With a weight and one edge there are two errors at once, of which another one is told.
    tried = [x for x in product(OPERANDS, OPERANDS) if weight is None or x[1][1] != (1,)]
    assert sum(_refused(call, *operands) for operands in tried) > 60


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_of_another_dtype() -> None:
    def call(d: str, input: Operand, bins: int, hist: Operand, edges: Operand) -> object:
        return torch.histogram(_same(d, input), bins, out=(_same(d, hist), _same(d, edges)))

    tried = product(OPERANDS, (-1, 0, 2), OPERANDS[::5], OPERANDS[::5])
    assert sum(_refused(call, *arguments) for arguments in tried) > 60


def test_ranges() -> None:
    def call(d: str, *bounds: float) -> object:
        return torch.histogram(torch.ones(3).to(d), 2, range=bounds)

    tried = [(1, 0), (0, torch.nan), (-torch.inf, 0), (1,), (0, 1, 2), (1, 1), (-1, 2)]
    assert sum(_refused(call, *bounds) for bounds in tried) == 5
