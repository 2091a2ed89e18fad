"""Windows to columns and back, in single elements and in blocks as long as the stride."""

import random

import pytest
import torch

from lazyxla.lowering import Target, lower_to_text
from tests.lowering.harness import check, record


@pytest.mark.parametrize("seed", range(8))
def test_columns_and_back(seed):
    choose = random.Random(seed)
    kernel, stride = ([choose.choice(of) for _ in range(2)] for of in ((1, 3, 9, 11), (1, 2, 4, 7)))
    padding = [min(choose.choice((0, 1, 3)), k // 2) for k in kernel]
    dilation = [choose.choice((1, 1, 1, 2)) for _ in range(2)]
    sizes = [d * (k - 1) + 1 + choose.randrange(20) for k, d in zip(kernel, dilation, strict=True)]
    x, geometry = torch.randn(2, 3, *sizes), (kernel, dilation, padding, stride)
    check("aten::im2col", x, *geometry)
    # Whole numbers: the order of sums does not show.
    columns = torch.randn_like(torch.ops.aten.im2col(x, *geometry)).round()
    check("aten::col2im", columns, sizes, *geometry)


@pytest.mark.parametrize("size", [1, 3, 70, 100])
@pytest.mark.parametrize("step", [1, 3, 16, 110])
@pytest.mark.parametrize(("before", "after"), [((), ()), ((2,), (3,)), ((2, 3), ())])
def test_unfold_backward(size, step, before, after):
    sizes, dim = [*before, size + 41, *after], len(before)
    grad = torch.randn_like(torch.empty(sizes).unfold(dim, size, step)).round()
    check("aten::unfold_backward", grad, sizes, dim, size, step)


def test_unfold_backward_without_elements():
    check("aten::unfold_backward", torch.zeros(0, 5, 3), [0, 20], 1, 3, 4)


@pytest.mark.parametrize("hop", [1, 2, 64])
@pytest.mark.parametrize(
    ("operator", "dilation"),
    [("im2col", 1), ("im2col", 2), ("col2im", 1), ("col2im", 2), ("unfold_backward", 1)],
)
def test_programs_do_not_grow_with_the_windows(operator, dilation, hop):
    def program(kernel):
        n = dilation * (kernel - 1) + 1 + 16 * hop
        geometry = [1, kernel], [1, dilation], [0, 0], [1, hop]
        call = {
            "im2col": (torch.empty(1, 2, 1, n), *geometry),
            "col2im": (torch.empty(1, 2 * kernel, 17), [1, n], *geometry),
            "unfold_backward": (torch.empty(2, 17, kernel), [2, n], 1, kernel, hop),
        }[operator]
        return lower_to_text(record(f"aten::{operator}", *call).program, Target("cpu"))

    assert program(1024).count("stablehlo.") == program(256).count("stablehlo.")
