"""What a compiled region is called with enters it as it is: a view as its own elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from tests.support import DEVICE, counted


def test_windows_of_memory_that_grows_are_one_program() -> None:
    @lazyxla.compile(full_graph=True, max_graphs=1)
    def total(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum()

    for size in (7, 9, 12, 40):
        memory = torch.arange(4.0 * size).view(size, 4)
        assert total(memory.to(DEVICE)[:3]).item() == (memory[:3] * 2).sum()


def test_batches_of_a_data_set_are_one_program() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6), torch.randn(40, 2)
    models = [nn.Linear(6, 2)]
    models.append(nn.Linear(6, 2))
    models[1].load_state_dict(models[0].state_dict())
    models[1].to(DEVICE)

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if x.device.type == DEVICE:
            step = lazyxla.compile(step, full_graph=True, max_graphs=1)
        return [step({"x": x[i : i + 8], "y": y[i : i + 8]}) for i in range(0, 40, 8)]

    expected = train(models[0], inputs, targets)
    found = train(models[1], inputs.to(DEVICE), targets.to(DEVICE))
    torch.testing.assert_close(torch.stack(found).cpu(), torch.stack(expected))


def test_writing_to_a_view_writes_to_its_memory() -> None:
    memory = torch.zeros(6, 3, device=DEVICE)

    @lazyxla.compile
    def update(x: torch.Tensor, all_of_it: torch.Tensor) -> torch.Tensor:
        before = x + 1
        x.add_(before)
        all_of_it[2].mul_(10)
        return x + all_of_it.sum()

    expected = torch.zeros(6, 3)
    for i in range(4):
        found = update(memory[i : i + 3], memory)
        part = expected[i : i + 3]
        part.add_(part + 1)
        expected[2].mul_(10)
        torch.testing.assert_close(found.cpu(), part + expected.sum())
        torch.testing.assert_close(memory.cpu(), expected)


def test_what_is_pending_before_runs_before() -> None:
    memory = torch.ones(8, device=DEVICE)

    @lazyxla.compile(max_graphs=1)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for i in range(4):
        memory.add_(i)
        for _ in range(i):
            memory.mul_(0.5)
        expected = memory.cpu()[2:5] * 2 if i % 2 else None
        found = twice(memory[2:5])
        assert expected is None or torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("given", [(), ([], {}), ("text", None), (torch.ones(3)[1:],)])
def test_what_is_no_view_of_the_device_is_as_before(given: Any) -> None:
    x = torch.ones(4, device=DEVICE)

    @lazyxla.compile
    def plain(*_: Any) -> torch.Tensor:
        return x + 1

    plain(*given)
    with counted() as n:
        plain(*given)
    assert (n.executions, n.compiles) == (1, 0)


def test_transposed_weights_are_no_inputs_of_their_own() -> None:
    weight = torch.randn(5, 3, device=DEVICE)

    @lazyxla.compile
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    x = torch.ones(2, 3, device=DEVICE)
    lazyxla.sync()
    product(x, weight.t())
    with counted() as n:
        product(x, weight.t())
    assert n.executions == 1


def test_the_copy_goes_with_the_call() -> None:
    memory = torch.zeros(1000, 100, device=DEVICE)
    lazyxla.sync(wait=True)

    @lazyxla.compile
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    total(memory[:500]).item()
    before = torch.lazyxla.memory_allocated()
    for _ in range(3):
        total(memory[:500]).item()
    assert torch.lazyxla.memory_allocated() == before
