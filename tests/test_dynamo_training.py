"""torch.compile in training: optimizers, writes in place, dtypes, and how often programs run."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, assert_same, counted, on_device

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_dynamo")]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.05, **k),
    "momentum": lambda p, **k: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.01, **k),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        # No bias before the normalization: its gradient is noise, which Adam makes large.
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,))) for _ in range(count)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_step_and_optimizer(name: str, foreach: bool) -> None:
    """One program per step in lazy mode, three in eager mode: forward, backward, optimizer."""
    for eager in (False, True):
        torch._dynamo.reset()
        reference = _net()
        model = copy.deepcopy(reference).to(DEVICE)
        theirs = OPTIMIZERS[name](reference.parameters(), foreach=foreach)
        optimizer = OPTIMIZERS[name](model.parameters(), foreach=foreach)
        compiled = torch.compile(_loss, backend=backend, fullgraph=True)
        step = torch.compile(optimizer.step, backend=backend)
        root = torch.ones(()).to(DEVICE)
        executions = []
        for x, y in _batches(5):
            theirs.zero_grad()
            expected = _loss(reference, x, y)
            expected.backward()
            theirs.step()
            ours = x.to(DEVICE), y.to(DEVICE)
            lazyxla.sync()
            with counted() as n, lazyxla.eager_mode(eager):
                optimizer.zero_grad()
                loss = compiled(model, *ours)
                loss.backward(root)
                step()
                lazyxla.sync()
            executions.append(n.executions)
            torch.testing.assert_close(loss.detach().cpu(), expected.detach())
        assert executions[2:] == ([3, 3, 3] if eager else [1, 1, 1])
        assert n.compiles == 0
        for mine, other in zip(
            model.state_dict().values(), reference.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine.cpu(), other)


def test_root_gradient_is_one_more_execution_in_eager_mode() -> None:
    """PyTorch makes the root gradient, a one, itself."""
    model = _net().to(DEVICE)
    compiled = torch.compile(_loss, backend=backend)
    (batch,) = ([t.to(DEVICE) for t in b] for b in _batches(1))
    with lazyxla.eager_mode(True):
        compiled(model, *batch).backward()
        model.zero_grad()
        with counted() as n:
            compiled(model, *batch).backward()
    assert n.executions == 3
    assert n.nodes_recorded == 3


def test_statistics_are_written_by_the_graph_itself() -> None:
    model = _net()
    ours = copy.deepcopy(model).to(DEVICE)
    compiled = torch.compile(ours, backend=backend)
    x = torch.randn(6, 1, 8, 8)
    on = x.to(DEVICE)
    with torch.no_grad():
        compiled(on)
        with counted() as n:
            compiled(on)
        model(x), model(x)
    assert n.nodes_recorded == 1
    for mine, theirs in zip(ours.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_modules_of_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    ours = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(4, 6, dtype=dtype)
    expected = model(x)
    expected.sum().backward()
    result = torch.compile(ours, backend=backend, fullgraph=True)(x.to(DEVICE))
    result.sum().backward()
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu(), expected)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_modules_of_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.second = nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x.bfloat16()).double()).float()

    model = Mixed()
    ours = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(3, 4)
    result = torch.compile(ours, backend=backend)(x.to(DEVICE))
    expected = model(x)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(result.cpu(), expected)
    assert [p.grad.dtype for p in ours.parameters()] == [p.dtype for p in model.parameters()]


def test_autocast_inside() -> None:
    linear = nn.Linear(4, 4).to(DEVICE)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("lazyxla", dtype=torch.bfloat16):
            y = linear(x)
        return y * 2

    x = torch.randn(2, 4).to(DEVICE)
    expected = function(x)
    result = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result.cpu(), expected.cpu())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Callable[[], Any]) -> None:
    model = _net().eval()
    ours = copy.deepcopy(model).to(DEVICE)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    x = torch.randn(2, 1, 8, 8)
    with guard():
        on = x.to(DEVICE)
        compiled(on).cpu()
        with counted() as n:
            result = compiled(on)
            lazyxla.sync()
        assert (n.nodes_recorded, n.executions, n.compiles) == (1, 1, 0)
        torch.testing.assert_close(result.cpu(), model(x))


def test_forward_keeps_the_weights_themselves() -> None:
    """Not copies of them, transposed, for the backward graph."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    ours = copy.deepcopy(model).to(DEVICE)
    compiled = torch.compile(ours, backend=backend)
    x = torch.randn(2, 64)
    on = x.to(DEVICE)
    with lazyxla.eager_mode(True):
        lazyxla.synchronize()
        before = lazyxla.memory_allocated()
        result = compiled(on)
        lazyxla.synchronize()
        kept = lazyxla.memory_allocated() - before
        result.sum().backward()
    assert kept < 64 * 64 * 4
    model(x).sum().backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def kept_by_forward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> int:
    """Bytes that the compiled forward graph of a scalar function keeps, if it runs by itself.

    The gradients must be PyTorch's.
    """
    compiled = torch.compile(function, backend=backend)
    on = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    with lazyxla.eager_mode(True):
        gc.collect()
        lazyxla.synchronize()
        before = lazyxla.memory_allocated()
        result = compiled(*on)
        lazyxla.synchronize()
        kept = lazyxla.memory_allocated() - before
        result.backward()
    expected = [x.detach().clone().requires_grad_() for x in inputs]
    function(*expected).backward()
    for mine, theirs in zip(on, expected, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    return kept


def test_forward_keeps_one_of_equal_views() -> None:
    """An attention layer's input is flattened for each of its projections."""

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        return sum((F.linear(h, w).cos().sum() for w in weights), torch.zeros((), device=x.device))

    weights = [torch.randn(2, 32) / 32 for _ in range(3)]
    size = 2 * 16 * 32 * 4
    assert size <= kept_by_forward(function, torch.randn(2, 16, 32), *weights) < 2 * size


def test_forward_keeps_what_others_are_views_of() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        return (h.t() * v).sum() + (h.flatten() * w).sum() + h.square().sum()

    size = 64 * 64 * 4
    inputs = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64 * 64)
    assert size <= kept_by_forward(function, *inputs) < 1.5 * size


