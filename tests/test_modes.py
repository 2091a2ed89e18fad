"""Eager mode and compiled regions: when recorded work runs."""

from __future__ import annotations

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted


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


def test_eager_compiles_each_kind_of_call_once() -> None:
    x = torch.randn(6, 7).to(DEVICE)
    lazyxla.sync()
    with lazyxla.eager_mode(True):
        y = torch.sin(x) * 3.0
        with counted() as n:
            for _ in range(5):
                y = torch.sin(x) * 3.0
        assert n.compiles == 0
        assert n.executions == 10
    torch.testing.assert_close(y.cpu(), torch.sin(x.cpu()) * 3.0)


def test_switching_to_eager_runs_what_is_pending() -> None:
    x = torch.randn(4).to(DEVICE) + 1
    with counted() as n, lazyxla.eager_mode(True):
        pass
    assert n.executions == 1
    assert x.shape == (4,)


def test_eager_training_step_matches_the_cpu() -> None:
    torch.manual_seed(0)
    reference = torch.nn.Linear(4, 3)
    model = torch.nn.Linear(4, 3).to(DEVICE)
    model.load_state_dict(reference.state_dict())
    x = torch.randn(5, 4)
    with lazyxla.eager_mode(True):
        for m in (reference, model):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            m(x.to(m.weight.device)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight.detach().cpu(), reference.weight.detach())


def test_compiled_function_is_one_program_in_either_mode() -> None:
    @lazyxla.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).relu().sum(0)

    x = torch.randn(8, 8).to(DEVICE)
    pending = torch.randn(3).to(DEVICE) * 2
    step(x)
    for eager in (False, True):
        with lazyxla.eager_mode(eager):
            with counted() as n:
                result = step(x)
            assert (n.executions, n.compiles) == (1, 0)
    expected = (x.cpu() @ x.cpu().t()).relu().sum(0)
    torch.testing.assert_close(result.cpu(), expected)
    assert pending.shape == (3,)


def test_pending_work_does_not_leak_into_a_region() -> None:
    x = torch.randn(4, 9).to(DEVICE)
    before = x + 1
    with counted() as n, lazyxla.region():
        after = before * 2
    assert n.executions == 2
    assert n.nodes_lowered == 2
    torch.testing.assert_close(after.cpu(), (x.cpu() + 1) * 2)


def test_region_restores_the_mode_and_runs_when_it_raises() -> None:
    x = torch.randn(7).to(DEVICE)
    with lazyxla.eager_mode(True):
        results = []

        def fail() -> None:
            with lazyxla.region(), lazyxla.region():
                results.append(x * 5)
                raise RuntimeError("mine")

        with counted() as n, pytest.raises(RuntimeError, match="mine"):
            fail()
        assert lazyxla.eager_mode() is True
        assert n.executions == 1
    torch.testing.assert_close(results[0].cpu(), x.cpu() * 5)


def test_eager_mode_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match=r"eager_mode\(\) takes True or False, not 'fast'"):
        lazyxla.eager_mode("fast")  # type: ignore[call-overload]
