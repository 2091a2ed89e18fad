"""Compiled regions: one program for a block or a function, whatever the mode around it."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
import threading
from collections.abc import Generator, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, assert_same, counted, on_host

pytestmark = pytest.mark.cuda

MODES = [False, True, "fused"]


@pytest.fixture(autouse=True)
def modes_stay_as_they_are() -> Iterator[None]:
    yield
    assert lazyxla.eager_mode() is False
    assert not _C.in_region()


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE)


# --- One program ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_function_is_one_program_in_every_mode(mode) -> None:
    @lazyxla.compile
    def product(x: torch.Tensor) -> torch.Tensor:
        """Says what it does."""
        return (x @ x.t()).relu().sum(0)

    assert product.__name__ == "product"
    assert product.__doc__ == "Says what it does."
    x = _tensor(8, 8)
    with lazyxla.eager_mode(mode):
        product(x)
        with counted() as n:
            result = product(x)
        assert (n.executions, n.compiles) == (1, 0)
        assert lazyxla.eager_mode() == mode
    torch.testing.assert_close(result.cpu(), (x.cpu() @ x.cpu().t()).relu().sum(0))


def test_pending_work_does_not_leak_into_a_region() -> None:
    x = _tensor(4, 9)
    before = x + 1
    with counted() as n, lazyxla.compile():
        after = before * 2
    assert n.executions == 2
    assert n.nodes_lowered == 2
    torch.testing.assert_close(after.cpu(), (x.cpu() + 1) * 2)


def test_a_value_read_inside_cuts_the_region() -> None:
    x = _tensor(3, 3)
    with counted() as n, lazyxla.compile():
        y = x + 1
        total = y.sum().item()
        z = y * total
    assert n.executions == 2
    assert_same(z, (x.cpu() + 1) * total)


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_restores_the_mode_and_runs_what_was_recorded(mode) -> None:
    x = _tensor(7)
    results = []

    @lazyxla.compile
    def fail() -> None:
        results.append(x * 5)
        raise KeyError("mine")

    with lazyxla.eager_mode(mode):
        with counted() as n, pytest.raises(KeyError, match="mine"):
            fail()
        assert lazyxla.eager_mode() == mode
        assert n.executions == 1
    assert_same(results[0], x.cpu() * 5)


def test_regions_nest_and_the_outermost_is_the_program() -> None:
    x = _tensor(5)

    @lazyxla.compile
    def inner(value: torch.Tensor) -> torch.Tensor:
        return value.exp()

    @lazyxla.compile
    def outer(value: torch.Tensor) -> torch.Tensor:
        return inner(inner(value) - 1) + 2

    with counted() as n:
        result = outer(x)
    assert n.executions == 1
    torch.testing.assert_close(result.cpu(), (x.cpu().exp() - 1).exp() + 2)


def test_a_mode_inside_a_region_counts_until_its_end() -> None:
    x = _tensor(6)
    with counted() as n, lazyxla.compile():
        y = x + 1
        with lazyxla.eager_mode(True):  # runs what was recorded
            y = y * 2
            y = lazyxla.compile(lambda t: (t - 3).abs())(y)
        assert lazyxla.eager_mode() is False
        y = y + 1
        y = y / 2
    assert n.executions == 4
    torch.testing.assert_close(y.cpu(), ((x.cpu() * 2 + 2 - 3).abs() + 1) / 2)


def test_a_region_belongs_to_its_thread() -> None:
    x = _tensor(2, 2)
    lazyxla.sync()
    executed = []

    def work() -> None:
        with lazyxla.eager_mode(True), counted() as n:
            (x + 1) * 2
        executed.append(n.executions)

    with lazyxla.compile():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert executed == [2]


def test_a_function_runs_in_several_threads() -> None:
    double = lazyxla.compile(lambda value: (value + value).relu())
    inputs = [torch.randn(4, 4) for _ in range(8)]
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        for _ in range(20):
            results[index] = double(inputs[index].to(DEVICE))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, value in enumerate(inputs):
        assert_same(results[index], (value + value).relu())


# --- What can be compiled ------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.total = _tensor(3) * 0

    @lazyxla.compile
    def add(self, x: torch.Tensor, *, times: int = 1) -> dict[str, object]:
        for _ in range(times):
            self.total += x
        return {"total": self.total, "times": times, "nothing": None}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self.total + x).square()


def test_methods_partials_and_callable_objects() -> None:
    counter, x = Counter(), _tensor(3)
    lazyxla.sync()
    with lazyxla.eager_mode(True), counted() as n:
        result = counter.add(x, times=3)
        assert n == {}
    assert n.executions == 1
    assert result["times"] == 3
    assert result["nothing"] is None
    torch.testing.assert_close(result["total"].cpu(), 3 * x.cpu())
    bound = lazyxla.compile(functools.partial(counter.add, times=1))
    with counted() as n:
        bound(x)
    assert n.executions == 1
    with lazyxla.eager_mode(True), counted() as n:
        squared = lazyxla.compile(counter)(x)
    assert n.executions == 1
    torch.testing.assert_close(squared.cpu(), (5 * x.cpu()).square())


def test_each_stretch_of_a_generator_is_a_program() -> None:
    log = []

    @lazyxla.compile
    def running(x: torch.Tensor) -> Generator[torch.Tensor, float, str]:
        total = x * 0
        try:
            for _ in range(3):
                total = (total + x) * 1.5
                try:
                    number = yield total
                except KeyError:
                    total = total * 0
                else:
                    total = total + (number or 0)
            return "end"
        finally:
            log.append(_C.in_region())

    x = torch.ones(2, 2)
    ours = running(x.to(DEVICE))
    with lazyxla.eager_mode(True):
        with counted() as n:
            assert_same(next(ours), x * 1.5)
        assert n.executions == 1
        assert not _C.in_region()
        with counted() as n:
            assert_same(ours.send(2.0), x * 6.75)
        assert n.executions == 1
        assert_same(ours.throw(KeyError()), x * 1.5)
        with pytest.raises(StopIteration) as stop:
            next(ours)
    assert stop.value.value == "end"
    closed = running(x.to(DEVICE))
    next(closed)
    closed.close()
    assert log == [True, True]


def test_a_module_keeps_its_class_state_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5)).to(DEVICE)
    seen = []
    handle = model.register_forward_hook(lambda m, a, result: seen.append(_C.in_region()))
    compiled = lazyxla.compile(model)
    assert type(compiled).__name__ == "Sequential"
    assert isinstance(compiled, nn.Sequential)
    assert repr(compiled) == repr(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [*map(id, compiled.parameters())] == [*map(id, model.parameters())]
    compiled.eval()
    assert not model.training
    x = _tensor(3, 4)
    with lazyxla.eager_mode(True):
        compiled(x)
        with counted() as n:
            result = compiled(x)
        assert n.executions == 1
        with counted() as n:
            assert_same(model(x), result.cpu())
        assert n.executions > 1
    assert seen == [True, True, False]
    handle.remove()
    compiled.extra = nn.Linear(2, 2)  # is in both
    assert "extra.weight" in model.state_dict()


def test_a_compiled_module_is_copied_and_pickled() -> None:
    compiled = lazyxla.compile(nn.Linear(4, 4).to(DEVICE))
    x = _tensor(3, 4)
    clone = copy.deepcopy(compiled)
    assert clone.weight is not compiled.weight
    lazyxla.sync()
    with lazyxla.eager_mode(True):
        with counted() as n:
            result = clone(x).relu()
        assert n.executions == 2
    assert_same(result, F.linear(x.cpu(), clone.weight.cpu(), clone.bias.cpu()).relu())
    loaded = pickle.loads(pickle.dumps(compiled))
    assert type(loaded) is nn.Linear
    assert_same(loaded.weight, compiled.weight.detach().cpu())
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    assert list(compiled.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("mode", MODES)
def test_a_training_step_in_a_block_is_one_program(mode) -> None:
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = copy.deepcopy(reference).to(DEVICE)
    batches = [torch.randn(5, 4).double() for _ in range(5)]
    for m in (reference, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        executions = []
        with lazyxla.eager_mode(mode):
            for batch in batches:
                x = batch.to(m[0].weight.device)
                with counted() as n, lazyxla.step():
                    m(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                executions.append(n.executions)
    assert executions == [
        1 + 2 * 4,
        1,
        1,
        1,
        1,
    ]  # two tensors of state for each parameter, at first
    assert_same(model.state_dict(), reference.state_dict())


async def _later(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, r"lazyxla.compile\(\) takes a function or a module, not 3"),
        (nn.Linear, r"takes a function or a module, not <class 'torch.nn"),
        (_later, "cannot make a program of _later: an async function is suspended at any time"),
    ],
)
def test_what_cannot_be_compiled(thing, message) -> None:
    with pytest.raises(TypeError, match=message):
        lazyxla.compile(thing)
    with pytest.raises(TypeError, match=message):
        lazyxla.compile(name="x")(thing)


# --- full_graph and max_graphs -------------------------------------------------------------------

BREAKS = {
    "item": (lambda y: y.sum().item(), "a value is read"),
    "if": (lambda y: 1 if y.sum() > 0 else 0, "a value is read"),
    "cpu": (lambda y: y.cpu(), "a value is read"),
    "print": (lambda y: str(y), "a value is read"),
    "host": (lambda y: on_host(y), "lazyxla_tests::on_host runs on the host"),
    "shape": (lambda y: y.nonzero(), "aten::nonzero runs on the host"),
    "sync": (lambda y: lazyxla.sync(), r"lazyxla.sync\(\) is called"),
    "mode": (lambda y: lazyxla.eager_mode(True), "the mode changes"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_full_graph_names_the_line_that_breaks_it(name) -> None:
    action, reason = BREAKS[name]
    kept = []

    @lazyxla.compile(full_graph=True, name="whole")
    def whole(x: torch.Tensor) -> None:
        kept.append(x * 2)
        action(kept[0])

    x = _tensor(3, 3)
    line = action.__code__.co_firstlineno
    with pytest.raises(RuntimeError) as error:
        whole(x)
    text = str(error.value).split("\nException raised from")[0]
    pattern = (
        rf"lazyxla: \S*test_compile.py:{line}: the compiled region whole has full_graph=True, "
        rf"but would break into two programs: {reason} before it ends"
    )
    assert re.fullmatch(pattern, text), text
    assert_same(kept[0], x.cpu() * 2)


def test_full_graph_of_an_inner_or_outer_region_counts() -> None:
    x = _tensor(3)
    inner = lazyxla.compile(lambda value: value.sum().item())
    with pytest.raises(RuntimeError, match="the compiled region outer has full_graph=True"):
        lazyxla.compile(lambda value: inner(value + 1), full_graph=True, name="outer")(x)
    strict = lazyxla.compile(lambda value: (value + 2).sum().item(), full_graph=True, name="strict")
    with pytest.raises(RuntimeError, match="the compiled region strict has full_graph=True"):
        lazyxla.compile(lambda value: strict(value))(x)


def test_full_graph_holds_in_the_backward_pass() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.sum().item()

    x = torch.randn(3, device=DEVICE, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match=r"test_compile.py:.* a value is read before it ends"),
        lazyxla.compile(full_graph=True),
    ):
        Reads.apply(x).sum().backward()


def test_full_graph_without_a_break() -> None:
    @lazyxla.compile(full_graph=True)
    def whole(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            return x.softmax(0)
        return x

    x = _tensor(3)
    x.tolist()  # not in the region
    with counted() as n:
        result = whole(x)
    assert n.executions == 1
    torch.testing.assert_close(result.cpu(), x.cpu().softmax(0))


def test_max_graphs() -> None:
    @lazyxla.compile(max_graphs=2, name="limited")
    def limited(x: torch.Tensor) -> torch.Tensor:
        return x.cosh() - 1

    for rows in (3, 4, 3, 4):
        limited(_tensor(rows))
    x = _tensor(5)
    kept = []
    with pytest.raises(
        RuntimeError,
        match="the compiled region limited needs another program than the 2 that it has, and "
        r"max_graphs allows no more\. Why: a new graph: like one before, but input 0 is "
        r"Float\[5\], not Float\[4\]",
    ):
        kept.append(limited(x))
    limited(_tensor(4))
    # Outside of the region nothing forbids it.
    torch.testing.assert_close((x.cosh() - 1).cpu(), x.cpu().cosh() - 1)


def test_max_graphs_loses_nothing() -> None:
    x, kept = _tensor(2, 3), []
    block = lazyxla.compile(max_graphs=1)
    with block:
        x.add_(1)
    with (
        pytest.raises(RuntimeError, match="the compiled region block needs another program"),
        block,
    ):
        kept.append(x.sinh())
    assert_same(kept[0], x.cpu().sinh())


@pytest.mark.parametrize("count", [0, -1])
def test_max_graphs_must_allow_one(count) -> None:
    with pytest.raises(ValueError, match=f"max_graphs must be at least 1, got {count}"):
        lazyxla.compile(lambda x: x, max_graphs=count)


def test_messages_tell_the_name(caplog) -> None:
    with caplog.at_level("INFO", logger="lazyxla"), lazyxla.compile(name="update"):
        _ = _tensor(3, 5).atan()
    assert "(update: a new graph" in caplog.text
