"""Linear layers: one node forward, one backward, and PyTorch's operators for whoever watches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, Watch, assert_same, check, counted, error_of, on_device

SHAPES = [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)]


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    weight, offset = torch.randn(5, 4, dtype=dtype), torch.randn(5, dtype=dtype)
    return (weight, offset) if bias else (weight,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_as_on_the_cpu(shape, bias):
    def run(x, *parameters):
        leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
        result = functional.linear(*leaves)
        return result, *torch.autograd.grad(result.sin().sum(), leaves)

    with counted() as n:
        check(run, torch.randn(shape), *layer(bias))
    assert n.fallbacks == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int64])
def test_dtypes(dtype):
    numbers = (torch.randn(3, 4) * 4).to(dtype), *((t * 4).to(dtype) for t in layer())
    check(functional.linear, *numbers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_gradients_in_dtypes(dtype):
    """Those of complex numbers are conjugated."""

    def run(*arguments):
        leaves = [t.detach().requires_grad_() for t in arguments]
        result = functional.linear(*leaves)
        return torch.autograd.grad(result, leaves, result.detach().sin())

    check(run, torch.randn(2, 3, 4, dtype=dtype), *layer(dtype=dtype))
    check(run, torch.randn(3, 4, dtype=dtype), *layer(bias=False, dtype=dtype))


def test_nodes():
    x, weight, bias = on_device((torch.randn(2, 3, 4), *layer()))
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    with counted() as n:
        result = functional.linear(x, weight, bias)
    assert n.nodes_recorded == 1
    above = on_device(torch.randn(2, 3, 5))
    with counted() as n:
        result.backward(above)
    assert n.nodes_recorded == 1
    with counted() as n, torch.no_grad():
        functional.linear(x, weight)
    assert n.nodes_recorded == 1


def test_eager_mode_runs_each_pass_at_once():
    with lazyxla.eager_mode(True):
        x, weight = on_device((torch.randn(6, 4), layer(bias=False)[0]))
        leaf = weight.requires_grad_()
        with counted() as n:
            result = functional.linear(x, leaf)
            result.backward(result.detach())
    assert n.executions == 2


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_gradients_that_are_asked_for(wanted):
    def run(*arguments):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(arguments)]
        functional.linear(*inputs).cos().sum().backward()
        assert [t.grad is not None for t in inputs] == [i == wanted for i in range(3)]
        return inputs[wanted].grad

    check(run, torch.randn(3, 4), *layer())


def test_second_derivatives():
    def run(*arguments):
        leaves = [t.detach().requires_grad_() for t in arguments]
        result = functional.linear(*leaves).sin().sum()
        first = torch.autograd.grad(result, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    check(run, torch.randn(3, 4, dtype=torch.float64), *layer(dtype=torch.float64))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_derivatives(which):
    def run(*arguments):
        with forward_ad.dual_level():
            inputs = list(arguments)
            inputs[which] = forward_ad.make_dual(inputs[which], inputs[which].cos())
            result = forward_ad.unpack_dual(functional.linear(*inputs))
            return result.primal, result.tangent

    check(run, torch.randn(3, 4), *layer())


def test_a_weight_of_one_dimension():
    check(functional.linear, torch.randn(3, 4), torch.randn(4))


@pytest.mark.parametrize(
    "shapes", [((3, 4), (5, 3), (5,)), ((3, 4), (5, 4), (4,)), ((3,), (5, 4), (5,))], ids=str
)
def test_errors(shapes):
    arguments = [torch.randn(shape) for shape in shapes]
    assert error_of(functional.linear, *on_device(arguments)) == error_of(
        functional.linear, *arguments
    )


def test_a_bias_of_another_dtype():
    """Where PyTorch's CPU refuses it depends on the shape and strides of the input."""
    x, weight, bias = torch.randn(2, 3, 4).double(), torch.randn(5, 4).double(), torch.randn(5)
    check(functional.linear, x.transpose(0, 1), weight, bias.half())

    def run(x, weight, bias):
        leaves = [t.detach().requires_grad_() for t in (x.transpose(0, 1), weight, bias)]
        return torch.autograd.grad(functional.linear(*leaves).sin().sum(), leaves)

    check(run, x, weight, bias)
    assert error_of(functional.linear, *on_device((x, weight, bias))) == error_of(
        functional.linear, x, weight, bias
    )


def test_autocast():
    x, weight, bias = on_device((torch.randn(3, 4), *layer()))
    with torch.autocast(DEVICE):
        result = functional.linear(x, weight.requires_grad_(), bias)
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_modes_see_the_operators_that_they_see_on_the_cpu():
    def seen(device):
        x, model = torch.randn(2, 3, 4, device=device), nn.Linear(4, 5, device=device)
        with Watch() as watch:
            model(x).sum().backward()
        return watch.seen

    found = seen(DEVICE)
    assert found == seen("cpu")
    assert "aten.addmm.default" in found


def test_flops_are_counted():
    def flops(device):
        x, model = torch.randn(3, 4, device=device), nn.Linear(4, 5, device=device)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return counter.get_total_flops()

    assert flops(DEVICE) == flops("cpu") == 2 * 2 * 3 * 4 * 5


def test_torch_compile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(DEVICE)
    x = torch.randn(3, 4, device=DEVICE)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with counted() as n:
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    assert n.fallbacks == 0
    assert_same([p.grad for p in model.parameters()], [g.cpu() for g in expected])


@pytest.mark.parametrize("mode", [False, True])
def test_weights_that_change_in_place(mode):
    """XNNPACK, which XLA takes on some processors, would go on multiplying by the first ones."""
    weight, x = torch.rand(256, 256), torch.rand(128, 256)
    ours, inputs = weight.to(DEVICE).requires_grad_(), x.to(DEVICE).requires_grad_()
    gradient = torch.ones(128, 256).to(DEVICE)
    for step in range(3):
        with lazyxla.eager_mode(mode), counted() as n:
            result = functional.linear(inputs, ours)
            (of_inputs,) = torch.autograd.grad(result, inputs, gradient)
            product = inputs.detach() @ ours.detach()
            lazyxla.sync()
            with torch.no_grad():
                ours.add_(0.1)
            lazyxla.sync()
        if step > 0:
            assert n.compiles == 0  # the programs of before
        torch.testing.assert_close(of_inputs.cpu(), torch.ones(128, 256) @ weight)
        torch.testing.assert_close(product.cpu(), x @ weight)
        torch.testing.assert_close(result.detach().cpu(), x @ weight.T)
        weight += 0.1
