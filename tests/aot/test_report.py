"""What the report of a compiled program says of its float32 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lazyxla import aot
from tests.support import needs_libtpu

pytestmark = needs_libtpu


@pytest.fixture
def matmul_precision() -> Any:
    """Sets PyTorch's, which is its own again after the test."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("precision", "dtype", "told"),
    [
        ("highest", torch.float32, True),
        ("high", torch.float32, False),
        ("medium", torch.float32, False),
        ("highest", torch.bfloat16, False),
    ],
)
def test_the_report_names_float32_at_the_highest_precision(
    precision: str, dtype: torch.dtype, told: bool, matmul_precision: Callable[[str], None]
) -> None:
    matmul_precision(precision)
    compiled = aot.compile(nn.Linear(256, 512).to(dtype), (torch.zeros(64, 256, dtype=dtype),),
                           topology="v5e:2x2")  # fmt: skip
    assert compiled.highest_precision_flops == (2 * 64 * 256 * 512 if told else 0)
    text = str(compiled)
    assert (' of the FLOPs, at "highest" precision' in text) == told
    assert ('torch.set_float32_matmul_precision("high") it is 3, with "medium" one' in text) == told
