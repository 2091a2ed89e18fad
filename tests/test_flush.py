"""Flushing: what is computed, compiled and bounded, told by the counters."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import lazyxla
from lazyxla import _C
from lazyxla.lowering import registry
from tests.support import DEVICE, assert_same, counted, on_device

pytestmark = pytest.mark.usefixtures("collected")


def vector(size: int = 8) -> torch.Tensor:
    return torch.arange(float(size))


# --- What is computed ----------------------------------------------------------------------------


def test_recording_runs_nothing():
    x = on_device(vector())
    with counted() as n:
        y = (x * 2 + 1).relu().sum()
        y.add_(1)
    assert n.nodes_recorded == 5
    assert n.flushes == n.lowerings == n.executions == 0


def test_dead_tensors_are_not_computed():
    x = on_device(vector())
    with counted() as n:
        y = x * 3.25
        for _ in range(5):
            x.exp().sin()  # nobody keeps it
        z = y.cos()
        z.copy_(y)  # overwritten: the cosine is dead
        lazyxla.sync()
    assert n.nodes_lowered == 1
    assert_same(z, vector() * 3.25)


def test_nothing_alive_compiles_nothing():
    x = on_device(vector())
    with counted() as n:
        (x + 1).exp()
        lazyxla.sync()
    assert (n.flushes, n.lowerings, n.executions) == (0, 0, 0)


def test_undefined_memory_is_not_computed():
    with counted() as n:
        x = torch.empty(5, device=DEVICE)
        lazyxla.sync()
        x.fill_(2)
        lazyxla.sync()
    assert n.nodes_lowered == 1


def test_overwritten_undefined_memory_is_not_read():
    with counted() as n:
        x = torch.empty(2, 5, device=DEVICE)
        x.zero_()
        x.add_(1.5)
        lazyxla.sync()
    assert n.nodes_lowered == 2


def test_a_read_computes_all_that_is_pending():
    x = on_device(vector())
    y, z = x * 5, x - 9
    with counted() as n:
        y.tolist()
        z.tolist()
        (y[2:3]).item()
    assert (n.executions, n.downloads) == (1, 3)


def test_equal_values_are_computed_once():
    """Two storages with the same value are one output; writing one leaves the other."""
    x = on_device(vector())
    y = x.exp()
    z = y.clone()
    lazyxla.sync()
    y.zero_()
    assert_same(z, vector().exp())


def test_a_read_within_a_loop_keeps_programs_small():
    def step(x, w, i):
        x.mul_(0.9).add_(w, alpha=0.1)
        w.sub_(x * 0.01)
        return x.sum().item() if i % 5 == 4 else None

    x, w = on_device(vector(16)), on_device(vector(16).flip(0))
    for i in range(15):
        step(x, w, i)
    with counted() as n:
        for i in range(100):
            step(x, w, i)
    assert n.executions == 20
    assert n.lowerings == n.compiles == 0
    assert n.cache_hits == 20


# --- What is compiled ----------------------------------------------------------------------------


def test_the_same_graph_compiles_once():
    with counted() as n:
        for i in range(6):
            x = on_device(vector(9) + i)
            y = (x * 2).tanh().add_(x)
            assert_same(y, ((vector(9) + i) * 2).tanh() + vector(9) + i)
    assert (n.compiles, n.cache_hits, n.executions) == (1, 5, 6)


def test_another_shape_or_operator_is_another_program():
    lazyxla.sync()
    before = _C.cached_programs()
    x = on_device(vector(10))
    for function in (torch.sin, torch.cos):
        for part in (x[:4].clone(), x[:3].clone()):
            lazyxla.sync()
            assert_same(function(part), function(part.cpu()))
    assert _C.cached_programs() - before == 5  # the two parts, and four times a function


def test_operands_are_part_of_the_key():
    x, y = on_device(vector()), on_device(vector().flip(0))
    lazyxla.sync()
    assert_same(x - y, vector() - vector().flip(0))
    assert_same(y - x, vector().flip(0) - vector())
    assert_same(x - x, torch.zeros(8))


@pytest.mark.parametrize("convert", [float, int, torch.tensor], ids=["float", "int", "tensor"])
def test_a_number_that_changes_compiles_once_more(convert):
    x = on_device(vector(11))
    lazyxla.sync()
    compiles = []
    for i in range(8):
        with counted() as n:
            y = x * convert(i + 2)
            lazyxla.sync()
        compiles.append(n.compiles)
        assert_same(y, vector(11) * convert(i + 2))
    assert compiles == [1, 1, 0, 0, 0, 0, 0, 0]


def test_several_numbers_that_change():
    """Each set of changing numbers costs one compile; those that stay remain constants."""
    x = on_device(vector(12))
    total = 0
    for i in range(10):
        with counted() as n:
            y = (x * (1.5 + i) + (i // 4)).clamp(min=-2.5, max=7 * i).div(3.0)
            lazyxla.sync()
        total += n.compiles
        assert_same(y, (vector(12) * (1.5 + i) + (i // 4)).clamp(min=-2.5, max=7 * i).div(3.0))
    assert total <= 3


def test_integer_slots_are_exact():
    x = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for value in (1, 2**53 + 1, -(2**62) + 3, 2**63 - 1):
        assert (x + value).tolist() == [value, value]


def test_float_slots_are_double():
    x = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for value in (0.1, 1e300, -5e-300, float("inf")):
        assert (x + value).tolist() == [value, value]
    assert (x + float("nan")).isnan().all()
    assert (x - 0.0).tolist() == [0.0, 0.0]


def test_negative_zero_is_not_zero():
    x = torch.ones(2, device=DEVICE)
    assert [torch.copysign(x, value)[0].item() for value in (0.0, -0.0, 0.0)] == [1, -1, 1]


def test_an_optimizer_step_count_does_not_recompile():
    w = on_device(vector(13)).requires_grad_()
    optimizer = torch.optim.Adam([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step():
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()
        schedule.step()
        lazyxla.sync()

    for _ in range(3):
        step()
    with counted() as n:
        for _ in range(10):
            step()
    assert n.compiles == n.shape_inferences == 0


@pytest.mark.parametrize("seed", range(6))
def test_numbers_of_a_loop_within_a_step_compile_once_more(seed: int):
    """In each step other turns of it have other numbers, and other positions."""
    rng = random.Random(seed)
    turns, columns = rng.randint(3, 8), 4 + seed
    numbers, places = [0.5] * turns, [0] * turns
    cpu = torch.randn(6, columns)
    x = cpu.to(DEVICE)

    def step(x):
        total = 0
        for number, place in zip(numbers, places):
            total = total + (x.tanh() - number).square().sum(0)[place] * 2
        return total

    with counted() as n:
        for _ in range(12):
            torch.testing.assert_close(step(x).cpu(), step(cpu))
            for turn in rng.sample(range(turns), 2):
                numbers[turn], places[turn] = rng.random(), rng.randrange(columns)
    assert n.compiles <= 3  # once for the numbers, and once for the positions


def test_random_numbers_do_not_recompile():
    x = torch.zeros(6, device=DEVICE)
    lazyxla.sync()
    seen = []
    for seed in (1, 2, 3, 1):
        torch.manual_seed(seed)
        with counted() as n:
            seen.append(x.normal_().tolist())
        assert n.compiles <= (not seen[1:])
    assert seen[0] == seen[3] != seen[1] != seen[2]


# --- The bound on what is pending ----------------------------------------------------------------


@pytest.fixture
def at_most_50_nodes() -> Iterator[None]:
    before = lazyxla.settings.max_pending_nodes
    lazyxla.settings.max_pending_nodes = 50
    yield
    lazyxla.settings.max_pending_nodes = before


@pytest.mark.usefixtures("at_most_50_nodes")
def test_a_loop_without_a_sync_runs_by_itself():
    x = torch.zeros(3, device=DEVICE)
    with counted() as n:
        for _ in range(500):
            x.add_(1)
    assert 8 <= n.executions <= 11
    assert n.compiles <= 3
    assert x.tolist() == [500] * 3


def test_a_deep_graph_is_no_deep_recursion():
    x = torch.zeros(3, device=DEVICE)
    lazyxla.sync()
    y = x
    for _ in range(15000):
        y = y + 1
    del y
    assert x.tolist() == [0, 0, 0]


# --- Failures ------------------------------------------------------------------------------------


def test_a_failing_lowering_names_the_operator_and_leaves_the_device_usable(run_python):
    run_python(
        """
