"""What programs for the CPU leave to PyTorch's kernels: which operators, and when not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import kernel_limits
from tests.support import assert_same, counted, on_device

Tensors = torch.Tensor | tuple[torch.Tensor, ...]

SIZES = (17, 31, 37)
"""Of more elements than a call needs, which do not divide by the number of threads."""

SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e20, -1e20, 1e-30, 1.0, -1.0, 0.5]

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{n: getattr(torch, n) for n in ("sin", "cos", "tan", "asin", "acos", "atan", "exp2")},
    "polygamma": lambda x: torch.polygamma(1, x),
    "fmod.Scalar": lambda x: torch.fmod(x, -0.7),
    "remainder.Scalar": lambda x: x % -0.7,
    "floor_divide.Scalar": lambda x: torch.ops.aten.floor_divide.Scalar(x, 0.3),
    "atan2": torch.atan2,
    "fmod.Tensor": torch.fmod,
    "remainder.Tensor": torch.remainder,
    "floor_divide": torch.floor_divide,
}
SPECIAL_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{n: getattr(torch.special, f"bessel_{n}") for n in ("j0", "j1", "y0", "y1")},
    **{n: getattr(torch.special, f"modified_bessel_{n}") for n in ("k0", "k1")},
    **{f"scaled {n}": getattr(torch.special, f"scaled_modified_bessel_{n}") for n in ("k0", "k1")},
    "airy_ai": torch.special.airy_ai,
    "chebyshev": lambda x: torch.special.chebyshev_polynomial_t(x, 3),
    "hermite": lambda x: torch.special.hermite_polynomial_h(x, 4),
    "laguerre": lambda x: torch.special.laguerre_polynomial_l(x, 2),
    "legendre": lambda x: torch.special.legendre_polynomial_p(x, 3),
}
BINARY = ("atan2", "fmod.Tensor", "remainder.Tensor", "floor_divide")

ROWS: dict[str, Callable[[torch.Tensor, int], Tensors]] = {
    "topk": lambda x, dim: x.topk(min(3, x.shape[dim]), dim),
    "smallest": lambda x, dim: x.topk(2, dim, largest=False)[0],
    "kthvalue": lambda x, dim: x.kthvalue(2, dim),
    "kthvalue kept": lambda x, dim: x.kthvalue(2, dim, True),
    "median": lambda x, dim: x.median(dim),
    "nanmedian kept": lambda x, dim: x.nanmedian(dim, True),
    "mode": lambda x, dim: x.mode(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumsum in float64": lambda x, dim: x.cumsum(dim, dtype=torch.float64),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "logcumsumexp": lambda x, dim: x.float().logcumsumexp(dim),
    "sort": lambda x, dim: x.sort(dim=dim, stable=True),
    "descending": lambda x, dim: x.sort(dim=dim, stable=True, descending=True),
}


def check(function: Callable[..., Tensors], *inputs: torch.Tensor, calls: int = 1) -> None:
    """Compares with PyTorch's results, where the program has so many calls."""
    expected = function(*inputs)
    ours = [on_device(x) for x in inputs]
    lazyxla.sync(wait=True)
    with counted() as n:
        got = function(*ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (calls, 0, 0, 1)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for a, b in pairs:
        assert_same(a, b)


def calls(name: str, dtype: torch.dtype) -> int:
    """How many calls one of `ROWS` is: XLA sorts elements of at most 32 bits."""
    return 0 if name in ("sort", "descending") and dtype.itemsize <= 4 else 1


def numbers(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Of which no two in a row are equal, but for dtypes of few numbers."""
    count = torch.Size(sizes).numel()
    return (torch.randperm(count) - count // 2).reshape(sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(SIZES) * 3).to(dtype)
    special = torch.tensor(SPECIAL).to(dtype)
    x.view(-1)[: len(SPECIAL)] = special
    if name not in BINARY:
        return check(FUNCTIONS[name], x)
    check(FUNCTIONS[name], x, special.roll(3)[:1].expand(37) + 1)  # broadcast
    check(FUNCTIONS[name], x, torch.randn(SIZES).to(dtype).transpose(0, 1).contiguous().view(SIZES))
    return check(FUNCTIONS[name], x, torch.tensor(0.3, dtype=dtype))  # of no dimensions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
def test_special_functions(name: str, dtype: torch.dtype) -> None:
    x = (torch.randn(SIZES) * 3).to(dtype)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    check(SPECIAL_FUNCTIONS[name], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["log", "log2", "log10", "atanh", "digamma"])
def test_functions_in_some_dtypes(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(SIZES).to(dtype)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    called = dtype == torch.float64 or (dtype == torch.float32 and name != "log")
    check(getattr(torch, name), x, calls=int(called))


def test_higher_polygammas() -> None:
    check(lambda x: torch.polygamma(2, x), torch.rand(SIZES) + 0.5, calls=0)


@pytest.mark.parametrize("name", ["sin", "atan2", "topk", "cumsum"])
def test_kernels_write_to_the_programs_memory(name: str) -> None:
    """Their results are not copied."""
    function = FUNCTIONS.get(name, lambda x, *dim: ROWS[name](x, *(dim or (0,))))
    x = on_device(torch.randn(SIZES, dtype=torch.float64))
    inputs = (x, x) if name == "atan2" else (x,)
    lazyxla.sync(wait=True)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profile, counted() as n:
        results = function(*inputs)
        lazyxla.sync(wait=True)
    assert n.kernel_calls == 1
    names = [event.key for event in profile.key_averages()]
    assert "aten::narrow" in names  # the threads' parts are seen
    assert "aten::copy_" not in names
    del results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_powers_by_a_number_that_varies(dtype: torch.dtype) -> None:
    """Of a number that is known as yet, XLA makes a product or a root."""
    x = (torch.randn(SIZES) * 3).to(dtype)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    for i, exponent in enumerate((2.0, 3.0, -1.0, 0.5, 1.7, 0.0, -2.0, 2.0)):
        check(lambda x, exponent=exponent: x**exponent, x, calls=min(i, 1))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_angles(dtype: torch.dtype) -> None:
    parts = torch.tensor([[a, b] for a in SPECIAL for b in SPECIAL], dtype=torch.float64)
    x = torch.randn(SIZES, dtype=dtype)
    x.view(-1)[: len(parts)] = torch.view_as_complex(parts).to(dtype)
    check(torch.angle, x)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("dims", "mode"),
    [(2, "bilinear"), (2, "nearest"), (2, "bicubic"), (3, "bilinear"), (3, "nearest")],
)
def test_samples_of_images(dims: int, mode: str, samples: int) -> None:
    """Those that XLA's form computes faster are not called: bicubic ones, and those of volumes."""
    image = torch.randn(samples, 4, *(9,) * dims)
    grid = torch.rand(samples, *(19,) * dims, dims) * 2.4 - 1.2
    grad = torch.randn(samples, 4, *(19,) * dims)

    def forward(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, grid, mode=mode, align_corners=False)

    def backward(image: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in (image, grid)]
        return torch.autograd.grad(forward(*inputs), inputs, grad)

    is_called = dims == 2 and mode != "bicubic"
    with torch.no_grad():
        check(forward, image, grid, calls=int(is_called))
        check(forward, image.double(), grid.double(), calls=int(is_called))
        check(forward, image[:, :1], grid[:, :3], calls=0)  # few elements
    check(backward, image, grid, grad, calls=int(dims == 2 or mode == "bilinear"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, dtype: torch.dtype) -> None:
    for dim in range(3):
        x = numbers(dtype, *SIZES)
        if name == "cumprod":
            x = 1 + x % 2
        check(lambda x, dim=dim: ROWS[name](x, dim), x, calls=calls(name, dtype))


@pytest.mark.parametrize("name", ROWS)
def test_one_row(name: str) -> None:
    """Which is not cut into parts."""
    check(lambda x: ROWS[name](x, 0), torch.rand(20_001) + 0.5, calls=calls(name, torch.float32))
    check(lambda x: ROWS[name](x, 0), numbers(torch.int64, 20_001) % 3 - 1)


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_wholes(name: str) -> None:
    x = torch.randn(SIZES)
    check(getattr(torch, name), x)
    x[3, 4, 5] = float("nan")
    check(getattr(torch, name), x)


def test_products_of_vectors() -> None:
    x, y = torch.randn(20_000).round(), torch.randn(20_000).round()  # of exact sums
    check(torch.dot, x, y)
    check(torch.dot, x.long(), y.long())


@pytest.mark.parametrize("adaptive", [F.adaptive_max_pool2d, F.adaptive_max_pool3d])
def test_adaptive_maximum_pooling(adaptive: Callable[..., torch.Tensor]) -> None:
    rank = 2 if adaptive is F.adaptive_max_pool2d else 3

    def run(x: torch.Tensor) -> Tensors:
        x = x.detach().requires_grad_()
        y = adaptive(x, (3,) * rank)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return y.detach(), grad

    check(run, numbers(torch.float32, 2, 3, *[7] * rank), calls=2)


def test_gradient_of_maximum_pooling_in_three_dimensions() -> None:
    def run(x: torch.Tensor) -> Tensors:
        x = x.detach().requires_grad_()
        y = F.max_pool3d(x, 3, 2, 1)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return y.detach(), grad

    check(run, numbers(torch.float32, 2, 3, 7, 8, 9))


SMALL_OR_OTHER: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "small": (torch.sin, torch.randn(100)),
    "small rows": (lambda x: x.sort(1), torch.rand(10, 20)),
    "integers": (torch.sin, torch.arange(20_000)),
    "complex": (torch.sin, torch.randn(20_000, dtype=torch.complex64)),
    "whole quotients": (lambda x: x // 7, torch.arange(20_000)),
    "no rows": (lambda x: x.cumsum(1), torch.ones(20_000, 0)),
}


@pytest.mark.parametrize("case", SMALL_OR_OTHER)
def test_what_xla_computes(case: str) -> None:
    function, x = SMALL_OR_OTHER[case]
    check(function, x, calls=0)


LEAST: dict[str, Callable[[int], tuple[Callable[..., Any], torch.Tensor]]] = {
    "function": lambda size: (torch.tan, torch.randn(size)),
    "order statistic": lambda size: (lambda x: x.kthvalue(3), torch.randn(size)),
    "running result": lambda size: (lambda x: x.cumsum(0), torch.ones(size)),
    "sort": lambda size: (lambda x: x.sort(stable=True), torch.arange(size).flip(0)),
    "topk": lambda size: (lambda x: x.topk(3), torch.randn(size)),
    "vector product": lambda size: (lambda x: torch.dot(x, x), torch.ones(size)),
}


@pytest.mark.parametrize("kind", LEAST)
def test_least_size(kind: str) -> None:
    """For other sizes of other kinds, too: no kind takes another one's size."""
    with kernel_limits.using({kind: 300}):
        check(*LEAST[kind](299), calls=0)
        check(*LEAST[kind](300), calls=1)
    with kernel_limits.using({other: 1 for other in LEAST if other != kind}):
        check(*LEAST[kind](301), calls=0)


def test_numbers_that_vary_compile_nothing() -> None:
    x = torch.randn(20_011)
    ours = on_device(x)
    for i in range(1, 6):
        with counted() as n:
            assert_same(ours % (i / 7), x % (i / 7))
        assert n.kernel_calls == 1
        assert n.compiles == (i < 3)


def test_sorts_are_stable() -> None:
    x = torch.randint(0, 5, (64, 512))
    expected = x.sort(dim=1, stable=True)
    check(lambda x: tuple(x.sort(1)) if x.device.type == "lazyxla" else expected, x)


def test_what_is_exported_has_none() -> None:
    text = lazyxla.export(torch.nn.Softmax(0), (on_device(torch.randn(4)),)).text()
    assert "host_call" not in text

    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    text = lazyxla.export(Sine(), (on_device(torch.randn(SIZES)),)).text()
    assert "host_call" not in text
    assert "stablehlo.sine" in text
