"""Factories, joining, padding, and views as functions."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.lowering.batch import ALL, FLOATS, REAL, Batch
from tests.lowering.harness import OnHost, run, text

CPU = torch.device("cpu")
FEW = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def counted(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """0, 1, 2, ... in `shape`."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_fills() -> None:
    batch = Batch()
    for dtype in ALL:
        x = counted(dtype, 2)
        batch.add("aten::zeros", [2, 3], dtype=dtype)
        batch.add("aten::ones", [2, 3], dtype=dtype)
        batch.add("aten::full", [2, 0], 1, dtype=dtype)
        batch.add("aten::full", [2], 3, dtype=dtype)
        batch.add("aten::zeros_like", x)
        batch.add("aten::ones_like", x)
        batch.add("aten::full_like", x, 1)
        batch.add("aten::full_like", x, 2.0, dtype=torch.float64)
        batch.add("aten::new_zeros", x, [3])
        batch.add("aten::new_ones", x, [3])
        batch.add("aten::new_full", x, [3], 1)
        batch.add("aten::scalar_tensor", 1, dtype=dtype)
        batch.add("aten::eye", 3, dtype=dtype)
        batch.add("aten::eye.m", 2, 4, dtype=dtype)
    batch.check()


def test_ranges() -> None:
    batch = Batch()
    for dtype in (None, torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        batch.add("aten::arange", 5, dtype=dtype)
        batch.add("aten::arange", 4.5, dtype=dtype)
        batch.add("aten::arange.start", 2, 9, dtype=dtype)
        batch.add("aten::arange.start_step", 10, 1, -3, dtype=dtype)
        if dtype is None or dtype.is_floating_point:
            batch.add("aten::arange.start_step", 0, 1, 0.1, dtype=dtype)
            batch.add("aten::arange.start", 0.5, 4, dtype=dtype)
        for steps in (0, 1, 2, 7):
            batch.add("aten::linspace", -3, 10, steps, dtype=dtype)
    for ends in itertools.product((1.0, torch.tensor(1.0)), (3.0, OnHost(torch.tensor(3.0)))):
        overload = ".".join(["aten::linspace", _kinds(ends)]).removesuffix(".")
        batch.add(overload, *ends, 5)
        batch.add(overload.replace("lin", "log"), *ends, 5, 2.0)
    # Bounds of integers are truncated, and the step is exact: 49 gaps from 50 to 1.
    batch.add("aten::linspace", 4.3, -3, 50, dtype=torch.int64)
    batch.add("aten::linspace.Tensor_Scalar", torch.tensor(50.0), 1, 50, dtype=torch.int64)
    batch.add("aten::logspace", 0.5, 1.2, 4, dtype=torch.int64)
    batch.add("aten::logspace", 4.3, -3, 2, dtype=torch.bfloat16)
    batch.add("aten::logspace", -2, 2, 9)
    batch.add("aten::range.step", 1, 6, 2)
    batch.check()


LINES = (-0.98, -23.2, 5), (1.2349, 11.2452, 50), (0.9141, -0.7649, 17), (3.7, 200.4, 33)


@pytest.mark.parametrize("function", [torch.linspace, torch.logspace])
def test_points_between_bounds_are_pytorchs_bit_for_bit(function: Callable[..., Tensor]) -> None:
    """In logspace, what float64's power is rounded to; that itself may differ in the last bit."""
    is_linear = function is torch.linspace
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    calls = []
    for dtype in dtypes + [torch.float64, torch.complex64] * is_linear:
        for start, end, steps in LINES:
            if dtype == torch.uint8:
                start, end = abs(start), abs(end)
            if not is_linear:
                start, end = start / 10, end / 100
            calls += [((start, end, count), dtype) for count in (1, steps)]
    ours = [function(*args, dtype=dtype, device="lazyxla") for args, dtype in calls]  # one program
    for result, (args, dtype) in zip(ours, calls, strict=True):
        assert torch.equal(result.cpu(), function(*args, dtype=dtype)), (dtype, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_up_to_infinity(dtype: torch.dtype) -> None:
    for ends in ((0, math.inf), (-math.inf, 1), (math.nan, 1), (-1e38, 1e38)):
        ours = torch.linspace(*ends, 5, dtype=dtype, device="lazyxla").cpu()
        assert_close(ours, torch.linspace(*ends, 5, dtype=dtype), equal_nan=True, rtol=0, atol=0)


def _kinds(ends: tuple[Any, ...]) -> str:
    if all(isinstance(e, float) for e in ends):
        return ""
    return "_".join("Scalar" if isinstance(e, float) else "Tensor" for e in ends)


WINDOWS = ("hann", "hamming", "blackman", "bartlett", "kaiser")


def test_windows() -> None:
    batch = Batch()
    for name, size in itertools.product(WINDOWS, (1, 6)):
        batch.add(f"aten::{name}_window", size)
        for periodic in (False, True):
            batch.add(f"aten::{name}_window.periodic", size, periodic)
    batch.add("aten::hamming_window.periodic_alpha", 5, False, 0.6)
    batch.add("aten::hamming_window.periodic_alpha_beta", 5, True, 0.6, 0.3)
    batch.add("aten::kaiser_window.beta", 5, True, 7.0)
    batch.check()


def test_triangles() -> None:
    batch = Batch()
    for dtype, diagonal in itertools.product(FEW, (-2, 1, 9)):
        for shape in ((3, 4), (2, 4, 3)):
            batch.add("aten::tril", counted(dtype, *shape), diagonal)
            batch.add("aten::triu", counted(dtype, *shape), diagonal)
    for row, col, offset in ((3, 3, 0), (3, 5, 1), (5, 2, -2), (4, 4, -9), (4, 4, 9), (0, 3, 0)):
        batch.add("aten::tril_indices", row, col, offset)
        batch.add("aten::triu_indices", row, col, offset)
    batch.check()


def test_joining() -> None:
    batch = Batch()
    for dtype in FEW:
        x, y = counted(dtype, 2, 3), counted(dtype, 2, 1)
        batch.add("aten::cat", [x, y, x], 1)
        batch.add("aten::cat", [x, x], -2)
        batch.add("aten::cat", [x, torch.zeros(0, dtype=dtype), x], 0)
        batch.add("aten::cat", [x, torch.ones(2, 2)], 1)
        batch.add("aten::stack", [x, x + x], 0)
        batch.add("aten::stack", [x, x + x], -1)
        batch.add("aten::block_diag", [x, y, x[0], x[0, 0]])
    batch.check()


def test_moving() -> None:
    batch = Batch()
    for dtype in FEW:
        x = counted(dtype, 2, 3, 4)
        for repeats in ([1, 2, 3], [2, 1, 1, 2], [0, 1, 1]):
            batch.add("aten::repeat", x, repeats)
        batch.add("aten::repeat", x[0, 0, 0], [3])
        batch.add("aten::flip", x, [0, -1])
        batch.add("aten::roll", x, [1], [])
        batch.add("aten::roll", x, [-2, 5], [0, -1])
        for k in (-1, 1, 2, 4):
            batch.add("aten::rot90", x, k, [0, 2])
            batch.add("aten::rot90", x, k, [2, 1])
        image = counted(dtype, 2, 8, 4, 6)
        batch.add("aten::pixel_shuffle", image, 2)
        batch.add("aten::pixel_unshuffle", image, 2)
        batch.add("aten::channel_shuffle", image, 4)
    batch.add("aten::repeat_interleave.Tensor", torch.tensor([2, 0, 3, 1]), output_size=6)
    batch.check()


def test_constant_padding() -> None:
    batch = Batch()
    for dtype in FEW:
        x = counted(dtype, 2, 3, 4)
        batch.add("aten::constant_pad_nd", x, [1, 2])
        batch.add("aten::constant_pad_nd", x, [1, -2, 0, 1], 1)
        batch.add("aten::constant_pad_nd", x, [0, 0, -1, 0, 2, 2], 1)
    batch.check()


@pytest.mark.parametrize("kind", ["reflection", "replication"])
def test_mirrored_padding(kind: str) -> None:
    batch = Batch()
    pads = {1: ([1, 2], [0, 3]), 2: ([1, 2, 0, 3], [2, 0, 1, 1]), 3: ([1, 2, 0, 3, 2, 1],)}
    for dtype, rank in itertools.product((torch.float32, torch.bfloat16), pads):
        x = counted(dtype, 2, *(4, 5, 4)[:rank])
        for padding, t in itertools.product(pads[rank], (x, x.unsqueeze(0))):
            op = f"{kind}_pad{rank}d"
            if dtype == torch.bfloat16 and kind == "reflection" and rank == 3:
                continue
            batch.add(f"aten::{op}", t, padding)
            grad = torch.ones_like(getattr(torch.ops.aten, op)(t, padding))
            batch.add(f"aten::{op}_backward", grad, t, padding)
    x = counted(torch.float32, 2, 5, 6)
    for padding in ([-1, 2], [2, -3]):
        op = f"{kind}_pad1d"
        batch.add(f"aten::{op}", x, padding)
    batch.check()


def test_scatters() -> None:
    batch = Batch()
    for dtype in FEW:
        x = counted(dtype, 3, 4, 5)
        ones = torch.ones_like(x)
        batch.add("aten::select_scatter", x, ones[:, 0], 1, 2)
        batch.add("aten::select_scatter", x, ones[0], 0, -1)
        batch.add("aten::slice_scatter", x, ones[:, 1:3], 1, 1, 3)
        batch.add("aten::slice_scatter", x, ones[..., :2], -1, -4, None, 2)
        batch.add("aten::slice_scatter", x, ones[:0], 0, 2, 2)
        for offset in (-1, 0, 2):
            diagonal = torch.diagonal(ones, offset, 0, 2)
            batch.add("aten::diagonal_scatter", x, diagonal, offset, 0, 2)
        batch.add("aten::as_strided_scatter", x, ones[0, :2, :3], [2, 3], [7, 2], 4)
        batch.add("aten::diag_embed", x[0])
        batch.add("aten::diag_embed", x[0], 1, 0, 2)
    batch.check()


def test_gradients_of_views() -> None:
    batch = Batch()
    for dtype in FLOATS:
        grad = counted(dtype, 3, 4)
        batch.add("aten::select_backward", grad, [3, 2, 4], 1, -1)
        batch.add("aten::slice_backward", grad, [3, 9], 1, 1, 9, 2)
        batch.add("aten::slice_backward", grad, [5, 4], 0, 0, 3, 1)
        batch.add("aten::diagonal_backward", grad, [3, 6, 5], 1, 1, 2)
        windows = counted(dtype, 4, 2, 3)
        batch.add("aten::unfold_backward", windows, [6, 2], 0, 3, 1)
        batch.add("aten::unfold_backward", windows, [12, 2], 0, 3, 3)
        batch.add("aten::unfold_backward", windows, [4, 7], 1, 3, 4)
    batch.check()


def test_copies() -> None:
    batch = Batch()
    for dtype in FEW:
        x = counted(dtype, 2, 3, 4)
        batch.add("aten::select_copy.int", x, 1, -1)
        batch.add("aten::slice_copy.Tensor", x, 2, 1, 100, 2)
        batch.add("aten::diagonal_copy", x, 1, 1, 2)
        batch.add("aten::unfold_copy", x, 2, 2, 1)
        batch.add("aten::as_strided_copy", x, [2, 2], [1, 5], 3)
        batch.add("aten::narrow_copy", x, 1, -2, 2)
        batch.add("aten::view_copy", x, [4, -1])
        batch.add("aten::_reshape_copy", x, [6, 4])
        batch.add("aten::_unsafe_view", x, [6, 4])
        batch.add("aten::expand_copy", x[:, :1], [5, 2, 3, 4])
        batch.add("aten::permute_copy", x, [2, 0, 1])
        batch.add("aten::transpose_copy.int", x, 0, -1)
        batch.add("aten::t_copy", x[0])
        batch.add("aten::squeeze_copy.dims", x[:1], [0, 1])
        batch.add("aten::unsqueeze_copy", x, -1)
        batch.add("aten::split_copy.Tensor", x, 3, 2)
        batch.add("aten::split_with_sizes_copy", x, [1, 3], -1)
        batch.add("aten::unbind_copy.int", x, -1)
        batch.add("aten::alias_copy", x)
    batch.check()


def test_ranges_are_not_constants() -> None:
    """However long a range is, the module holds an iota."""
    assert "iota" in text("aten::arange.start_step", 1, 10, 2)
    assert run("aten::full", [2], 7)[0].tolist() == [7, 7]


def test_cropping_pads() -> None:
    """A negative amount crops, for every dtype."""
    batch = Batch()
    for dtype in REAL:
        batch.add("aten::constant_pad_nd", counted(dtype, 3), [-1, 1])
    batch.check()
