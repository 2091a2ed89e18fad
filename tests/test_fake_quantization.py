"""Fake quantization: training with the rounding errors of a quantized model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, check, counted, error_of, on_device

aten = torch.ops.aten
RANGES = [(0, 255), (-128, 127), (0, 127), (-8, 7)]
INF = float("inf")
FEW = torch.tensor([0.0, -0.0, 0.05, 0.15, -0.05, 0.25, INF, -INF, float("nan"), 1e-3])


@pytest.fixture(autouse=True)
def nothing_on_the_host():
    lazyxla.reset_counters()
    yield
    assert lazyxla.fallbacks() == {}
    assert lazyxla.counters()["host_calls"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bounds", RANGES, ids=str)
def test_of_tensors(bounds, dtype):
    x = torch.cat([torch.randn(30) * 9, FEW]).reshape(4, 10).to(dtype)
    zero = bounds[0] + 3
    scale, offset, on = torch.tensor([0.1]), torch.tensor([zero], dtype=torch.int32), torch.ones(1)
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, zero, *bounds), x)
    if_on = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    for enabled in (on, on * 0):
        check(lambda x, *rest: if_on(x, *rest, *bounds), x, scale, offset, enabled)


@pytest.mark.parametrize("zero_dtype", [torch.int32, torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_channels(dim, dtype, zero_dtype):
    x = (torch.randn(3, 4, 5) * 3).to(dtype).transpose(0, 1)
    scale = torch.rand(x.shape[dim]) + 0.05
    zero = (torch.randn(x.shape[dim]) * 2).to(zero_dtype)
    function = aten.fake_quantize_per_channel_affine_cachemask
    check(lambda *tensors: function(*tensors, dim, -8, 7), x, scale, zero)


def test_the_numbers_are_inputs():
    x = torch.randn(8, device=DEVICE)
    compiles = []
    for scale in (0.1, 0.2, 0.3, 0.4):
        with counted() as n:
            torch.fake_quantize_per_tensor_affine(x, scale, 0, -8, 7).cpu()
        compiles.append(n.compiles)
    assert compiles == [1, 1, 0, 0]


@pytest.mark.parametrize("zero", [-20.0, -1.5, -0.5, 0.2, 0.5, 1.5, 3.7, 90.0])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_learned_parameters(dim, zero):
    x, count = torch.randn(4, 5) * 3, 1 if dim is None else (4, 5)[dim]

    def run(x, grad, scale, zero):
        leaves = [t.detach().requires_grad_() for t in (x, scale, zero)]
        if dim is None:
            result = torch._fake_quantize_learnable_per_tensor_affine(*leaves, -8, 7, 0.7)
        else:
            result = torch._fake_quantize_learnable_per_channel_affine(*leaves, dim, -8, 7, 0.7)
        return result.detach(), torch.autograd.grad(result, leaves, grad)

    check(run, x, torch.randn(4, 5), torch.rand(count) + 0.2, torch.full((count,), zero))


@pytest.mark.parametrize("spread", [1, 1e-3, 1e-6, 0, 1e15])
@pytest.mark.parametrize("shift", [0, -10, 10])
@pytest.mark.parametrize("of_channels", [False, True], ids=["tensor", "channels"])
def test_observers(of_channels, shift, spread):
    """Of each kind of data, three batches, with each combination of what is on."""
    batches = [torch.randn(4, 2, 3) * spread + shift * spread for _ in range(3)]

    def run(observing, quantizing, bounds, symmetric, *batches):
        device, size = batches[0].device, (0,) if of_channels else ()
        buffers = [torch.full(size, INF), torch.full(size, -INF)]
        if not observing:  # they have been found before
            size = (4,) if of_channels else ()
            buffers = [torch.full(size, -0.5), torch.full(size, 0.7)]
        parameters = (4,) if of_channels and not observing else (1,)
        buffers += [torch.ones(parameters), torch.zeros(parameters, dtype=torch.int32)]
        switches = [torch.tensor([on]) for on in (observing, quantizing)]
        switches, buffers = ([t.to(device) for t in given] for given in (switches, buffers))
        results = [
            torch.fused_moving_avg_obs_fake_quant(
                x, *switches, *buffers, 0.01, *bounds, 0, of_channels, symmetric
            )
            for x in batches
        ]
        if of_channels and observing and not quantizing:
            buffers = buffers[:2]  # the kernel leaves the others uninitialized
        return results, buffers

    for case in itertools.product((1, 0), (1, 0), RANGES[:3], (False, True)):
        check(lambda *batches, case=case: run(*case, *batches), *batches)


def make(config: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2)
    )
    model.qconfig = quantization.get_default_qat_qconfig(config)
    return quantization.prepare_qat(model.train())


def steps(model: nn.Module, device: str, after: Callable[[int], None] = lambda step: None) -> Any:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(6):
        x = torch.randn(4, 3, 6, 6, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses, {name: value.detach().cpu() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
@pytest.mark.parametrize("config", ["fbgemm", "qnnpack"])
def test_training(config):
    """The observers' buffers, too, are those of the CPU; the loop settles after two steps."""
    compiles: list[int] = []

    def count(step: int) -> None:
        compiles.append(lazyxla.counters()["compiles"])

    model = make(config)
    ours, theirs = steps(model, DEVICE, count), steps(model, "cpu")
    # A value at the edge of two steps falls on the other side after another rounding.
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert compiles[1:] == [compiles[1]] * 5


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_compiled():
    model = make("fbgemm").to(DEVICE)
    x = torch.randn(4, 3, 6, 6, device=DEVICE)
    model(x)
    model.apply(quantization.disable_observer)
    model.eval()
    expected = model(x).cpu()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x).cpu(), expected)
    with counted() as n:
        torch.testing.assert_close(compiled(x).cpu(), expected)
    assert (n.compiles, n.executions) == (0, 1)


