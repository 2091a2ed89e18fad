"""Eager mode, blocks and threads: when recorded work runs, told by the counters."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla import _C
from lazyxla.lowering.cpu import kernel_limits
from tests.support import DEVICE, assert_same, counted

# --- Setting the mode ----------------------------------------------------------------------------


def test_lazy_is_the_default_and_eager_runs_every_operator() -> None:
    assert lazyxla.eager_mode() is False
    x = torch.randn(3, 5).to(DEVICE)
    with lazyxla.eager_mode(True):
        assert lazyxla.eager_mode() is True
        with counted() as n:
            y = (x * 2).exp()
            y += 1
        assert n.executions == 3
    assert lazyxla.eager_mode() is False
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).exp() + 1)


def test_without_a_block_the_mode_is_the_process_s() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(lazyxla.eager_mode()))
    lazyxla.eager_mode("fused")
    try:
        assert lazyxla.eager_mode() == "fused"
        thread.start()
        thread.join()
        assert seen == ["fused"]
    finally:
        lazyxla.eager_mode(False)
    assert lazyxla.eager_mode() is False


def test_a_block_is_its_thread_s() -> None:
    seen = []
    with lazyxla.eager_mode(True):
        thread = threading.Thread(target=lambda: seen.append(lazyxla.eager_mode()))
        thread.start()
        thread.join()
        lazyxla.eager_mode("fused")  # within the block: the block's
        assert lazyxla.eager_mode() == "fused"
    assert seen == [False]
    assert lazyxla.eager_mode() is False


def test_blocks_nest_and_end_by_an_exception() -> None:
    switch = lazyxla.eager_mode(True)
    lazyxla.eager_mode(False)

    def fail() -> None:
        with switch, lazyxla.eager_mode(False), switch:
            assert lazyxla.eager_mode() is True
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert lazyxla.eager_mode() is False


@pytest.mark.parametrize("mode", [False, True, "fused"])
def test_autograd_s_thread_is_in_the_mode_of_the_backward_pass(mode) -> None:
    x = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((lazyxla.eager_mode(), threading.get_ident()))
            return gradient

    with lazyxla.eager_mode(mode):
        Spy.apply(x).sum().backward()
    ((there, thread),) = seen
    assert there == mode
    assert thread != threading.get_ident()


def test_switching_to_eager_runs_what_is_pending() -> None:
    x = torch.randn(4).to(DEVICE) + 1
    with counted() as n, lazyxla.eager_mode(True):
        pass
    assert n.executions == 1
    assert x.shape == (4,)


def test_leaving_a_lazy_block_runs_what_is_pending() -> None:
    x = torch.randn(4).to(DEVICE)
    with lazyxla.eager_mode(True):
        with counted() as n, lazyxla.eager_mode(False):
            y = x + 1
            y = y * 3
        assert n.executions == 1
    assert_same(y, (x.cpu() + 1) * 3)


def test_a_block_in_one_thread_is_never_seen_by_another() -> None:
    """Nor does it change the process's mode, in whatever order threads begin and end blocks."""
    over = threading.Event()
    seen: list[object] = []

    def watch() -> None:
        while not over.is_set():
            seen.append(lazyxla.eager_mode())

    def enter(mode: Any) -> None:
        for _ in range(3000):
            with lazyxla.eager_mode(mode):
                if lazyxla.eager_mode() != mode:
                    seen.append(mode)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        watcher = threading.Thread(target=watch)
        threads = [threading.Thread(target=enter, args=(m,)) for m in (True, "fused", True)]
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        watcher.join()
    finally:
        sys.setswitchinterval(interval)
    assert set(seen) == {False}
    assert lazyxla.eager_mode() is False


@pytest.mark.parametrize("mode", ["fast", 1, 0, [True]])
def test_eager_mode_refuses_what_it_does_not_know(mode) -> None:
    with pytest.raises(TypeError, match=r'eager_mode\(\) takes True, False or "fused", not '):
        lazyxla.eager_mode(mode)


# --- Strict eager --------------------------------------------------------------------------------


def test_eager_compiles_each_kind_of_call_once() -> None:
    x = torch.randn(6, 7).to(DEVICE)
    with lazyxla.eager_mode(True):
        y = torch.sin(x) * 3.0
        with counted() as n:
            for _ in range(5):
                y = torch.sin(x) * 3.0
        assert (n.executions, n.compiles, n.lowerings) == (10, 0, 0)
    torch.testing.assert_close(y.cpu(), torch.sin(x.cpu()) * 3.0)


def test_calls_of_one_kind_that_are_different_programs() -> None:
    """The same operator, dtypes and shapes: the same operand twice, other numbers, a live alias."""
    host = torch.randn(5, 5)
    with lazyxla.eager_mode(True):
        for _ in range(3):
            x, y = host.to(DEVICE), (host + 1).to(DEVICE)
            assert_same(x + y, host + (host + 1))
            assert_same(x + x, host + host)
            assert_same(torch.add(x, y, alpha=2), torch.add(host, host + 1, alpha=2))
            for number in (1.5, 2.5, 3.5, 1.5):
                assert_same(x * number, host * number)
            view = x.detach()
            assert_same(x.add_(x), host + host)
            assert_same(view, host + host)
            kept = x.clone()
            assert_same(x.mul_(kept), (host + host) ** 2)
            assert_same(kept, host + host)
            assert_same(x.t().add_(y), ((host + host) ** 2).t() + (host + 1))
            assert_same(x[1:3].neg_(), -((host + host) ** 2 + (host + 1).t())[1:3])
            assert_same(torch.add(x, y, out=x), x.cpu())
            largest, where = torch.max(y, 0)
            assert_same(largest, (host + 1).amax(0))
            assert_same(where, (host + 1).argmax(0))


