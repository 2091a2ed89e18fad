"""In inference the host does a graph's first runs, and then its program is compiled."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import lazyxla
from tests import vision  # noqa: F401 - transformers wants a torchvision that can be imported
from tests.random_programs import RandomProgram
from tests.support import DEVICE, counted
from tests.test_loops import generate, language_model, prompt

COMPILED_AT, RUNS = 4, 64
OPERATOR_COMPILED_AT, OPERATOR_RUNS = 24, 32  # in eager mode


@pytest.fixture(autouse=True)
def _host_programs() -> Iterator[None]:
    lazyxla.settings.host_programs = True
    yield
    lazyxla.settings.host_programs = False


_sizes = itertools.count(101)
"""Each test's own: a graph of another one's size is new."""


def run(
    function: Callable[..., torch.Tensor], x: torch.Tensor, *numbers: float
) -> tuple[int, int, int]:
    """Runs it once and compares it with the CPU.

    Returns:
        How many programs were compiled, run by the host, and run at all.
    """
    ours = x.to(DEVICE)
    lazyxla.sync(wait=True)
    with counted() as n:
        result = function(ours, *numbers)
        lazyxla.sync(wait=True)
    expected = function(x, *numbers)
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(result.cpu(), expected)
    return n.compiles, n.host_programs, n.executions


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_counts(mode: Any) -> None:
    x = torch.randn(next(_sizes), 5)
    with mode():
        counts = [run(lambda x: (x.sin() @ x.mT).softmax(0), x) for _ in range(RUNS + 3)]
    on_host = [(int(i == COMPILED_AT), 1, 1) for i in range(1, RUNS + 1)]
    assert counts == on_host + [(0, 0, 1)] * 3


def test_with_gradients_it_is_compiled_at_once() -> None:
    x = torch.randn(next(_sizes), 5)
    assert [run(lambda x: x.sin() @ x.mT, x) for _ in range(3)] == [(1, 0, 1)] + [(0, 0, 1)] * 2


def test_gradients_end_a_trial() -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad():
        assert [run(lambda x: x.cos() @ x.mT, x) for _ in range(2)] == [(0, 1, 1)] * 2
    assert run(lambda x: x.cos() @ x.mT, x) == (1, 0, 1)
    with torch.no_grad():
        assert run(lambda x: x.cos() @ x.mT, x) == (0, 0, 1)


def test_numbers_that_varied_are_inputs() -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad():
        counts = [run(lambda x, n: x.sin() * n, x, i / 8) for i in range(RUNS + 4)]
    assert sum(compiles for compiles, _, _ in counts) == 1
    assert counts[-1] == (0, 0, 1)


def test_where_a_view_begins_is_an_input() -> None:
    rows = next(_sizes)
    x = torch.randn(rows, 5)

    def function(x: torch.Tensor, row: int) -> torch.Tensor:
        y = x.clone()
        y[row] = x[row + 1] * 2
        return y

    with torch.no_grad():
        counts = [run(function, x, i) for i in range(RUNS + 4)]
    assert sum(compiles for compiles, _, _ in counts) == 1


def test_what_runs_in_stages_is_part_of_another() -> None:
    """XLA computes the cast, the host the others: three stages, also after one that is new."""
    size = next(_sizes)
    weights = [torch.randn(size, size) for _ in range(6)]
    ours = [weight.to(DEVICE) for weight in weights]

    def half(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
            weight.mul_(0.5).add_(x.mean())
        return x

    def function(x: torch.Tensor) -> torch.Tensor:
        used = weights if x.device.type == "cpu" else ours
        x = half(x, used[:3])
        return half((x * 9).to(torch.int64).to(torch.float32), used[3:])

    x = torch.randn(5, size)
    with torch.no_grad(), counted() as n:
        alone = run(function, x)
        after_another = run(lambda x: function(x.flip(0)), x)
        alone_again = run(function, x)
    assert n.graphs_cut == 2
    assert alone == (1, 2, 3)
    assert after_another == (0, 3, 4)
    assert alone_again == (0, 2, 3)
    for weight, mine in zip(weights, ours, strict=True):
        torch.testing.assert_close(mine.cpu(), weight)


NEVER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: (x * 1e3).to(torch.int64),
    "division": lambda x: (x > 0).to(torch.int32) // (x > 9).to(torch.int32).add_(2),
    "large": lambda x: (x.repeat(1, 9000).sin() + 1)[:, ::100],
}


def test_a_kernel_warns_once_for_each_run() -> None:
    x = torch.randn(1, next(_sizes))
    for _ in range(2):
        with torch.no_grad(), pytest.warns(UserWarning, match="degrees of freedom") as told:
            n = run(lambda x: x.std(0).nan_to_num(), x)
        assert n == (0, 1, 1)
        assert len(told) == 2  # the CPU's, too


@pytest.mark.parametrize("name", NEVER)
def test_what_is_compiled_at_once(name: str) -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad():
        counts = [run(NEVER[name], x) for _ in range(2)]
    assert [each[:2] for each in counts] == [(1, 0), (0, 0)]


def test_random_numbers_without_a_kernel_are_compiled_at_once() -> None:
    size = next(_sizes)
    with torch.no_grad(), counted() as n:
        torch.manual_seed(1)
        first = torch.empty(size, device=DEVICE).cauchy_().abs().cpu()
        torch.manual_seed(1)
        assert torch.equal(torch.empty(size, device=DEVICE).cauchy_().abs().cpu(), first)
    assert n.compiles >= 1
    assert n.host_programs == 0


def test_regions_are_compiled() -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad():
        assert run(lazyxla.compile(lambda x: x.sin() - x), x)[:2] == (1, 0)


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_eager_mode_compiles_operators_that_recur_often(needs_gradients: bool) -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.set_grad_enabled(needs_gradients), lazyxla.eager_mode(True):
        counts = [run(lambda x: x.sin(), x) for _ in range(OPERATOR_RUNS + 3)]
    on_host = [(int(i == OPERATOR_COMPILED_AT), 1, 1) for i in range(1, OPERATOR_RUNS + 1)]
    assert counts == on_host + [(0, 0, 1)] * 3


def test_batches_of_fused_eager_mode() -> None:
    x = torch.randn(next(_sizes), 5)
    with lazyxla.eager_mode("fused"):
        assert run(lambda x: x.exp() - x, x)[:2] == (1, 0)  # a step of training, for all we know
        with torch.no_grad():
            assert run(lambda x: x.exp() + x, x) == (0, 1, 1)


def test_turned_off() -> None:
    lazyxla.settings.host_programs = False
    with torch.no_grad():
        assert run(lambda x: x.tan() - x, torch.randn(next(_sizes), 5)) == (1, 0, 1)


def test_turning_it_off_ends_a_trial() -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad():
        assert run(lambda x: x.tan() @ x.mT, x) == (0, 1, 1)
        lazyxla.settings.host_programs = False
        assert run(lambda x: x.tan() @ x.mT, x) == (1, 0, 1)


def test_told(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(next(_sizes), 5)
    with torch.no_grad(), caplog.at_level("INFO", logger="lazyxla"):
        for _ in range(RUNS + 2):
            run(lambda x: x.erf() + x.mT.mean() * x, x)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "running 5 operators by PyTorch's kernels (a new graph" in told[0]
    assert "compiling 5 operators (a graph that PyTorch's kernels ran before, 3 times)" in told[1]


def test_an_index_out_of_range_is_told_and_undone() -> None:
    rows = next(_sizes)
    x = torch.randn(rows, 5)

    def function(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[row] * 2

    with torch.no_grad():
        ours = x.to(DEVICE)
        wrong = torch.tensor([rows], device=DEVICE)
        lazyxla.sync()
        lost = function(ours, wrong)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            lazyxla.sync(wait=True)
        del lost
        assert torch.equal(ours.cpu(), x)
        with counted() as n:
            result = function(ours, torch.tensor([rows - 1], device=DEVICE)).cpu()
        assert (n.compiles, n.host_programs) == (0, 1)
        torch.testing.assert_close(result, function(x, torch.tensor([rows - 1])))


def test_threads() -> None:
    x = torch.randn(next(_sizes), 7)
    ours, expected = x.to(DEVICE), (x.sin() @ x.mT).sum(1)
    lazyxla.sync(wait=True)

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(RUNS):
                torch.testing.assert_close((ours.sin() @ ours.mT).sum(1).cpu(), expected)

    with counted() as n, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what one of them raised
    assert (n.compiles, n.host_programs) == (1, RUNS)


SAME = """
import torch, lazyxla
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(33, 65), torch.nn.GELU(), torch.nn.LayerNorm(65), torch.nn.Linear(65, 33)
).to("lazyxla")
x = torch.randn(7, 33).to("lazyxla")
with torch.no_grad():
    for _ in range(80):
        x = model(x).tanh()
        lazyxla.sync()
    print(x.double().sum().item().hex(), lazyxla.counters()["compiles"])
