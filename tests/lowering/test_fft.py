"""Fourier transforms."""

import pytest
import torch

from lazyxla.lowering import check_lowering
from tests.lowering.harness import check, record


@pytest.mark.parametrize("normalization", [0, 1, 2])
@pytest.mark.parametrize("dims", [[1], [0, 2], [0, 1, 2, 3]])
def test_complex(dims: list[int], normalization: int) -> None:
    x = torch.randn(3, 4, 5, 2, dtype=torch.complex64)
    check("aten::_fft_c2c", x, dims, normalization, True)
    check("aten::_fft_c2c", x, dims, normalization, False)


@pytest.mark.parametrize("dims", [[1], [0, 2], [0, 1, 2, 3]])
def test_real(dims: list[int]) -> None:
    x = torch.randn(3, 4, 5, 2)
    check("aten::_fft_r2c", x, dims, 1, True)
    check("aten::_fft_r2c", x, dims, 2, False)


@pytest.mark.parametrize("size", [6, 7])
def test_to_real(size: int) -> None:
    x = torch.fft.rfftn(torch.randn(3, size), dim=(0, 1))
    check("aten::_fft_c2r", x, [0, 1], 2, size)


@pytest.mark.parametrize(("dtype", "how"), [(torch.float32, "device"), (torch.float64, "host")])
def test_float64_is_not_lowered_for_the_tpu(dtype, how):
    program = record("aten::_fft_r2c", torch.randn(3, 8, dtype=dtype), [1], 0, True).program
    assert check_lowering(program, "tpu") == how
    assert check_lowering(program, "cpu") == "device"