def test_in_place_operators_take_over_the_memory() -> None:
    x = torch.zeros(1 << 18, device=DEVICE)
    with lazyxla.eager_mode(True):
        x.add_(1)
        x.add_(1)
        lazyxla.synchronize()
        lazyxla.reset_peak_memory_stats()
        before = lazyxla.memory_allocated()
        for _ in range(3):
            x.add_(1)
        assert lazyxla.max_memory_allocated() == before
        kept = x.detach().clone()
        y = x.view(-1)
        y.add_(1)
        assert (x.cpu() == 6).all()
        assert (kept.cpu() == 5).all()


def test_random_numbers_go_on() -> None:
    results = []
    for mode in (False, True, "fused"):
        torch.manual_seed(5)
        with lazyxla.eager_mode(mode):
            x = torch.rand(4, device=DEVICE)
            y = torch.randn(4, device=DEVICE)
            x.uniform_()
            results.append(torch.stack([x, y, F.dropout(torch.ones_like(x), 0.5)]).cpu())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )


def _train(model: nn.Module, steps: int) -> list[float]:
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(6, 1, 8, 8).double(), torch.randint(0, 5, (6,))
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", [True, "fused"])
def test_training_matches_the_cpu_and_stops_compiling(mode) -> None:
    # In double precision: Adam makes steps of rounding errors where a gradient should be zero.
    reference = _net().double()
    model = copy.deepcopy(reference).to(DEVICE)
    with lazyxla.eager_mode(mode):
        losses = _train(model, 5)
        with counted() as n:
            _train(copy.deepcopy(reference).to(DEVICE), 3)
        assert n.compiles == 0
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(_train(reference, 5)))
    assert_same(model.state_dict(), reference.state_dict())


def test_an_operator_s_error_is_raised_at_its_call() -> None:
    with lazyxla.eager_mode(True):
        x = torch.ones(3, 4, device=DEVICE)
        with pytest.raises(RuntimeError, match="must match the size"):
            x + torch.ones(5, device=DEVICE)
        y = x + 1
    assert_same(y, torch.full((3, 4), 2.0))


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = (x @ x).tanh()
    return x


@pytest.mark.parametrize("mode", [False, True])
def test_blocking_waits_for_each_program(mode) -> None:
    with kernel_limits.using({}):  # matmuls that XLA computes: it does not wait for those
        x = torch.randn(400, 400, dtype=torch.float64).to(DEVICE)
        _chain(x)
        lazyxla.synchronize()
        lazyxla.settings.blocking = True
        try:
            with lazyxla.eager_mode(mode):
                y = _chain(x)
                lazyxla.sync()
                assert _C.is_ready(y)
        finally:
            lazyxla.settings.blocking = False
        with lazyxla.eager_mode(mode):
            waits = [_C.is_ready(_chain(x)) for _ in range(5)]
        assert False in waits  # without it, some are still being computed


def test_what_fails_while_nobody_waits_is_told_by_who_reads() -> None:
    # The plugin finds no memory when it is given the program, or on a thread that prepares to run.
    told = r"this value was not computed.*out of device memory|Out of memory allocating"
    with lazyxla.eager_mode(True):
        huge = torch.empty(1 << 46, device=DEVICE).sinh()  # compiles meanwhile
        smaller = huge[:3] + 1
        with pytest.raises(RuntimeError, match=told):
            huge.sum().item()
        with pytest.raises(RuntimeError, match=told):
            smaller.tolist()
        with contextlib.suppress(RuntimeError):  # the thread's error also is the device's
            lazyxla.sync(wait=True)
        assert_same(torch.ones(3).to(DEVICE) + 1, torch.full((3,), 2.0))


def test_with_blocking_it_is_told_at_the_call() -> None:
    lazyxla.settings.blocking = True
    try:
        source = torch.empty(1 << 46, device=DEVICE)
        lazily = source.cosh()
        with pytest.raises(torch.OutOfMemoryError, match="lazyxla: out of device memory"):
            lazyxla.sync()
        with (
            lazyxla.eager_mode(True),
            pytest.raises(torch.OutOfMemoryError, match="lazyxla: out of device memory"),
        ):
            source.acosh()
    finally:
        lazyxla.settings.blocking = False
    assert_same(torch.ones(3).to(DEVICE) + 1, torch.full((3,), 2.0))
    assert lazily.shape == source.shape


@pytest.mark.parametrize("mode", ["True", "'fused'"])
def test_a_program_may_end_while_others_compile(run_python, mode) -> None:
    result = run_python(
        f"""
import torch, lazyxla
lazyxla.eager_mode({mode})
x = torch.ones(64, 64, device="lazyxla")
for i in range(40):
    x = (x @ x[:, :64 - i]).softmax(0)[:, :1].expand(64, 64) + i
"""
    )
    assert result.stderr == ""
