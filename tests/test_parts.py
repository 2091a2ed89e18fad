"""A graph with very many results is run as several programs, if its parts are independent."""

from __future__ import annotations

import gc
from collections.abc import Callable
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


@pytest.fixture(autouse=True)
def refused_rule(own_rules: None) -> None:
    @lazyxla.lowering.rule("parts::refused")
    def lower(b: Any, x: Any) -> Any:
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
    gc.collect()  # other tests' tensors, which would go in between
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
@pytest.mark.parametrize("drawn_in", ["the part that fails", "another"])
def test_if_a_part_cannot_be_lowered_nothing_is_changed(fails: int, drawn_in: str) -> None:
    tensors = [torch.full((4,), float(i), device=DEVICE) for i in range(MANY)]
    lazyxla.sync()
    state = torch.lazyxla.get_rng_state()
    for tensor in tensors:
        tensor.add_(1)
    tensors[fails].copy_(refused(tensors[fails]))
    drawn = torch.rand(4, device=DEVICE)
    if drawn_in == "the part that fails":
        drawn.add_(tensors[fails])
    with pytest.raises(NotImplementedError, match="this rule has no idea"):
        lazyxla.sync()
    assert torch.equal(torch.lazyxla.get_rng_state(), state)
    assert torch.stack(tensors).cpu()[:, 0].tolist() == [float(i) for i in range(MANY)]
    for tensor in tensors:
        tensor.add_(1)
    lazyxla.sync()
    assert torch.stack(tensors).cpu()[:, 0].tolist() == [float(i + 1) for i in range(MANY)]
    with pytest.raises(RuntimeError, match="was not computed"):
        drawn.cpu()
    assert torch.equal(torch.lazyxla.get_rng_state(), state)


def test_what_does_not_depend_on_new_tensors_that_fail_stays_pending() -> None:
    x = torch.ones(4, device=DEVICE)
    lazyxla.sync()
    torch.manual_seed(7)
    expected = torch.rand(4, device=DEVICE).cpu()
    torch.manual_seed(7)
    drawn = torch.rand(4, device=DEVICE)
    after = torch.lazyxla.get_rng_state()
    fresh = [x + float(i) for i in range(MANY)]
    bad = refused(x)
    with pytest.raises(NotImplementedError, match="this rule has no idea"):
        lazyxla.sync()
    with pytest.raises(RuntimeError, match="was not computed"):
        bad.cpu()
    assert torch.equal(drawn.cpu(), expected)
    assert torch.equal(torch.lazyxla.get_rng_state(), after)
    assert torch.stack(fresh).cpu()[:, 0].tolist() == [1.0 + i for i in range(MANY)]


FAILING_PLUGIN = """
import ctypes, os, torch, lazyxla

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
lazyxla.settings.cache_size = 0
tensors = [torch.zeros(4, device="lazyxla") for _ in range(1100)]
lazyxla.sync(wait=True)
state = torch.lazyxla.get_rng_state()
for round, (stage, times, changed) in enumerate([
    ("compile", 1, 0),  # the first part's program
    ("execute", 5, 0),  # every part
    ("execute", 1, 1100 - 256),  # the first part
    ("", 0, 1100),
]):
    before = torch.stack(tensors).cpu()
    lazyxla.sync(wait=True)
    for tensor in tensors:
        tensor.add_(torch.full((4 + round,), 1.0, device="lazyxla")[:4])  # a program of its own
    drawn = torch.rand(4, device="lazyxla")
    plugin.fail(stage.encode(), times)
    try:
        lazyxla.sync(wait=True)
        assert not stage
    except torch.OutOfMemoryError:
        assert stage
    plugin.fail(b"", 0)
    after = torch.stack(tensors).cpu()
    assert ((after - before)[:, 0] == 1).sum() == changed, (stage, times)
    assert torch.equal(torch.lazyxla.get_rng_state(), state) == (changed == 0)
"""


def test_parts_that_the_plugin_refuses(
    run_python: Callable[..., Any], plugin: Callable[[str], dict[str, str]]
) -> None:
    run_python(FAILING_PLUGIN, **plugin("failing"))