"""


def test_another_process_computes_the_same(run_python: Callable[..., Any]) -> None:
    first, second = (
        run_python(SAME, LAZYXLA_HOST_PROGRAMS="1", LAZYXLA_CACHE_SIZE="0").stdout for _ in range(2)
    )
    assert first == second
    assert first.split()[1] == "1"


LOADED = """
import torch, lazyxla
with torch.no_grad():
    for _ in range({rounds}):
        (torch.ones(17, 3, device="lazyxla").sin().mT @ torch.ones(17, 3, device="lazyxla")).cpu()
counters = lazyxla.counters()
print(counters["compiles"], counters["programs_loaded"], counters["host_programs"])
"""


def test_what_is_on_disk_is_loaded_at_once(run_python: Callable[..., Any], tmp_path: Any) -> None:
    kept = {"LAZYXLA_CACHE_DIR": str(tmp_path), "LAZYXLA_CACHE_SIZE": str(1 << 28)}
    first = run_python(LOADED.format(rounds=70), LAZYXLA_HOST_PROGRAMS="1", **kept)
    second = run_python(LOADED.format(rounds=2), LAZYXLA_HOST_PROGRAMS="1", **kept)
    assert first.stdout.split() == ["1", "0", "64"]
    assert second.stdout.split() == ["0", "1", "0"]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed: int) -> None:
    @hypothesis.seed(1000 + seed)
    @hypothesis.settings(
        max_examples=100,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.randoms(), st.integers(1, 14))
    def run(random: Any, steps: int) -> None:
        program = RandomProgram(random.choice)
        try:
            with torch.no_grad():
                program.run(steps)
        finally:
            program.forget()

    with counted() as n:
        run()
    assert n.host_programs > n.compiles


def test_generating() -> None:
    model = language_model("Llama")
    want = generate(model, prompt(13), cache_implementation="static")
    model.to(DEVICE)
    with counted() as n:
        for _ in range(4):
            got = generate(model, prompt(13), cache_implementation="static")
            assert torch.equal(got, want)
    assert n.compiles <= 6  # the model's once or twice, and small programs
    with counted() as n:
        assert torch.equal(generate(model, prompt(13), cache_implementation="static"), want)
    assert n.compiles == 0


def test_generating_with_a_cache_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    lazyxla.recompilations._causes.clear()  # the same line may have been told before
    model = language_model("Llama", num_hidden_layers=1)
    want = generate(model, prompt(11))
    model.to(DEVICE)
    with counted() as n, caplog.at_level(logging.WARNING, logger="lazyxla"):
        assert torch.equal(generate(model, prompt(11)), want)
    assert n.compiles <= 2  # each token's graph is new, and no program is made of it
    told = [r.getMessage() for r in caplog.records if "static" in r.getMessage()]
    assert len(told) == 1
    assert 'cache_implementation="static"' in told[0]
