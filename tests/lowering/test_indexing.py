"""Gather, scatter and what is made of them, against PyTorch's CPU kernels."""

from itertools import product

import pytest
import torch

from tests.lowering.batch import Batch
from tests.lowering.harness import OnHost, check, run, text

X = torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(4, 5, 6)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def some(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, 7, shape, generator=generator).to(dtype)


COLUMN = torch.tensor([[0], [-2], [3]])
INDICES = {
    "first": [ints(3, 0, -1)],
    "int32": [ints(3, 0, -1, dtype=torch.int32)],
    "middle": [None, ints(4, -5)],
    "last": [None, None, torch.tensor([[1, 2], [5, -6]])],
    "two adjacent": [ints(0, 3), ints(1, -1)],
    "two adjacent at the end": [None, ints(0, 3), ints(1, -1)],
    "apart": [ints(0, 3), None, ints(1, -1)],
    "broadcast": [COLUMN, ints(1, 2)],
    "broadcast apart": [COLUMN, None, ints(1, 2)],
    "all": [ints(1, 2), ints(0, 0), ints(-1, 1)],
    "zero-dim": [None, torch.tensor(2)],
    "on host": [ints(0, 2), OnHost(torch.tensor(-1))],
    "empty": [torch.zeros(0, dtype=torch.int64)],
    "rank two, middle": [None, torch.tensor([[0, 1, 2]])],
}


def test_index() -> None:
    batch = Batch()
    for name in INDICES:
        batch.add("aten::index.Tensor", X, INDICES[name])
        if name != "on host":
            batch.add("aten::_unsafe_index.Tensor", X, INDICES[name])
    batch.check()


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate: bool) -> None:
    batch = Batch()
    for name in INDICES:
        indices = INDICES[name]
        plain = [i.tensor if isinstance(i, OnHost) else i for i in indices]
        values = some(tuple(X[tuple(slice(None) if i is None else i for i in plain)].shape))
        batch.add("aten::index_put", X, indices, values, accumulate)
        batch.add("aten::index_put", X, indices, OnHost(torch.tensor(2.5)), accumulate)
    batch.check()


def test_index_put_adds_duplicates() -> None:
    batch = Batch()
    index = ints(1, 1, 1, 0)
    for dtype in DTYPES:
        x, values = some((3, 2), dtype), some((4, 2), dtype)
        batch.add("aten::index_put", x, [index], values, True)
    batch.add("aten::index_put", X, [index, None, ints(2, 2, 2, 2)], some((4, 5)), True)
    batch.add("aten::_index_put_impl", X, [index], some((6,)), True, True)
    batch.add("aten::_unsafe_index_put", X, [index], some((5, 6)), True)
    batch.check()


def test_index_put_sums_narrow_floats_exactly() -> None:
    """257 ones: a bfloat16 sum would stop at 256."""
    x, index = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int64)
    (result,) = run("aten::index_put", x, [index], torch.ones(512, dtype=torch.bfloat16), True)
    assert result.item() == 512


def test_masked_index() -> None:
    batch = Batch()
    for indices in [[ints(0, 9, -7)], [None, ints(1, -99, 4)]]:
        mask = torch.tensor([True, False, False])
        values = X[tuple(slice(None) if i is None else i.clamp(0, 3) for i in indices)]
        mask = mask.reshape([3 if n == 3 else 1 for n in values.shape]).expand(values.shape)
        batch.add("aten::_unsafe_masked_index", X, mask.contiguous(), indices, 7.5)
        batch.add(
            "aten::_unsafe_masked_index_put_accumulate", X, mask.contiguous(), indices, values
        )
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_slices(dtype: torch.dtype) -> None:
    batch = Batch()
    for dim in [0, 1, -1]:
        x, index = some((4, 5, 6), dtype), ints(3, 0, 3)
        shape = [4, 5, 6]
        shape[dim] = 3
        source = some(tuple(shape), dtype)
        batch.add("aten::index_select", x, dim, index)
        batch.add("aten::index_select", x, dim, index.int())
        # Unless it goes along dimension 0 without alpha, the CPU rounds to bfloat16 at every term.
        batch.add("aten::index_add", x, dim, index, source, rounded_once=True)
        batch.add("aten::index_add", x, dim, index, source, alpha=2, rounded_once=True)
        batch.add("aten::index_copy", x, dim, ints(3, 0, 1), source)
        batch.add("aten::index_fill.int_Scalar", x, dim, ints(3, -2), 5)
        batch.add("aten::index_fill.int_Tensor", x, dim, ints(3, 0), torch.tensor(5, dtype=dtype))
    batch.check()


