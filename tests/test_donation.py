"""Memory of programs: what is donated, what is kept, and that a long loop leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, assert_same, counted, on_device

pytestmark = pytest.mark.usefixtures("collected")


def test_memory_of_tensors():
    start = lazyxla.memory_allocated()
    x = on_device(torch.arange(1024.0))
    lazyxla.sync()
    assert lazyxla.memory_allocated() - start == 4096
    y = x.view(32, 32).t()
    assert lazyxla.memory_allocated() - start == 4096
    z = y + 1
    assert lazyxla.memory_allocated() - start == 4096
    lazyxla.sync()
    assert lazyxla.memory_allocated() - start == 8192
    del x, y, z
    assert lazyxla.memory_allocated() == start


def test_updating_in_place_donates():
    x = torch.ones(4096, device=DEVICE)
    lazyxla.sync(wait=True)
    start = lazyxla.memory_allocated()
    x.add_(1)
    lazyxla.sync(wait=True)
    lazyxla.reset_peak_memory_stats()
    for _ in range(20):
        x.add_(1)
        lazyxla.sync()
    assert lazyxla.memory_allocated() == start
    assert lazyxla.max_memory_allocated() == start
    assert x[0].item() == 22


def test_what_somebody_else_holds_is_not_donated():
    x = torch.ones(4096, device=DEVICE)
    lazyxla.sync()
    y = x.clone()
    lazyxla.sync()
    x.add_(1)
    lazyxla.sync()
    assert (x[7].item(), y[7].item()) == (2, 1)
    z = x * 1
    x.mul_(5)
    lazyxla.sync()
    assert (x[7].item(), z[7].item()) == (10, 2)


def test_memory_is_given_away_alike_wherever_objects_lie():
    """A new tensor may lie where a dead one lay, which is no reason to compile."""

    def run(takers: int) -> None:
        given, other = on_device((torch.arange(8.0), torch.arange(8.0)))
        doubled = given * 2
        del given  # its elements are needed still
        held = [torch.empty(8, device=DEVICE) for _ in range(takers)]
        moved = other + 1
        lazyxla.sync()
        assert_same((doubled, moved), (torch.arange(8.0) * 2, torch.arange(8.0) + 1))
        assert len(held) == takers

    run(0)
    with counted() as n:
        for takers in (1, 0, 2, 0):
            run(takers)
    assert (n.compiles, n.executions) == (0, 4)


def test_parameters_are_donated_to_themselves():
    w = [torch.full((1000,), float(i), device=DEVICE) for i in range(3)]
    lazyxla.sync()
    for _ in range(4):
        torch._foreach_add_(w, 1.0)
        lazyxla.sync(wait=True)
    start = lazyxla.memory_allocated()
    lazyxla.reset_peak_memory_stats()
    for _ in range(4):
        torch._foreach_add_(w, 1.0)
        lazyxla.sync(wait=True)
    assert lazyxla.max_memory_allocated() == start
    assert [t[0].item() for t in w] == [8, 9, 10]


def test_a_long_loop_leaves_nothing_behind():
    model = on_device(torch.eye(4))
    x = on_device(torch.arange(4.0))

    def step(i):
        loss = (x @ model).tanh().sum() * (i % 3)
        model.sub_(loss * 1e-3)
        return loss.item() if i % 10 == 9 else lazyxla.sync()

    for i in range(30):
        step(i)
    live = torch.lazyxla.memory_stats()["allocation.all.current"]
    programs, shapes, allocated = (
        _C.cached_programs(),
        _C.cached_shapes(),
        lazyxla.memory_allocated(),
    )
    with counted() as n:
        for i in range(1000):
            step(i)
    gc.collect()
    assert torch.lazyxla.memory_stats()["allocation.all.current"] == live
    assert (_C.cached_programs(), _C.cached_shapes()) == (programs, shapes)
    assert lazyxla.memory_allocated() == allocated
    assert n.compiles == n.shape_inferences == 0
