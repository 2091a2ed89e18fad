"""Resampling, windows as columns, sampling at points."""

import pytest
import torch

from lazyxla.lowering import lower, lower_to_text
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


_LARGE = [
    ("aten::upsample_linear1d", [2000], [1500], False),
    ("aten::upsample_linear1d", [300], [9000], True),
    ("aten::upsample_nearest1d", [2000], [1501]),
    ("aten::upsample_bilinear2d", [3, 1200], [5, 900], False),
    ("aten::upsample_bicubic2d", [1100, 2], [1000, 3], True),
    ("aten::_upsample_bilinear2d_aa", [1, 9000], [1, 120], False),  # of many elements each
]


@pytest.mark.parametrize(("op", "sizes", "out", "corners"), [(*case, None)[:4] for case in _LARGE])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_large_maps_are_no_matrices(op, sizes, out, corners, platform):
    """A matrix from 16,000 samples to 32,000 would take 2 GB."""
    x = torch.randn(1, 2, *sizes)
    rest = () if corners is None else (corners,)
    recorded = harness.record(op, x, out, *rest)
    grad = torch.randn_like(recorded.expected[0])
    backward = harness.record(f"{op}_backward", grad, out, list(x.shape), *rest)
    matrices = [f"{m}x{n}xf32" for n, m in zip(sizes, out, strict=True) if n * m > 10_000]
    for each in (recorded, backward):
        program = lower_to_text(each.program, platform)
        assert not any(matrix in program for matrix in matrices)
        [got], _ = harness.execute(each.program, each.inputs, platform)
        torch.testing.assert_close(got, each.expected[0])


def test_which_maps_are_matrices():
    """CPUs gather what is not small, and the adjoint of what is large."""

    def platforms(op, *args):
        program = harness.record(op, *args).program
        return [p for p in ("cpu", "cuda", "tpu") if "dot_general" in lower_to_text(program, p)]

    x, y = torch.randn(1, 1, 9), torch.randn(1, 1, 300)
    assert platforms("aten::upsample_linear1d", x, [12], False) == ["cuda", "tpu"]
    back = "aten::upsample_linear1d_backward"
    assert platforms(back, x, [9], [1, 1, 12], False) == ["cpu", "cuda", "tpu"]
    assert platforms(back, y, [300], [1, 1, 200], False) == ["cuda", "tpu"]


_KEPT_APART = {
    "aten::upsample_linear1d": [((40,), [101]), ((40,), [40]), ((12,), [5])],
    "aten::upsample_bilinear2d": [((8, 8), [5, 8]), ((8, 8), [16, 11])],
    "aten::upsample_bicubic2d": [((8, 8), [8, 8]), ((8, 8), [5, 11])],
    "aten::upsample_nearest2d": [((8, 8), [5, 11])],
    "aten::_upsample_bilinear2d_aa": [((8, 8), [5, 8]), ((30, 40), [3, 2]), ((8, 8), [8, 8])],
    "aten::_upsample_bicubic2d_aa": [((8, 8), [5, 8]), ((8, 8), [11, 16])],
    "aten::_adaptive_avg_pool2d": [((8, 8), [3, 5]), ((8, 8), [12, 8])],
}


@pytest.mark.parametrize("op", _KEPT_APART)
def test_what_is_no_number_stays_where_it_is(op):
    """A position without weight is no operand: 0 times infinity would be NaN. Gradients, which are
    multiplied by matrices, are gathered if they are not finite."""
    rest = (False,) if op.startswith(("aten::upsample", "aten::_upsample")) else ()
    rest = () if "nearest" in op else rest
    for sizes, out in _KEPT_APART[op]:
        for value in (float("inf"), float("nan")):
            x, grad = torch.randn(3, 1, *sizes), torch.randn(3, 1, *out)
            for each in (x, grad):  # at the first element, at the last, at one between
                count = each[0].numel()
                for image, at in enumerate((0, count // 2, count - 1)):
                    each[image].view(-1)[at] = value
            check(op, x, out, *rest)
            given = (grad, x) if "adaptive" in op else (grad, out, list(x.shape), *rest)
            check(f"{op}_backward", *given)


def test_scales_of_images_that_keep_their_size():
    """PyTorch's kernels for antialiasing copy them, and so does that for bicubic's gradient."""
    x = torch.randn(1, 2, 8, 8)
    for out, scales in (([8, 8], (1.05, 1.05)), ([8, 12], (1.05, 1.6))):
        for op in _INTERPOLATIONS:
            if "2d" in op:
                _check_with_gradient(op, (1, 2, 8, 8), out, False, *scales)
        check("aten::_upsample_lanczos2d_aa", x, out, False, *scales)
