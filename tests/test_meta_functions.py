"""Operators whose results torch's own meta functions tell wrongly, or fail to tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import DEVICE, assert_same, error_of, on_device


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
def test_baddbmm_of_another_dtype(bias: torch.dtype) -> None:
    x, y = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 4, 5).bfloat16()
    added = torch.randn(2, 3, 5).to(bias)
    expected = torch.baddbmm(added.float(), x.float(), y.float(), beta=2, alpha=0.5)
    operands = on_device((added, x, y))
    actual = torch.baddbmm(*operands, out_dtype=torch.float32, beta=2, alpha=0.5)
    assert_same(actual, expected)


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@pytest.mark.parametrize(
    "ends",
    [
        (torch.tensor(0.5 + 1j), torch.tensor(2.0)),
        (torch.tensor(1), torch.tensor(0.5 + 1j)),
        (torch.tensor(0.5 + 1j), 2.0),
        (0.5, torch.tensor(2 + 1j)),
        (torch.tensor(1.0), torch.tensor(2)),
    ],
)
def test_ranges_between_tensors(name: str, ends: tuple[Any, Any]) -> None:
    op = getattr(torch, name)
    assert_same(op(*on_device(ends), 5, device=DEVICE), op(*ends, 5))


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@pytest.mark.parametrize(
    ("ends", "kwargs"),
    [
        ((torch.ones(2), 3), {}),
        ((3, torch.ones(2, 2)), {}),
        ((torch.tensor(1j), 3), {"dtype": torch.float64}),
    ],
)
def test_errors_of_ranges(name: str, ends: tuple[Any, Any], kwargs: dict[str, Any]) -> None:
    op = getattr(torch, name)
    expected = error_of(lambda: op(*ends, 5, **kwargs))
    assert expected[0] is RuntimeError
    assert error_of(lambda: op(*on_device(ends), 5, device=DEVICE, **kwargs)) == expected
