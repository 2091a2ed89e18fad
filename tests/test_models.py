"""Real models train on the device as on the CPU, and the counters say how.

Each model trains a few steps on both from the same start with the same batches. In double precision
the two must agree to the last few digits, which a chaotic step (batch norm over four images, say)
does not allow in single precision; the single-precision run of the other tests is test_training's.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lazyxla
from tests.models import CASES, Batch
from tests.support import DEVICE, counted

pytestmark = pytest.mark.cuda

STEPS = 4


def _double(batch: Batch) -> Batch:
    return tuple(x.double() if x.is_floating_point() else x for x in batch)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, batch: Batch
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = CASES[name].loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", CASES)
def test_training_matches_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    reference = CASES[name].make().double().train()
    model = copy.deepcopy(reference).to(DEVICE)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=CASES[name].lr, momentum=0.9) for m in (reference, model)
    ]
    lazyxla.reset_counters()
    for step in range(STEPS):
        batch = _double(CASES[name].batch())
        expected = _step(reference, optimizers[0], name, batch)
        with counted() as n:
            loss = _step(model, optimizers[1], name, tuple(x.to(DEVICE) for x in batch))
            lazyxla.sync()
        reads = CASES[name].reads
        # The first step makes each momentum besides, by one program for each new shape.
        states = optimizers[1].state.values() if step == 0 else ()
        momenta = [state["momentum_buffer"] for state in states]
        assert n.executions == 1 + reads + len(momenta)
        shapes = {momentum.shape for momentum in momenta}
        steps = 1 + reads if step == 0 else 0
        assert steps <= n.compiles <= steps + len(shapes), step
        torch.testing.assert_close(loss.cpu(), expected)
        for (key, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert theirs.grad is None or ours.grad is not None
            if theirs.grad is not None:
                torch.testing.assert_close(
                    ours.grad.cpu(), theirs.grad, msg=lambda m, k=key: f"{k}: {m}"
                )
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("name", CASES)
def test_evaluation_matches_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    reference = CASES[name].make().eval()
    model = copy.deepcopy(reference).to(DEVICE)
    lazyxla.reset_counters()
    with torch.no_grad():
        for step in range(2):
            batch = CASES[name].batch()
            expected = CASES[name].loss(reference, batch)
            with counted() as n:
                loss = CASES[name].loss(model, tuple(x.to(DEVICE) for x in batch))
                lazyxla.sync()
            assert n.executions == 1 + CASES[name].reads
            assert n.compiles == (n.executions if step == 0 else 0)
            torch.testing.assert_close(loss.cpu(), expected)
    assert lazyxla.fallbacks() == {}
