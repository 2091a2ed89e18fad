"""Segment reductions, pairwise distances, fractional pooling, places of elements not zero."""

import pytest
import torch

from tests.lowering.harness import check, execute, record, text


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "amax", "min", "amin", "prod"])
def test_segment_reduce(reduce: str) -> None:
    data = torch.randn(7, 3)
    data[2] = 0
    lengths = torch.tensor([3, 0, 4])
    offsets = torch.tensor([0, 3, 3, 7])
    for initial in (None, 1.5):
        check("aten::segment_reduce", data, reduce, lengths=lengths, initial=initial)
        check("aten::segment_reduce", data, reduce, offsets=offsets, initial=initial)
    output = torch.segment_reduce(data, reduce, lengths=lengths, initial=1)
    grad = torch.randn(3, 3)
    options = {"lengths": lengths, "initial": 1}
    check("aten::_segment_reduce_backward", grad, output, data, reduce, **options)


def test_gradient_of_segments_products_with_zeros_and_nan() -> None:
    segments = [[2, 3], [0, 3], [0, 0, 4], [float("nan"), 3, 2], [float("nan")] * 2]
    segments += [[float("nan"), 0, 2], []]
    data = torch.tensor([x for segment in segments for x in segment])
    lengths = torch.tensor([len(segment) for segment in segments])
    for initial in (None, 0.0, 2.0):
        options = {"lengths": lengths, "initial": initial}
        output = torch.segment_reduce(data, "prod", **options, unsafe=True)
        grad = torch.arange(1.0, len(segments) + 1)
        check("aten::_segment_reduce_backward", grad, output, data, "prod", **options)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_pdist(p: float) -> None:
    x = torch.randn(5, 4)
    check("aten::_pdist_forward", x, p)
    distances = torch.nn.functional.pdist(x, p)
    check("aten::_pdist_backward", torch.randn(10), x, p, distances)


@pytest.mark.parametrize("count", [2, 3, 37, 1500])
def test_pairs_of_rows_are_computed(count: int) -> None:
    """A table of them would be longer than the tensor."""
    x = torch.randn(count, 1)
    check("aten::_pdist_forward", x, 1.0)
    assert len(text("aten::_pdist_forward", x, 1.0)) < 12_000


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_max_pool(rank: int) -> None:
    x, samples = torch.randn(2, 3, *[9] * rank), torch.rand(2, 3, rank)
    args = ([2, 3, 2][:rank], [4, 1, 3][:rank])
    name = f"aten::fractional_max_pool{rank}d"
    check(name, x, *args, samples)
    forward = getattr(torch.ops.aten, f"fractional_max_pool{rank}d")
    output, indices = forward(x, *args, samples)
    check(f"{name}_backward", torch.randn_like(output), x, *args, indices)


def test_nonzero_static() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    check("aten::nonzero_static", x, size=2)
    check("aten::nonzero_static", x, size=5, fill_value=-1)
    check("aten::nonzero_static", x[:0], size=1, fill_value=-1)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_segments_keep_nan(reduce: str) -> None:
    x = torch.tensor([1.0, float("nan"), 3.0, -1.0])
    check("aten::segment_reduce", x, reduce, lengths=torch.tensor([2, 2]))
    check("aten::segment_reduce", x, reduce, lengths=torch.tensor([2, 2]), initial=2.0)


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_segments_are_found_in_linear_time(by: str) -> None:
    """No element is compared with each segment."""
    ends = torch.arange(38)
    ends[-1] = 41
    table = {"lengths": ends.diff(), "offsets": ends}[by]
    assert "41x37" not in text("aten::segment_reduce", torch.ones(41), "sum", **{by: table})


def test_segments_that_end_beyond_the_data_or_before_it() -> None:
    """PyTorch reads foreign memory for such lengths; the elements that are there are reduced."""
    data = torch.arange(1.0, 6.0)
    program = record("aten::segment_reduce", data, "sum", lengths=torch.tensor([2, 3]))
    for lengths, expected in (([2, 9], [3.0, 12.0]), ([0, 1], [0.0, 1.0])):
        inputs = [data, torch.tensor(lengths)]
        [got], _ = execute(program.program, inputs)
        torch.testing.assert_close(got, torch.tensor(expected))
