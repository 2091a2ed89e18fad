"""Resampling, windows as columns, sampling at points."""

import pytest
import torch

from lazyxla.lowering import lower
from tests.lowering import harness
from tests.lowering.harness import check, text

_SIZES = {
    1: [((2, 3, 5), [10]), ((2, 3, 7), [4]), ((1, 2, 4), [7])],
    2: [((2, 3, 4, 5), [8, 10]), ((1, 2, 7, 6), [4, 9]), ((1, 2, 5, 4), [1, 1])],
    3: [((1, 2, 3, 4, 2), [6, 8, 4]), ((1, 2, 4, 3, 5), [3, 5, 4])],
}


def _check_with_gradient(op, shape, out, *rest):
    x = torch.randn(shape)
    check(f"aten::{op}", x, out, *rest)
    grad = torch.randn(*shape[:2], *out)
    check(f"aten::{op}_backward", grad, out, list(shape), *rest)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", ["upsample_nearest", "_upsample_nearest_exact"])
def test_nearest(name, rank):
    for shape, out in _SIZES[rank]:
        _check_with_gradient(f"{name}{rank}d", shape, out)
    shape = (1, 2, 4, 5, 6)[: 2 + rank]
    out = [int(n * 1.7) for n in shape[2:]]
    _check_with_gradient(f"{name}{rank}d", shape, out, *[1.7] * rank)
    out = [2 * n for n in shape[2:]]
    _check_with_gradient(f"{name}{rank}d", shape, out, *[2.0] * rank)
    # A scale that is given counts, also where the sizes have another factor. Of twice the size
    # PyTorch's kernel for the gradient takes none, unlike the one for the values.
    out = [3 * n for n in shape[2:]]
    _check_with_gradient(f"{name}{rank}d", shape, out, *[2.6] * rank)


def test_pixels_that_all_repeat_alike_are_not_looked_up():
    x = torch.randn(1, 2, 4, 5)
    for scales in ((), (2.0, 2.0), (None, 2.0)):
        assert "gather" not in text("aten::upsample_nearest2d", x, [8, 10], *scales)
    for out, *scales in (([8, 9],), ([8, 10], 2.0, 1.6)):
        assert "gather" in text("aten::upsample_nearest2d", x, out, *scales)


_INTERPOLATIONS = {
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 3,
    "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("op", _INTERPOLATIONS)
def test_interpolation(op, align_corners):
    rank = _INTERPOLATIONS[op]
    for shape, out in _SIZES[rank]:
        _check_with_gradient(op, shape, out, align_corners)
    shape = (1, 2, 4, 5, 6)[: 2 + rank]
    out = [int(n * 1.7) for n in shape[2:]]
    _check_with_gradient(op, shape, out, align_corners, *[1.7] * rank)


def test_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By products over the last dimension; the programs run on the CPU as well."""
    monkeypatch.setattr(
        harness, "lower", lambda p, t, **k: lower(p, t._replace(platform="cuda"), **k)
    )
    for op, rank in _INTERPOLATIONS.items():
        for shape, out in _SIZES[rank]:
            _check_with_gradient(op, shape, out, False)


def test_antialiasing_over_many_pixels():
    x = torch.randn(1, 2, 33, 40)
    for kind in ("bilinear", "bicubic", "lanczos"):
        check(f"aten::_upsample_{kind}2d_aa", x, [5, 7], False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    x = torch.randn(1, 2, 5, 6).to(dtype)
    check("aten::upsample_bilinear2d", x, [8, 9], False)
    check("aten::upsample_bicubic2d", x.double(), [8, 9], True)
    check("aten::upsample_nearest2d", x, [7, 9])


def test_images_of_bytes():
    x = torch.randint(0, 256, (1, 3, 6, 7), dtype=torch.uint8)
    check("aten::upsample_nearest2d", x, [9, 14])
    for size in ([12, 14], [4, 11]):
        for align_corners in (False, True):
            check("aten::upsample_bilinear2d", x, size, align_corners)


_BYTES = [((6, 7), (12, 14)), ((30, 40), (9, 11)), ((5, 3), (4, 13)), ((64, 90), (3, 2))]


@pytest.mark.parametrize("sizes", _BYTES)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(
    "name", ["upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
)
def test_bytes_are_weighted_in_fixed_point(name, align_corners, sizes):
    """With PyTorch's weights of 16 bits, so that not one byte differs."""
    x = torch.randint(0, 256, (2, 5, *sizes[0]), dtype=torch.uint8)
    check(f"aten::{name}", x, list(sizes[1]), align_corners)


@pytest.mark.parametrize("lead", [(2,), ()])
def test_columns(lead):
    x = torch.randn(*lead, 3, 6, 7)
    for window in (([2, 3], [1, 1], [0, 1], [1, 2]), ([3, 3], [2, 1], [2, 1], [2, 2])):
        check("aten::im2col", x, *window)
        columns = torch.ops.aten.im2col(x, *window)
        check("aten::col2im", torch.randn_like(columns), [6, 7], *window)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize(("rank", "mode"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_grid_sampler(rank, mode, padding, align_corners):
    image = torch.randn(2, 3, *(4, 5, 6)[:rank])
    grid = torch.rand(2, *(3, 4, 2)[:rank], rank) * 3 - 1.5
    op, rest = f"aten::grid_sampler_{rank}d", (mode, padding, align_corners)
    check(op, image, grid, *rest)
    grad = torch.randn(2, 3, *grid.shape[1:-1])
    check(f"{op}_backward", grad, image, grid, *rest, [True, True])
