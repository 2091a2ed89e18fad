"""Look-ups along a dimension, which TPUs do one by one: of short rows they compare instead."""

import math

import pytest
import torch

from lazyxla.lowering import lower_to_text
from tests.lowering.harness import execute, record

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "of_index", "dim"),
    [
        ((300, 8), (300, 5), 1),
        ((8, 300), (5, 300), 0),
        ((7, 11, 30), (6, 9, 30), 1),  # fewer rows than there are
        ((512,), (1024,), 0),
    ],
)
def test_short_rows(
    sizes: tuple[int, ...], of_index: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(sizes) * 3).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[:4] = torch.tensor([-0.0, math.inf, math.nan, -math.inf])
    recorded = record("aten::gather", x, dim, torch.randint(0, sizes[dim], of_index))
    for platform, looks_up in (("tpu", False), ("cpu", True), ("cuda", True)):
        assert ("gather" in lower_to_text(recorded.program, platform)) == looks_up
        [got], _ = execute(recorded.program, recorded.inputs, platform)
        [expected] = recorded.expected
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            known = ~expected.isnan()  # nothing is said of the sign of nan
            assert torch.equal(got.signbit()[known], expected.signbit()[known])


@pytest.mark.parametrize(
    ("sizes", "of_index", "dtype"),
    [
        ((4, 513), (4, 400), torch.float32),  # a longer row
        ((4, 8), (4, 8), torch.float32),  # few
        ((300, 8), (300, 5), torch.float64),
        ((300, 8), (300, 5), torch.complex64),
    ],
)
def test_what_is_looked_up(
    sizes: tuple[int, ...], of_index: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, index = torch.randn(sizes).to(dtype), torch.randint(0, sizes[1], of_index)
    recorded = record("aten::gather", x, 1, index)
    assert "gather" in lower_to_text(recorded.program, "tpu")


def test_indices_out_of_range_are_the_nearest_in_range() -> None:
    """As for every gather: there is no check, which would need the values."""
    x = torch.randn(300, 8)
    recorded = record("aten::gather", x, 1, torch.zeros(300, 5, dtype=torch.int64))
    index = torch.randint(-20, 20, (300, 5))
    for platform in ("cpu", "tpu"):
        [got], _ = execute(recorded.program, [x, index], platform)
        assert torch.equal(got, x.gather(1, index.clamp(0, 7)))
