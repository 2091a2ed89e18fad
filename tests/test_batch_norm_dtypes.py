"""Batch norms whose input, parameters and running statistics have several dtypes.

PyTorch's CPU kernels take few of these mixes, CUDA's more: FSDP's mixed precision casts a batch
norm's parameters and leaves its running statistics in float32. What is accepted has the values of
float32 tensors, in the dtypes of the tensors that were given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lazyxla

CHANNELS = 4
REFERENCE_DTYPE = torch.float32
MIXES = [
    (x, parameters, statistics)
    for x in (torch.float32, torch.bfloat16, torch.float16)
    for parameters in (x, torch.float32, None)
    for statistics in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if x != torch.float32 or parameters != x or statistics != x
]


def tensors(x: Any, parameters: Any, statistics: Any) -> tuple[Tensor, ...]:
    """Input, weight, bias, running mean and running variance: the last four may be None."""
    torch.manual_seed(0)
    shapes = [(6, CHANNELS, 5)] + 4 * [(CHANNELS,)]
    dtypes = (x, parameters, parameters, statistics, statistics)
    made = (torch.rand(shape) + 0.5 for shape in shapes)
    return tuple(None if d is None else t.to(d) for t, d in zip(made, dtypes, strict=True))


def run(given: tuple[Tensor, ...], function: Any, train: bool) -> list[Tensor]:
    """The result, the running statistics and the gradients."""
    x, weight, bias, mean, var = given
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    out = function(x, mean, var, weight, bias, train)
    grad = torch.arange(float(out.numel())).sin().view(out.shape).bfloat16()
    grads = torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))
    assert out.dtype == x.dtype
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
    return [out.detach(), mean, var, *grads]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("compiled", [False, True], ids=["recorded", "compiled"])
def test_running_statistics_have_a_dtype_of_their_own(train: bool, compiled: bool) -> None:
    function: Any = torch.nn.functional.batch_norm
    if compiled:
        function = torch.compile(function, backend="lazyxla", dynamic=False)
    before = lazyxla.counters()
    found = {}
    for mix in MIXES[::5] if compiled else MIXES:
        given = tensors(*mix)
        found[mix] = run(
            tuple(None if t is None else t.to("lazyxla") for t in given), function, train
        )
    lazyxla.sync()
    after = lazyxla.counters()
    assert after["fallbacks"] == before["fallbacks"]
    assert after["executions"] == before["executions"] + 1
    for mix, results in found.items():
        given = tuple(None if t is None else t.to(REFERENCE_DTYPE) for t in tensors(*mix))
        expected = run(given, torch.nn.functional.batch_norm, train)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b.to(a.dtype), msg=f"{mix}")


@pytest.mark.parametrize("x", [torch.float32, torch.float64])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_are_no_narrower_than_the_input(x: Any, parameters: Any) -> None:
    """As on the CPU and on CUDA, whatever the statistics are."""
    if parameters == x:
        pytest.skip("they have the input's dtype")
    given = tensors(x, parameters, parameters)
    with pytest.raises(RuntimeError) as expected:
        run(given, torch.nn.functional.batch_norm, True)
    for statistics in (parameters, torch.float32):
        on_device = tuple(t.to("lazyxla") for t in tensors(x, parameters, statistics))
        with pytest.raises(RuntimeError) as found:
            run(on_device, torch.nn.functional.batch_norm, True)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm])
def test_a_layer_with_cast_parameters_is_trained(layer: Any) -> None:
    """One program for each step from the second on."""
    model = layer(CHANNELS).to("lazyxla")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, CHANNELS, device="lazyxla", dtype=torch.bfloat16)
    compiles = []
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[-1] == compiles[1]
    assert model.running_mean.dtype == torch.float32
    assert model.running_mean.isfinite().all()
