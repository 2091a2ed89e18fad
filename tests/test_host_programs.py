"""Graphs of a line that stay new are run by PyTorch's kernels, once a few of them were compiled."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted

COMPILED_FIRST = 4

_lines = itertools.count()


def new_line() -> Callable[[bool], None]:
    """A sync in a line of its own, which waits or not: what recurs is counted for each line."""
    code = compile("lazyxla.sync(wait=wait)", f"line_{next(_lines)}.py", "exec")
    return lambda wait: exec(code, {"lazyxla": lazyxla, "wait": wait})


@pytest.fixture(autouse=True)
def _host_programs() -> Iterator[None]:
    lazyxla.settings.host_programs = True
    yield
    lazyxla.settings.host_programs = False


def run(function: Callable[..., torch.Tensor], rounds: int, first: int = 2) -> dict[str, int]:
    """Compares a function of a growing tensor with the CPU; what the last four rounds counted."""
    sync = new_line()
    for size in range(first, first + rounds):
        x = torch.randn(size, 3)
        ours = x.to(DEVICE)
        if size == first + rounds - 4:
            lazyxla.reset_counters()
        result = function(ours)
        sync(False)
        expected = function(x)
        assert (result.dtype, result.shape, result.stride()) == (
            *(expected.dtype, expected.shape, expected.stride()),
        )
        torch.testing.assert_close(result.cpu(), expected)
    return lazyxla.counters()


def test_a_cat_that_grows() -> None:
    ours, theirs = torch.zeros(0, 3, device=DEVICE), torch.zeros(0, 3)
    lazyxla.sync()
    compiles = []
    for number in range(COMPILED_FIRST + 8):
        with counted() as n:
            ours = torch.cat([ours, torch.full((1, 3), float(number), device=DEVICE)])
            lazyxla.sync(wait=True)
        theirs = torch.cat([theirs, torch.full((1, 3), float(number))])
        compiles.append((n.compiles, n.host_programs, n.executions))
    assert compiles == [(1, 0, 1)] * COMPILED_FIRST + [(0, 1, 1)] * 8
    assert torch.equal(ours.cpu(), theirs)


def test_what_ran_is_known() -> None:
    for size in range(2, 2 + COMPILED_FIRST + 2):
        (torch.ones(size, device=DEVICE).sin() * 2).cpu()
    with counted() as n:
        result = torch.ones(size, device=DEVICE).sin() * 3
        lazyxla.sync(wait=True)
    assert (n.compiles, n.host_programs) == (0, 1)
    torch.testing.assert_close(result.cpu(), torch.ones(size).sin() * 3)


def test_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lazyxla"):
        for size in range(2, 2 + COMPILED_FIRST + 2):
            torch.ones(size, device=DEVICE).tan().cpu()
    told = [r.getMessage() for r in caplog.records if "PyTorch's kernels" in r.getMessage()]
    assert len(told) == 2
    assert f"{__file__}:" in told[0]
    assert "running 2 operators by PyTorch's kernels (a new graph" in told[0]


def test_turned_off() -> None:
    lazyxla.settings.host_programs = False
    n = run(lambda x: x.cos() - 1, COMPILED_FIRST + 4)
    assert (n["compiles"], n["host_programs"]) == (4, 0)


def test_regions_are_compiled() -> None:
    function = lazyxla.compile(lambda x: x.sin() - x)
    n = run(function, COMPILED_FIRST + 4)
    assert (n["compiles"], n["host_programs"]) == (4, 0)


ON_HOST: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.cat([x, x[:1]]).t(),
    lambda x: x[1:] - x[:-1],
    lambda x: x.flip(0).mT[:, 1:].exp(),
    lambda x: x.mean(0, keepdim=True).expand(3, 3),
    lambda x: (x * 3).to(torch.bfloat16).float() + 0.5,
    lambda x: x.softmax(1) @ x.mT,
    lambda x: torch.where(x > 0, x, 2.0).sum(1),
    lambda x: (x > 0).to(torch.int32) * 3,
    lambda x: x.view(torch.int32) & 255,
    # Views of a copy, which is itself a part of its operand's memory.
    lambda x: x[1:].clone().t(),
    lambda x: x[1:].clone().view(torch.int16)[:, 1:] + 1,
    lambda x: x[1:].clone().fill_diagonal_(1.0).view(-1)[3:].clone().view(-1, 3).t(),
    lambda x: torch.stack([x.amax(0), x.amin(0), x.var(0)]),
    lambda x: torch.arange(x.shape[0], device=x.device) * 2,
    lambda x: x.cumsum(0).clamp(-1, 1),
    lambda x: torch.nn.functional.pad(x, (1, 2), value=3.0),
    lambda x: x.unfold(0, 2, 1).contiguous(),
    lambda x: torch.addmm(x[:1, :3], x, x[:2].mT @ x[:2], alpha=0.5),
    lambda x: x.clone().fill_diagonal_(1.0),
    lambda x: x[torch.tensor([0, 1], device=x.device)],
    lambda x: x.gather(0, torch.zeros(1, 3, dtype=torch.int64, device=x.device)),
    lambda x: torch.zeros_like(x).index_fill_(1, torch.tensor([1], device=x.device), 2.0) + x,
    # Complex numbers are no inputs: each makes an operator of its own.
    lambda x: torch.where(x > 0, x * (1 + 2j), 1j) + torch.full_like(x, 3, dtype=torch.complex64),
    lambda x: torch.complex(x, x).masked_fill(x > 0, 2j).add_(x, alpha=1 - 1j),
    lambda x: (x > 0).to(torch.int64).repeat(2, 1),
    # The kernel returns a conjugate as a bit of the tensor.
    lambda x: (
        torch.linalg.solve_ex(
            torch.complex(x, x.abs() + 1).diag_embed(), torch.complex(x, x).unsqueeze(1), left=False
        ).result
    ),
    # Of zeros, which operators are tried with, no index and no probability would be made.
    lambda x: x.gather(1, (x != 0).sum(1, keepdim=True) - 2),
    lambda x: torch.nn.functional.binary_cross_entropy(x.abs() / x.abs().sum(), x.sigmoid()),
]


@pytest.mark.parametrize("number", range(len(ON_HOST)))
def test_operators(number: int) -> None:
    n = run(ON_HOST[number], COMPILED_FIRST + 6)
    assert (n["compiles"], n["host_programs"]) == (0, 4)


def test_writes_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:, 0] = 5
        y.t()[1].mul_(2)
        x.add_(y)
        return x.view(-1)[::2]

    assert run(function, COMPILED_FIRST + 6)["host_programs"] == 4


# What XLA defines otherwise, or draws from the device's generator.
COMPILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "division": lambda x: (x > 0).to(torch.int32) // (x > 9).to(torch.int32).add_(2),
    "cast": lambda x: (x * 1e3).to(torch.int64),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_all_the_same(name: str) -> None:
    n = run(COMPILED[name], COMPILED_FIRST + 6, first=3)
    assert (n["compiles"], n["host_programs"]) == (4, 0)


@pytest.mark.parametrize("size", [17, 100_003])
def test_later_programs_may_write_to_the_results(size: int) -> None:
    x = torch.arange(float(size))
    with torch.no_grad():
        ours = x.to(DEVICE) + 1
        with counted() as n:
            lazyxla.sync(wait=True)
        assert (n.compiles, n.host_programs) == (0, 1)
        memory = lazyxla.host_view(ours).data_ptr()
        lazyxla.settings.host_programs = False
        ours.mul_(2)
        lazyxla.sync(wait=True)
        assert lazyxla.host_view(ours).data_ptr() == memory
        others = [torch.full((size,), -1.0) for _ in range(20)]
        assert memory not in {other.data_ptr() for other in others}  # it is not free yet
        assert torch.equal(ours.cpu(), (x + 1) * 2)


def test_random_numbers_are_the_same() -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [
            torch.rand(size, device=DEVICE).mul_(2).cpu() for size in range(2, COMPILED_FIRST + 6)
        ]

    before = draw()
    assert all(map(torch.equal, draw(), before))
    lazyxla.settings.host_programs = False
    assert all(map(torch.equal, draw(), before))


STEPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: torch.cat([x, y[:1]]),
    lambda x, y: x[1:] if x.shape[0] > 4 else x * 2,
    lambda x, y: x + y[0],
    lambda x, y: x.flip(0).sin(),
    lambda x, y: torch.where(x > 0, x, -x / 2),
    lambda x, y: x.t().contiguous().t() - 1,
    lambda x, y: x.clone().mul_(0.5),
    lambda x, y: x - x.mean(0),
    lambda x, y: torch.stack([x, x.cos()], 1).sum(1),
]


def compute(device: str, seed: int, rounds: int = 18) -> torch.Tensor:
    """A state that grows and shrinks by the same operators in each round."""
    chance = random.Random(seed)
    steps = chance.sample(STEPS, 3)
    x, y = torch.linspace(-1, 1, 12).reshape(4, 3).to(device), torch.eye(3).to(device)
    for number in range(rounds):
        for step in steps:
            x = step(x, y)
        x = torch.cat([x, torch.full((1, 3), number / 8, device=device)])
        if device == DEVICE:
            lazyxla.sync()
    return x.cpu()


@pytest.mark.parametrize("seed", range(24))
def test_random_loops(seed: int) -> None:
    torch.testing.assert_close(compute(DEVICE, seed), compute("cpu", seed))


def test_threads() -> None:
    results: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        results[seed] = compute(DEVICE, seed % 3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        torch.testing.assert_close(results[seed], compute("cpu", seed % 3))


def test_a_stage_of_a_cut_graph() -> None:
    def losses(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(30))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen = torch.zeros(0, device=device)
        all_seen = []
        for _ in range(24):
            loss = model(torch.ones(4, 8, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = torch.cat([seen, loss.detach()[None]])
            if device == DEVICE:
                lazyxla.sync()
            all_seen.append(seen)
        return [each.cpu() for each in all_seen]

    ours = losses(DEVICE)
    with counted() as n:
        losses(DEVICE)
    assert n.compiles == 0
    torch.testing.assert_close(ours, losses("cpu"))
    assert lazyxla.counters()["host_programs"] > 0


def test_a_flush_does_not_wait_for_inputs() -> None:
    sync = new_line()

    def grow(x: torch.Tensor) -> torch.Tensor:
        grown = torch.cat([x, x[:1]])
        sync(False)
        return grown

    for size in range(2, COMPILED_FIRST + 4):
        x = torch.ones(size, device=DEVICE)
        lazyxla.sync()
        grow(x)
    lazyxla.reset_counters()

    def slow() -> torch.Tensor:
        result = torch.ones(700, 700, device=DEVICE)
        for _ in range(60):
            result = result @ result / 700
        return result[0, :40].clone()

    slow()
    lazyxla.sync(wait=True)  # compiled
    outcomes = []
    for _ in range(5):  # on a busy machine the input may be there before the flush
        x = slow()
        lazyxla.sync()
        with counted() as n:
            grown = grow(x)
        torch.testing.assert_close(grown.cpu(), torch.ones(41))
        outcomes.append((n.compiles, n.host_programs))  # it is counted when it runs
    assert (0, 0) in outcomes
    assert lazyxla.counters()["host_programs"] == len(outcomes)


def test_a_failure_is_told_and_undone() -> None:
    kept = torch.arange(4.0, device=DEVICE)

    def step(size: int, value: float) -> torch.Tensor:
        x = torch.full((size,), value, device=DEVICE)
        lazyxla.sync()
        kept.add_(1)
        return (torch.linalg.eigvalsh(x.outer(x)) + kept.sum()).cpu()

    for size in range(2, COMPILED_FIRST + 4):
        step(size, 0.25)
    assert lazyxla.counters()["host_programs"] > 0
    before = kept.cpu()
    with pytest.raises(RuntimeError, match="failed to converge"):
        step(20, math.inf)
    assert torch.equal(kept.cpu(), before)
    with counted() as n:
        step(21, 0.25)
    assert n.compiles == 0
    assert torch.equal(kept.cpu(), before + 1)


RULE = """
import torch, lazyxla