X, SCALES = torch.randn(2, 3), torch.tensor([0.1, 0.2, 0.3])
ZEROS = torch.tensor([0, 1, 2], dtype=torch.int32)
_of_tensor = torch.fake_quantize_per_tensor_affine
_of_channels = torch.fake_quantize_per_channel_affine
_learned = torch._fake_quantize_learnable_per_channel_affine
_tensor_gradient = aten._fake_quantize_learnable_per_tensor_affine_backward
_channel_gradient = aten._fake_quantize_learnable_per_channel_affine_backward
WRONG: dict[str, Callable[..., Any]] = {
    "bounds": lambda x, s, z: _of_tensor(x, 0.1, 0, 7, -8),
    "zero point": lambda x, s, z: _of_tensor(x, 0.1, 9, -8, 7),
    "integers": lambda x, s, z: _of_tensor(x.int(), 0.1, 0, -8, 7),
    "bounds of tensors": lambda x, s, z: _of_tensor(x, s[:1], z[:1], 7, -8),
    "several": lambda x, s, z: _of_tensor(x, s, z, -8, 7),
    "dtype of scales": lambda x, s, z: _of_channels(x, s.double(), z, 1, -8, 7),
    "dtype of zero points": lambda x, s, z: _of_channels(x, s, z.long(), 1, -8, 7),
    "dimensions of scales": lambda x, s, z: _of_channels(x, s[None], z, 1, -8, 7),
    "dimensions of zero points": lambda x, s, z: _of_channels(x, s, z[None], 1, -8, 7),
    "counts": lambda x, s, z: _of_channels(x, s, z[:2], 1, -8, 7),
    "channels": lambda x, s, z: _of_channels(x, s, z, 0, -8, 7),
    "negative dimension": lambda x, s, z: _of_channels(x, s, z, -1, -8, 7),
    "no such dimension": lambda x, s, z: _of_channels(x, s, z, 2, -8, 7),
    "bounds of channels": lambda x, s, z: _of_channels(x, s, z, 1, 7, -8),
    "learned": lambda x, s, z: _learned(x, s, s, 0, -8, 7, 1.0),
    "learned bounds": lambda x, s, z: _learned(x, s, s, 1, 7, -8, 1.0),
    "without zero": lambda x, s, z: _tensor_gradient(x, x, s[:1], s[:1], 1, 7, 1.0),
    "shapes": lambda x, s, z: _tensor_gradient(x[:1], x, s[:1], s[:1], -8, 7, 1.0),
    "channels without zero": lambda x, s, z: _channel_gradient(x, x, s, s, 1, 1, 7, 1.0),
    "channels of the gradient": lambda x, s, z: _channel_gradient(x, x, s, s, 0, -8, 7, 1.0),
    "observed dimension": lambda x, s, z: torch.fused_moving_avg_obs_fake_quant(
        x, z[:1], z[:1], s[0].clone(), s[1].clone(), s[:1], z[:1], 0.1, 0, 255, 5
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    with counted() as n:
        ours = error_of(WRONG[name], *on_device((X, SCALES, ZEROS)))
    assert ours is not None
    assert ours == error_of(WRONG[name], X, SCALES, ZEROS)
    assert n.executions == 0


def test_zero_points_out_of_range():
    """Their values are data, which is looked at with the setting."""
    lazyxla.settings.check_indices = True
    try:
        with pytest.raises(RuntimeError, match="must be between `quant_min` and `quant_max`"):
            _of_channels(*on_device((X, SCALES, ZEROS + 100)), 1, -8, 7)
    finally:
        lazyxla.settings.check_indices = False
