"""Numbers that a dtype cannot hold are errors, and nan goes where it goes on the CPU."""

from collections.abc import Callable

import pytest
import torch

import lazyxla

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


@pytest.mark.parametrize(("dtype", "number"), [*TOO_LARGE[1:3], TOO_LARGE[-1]])
def test_a_single_number_is_rounded(dtype: torch.dtype, number: float) -> None:
    def each(d: str) -> list[torch.Tensor]:
        x, first = torch.ones(3, dtype=dtype).to(d), torch.tensor([True, False, False]).to(d)
        x[1] = -number
        made = [torch.full(shape, number, dtype=dtype, device=d) for shape in ((), (1, 1))]
        made += [torch.scalar_tensor(number, dtype=dtype, device=d), torch.where(first, x, number)]
        if dtype.itemsize > 1:  # the CPU has no linspace for less
            made.append(torch.linspace(number, number, 1, dtype=dtype, device=d))
        return [y.float().cpu() for y in (x, *made)]

    assert [y.tolist() for y in each("lazyxla")] == [y.tolist() for y in each("cpu")]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
@pytest.mark.parametrize("dtype", [torch.uint64, torch.float32, torch.bool, torch.int64])
def test_numbers_beyond_int64(dtype: torch.dtype, number: int) -> None:
    def each(d: str) -> list[object]:
        x = torch.ones(2, dtype=dtype).to(d)
        calls = [
            lambda: torch.full((2,), number, dtype=dtype, device=d),
            lambda: x.clone().fill_(number),
            lambda: x * number,
            lambda: x + torch.tensor(number, dtype=torch.uint64),
            lambda: x < number,
            lambda: torch.full_like(x, number)[0].item(),
        ]
        return [outcome(call) for call in calls]

    assert each("lazyxla") == each("cpu")


def outcome(call: Callable[[], object]) -> object:
    try:
        result = call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return (result.dtype, result.tolist()) if isinstance(result, torch.Tensor) else result


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
        # Whole numbers: sums of their products are exact in any order.
        x, y = (torch.randint(-3, 4, size).to(dtype) for size in (left, right))
        results = []
        for device in ("cpu", "lazyxla"):
            inputs = [t.detach().to(device).requires_grad_() for t in (x, y)]
            where = None if offs is None else offs.to(device)
            lazyxla.sync()
            lazyxla.reset_counters()
            result = torch._grouped_mm(*inputs, offs=where)
            grads = torch.autograd.grad(result.square().sum(), inputs)
            assert lazyxla.counters()["downloads"] == 0
            results.append([result, *grads])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
    assert lazyxla.fallbacks() == {}


def test_sizes_of_grouped_products_are_data() -> None:
    x, y = torch.randn(32, 16), torch.randn(4, 16, 8)
    ours = [t.to("lazyxla") for t in (x, y)]
    lazyxla.reset_counters()
    for ends in ([8, 8, 24, 32], [1, 2, 3, 32], [0, 0, 0, 32]):
        offs = torch.tensor(ends, dtype=torch.int32)
        result = torch._grouped_mm(*ours, offs=offs.to("lazyxla"))
        torch.testing.assert_close(result.cpu(), torch._grouped_mm(x, y, offs=offs))
    assert lazyxla.counters()["compiles"] == 1


def test_refusals_of_grouped_products() -> None:
    offs = torch.tensor([8, 16], dtype=torch.int32)
    x, y = torch.randn(16, 16), torch.randn(2, 16, 8)
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = [
        (x, y, None),
        (x, y, offs.long()),
        (x, torch.randn(3, 16, 8), offs),
        (x, torch.randn(2, 8, 8), offs),
        (x.bfloat16(), y, offs),
        (x.double(), y.double(), offs),
        (torch.randn(2, 16, 16), y, offs),
    ]
    for left, right, ends in calls:
        messages = []
        for device in ("cpu", "lazyxla"):
            moved = None if ends is None else ends.to(device)
            with pytest.raises(RuntimeError) as raised:
                torch._grouped_mm(left.to(device), right.to(device), offs=moved)
            messages.append(str(raised.value).lower()[:40])
        assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["sum", "nansum", "prod", "mean", "cumsum", "cumprod"])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (torch.float32, torch.int32),
        (torch.float16, torch.float64),
        (torch.float16, torch.complex64),
        (torch.bool, torch.int8),
    ],
)
def test_reductions_compute_in_the_dtype_of_out(
    name: str, dtype: torch.dtype, out: torch.dtype
) -> None:
    """What they add up is cast before, so nothing overflows that the result can hold."""
    x = torch.linspace(1.5, 90, 8).to(dtype).expand(2, 8)
    results = []
    for device in ("cpu", "lazyxla"):
        into = torch.empty(0, dtype=out, device=device)
        try:
            results.append(getattr(torch, name)(x.to(device), 1, out=into).cpu())
        except (RuntimeError, NotImplementedError) as error:
            results.append(str(error))
    if isinstance(results[0], str) and "nansum_cpu" not in results[0]:
        assert results[1] == results[0]
    elif isinstance(results[0], torch.Tensor):
        torch.testing.assert_close(results[1], results[0])


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


def test_logarithms_of_one_and_a_little() -> None:
    """Of all magnitudes, by float32's relative tolerance alone: its absolute one, 1e-5, is greater
    than most of these numbers, and would pass zeros.
    """
    magnitudes = torch.logspace(-37, 38, 2001)
    x = torch.cat([magnitudes, -magnitudes[magnitudes < 1], torch.tensor([0.0, -1.0, INF, NAN])])
    strict = {"rtol": 1.3e-6, "atol": 0.0}  # tighter than the default, see above
    torch.testing.assert_close(x.to("lazyxla").log1p().cpu(), x.log1p(), **strict, equal_nan=True)
    # As part of a larger program, where XLA sees what is added before.
    far = torch.linspace(-80, 80, 2001)
    expected = torch.nn.functional.softplus(far * 1, threshold=100)
    result = torch.nn.functional.softplus(far.to("lazyxla") * 1, threshold=100)
    torch.testing.assert_close(result.cpu(), expected, **strict)
    assert torch.tensor([-0.0]).to("lazyxla").log1p().cpu().signbit().all()


@pytest.mark.parametrize("number", [41, 49, 255.0])
def test_quotients_that_are_rounded_by_the_division(number: float) -> None:
    x = torch.arange(-1024.0, 1024.0)
    ours = x.to("lazyxla")
    assert torch.equal((ours // number).cpu(), x // number)
    for mode in ("floor", "trunc"):
        result = torch.div(ours, number, rounding_mode=mode)
        assert torch.equal(result.cpu(), torch.div(x, number, rounding_mode=mode))
