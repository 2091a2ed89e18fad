"""float8: casts bit by bit, and scaled products."""

import pytest
import torch

from tests.lowering.harness import check, run

FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
SOURCES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Around the greatest numbers of the four dtypes, and the smallest.
EDGES = [0.0, -0.0, 240, 248, 448, 449, 464, 465, 480, 57344, 61439, 61440, 65504, 1e9, -1e9]
EDGES += [2.0**-8, 2.0**-9, 2.0**-10, 1.01 * 2.0**-10, 2.0**-16, 2.0**-17, 2.0**-18]
EDGES += [float("inf"), -float("inf"), float("nan")]


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """nan has several."""
    assert actual.dtype == expected.dtype
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    assert torch.equal(actual.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_casts(dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.cat([torch.randn(200) * 10.0**e for e in range(-5, 6)] + [torch.tensor(EDGES)])
    x = x.to(source)
    (result,) = run("aten::_to_copy", x, dtype=dtype)
    _same_bits(result, x.to(dtype))
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    (result,) = run("aten::_to_copy", every, dtype=source)
    torch.testing.assert_close(result, every.to(source), rtol=0, atol=0, equal_nan=True)


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 32).to(dtype), torch.randn(48, 32).to(dtype).t()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_mm(out: torch.dtype) -> None:
    x, y = _operands(torch.float8_e4m3fn)
    one, other = torch.tensor(2.0), torch.tensor(0.3)
    check("aten::_scaled_mm", x, y, one, other, out_dtype=out)
    check("aten::_scaled_mm", x, y, one, other, bias=torch.randn(48).to(out), out_dtype=out)


def test_scaled_mm_by_rows_and_columns() -> None:
    x, y = _operands(torch.float8_e4m3fn)
    check("aten::_scaled_mm", x, y, torch.rand(16, 1), torch.rand(1, 48), out_dtype=torch.bfloat16)


def test_scaled_mm_saturates() -> None:
    """By its definition: PyTorch's own kernel gives nan on some processors. All sums are exact."""
    x, y = (torch.randint(-4, 5, shape).float() for shape in ((16, 32), (48, 32)))
    operands = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t()
    (result,) = run("aten::_scaled_mm", *operands, torch.tensor(8.0), torch.tensor(1.0))
    exact = x @ y.t() * 8
    bound = torch.finfo(torch.float8_e4m3fn).max
    assert (exact.abs() > bound).any()
    assert (exact.abs() < bound).any()
    _same_bits(result, exact.clamp(-bound, bound).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("bias", [None, torch.ones(48, dtype=torch.bfloat16)])
def test_scaled_mm_with_recipes(bias: torch.Tensor | None) -> None:
    x, y = _operands(torch.float8_e4m3fn)
    one, other = torch.tensor(2.0), torch.tensor(0.3)
    rows, columns = torch.rand(16, 1), torch.rand(1, 48)
    for recipe, scales in (0, (one, other)), (1, (rows, columns)):
        (left, right), rest = scales, (bias, torch.bfloat16)
        check("aten::_scaled_mm_v2", x, y, [left], [recipe], [0], [right], [recipe], [0], *rest)
