"""Numbers that a dtype cannot hold are errors, and nan goes where it goes on the CPU."""

import pytest
import torch

import lazyxla  # noqa: F401

INF, NAN = float("inf"), float("nan")
TOO_LARGE = [(torch.uint8, 300), (torch.float16, 1e6), (torch.bfloat16, 1e39)]
TOO_LARGE += [(torch.float8_e4m3fn, 1e9), (torch.float8_e5m2, 1e9)]


@pytest.mark.parametrize(("dtype", "number"), TOO_LARGE)
def test_number_overflows(dtype: torch.dtype, number: float) -> None:
    x = torch.ones(3, dtype=dtype).to("lazyxla")
    message = "cannot be converted to type .* without overflow"
    with pytest.raises(RuntimeError, match=message):
        torch.constant_pad_nd(x, (1, 1), number)
    with pytest.raises(RuntimeError, match=message):
        x.fill_(number)
    with pytest.raises(RuntimeError, match=message):
        torch.full((3,), number, dtype=dtype, device="lazyxla")
    assert torch.constant_pad_nd(x, (0, 0), number).shape == (3,)  # nothing is filled


def test_crop_with_a_number() -> None:
    x = torch.arange(5.0)
    result = torch.constant_pad_nd(x.to("lazyxla"), (-3, 1), 7.0)
    assert result.tolist() == torch.constant_pad_nd(x, (-3, 1), 7.0).tolist()


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
def test_distances_of_nan(p: float) -> None:
    x = torch.tensor([[1.0, NAN], [2.0, 3.0], [4.0, 1.0], [INF, 0.0], [INF, 1.0]])
    ours = x.to("lazyxla")
    torch.testing.assert_close(torch.pdist(ours, p).cpu(), torch.pdist(x, p), equal_nan=True)
    expected = torch.cdist(x, x, p, compute_mode="donot_use_mm_for_euclid_dist")
    result = torch.cdist(ours, ours, p, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(result.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("indices", [[0, 1, 2], [1, 0, 2], [3, 2, 1], [2, 1, 0, 3]])
@pytest.mark.parametrize("offsets", [[0], [0, 1], [0, 0, 1]])
def test_maxima_of_bags_with_nan(indices: list[int], offsets: list[int]) -> None:
    weight = torch.tensor([[1.0, NAN, 3.0], [NAN, 5.0, 1.0], [2.0, 6.0, NAN], [NAN, 0.0, INF]])
    args = weight, torch.tensor(indices), torch.tensor(offsets)
    expected = torch.embedding_bag(*args, mode=2)
    result = torch.embedding_bag(*(x.to("lazyxla") for x in args), mode=2)
    torch.testing.assert_close(result[0].cpu(), expected[0], equal_nan=True)
    assert torch.equal(result[3].cpu(), expected[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products(dtype: torch.dtype) -> None:
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    shapes = [
        ((4, 8, 16), (4, 16, 8), None),
        ((32, 16), (4, 16, 8), ends),
        ((8, 32), (32, 16), ends),
        ((4, 8, 16), (16, 32), ends),
    ]
    for left, right, offs in shapes:
        x, y = torch.randn(left).to(dtype), torch.randn(right).to(dtype)
        expected = torch._grouped_mm(x, y, offs=offs)
        offs = None if offs is None else offs.to("lazyxla")
        result = torch._grouped_mm(x.to("lazyxla"), y.to("lazyxla"), offs=offs)
        torch.testing.assert_close(result.cpu(), expected)


@pytest.mark.parametrize("dims", [[0, 2, 3], [0, 1, 2, 3]])
def test_sums_over_several_dimensions(dims: list[int]) -> None:
    """XLA's CPU backend itself adds up one element after the other: 30 times PyTorch's error."""
    ours = theirs = 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(16, 8, 32, 32)
        exact = x.double().sum(dims)
        ours += float((x.to("lazyxla").sum(dims).cpu() - exact).abs().max())
        theirs += float((x.sum(dims) - exact).abs().max())
    assert ours <= 5 * theirs
