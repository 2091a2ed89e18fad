"""Cells of an LSTM and a GRU: one operator with real numbers, PyTorch's operators otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.support import DEVICE, assert_same, counted, on_device

CELLS = ["LSTMCell", "GRUCell", "RNNCell"]


def make(kind: str, **options) -> nn.Module:
    torch.manual_seed(0)
    return getattr(nn, kind)(4, 3, **options)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def compare(function, module, *tensors) -> None:
    """The function's results on the device are those on the CPU; nothing runs on the host."""
    expected = function(module, *tensors)
    with counted() as n:
        found = function(copy.deepcopy(module).to(DEVICE), *on_device(tensors))
        assert_same(found, expected, strides=False)  # of gradients they are the formula's
    assert n.fallbacks == 0


def gradients(module, x):
    x = x.detach().requires_grad_()
    result = first(module(x))
    inputs = [x, *module.parameters()]
    found = torch.autograd.grad(result, inputs, result.detach().sin(), allow_unused=True)
    return result.detach(), [t for t in found if t is not None]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", CELLS)
def test_gradients_of_cells(kind, dtype, bias):
    compare(gradients, make(kind, dtype=dtype, bias=bias), torch.randn(2, 4, dtype=dtype))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{"bidirectional": True}, {"num_layers": 2}], ids=str)
def test_gradients_of_complex_layers(kind, options):
    module = make(kind, dtype=torch.complex128, **options)
    compare(gradients, module, torch.randn(5, 2, 4, dtype=torch.complex128))


@pytest.mark.parametrize("kind", CELLS)
def test_forward_mode(kind):
    def tangents(module, x):
        def run(x):
            return first(module(x))

        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, x / 2))).tangent
        return tangent, torch.func.jvp(run, (x,), (x / 2,)), torch.func.jacfwd(run)(x)

    compare(tangents, make(kind), torch.randn(2, 4))


@pytest.mark.parametrize("kind", CELLS)
def test_second_derivatives(kind):
    def second(module, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(first(module(x)).square().sum(), x, create_graph=True)
        return torch.autograd.grad(
            slope.square().sum(), [x, *module.parameters()], allow_unused=True
        )

    def found(module, x):
        return [t for t in second(module, x) if t is not None]

    compare(found, make(kind), torch.randn(2, 4))


@pytest.mark.parametrize(("kind", "name"), [("LSTMCell", "lstm"), ("GRUCell", "gru")])
def test_a_real_cell_is_one_operator(kind, name):
    """With its linear layers; PyTorch's operators are about ten more."""
    module, x = make(kind).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.profiler.profile() as profile:
        module(x)
    names = {event.key for event in profile.key_averages()}
    assert f"aten::_thnn_fused_{name}_cell" in names
    assert "aten::sigmoid" not in names
