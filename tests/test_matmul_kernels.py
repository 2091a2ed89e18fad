"""Which matmuls programs for the CPU leave to PyTorch's kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import kernel_limits
from tests.support import assert_same, counted, on_device

BF16 = torch.bfloat16
Function = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def all_pay() -> Iterator[None]:
    """On every processor, and small ones, too. The sizes here are of no other test's programs."""
    with kernel_limits.using({"matmul bfloat16": 1000}):
        yield


def randn(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Whole numbers: the order of sums does not show, but how often a sum is rounded does."""
    real, imag = torch.randn(2, *sizes).mul(3).round()
    return (torch.complex(real, imag) if dtype.is_complex else real).to(dtype)


def compare(function: Function, *args: torch.Tensor, calls: int, gradients: bool = False) -> None:
    grad = randn(*function(*args).shape, dtype=args[0].dtype)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if not gradients:
            return [function(*tensors)]
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.device))]

    ours = [on_device(t) for t in args]
    with counted() as n:
        got = run(*ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (calls, 0, 0, 1)
    for a, b in zip(got, run(*args), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("lead", [(41,), (3, 17)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers(lead: tuple[int, ...], bias: bool) -> None:
    args = randn(*lead, 47), randn(53, 47), *([randn(53)] if bias else [])
    compare(F.linear, *args, calls=3, gradients=True)


@pytest.mark.parametrize(
    ("function", "sizes", "calls"),
    [
        (torch.mm, [(43, 47), (47, 53)], 1),
        (lambda x, y: x.t() @ y, [(47, 43), (47, 53)], 1),
        (lambda x, y: x @ y.t(), [(43, 47), (59, 47)], 1),
        (torch.addmm, [(53,), (44, 47), (47, 53)], 1),
        (lambda c, x, y: torch.addmm(c, x.t(), y), [(53,), (47, 44), (47, 53)], 1),
        (lambda x, y: torch.tensordot(x, y, 2), [(43, 5, 47), (5, 47, 53)], 1),
        (lambda x, y: torch.tensordot(x, y, [[0, 1], [0, 1]]), [(5, 47, 43), (5, 47, 53)], 1),
        (lambda x, y: torch.einsum("aib,ic->abc", x, y), [(5, 47, 43), (47, 53)], 1),
        (lambda x, y: torch.tensordot(x, y, [[1], [0]]), [(5, 47, 44), (47, 53)], 1),
        (lambda x, y: torch.tensordot(x, y, [[0, 2], [2, 0]]), [(5, 44, 47), (47, 53, 5)], 1),
        (lambda x, y: torch.einsum("iaj,jbi->ab", x, y), [(6, 44, 47), (47, 53, 6)], 1),
        (lambda c, x, y: torch.addmm(c, x, y.t()), [(53,), (46, 47), (53, 47)], 1),
        (lambda c, x, y: torch.addmm(c, x, y.t(), beta=2), [(53,), (46, 47), (53, 47)], 0),
        (lambda c, x, y: torch.addmm(c, x, y.t()), [(46, 53), (46, 47), (53, 47)], 0),
        (torch.bmm, [(2, 43, 47), (2, 47, 53)], 0),
        (torch.mv, [(43, 47), (47,)], 0),
        (F.linear, [(1, 47), (53, 47)], 0),
        (F.linear, [(47,), (53, 47), (53,)], 0),
        (F.linear, [(0, 47), (53, 47), (53,)], 0),
        (torch.mm, [(3, 4), (4, 5)], 0),  # small
    ],
)
def test_which_products(function: Function, sizes: list[tuple[int, ...]], calls: int) -> None:
    compare(function, *(randn(*size) for size in sizes), calls=calls)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_a_table_can_name_other_dtypes(dtype: torch.dtype) -> None:
    with kernel_limits.using({f"matmul {dtype}".replace("torch.", ""): 1000}):
        args = [randn(*size, dtype=dtype) for size in ((44, 47), (53, 47), (53,))]
        compare(F.linear, *args, calls=3, gradients=True)
        compare(lambda x, y: x.mH @ y, *args[:1], args[0] + 1, calls=1)
        compare(F.linear, randn(44, 47), randn(53, 47), randn(53), calls=0, gradients=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_narrow_floats_are_called_in_float32(dtype: torch.dtype, bias: bool) -> None:
    """No dimension may be small there, of none of the three products."""
    with kernel_limits.using({"matmul float32": 1000}):
        sizes = ((2, 33, 67), (71, 67), *([(71,)] if bias else []))
        compare(F.linear, *(randn(*s, dtype=dtype) for s in sizes), calls=3, gradients=True)
        for rows, inner, columns in ((63, 67, 71), (67, 63, 71), (67, 71, 63)):
            args = randn(rows, inner, dtype=dtype), randn(inner, columns, dtype=dtype)
            compare(torch.mm, *args, calls=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_not_called(dtype: torch.dtype) -> None:
    args = [randn(*size, dtype=dtype) for size in ((42, 47), (53, 47), (53,))]
    compare(F.linear, *args, calls=0, gradients=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows(dtype: torch.dtype, lead: tuple[int, ...], bias: bool) -> None:
    """Of a linear layer in float32, one row only with a bias; not of products with a weight that is
    not transposed."""
    with kernel_limits.using({"matmul of few rows float32": 1000}):
        few = dtype == torch.float32 and (lead in ((3,), (3, 1)) or (bias and lead != (2, 2)))
        args = randn(*lead, 61, dtype=dtype), randn(59, 61, dtype=dtype)
        compare(F.linear, *args, *([randn(59, dtype=dtype)] if bias else []), calls=int(few))
        compare(torch.matmul, args[0], randn(61, 59, dtype=dtype), calls=0)


def test_processors_without_a_limit_call_none() -> None:
    with kernel_limits.using({}):
        compare(F.linear, randn(48, 47), randn(53, 47), randn(53), calls=0, gradients=True)


def test_compiled_steps_call_them() -> None:
    layer = torch.nn.Linear(47, 53).to("lazyxla", BF16)
    compiled = torch.compile(layer, backend="lazyxla")
    x = on_device(randn(51, 47)).requires_grad_()
    compiled(x).square().sum().backward()
    lazyxla.sync(wait=True)
    with counted() as n:
        compiled(x).square().sum().backward()
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks) == (3, 0, 0)


def test_what_is_exported_has_none() -> None:
    layer = torch.nn.Linear(47, 53).to("lazyxla", BF16)
    program = lazyxla.export(layer, (on_device(randn(52, 47)),)).text()
    assert "host_call" not in program
    assert "stablehlo.dot_general" in program
