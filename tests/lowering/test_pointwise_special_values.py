"""Element-wise operators where compilers go wrong: nan, constants, overflow, no elements."""

import re

import pytest
import torch

from tests.lowering.batch import (
    Batch,
)
from tests.lowering.harness import check, text


def test_integers_wrap() -> None:
    batch = Batch()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        x = torch.tensor([limits.max, limits.min, 1], dtype=dtype)
        for op in ("add.Tensor", "mul.Tensor", "sub.Tensor"):
            batch.add(f"aten::{op}", x, x.flip(0))
        batch.add("aten::neg", x)
        batch.add("aten::abs", x)
    batch.check()


def test_exact_operations_stay_narrow() -> None:
    """Between tensors of one dtype, what rounds correctly is computed in it: no conversions in the
    module.
    """
    x = torch.ones(2, dtype=torch.bfloat16)
    assert "f32" not in text("aten::add.Tensor", x, x)
    assert "f32" not in text("aten::mul.Tensor", x, x)
    assert "f32" in text("aten::exp", x)


@pytest.mark.parametrize("name", ["maximum", "minimum", "clamp_min.Tensor", "clamp_max.Tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extrema_keep_the_nan_of_either_operand(name, dtype):
    nan = float("nan")
    x, y = torch.tensor([[1, nan, 3, nan], [nan, 1, 2, nan]], dtype=dtype)
    check(f"aten::{name}", x, y)
    check(f"aten::{name}", y, x)
    check("aten::clamp.Tensor", x, y, y)


def test_extrema_with_the_operands_exchanged():
    """XLA takes both for the same, and the nan of which operand it keeps depends on that."""
    nan = float("nan")
    x, y = torch.tensor([[1, nan, 3, nan], [nan, 1, 2, nan]])
    on_device = x.to("lazyxla"), y.to("lazyxla")
    first, second = torch.maximum(*on_device), torch.maximum(*reversed(on_device))
    torch.testing.assert_close(first.cpu(), torch.maximum(x, y), equal_nan=True)
    torch.testing.assert_close(second.cpu(), torch.maximum(x, y), equal_nan=True)


def test_constants_compare_as_what_they_are():
    """XLA folds comparisons of constants; negative ones are not to be taken for unsigned."""
    pairs = [(a, b) for a in (-2, -1, 0, 1) for b in (-1, 0, 1)]
    operators = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.maximum, torch.minimum)
    expected, found = [], []
    for dtype in (torch.int8, torch.int32, torch.int64, torch.float32):
        for a, b in pairs:
            for device, results in (("cpu", expected), ("lazyxla", found)):
                x, y = (torch.full((2,), v, dtype=dtype, device=device) for v in (a, b))
                results += [operator(x, y) for operator in operators]
    for e, f in zip(expected, found, strict=True):
        assert torch.equal(e, f.cpu())


@pytest.mark.parametrize("diagonal", [-2, -1, 0, 1])
def test_triangles_of_one_element(diagonal):
    check("aten::tril", torch.ones(1, 1), diagonal)
    check("aten::triu", torch.ones(1, 1), diagonal)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integer_quotients_without_elements(dtype: torch.dtype) -> None:
    """XLA's CPU compiler divides by zero there, which ends the process: none may reach it."""
    x, y = torch.empty(0, 1, 3, dtype=dtype), torch.empty(0, 4, 3, dtype=dtype)
    for op, options in (
        ("aten::fmod.Tensor", {}),
        ("aten::remainder.Tensor", {}),
        ("aten::div.Tensor_mode", {"rounding_mode": "trunc"}),
    ):
        assert not re.search("stablehlo.(divide|remainder)", text(op, x, y, **options))
        check(op, x, y, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_divisors_of_the_least_and_greatest_integers(dtype: torch.dtype) -> None:
    """The least one has no absolute value."""
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.min, info.min + 1, info.max, 0, 1, 6, 9], dtype=dtype)
    check("aten::gcd", edges[:, None], edges)
    others = edges[1:] if dtype.is_signed else edges
    check("aten::lcm", others[:, None], others)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64])
def test_negative_numbers_wrap_around(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.tensor([-1.0, -2.5, 0.0, 3.0, 2.0**31], dtype=source)
    check("aten::_to_copy", x, dtype=dtype)


@pytest.mark.parametrize("name", ["log2", "log10"])
def test_logarithms_of_complex_zero(name: str) -> None:
    check(f"aten::{name}", torch.tensor([0j, 1 + 1j, -2.5 + 0j, 1e20j]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_large_exponents_of_integers(dtype: torch.dtype) -> None:
    """XLA's own power reads six bits of them: 0 ** 64 would be 1."""
    batch = Batch()
    x = torch.tensor([0, 1, 2, 3, 7, 100], dtype=dtype)
    exponents = torch.tensor([0, 5, 63, 64, 65, 127], dtype=dtype)
    batch.add("aten::pow.Tensor_Tensor", x[:, None], exponents)
    batch.add("aten::pow.Scalar", 3, exponents)
    batch.add("aten::pow.Tensor_Scalar", x, 65)
    if dtype == torch.int64:
        batch.add("aten::pow.Tensor_Tensor", x[:, None], exponents + (1 << 40))
        batch.add("aten::pow.Tensor_Tensor", torch.tensor([-1, -3, 1, 0, 2]), torch.tensor(-65))
    batch.check()


def test_small_exponents_of_integers_need_no_loop() -> None:
    x = torch.tensor([2, 3])
    assert "while" not in text("aten::pow.Tensor_Scalar", x, 5)
    assert "while" in text("aten::pow.Tensor_Scalar", x, 64)
