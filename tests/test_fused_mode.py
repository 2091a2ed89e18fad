"""Fused eager mode: where batches are cut, and what runs by itself."""

from __future__ import annotations

import time

import torch
from torch import nn

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, assert_same, counted

LEAST, MOST = 32, 64  # operators in a batch, see csrc/record/batches.cpp


def _body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x + y
    x = x * 0.5
    x = x - y
    x = x.tanh()
    x = x.square()
    x = x + 1.0
    return x.neg()


def test_fused_runs_batches_by_itself() -> None:
    x, y = torch.randn(3, 3).to(DEVICE), torch.randn(3, 3).to(DEVICE)
    lazyxla.sync()
    with lazyxla.eager_mode("fused"), counted() as n:
        for _ in range(150):
            x = _body(x, y)
    assert 150 * 7 / MOST < n.executions <= 150 * 7 / LEAST + 1


def test_repeated_code_is_cut_at_the_same_places() -> None:
    """Seven operators divide no batch size, yet few programs are compiled, and soon no more."""
    host = torch.randn(3, 3), torch.randn(3, 3)
    x, y = host[0].to(DEVICE), host[1].to(DEVICE)
    with lazyxla.eager_mode("fused"):
        with counted() as n:
            for _ in range(200):
                x = _body(x, y)
        assert n.compiles <= 3
        with counted() as n:
            for _ in range(400):
                x = _body(x, y)
        assert n.compiles <= 1  # 0, or what a pause of this process left
        assert n.executions >= 400 * 7 / MOST
        with counted() as n:
            x.sum().item()
        assert n.executions == 1
    with counted() as n:
        pass
    expected = host[0]
    for _ in range(600):
        expected = _body(expected, host[1])
    torch.testing.assert_close(x.cpu(), expected)


def test_layers_that_repeat_share_their_programs() -> None:
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(12)))
    layers.to(DEVICE).eval()
    x = torch.randn(5, 3, 16).to(DEVICE)
    lazyxla.sync()
    with lazyxla.eager_mode("fused"), torch.no_grad(), counted() as n:
        for _ in range(4):
            y = layers(x)
        y.cpu()
    assert n.compiles <= 8
    torch.testing.assert_close(y.cpu(), layers.cpu()(x.cpu()))


def _run_by_itself(tensor: torch.Tensor) -> bool:
    """Whether a pending tensor is computed though nobody asks for it."""
    deadline = time.monotonic() + 30
    while _C.is_pending(tensor):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_what_was_left_lying_runs_by_itself() -> None:
    x = torch.randn(3, 7).to(DEVICE)
    with lazyxla.eager_mode("fused"):
        y = x + 3
        assert _run_by_itself(y)
        for _ in range(3):  # a place where the host pauses every time
            z = x * 5 - 2
            assert _run_by_itself(z)
    assert_same(y, x.cpu() + 3)
    assert_same(z, x.cpu() * 5 - 2)


def test_nothing_is_left_lying_while_the_device_works() -> None:
    """What is recorded meanwhile would only wait elsewhere, in a program of its own."""
    x, matrix = torch.randn(3, 7).to(DEVICE), (torch.randn(1024, 1024) / 32).to(DEVICE)
    with lazyxla.eager_mode("fused"):
        for _ in range(2):  # where the host pauses twice it would pause again
            work = matrix
            for _ in range(50):  # some 100 GFLOP
                work = work @ matrix
            lazyxla.sync()
            y = x * 3 - 1
            time.sleep(0.1)
            assert _C.is_pending(y)
            lazyxla.sync(wait=True)
    assert_same(y, x.cpu() * 3 - 1)


def test_lazy_work_may_lie_for_as_long_as_it_likes() -> None:
    x = torch.randn(3, 7).to(DEVICE)
    with lazyxla.eager_mode("fused"):
        _ = x + 1
    y = x - 4
    time.sleep(0.1)
    assert _C.is_pending(y)