def test_forward_keeps_small_views_of_a_large_tensor() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x + 1
        return (h[3] * v).sum() + (h[5] * w).sum()

    size = 2 * 64 * 4
    assert size <= kept_by_forward(function, torch.randn(64, 64), *torch.randn(2, 64)) < 2 * size


def test_arguments_that_share_memory() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y.add_(1)
        return x.sum() + y.sum()

    def run(base: torch.Tensor, f: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return f(base[:3], base[2:]), base

    compiled = torch.compile(function, backend=backend)
    base = torch.randn(5)
    ours = base.to(DEVICE)
    for _ in range(2):
        assert_same(run(ours, compiled), run(base, function))


def test_results_that_are_views_of_each_other() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.view(-1), y.t(), x, x[0]

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.randn(2, 3)
    ours = x.to(DEVICE)
    theirs = function(x)
    mine = compiled(ours)
    assert_same(mine, theirs)
    for results in (theirs, mine):
        results[1][0] = 9.0
        results[4].zero_()
    assert_same(mine, theirs)
    assert_same(ours, x)


def test_random_operators_follow_the_seed_and_differ() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = [F.rrelu(-x, 0.1, 0.9, training=True) for _ in range(2)]
        return F.dropout(x, 0.5), F.dropout(x, 0.5), *noise

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.ones(200, device=DEVICE)
    torch.manual_seed(3)
    first, second = ([t.cpu() for t in compiled(x)] for _ in range(2))
    torch.manual_seed(3)
    again = [t.cpu() for t in compiled(x)]
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[2], first[3])


def test_dropout_is_the_same_forward_and_backward() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.4) * 3, backend=backend)
    x = torch.ones(50, 50).to(DEVICE).requires_grad_()
    result = compiled(x)
    result.sum().backward()
    torch.testing.assert_close(result.detach().cpu(), x.grad.cpu())


@pytest.mark.parametrize(("name", "dynamic"), [("det", False), ("slogdet", False), ("det", True)])
def test_gradient_of_determinants_in_any_layout(name: str, dynamic: bool) -> None:
    """Its formula depends on the strides of the matrix, which the graph's node does not see."""

    def loss(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(a) if name == "det" else torch.linalg.slogdet(a)[1]

    compiled = torch.compile(loss, backend=backend, dynamic=dynamic)
    torch.manual_seed(0)
    matrix = torch.randn(4, 4) + 4 * torch.eye(4)
    every_second = torch.zeros(8, 8)
    every_second[::2, ::2] = matrix
    for dtype in (torch.float32, torch.complex64):
        for data in (matrix, matrix.mT, every_second[::2, ::2])[: 2 if dtype.is_complex else 3]:
            expected, x = (d.detach().to(dtype) for d in (data, data))
            x = torch.empty_strided(x.shape, data.stride(), dtype=dtype, device=DEVICE).copy_(x)
            assert x.stride() == data.stride()
            for a in (expected.requires_grad_(), x.requires_grad_()):
                (compiled(a) if a is x else loss(a)).abs().backward()
            torch.testing.assert_close(x.grad.cpu(), expected.grad)


def test_several_threads() -> None:
    model = _net().eval()
    compiled = torch.compile(copy.deepcopy(model).to(DEVICE), backend=backend)
    x = torch.randn(2, 1, 8, 8)
    ours = on_device(x)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(ours).cpu(), model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@torch._dynamo.config.patch(compiled_autograd=True)
def test_compiled_autograd() -> None:
    """The backward pass of operators that ran one by one, as a graph."""
    reference = _net()
    model = copy.deepcopy(reference).to(DEVICE)
    backward = torch.compile(lambda loss: loss.backward(), backend=backend)
    for x, y in _batches(3):
        reference.zero_grad()
        model.zero_grad()
        _loss(reference, x, y).backward()
        with lazyxla.eager_mode(True):
            loss = _loss(model, x.to(DEVICE), y.to(DEVICE))
            with counted() as n:
                backward(loss)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), other.grad)
    assert (n.compiles, n.executions) == (0, 2)  # the root gradient and the graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_backwards_of_a_graph(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).tanh().exp().sum()

    x = torch.randn(4, 3, requires_grad=True)
    ours = x.detach().to(DEVICE).requires_grad_()
    loss = function(x)
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)(ours)
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        compiled.backward(retain_graph=retain)
        lazyxla.sync()
    torch.testing.assert_close(ours.grad.cpu(), x.grad)
    with pytest.raises(RuntimeError, match="second time"):
        compiled.backward()