@lazyxla.lowering.rule("aten::digamma")
def digamma(b, x):
    return b.hlo.negate(x)

for size in range(2, 14):
    x = torch.ones(size, device="lazyxla")
    lazyxla.sync()
    assert torch.equal(torch.digamma(x).cpu(), -torch.ones(size))
print(lazyxla.counters()["host_programs"] - 8)  # those that make x
"""


def test_a_users_rule_is_compiled(run_python: Callable[..., Any]) -> None:
    assert run_python(RULE, LAZYXLA_HOST_PROGRAMS="1").stdout.split() == ["0"]


ENDING = """
import torch, lazyxla
x = torch.ones(0, device="lazyxla")
lazyxla.sync()
slow = torch.ones(500, 500, device="lazyxla")
for number in range(14):
    for _ in range(4):
        slow = slow @ slow / 500
    first = slow[0, :1].clone()
    lazyxla.sync()
    x = torch.cat([x, first])
    before = lazyxla.counters()["compiles"]
    lazyxla.sync()
print(lazyxla.counters()["compiles"] - before)
"""


def test_a_process_may_end_while_one_waits(run_python: Callable[..., Any]) -> None:
    result = run_python(ENDING, LAZYXLA_HOST_PROGRAMS="1")
    assert result.returncode == 0
    assert result.stdout.split() == ["0"]