def test_slices_of_zero_dim_tensors() -> None:
    batch = Batch()
    x, index = torch.tensor(2.0), ints(0)
    batch.add("aten::index_select", x, 0, index)
    batch.add("aten::index_select", X[0, 0], 0, torch.tensor(3))
    batch.add("aten::index_add", x, 0, index, torch.tensor(3.0))
    batch.add("aten::index_add", X[0, 0], 0, torch.tensor(3), torch.tensor([3.0]))
    batch.add("aten::index_copy", x, 0, index, torch.tensor(3.0))
    batch.add("aten::index_fill.int_Scalar", x, 0, index, 3.0)
    batch.add("aten::gather", x, 0, torch.tensor(0))
    batch.add("aten::gather", X[0, 0], 0, torch.tensor(4))
    batch.add("aten::scatter.src", x, 0, torch.tensor(0), torch.tensor(5.0))
    batch.add("aten::scatter_add", X[0, 0], 0, torch.tensor(4), torch.tensor(5.0))
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_index_reduce(dtype: torch.dtype) -> None:
    batch = Batch()
    for reduce, include_self in product(["prod", "mean", "amax", "amin"], [True, False]):
        x, index = some((4, 3), dtype) - 2, ints(2, 0, 2, 2)
        source = some((4, 4), dtype)[:, :3].contiguous() - 3
        batch.add("aten::index_reduce", x, 0, index, source, reduce, include_self=include_self)
        batch.add("aten::index_reduce", x, 1, ints(1), source[:, :1].contiguous(), reduce)
    batch.check()


def test_gather() -> None:
    batch = Batch()
    for dim in [0, 1, -1]:
        index = torch.tensor([[0, 1, 2], [2, 0, 1]])
        batch.add("aten::gather", some((3, 4)), dim, index)
        batch.add("aten::gather", some((3, 3), torch.bool), dim, index)
        batch.add("aten::gather", some((3, 3)), dim, index[:0])
    batch.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter(dtype: torch.dtype) -> None:
    batch = Batch()
    x, source = some((3, 4), dtype), some((3, 5), dtype)
    unique = torch.tensor([[0, 1, 2], [2, 0, 1]])
    equal = torch.tensor([[0, 0], [2, 0], [3, 3]])
    batch.add("aten::scatter.src", x, 0, unique, source)
    batch.add("aten::scatter.src", x, 1, unique[:, :2], source)
    batch.add("aten::scatter.value", x, 1, equal, 1)
    batch.add("aten::scatter_add", x, 1, equal, source)
    batch.add("aten::scatter_add", x, 0, equal[:2], source)
    if dtype != torch.bool:
        for reduce in ("add", "multiply"):
            batch.add("aten::scatter.reduce", x, 1, equal, source, reduce=reduce)
            batch.add("aten::scatter.value_reduce", x, 1, equal, 3, reduce=reduce)
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_scatter_reduce(dtype: torch.dtype) -> None:
    batch = Batch()
    for reduce, include_self in product(["sum", "prod", "mean", "amax", "amin"], [True, False]):
        x, source = some((3, 4), dtype) - 2, some((3, 5), dtype) - 4
        index = torch.tensor([[0, 0], [2, 0], [3, 3]])
        batch.add(
            "aten::scatter_reduce.two", x, 1, index, source, reduce, include_self=include_self
        )
        batch.add(
            "aten::scatter_reduce.two", x, 0, index[:2], source, reduce, include_self=include_self
        )
    batch.check()


ONE_PLACE = {
    "a row": ("aten::index_put", [ints(-2)]),
    "a number in int32": ("aten::index_put", [None, torch.tensor(3, dtype=torch.int32)]),
    "an element": ("aten::index_put", [ints(1), ints(-1), ints(5)]),
    "apart": ("aten::index_put", [ints(3), None, ints(2)]),
    "along a dimension": ("aten::index_copy", 1, ints(4)),
}


@pytest.mark.parametrize("name", ONE_PLACE)
def test_a_write_at_one_place_is_a_slice_in_place(name: str) -> None:
    op, *where = ONE_PLACE[name]
    shape = (4, 1, 6) if op == "aten::index_copy" else ()
    for dtype in DTYPES:
        check(op, X.to(dtype), *where, some(shape, dtype))
    text_of_it = text(op, X, *where, some(shape))
    assert "dynamic_update_slice" in text_of_it
    assert "stablehlo.scatter" not in text_of_it
    assert "inlineable" in text_of_it  # not fused, so not repeated for each reader


def test_flat_indices() -> None:
    batch = Batch()
    index = torch.tensor([[3, -1], [0, 3]])
    for x in (X, X.long()):
        batch.add("aten::take", x, index)
        batch.add("aten::put", x, index[0], torch.tensor([1, 2]).to(x.dtype))
        batch.add("aten::put", x, index, torch.tensor([[1, 2], [3, 4]]).to(x.dtype), True)
    batch.add("aten::take", torch.tensor(3.0), torch.tensor(0))
    batch.check()


def test_masked_scatter() -> None:
    batch = Batch()
    mask = some((4, 5), torch.bool)
    x, source = some((4, 5)), some((20,))
    batch.add("aten::masked_scatter", x, mask, source)
    batch.add("aten::masked_scatter", x, mask[:1], source)
    batch.add("aten::masked_scatter_backward", x, mask, [4, 5])
    batch.add("aten::masked_scatter_backward", x, mask, [18])
    batch.check()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_scattered_extrema_keep_nan(reduce):
    source, index = torch.tensor([1.0, float("nan"), 3.0, -1.0]), torch.tensor([0, 0, 1, 1])
    for include_self in (False, True):
        check(
            "aten::scatter_reduce.two",
            torch.zeros(2),
            0,
            index,
            source,
            reduce,
            include_self=include_self,
        )
    nan_first = torch.tensor([float("nan"), 1.0])
    check("aten::scatter_reduce.two", nan_first, 0, index, source[[0, 0, 2, 3]], reduce)
