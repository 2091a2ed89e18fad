"""Sorting and searching, against PyTorch's CPU kernels."""

import math

import pytest
import torch

from tests.lowering.harness import check, run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
SPECIAL = torch.tensor([1.0, math.nan, -0.0, math.inf, 0.0, -math.inf, -math.nan, -3.0, 1.0])


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.float16])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(dtype: torch.dtype, descending: bool) -> None:
    x = some((5, 40), dtype)
    for dim in (0, -1):
        check("aten::sort.stable", x, stable=True, dim=dim, descending=descending)
    (values, index) = run("aten::sort", x, -1, descending)
    assert torch.equal(values, x.sort(-1, descending)[0])
    assert torch.equal(x.gather(-1, index), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("descending", [False, True])
def test_sort_of_special_values(dtype: torch.dtype, descending: bool) -> None:
    """nan is the greatest and equals itself; the zeros are equal and keep their order and signs."""
    x = SPECIAL.to(dtype)
    check("aten::sort.stable", x, stable=True, dim=0, descending=descending)
    (values, _) = run("aten::sort.stable", x, stable=True, dim=0, descending=descending)
    zeros = values[values == 0]
    assert torch.signbit(zeros).tolist() == [True, False]


def test_sort_of_extreme_integers() -> None:
    for dtype in (torch.int32, torch.int64, torch.int8):
        limits = torch.iinfo(dtype)
        x = torch.tensor([limits.max, 0, limits.min, -1, 1], dtype=dtype)
        check("aten::sort.stable", x, stable=True, dim=0)
        check("aten::sort.stable", x, stable=True, dim=0, descending=True)


def test_sort_of_few() -> None:
    for x in (torch.tensor(3.0), torch.zeros(0), torch.zeros(2, 0), torch.zeros(2, 1)):
        check("aten::sort.stable", x, stable=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [False, True])
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    x = torch.stack([torch.randperm(20) for _ in range(3)]).to(dtype)
    check("aten::topk", x, 5, -1, largest)
    check("aten::topk", x, 2, 0, largest)
    check("aten::topk", x, 20, 1, largest)
    check("aten::topk", x, 0, 1, largest)


@pytest.mark.parametrize("largest", [False, True])
def test_topk_of_special_values(largest: bool) -> None:
    x = torch.tensor([1.0, -math.nan, math.inf, -math.inf, -3.0, 2.0])
    check("aten::topk", x, 6, 0, largest)
    check("aten::topk", x.double(), 6, 0, largest)
    check("aten::topk", torch.tensor(3.0), 1)


@pytest.mark.parametrize("size", [0, 1, 7, 100])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_searchsorted(size: int, right: bool, dtype: torch.dtype) -> None:
    sequence = some((2, size), dtype).sort(-1)[0]
    x = some((2, 5), dtype)
    check("aten::searchsorted.Tensor", sequence, x, right=right)
    check("aten::searchsorted.Tensor", sequence[0].contiguous(), x, side="right", out_int32=True)
    check("aten::searchsorted.Scalar", sequence[0].contiguous(), 12, right=right)
    check("aten::bucketize.Tensor", x, sequence[1].contiguous(), right=right)
    check("aten::bucketize.Scalar", 12, sequence[1].contiguous(), right=right, out_int32=True)


def test_searchsorted_by_a_sorter() -> None:
    for size in (9, 70):
        sequence, x = torch.randn(2, size), torch.randn(2, 3)
        x[0, 0] = math.nan
        sorter = sequence.sort(-1)[1]
        check("aten::searchsorted.Tensor", sequence, x, sorter=sorter)


@pytest.mark.parametrize("count", [0, 3, 90])
@pytest.mark.parametrize("invert", [False, True])
def test_isin(count: int, invert: bool) -> None:
    x = some((3, 4), torch.int64)
    members = torch.randint(0, 50, (count,))
    check("aten::isin.Tensor_Tensor", x, members, invert=invert)
    check("aten::isin.Tensor_Tensor", x.float(), members, invert=invert)
    check("aten::isin.Tensor_Scalar", x, 44, invert=invert)
    check("aten::isin.Scalar_Tensor", 44, members, invert=invert)


def test_histc() -> None:
    x = torch.tensor([0.0, 1.0, 2.5, -3.0, 4.0, 2.5, 9.0, 3.999])
    check("aten::histc", x, 4, 0, 4)
    check("aten::histc", x, 7)
    check("aten::histc", x.double().reshape(2, 4), 7, -1, 2.5)
    check("aten::histc", torch.full((3,), 2.0), 3)