import torch, lazyxla
from lazyxla.lowering import registry
library = torch.library.Library("lazyxla_test", "DEF")
library.define("broken(Tensor x) -> Tensor")
library.impl("broken", lambda x: torch.empty_like(x), "Meta")

@registry.rule("lazyxla_test::broken")
def broken(b, x):
    raise ValueError("not today")

lazyxla._C.register_operators(registry.names())
x = torch.ones(3, device="lazyxla")
z = x * 5  # pending with the broken operator, but not dependent on it
y = torch.ops.lazyxla_test.broken(x + 1)
for _ in range(2):
    try:
        y.cpu()
    except Exception as error:
        text = str(error)
    else:
        raise AssertionError("no error")
    assert "lazyxla_test::broken" in text and "not today" in text, text
del y
assert (x * 2).tolist() == [2, 2, 2] and z.tolist() == [5, 5, 5]
"""
    )


def test_what_comes_of_a_failure_tells_it_once():
    registry.rule("aten::digamma")(lambda b, x: b.nothing())
    y = torch.ones(3, device="lazyxla").digamma()
    for _ in range(4):
        with pytest.raises(RuntimeError, match="digamma"):
            lazyxla.sync()
        y = y + 1
    with pytest.raises(RuntimeError) as failure:
        y.cpu()
    assert str(failure.value).count("was not computed") == 1
    assert "aten::digamma" in str(failure.value)
