"""The calls that benchmarks/operators.py times have PyTorch's values, at the sizes that it times.

In float64: sums of so many numbers in float32 depend on their order by more than the tolerance.
"""

from __future__ import annotations

import pytest
import torch

import lazyxla
from benchmarks.operator_cases import CASES
from tests.support import DEVICE, counted

RANDOM = {"dropout", "normal_numbers"}
ODD = {name for name in CASES if name.endswith("_odd")}
"""The same functions at sizes that differ in how long they take."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - RANDOM - ODD))
def test_values(name: str) -> None:
    case = CASES[name]
    theirs = case.make_inputs(torch.float64)
    ours = [x.to(DEVICE) for x in theirs]
    for x in (*ours, *theirs):
        x.requires_grad_(case.differentiable and x.is_floating_point())
    expected = case.function(*theirs)
    weight = torch.rand_like(expected) if case.differentiable else None
    with counted() as n:
        got = case.function(*ours)
        if weight is not None:
            expected.backward(weight)
            got.backward(weight.to(DEVICE))
        lazyxla.sync(wait=True)
    assert n.fallbacks == 0
    torch.testing.assert_close(got.detach().cpu(), expected.detach())
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad.cpu(), b.grad)
