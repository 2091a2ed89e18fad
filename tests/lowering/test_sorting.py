"""Sorting and searching, against PyTorch's CPU kernels."""

import math
from itertools import product

import pytest
import torch

from tests.lowering.batch import Batch
from tests.lowering.harness import run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
SPECIAL = torch.tensor([1.0, math.nan, -0.0, math.inf, 0.0, -math.inf, -math.nan, -3.0, 1.0])


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float16])
def test_sort(dtype: torch.dtype) -> None:
    batch = Batch()
    for descending in [False, True]:
        x = some((5, 40), dtype)
        for dim in (0, -1):
            batch.add("aten::sort.stable", x, stable=True, dim=dim, descending=descending)
        (values, index) = run("aten::sort", x, -1, descending)
        assert torch.equal(values, x.sort(-1, descending)[0])
        assert torch.equal(x.gather(-1, index), values)
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sort_of_special_values(dtype: torch.dtype) -> None:
    """nan is the greatest and equals itself; the zeros are equal and keep their order and signs."""
    batch = Batch()
    for descending in [False, True]:
        x = SPECIAL.to(dtype)
        batch.add("aten::sort.stable", x, stable=True, dim=0, descending=descending)
        (values, _) = run("aten::sort.stable", x, stable=True, dim=0, descending=descending)
        zeros = values[values == 0]
        assert torch.signbit(zeros).tolist() == [True, False]
    batch.check()


def test_sort_of_extreme_integers() -> None:
    batch = Batch()
    for dtype in (torch.int32, torch.int64, torch.int8):
        limits = torch.iinfo(dtype)
        x = torch.tensor([limits.max, 0, limits.min, -1, 1], dtype=dtype)
        batch.add("aten::sort.stable", x, stable=True, dim=0)
        batch.add("aten::sort.stable", x, stable=True, dim=0, descending=True)
    batch.check()


def test_sort_of_few() -> None:
    batch = Batch()
    for x in (torch.tensor(3.0), torch.zeros(0), torch.zeros(2, 0), torch.zeros(2, 1)):
        batch.add("aten::sort.stable", x, stable=False)
    batch.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk(dtype: torch.dtype) -> None:
    batch = Batch()
    for largest in [False, True]:
        x = torch.stack([torch.randperm(20) for _ in range(3)]).to(dtype)
        batch.add("aten::topk", x, 5, -1, largest)
        batch.add("aten::topk", x, 2, 0, largest)
        batch.add("aten::topk", x, 20, 1, largest)
        batch.add("aten::topk", x, 0, 1, largest)
    batch.check()


def test_topk_of_special_values() -> None:
    batch = Batch()
    for largest in [False, True]:
        x = torch.tensor([1.0, -math.nan, math.inf, -math.inf, -3.0, 2.0])
        batch.add("aten::topk", x, 6, 0, largest)
        batch.add("aten::topk", x.double(), 6, 0, largest)
        batch.add("aten::topk", torch.tensor(3.0), 1)
    batch.check()


@pytest.mark.parametrize("size", [0, 1, 7, 100])
def test_searchsorted(size: int) -> None:
    batch = Batch()
    for right, dtype in product([False, True], [torch.float32, torch.int64]):
        sequence = some((2, size), dtype).sort(-1)[0]
        x = some((2, 5), dtype)
        batch.add("aten::searchsorted.Tensor", sequence, x, right=right)
        batch.add(
            "aten::searchsorted.Tensor", sequence[0].contiguous(), x, side="right", out_int32=True
        )
        batch.add("aten::searchsorted.Scalar", sequence[0].contiguous(), 12, right=right)
        batch.add("aten::bucketize.Tensor", x, sequence[1].contiguous(), right=right)
        batch.add(
            "aten::bucketize.Scalar", 12, sequence[1].contiguous(), right=right, out_int32=True
        )
    batch.check()


@pytest.mark.parametrize("size", [1, 6, 64, 65, 100])
def test_searchsorted_takes_the_steps_of_pytorch(size: int) -> None:
    """Of what is not sorted, the place depends on which elements are compared."""
    batch = Batch()
    sequence, x = torch.randn(3, size), torch.randn(3, 40)
    sequence[1, torch.rand(size) < 0.3] = math.nan
    x[:, 0], x[:, 1], x[:, 2:4] = math.nan, math.inf, sequence[:, :1]
    for right in (False, True):
        batch.add("aten::searchsorted.Tensor", sequence, x, right=right)
        for row in sequence:
            batch.add("aten::bucketize.Tensor", x, row.contiguous(), right=right)
    batch.check()


def test_searchsorted_by_a_sorter() -> None:
    batch = Batch()
    for size in (9, 70):
        sequence, x = torch.randn(2, size), torch.randn(2, 3)
        x[0, 0] = math.nan
        sorter = sequence.sort(-1)[1]
        batch.add("aten::searchsorted.Tensor", sequence, x, sorter=sorter)
    batch.check()


def test_isin() -> None:
    batch = Batch()
    for count, invert in product([0, 3, 90], [False, True]):
        x = some((3, 4), torch.int64)
        members = torch.randint(0, 50, (count,))
        batch.add("aten::isin.Tensor_Tensor", x, members, invert=invert)
        batch.add("aten::isin.Tensor_Tensor", x.float(), members, invert=invert)
        batch.add("aten::isin.Tensor_Scalar", x, 44, invert=invert)
        batch.add("aten::isin.Scalar_Tensor", 44, members, invert=invert)
    batch.check()


def test_histc() -> None:
    batch = Batch()
    x = torch.tensor([0.0, 1.0, 2.5, -3.0, 4.0, 2.5, 9.0, 3.999])
    batch.add("aten::histc", x, 4, 0, 4)
    batch.add("aten::histc", x, 7)
    batch.add("aten::histc", x.double().reshape(2, 4), 7, -1, 2.5)
    batch.add("aten::histc", torch.full((3,), 2.0), 3)
    batch.check()
