"""A graph with very many results is run as several programs, if its parts are independent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted

MANY = 1100  # more than csrc/graph/walk.h takes as one program without looking


@torch.library.custom_op("parts::refused", mutates_args=())
def refused(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@refused.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@lazyxla.lowering.rule("parts::refused")
def _lower(b: Any, x: Any) -> Any:
    raise ValueError("this rule has no idea")


def test_ten_thousand_results_are_a_few_programs() -> None:
    x = torch.ones(8, device=DEVICE)
    lazyxla.sync()
    with counted() as n:
        results = [x + float(i) for i in range(10_000)]
        lazyxla.sync()
    # The first part, the same with numbers that vary, and what is left.
    assert n.compiles == 3
    assert n.executions == 40
    for i in (0, 255, 256, 5000, 9999):
        assert results[i].tolist() == [1.0 + i] * 8
    with counted() as n:
        results = [x + float(i + 1) for i in range(10_000)]
        lazyxla.sync()
    assert n.compiles <= 1  # the last part's numbers vary, too
    assert results[9999].tolist() == [10001.0] * 8


def test_results_that_hang_together_are_one_program() -> None:
    x = torch.ones(2, device=DEVICE)
    lazyxla.sync()
    with counted() as n:
        common = x.sum()
        results = [common.view(1) for _ in range(10)] + [common + 1 for _ in range(MANY)]
        lazyxla.sync()
    assert (n.compiles, n.executions) == (1, 1)
    assert results[-1].item() == 3.0


def test_tensors_written_in_place_give_their_memory_away() -> None:
    tensors = [torch.full((4,), float(i), device=DEVICE) for i in range(MANY)]
    lazyxla.sync(wait=True)
    before = torch.lazyxla.memory_allocated()
    for _ in range(3):
        for tensor in tensors:
            tensor.add_(1)
        with counted() as n:
            lazyxla.sync(wait=True)
        assert n.executions == 5
        assert torch.lazyxla.memory_allocated() == before
    assert [t[0].item() for t in tensors[:3]] == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("fails", [0, 700, MANY - 1])
def test_if_a_part_fails_nothing_is_changed(fails: int) -> None:
    tensors = [torch.full((4,), float(i), device=DEVICE) for i in range(MANY)]
    lazyxla.sync()
    state = torch.lazyxla.get_rng_state()
    for tensor in tensors:
        tensor.add_(1)
    tensors[fails].copy_(refused(tensors[fails]))
    fresh = torch.rand(3, device=DEVICE)
    fresh.add_(tensors[fails][:3])
    with pytest.raises(NotImplementedError, match="this rule has no idea"):
        lazyxla.sync()
    assert torch.stack(tensors).cpu()[:, 0].tolist() == [float(i) for i in range(MANY)]
    for tensor in tensors:
        tensor.add_(1)
    lazyxla.sync()
    assert torch.stack(tensors).cpu()[:, 0].tolist() == [float(i + 1) for i in range(MANY)]
    with pytest.raises(RuntimeError, match="was not computed"):
        fresh.cpu()
    assert torch.equal(torch.lazyxla.get_rng_state(), state)
