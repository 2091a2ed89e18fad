"""Compiled regions: one program for a block or a function, whatever the mode around it."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import weakref
from collections.abc import Generator
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, assert_same, counted

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("modes_stay_as_they_are")]

MODES = [False, True, "fused"]


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


def test_a_waiting_generator_keeps_nothing_alive() -> None:
    @lazyxla.compile
    def doubling() -> Generator[torch.Tensor, torch.Tensor, None]:
        x = torch.ones(2, device=DEVICE)
        while True:
            x = (yield x * 2) + 0

    ours = doubling()
    yielded = weakref.ref(next(ours))
    assert yielded() is None
    given = torch.ones(2, device=DEVICE)
    sent = weakref.ref(given)
    ours.send(given)
    del given
    assert sent() is None
    ours.close()


def test_objects_whose_call_is_a_generator() -> None:
    class Counts:
        def __call__(self, x: torch.Tensor) -> Generator[torch.Tensor, None, None]:
            for number in range(3):
                yield (x + number) * 2

    x = torch.ones(2).to(DEVICE)
    with lazyxla.eager_mode(True), counted() as n:
        results = list(lazyxla.compile(Counts())(x))
    assert n.executions == 3
    assert_same(results, [torch.full((2,), 2.0 * number) for number in (1, 2, 3)])


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


def test_a_module_s_class_hears_of_no_class_of_ours() -> None:
    class Listed(nn.Linear):
        names: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, name: str) -> None:
            cls.names.append(name)

    class Named(Listed, name="first"):
        pass

    x = _tensor(3, 4)
    compiled = lazyxla.compile(Named(4, 4).to(DEVICE))
    assert_same(compiled(x), F.linear(x.cpu(), compiled.weight.cpu(), compiled.bias.cpu()))
    assert Listed.names == ["first"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_of_torch_jit() -> None:
    layer = nn.Linear(4, 4)
    compiled = lazyxla.compile(torch.jit.script(nn.Sequential(layer, nn.ReLU())).to(DEVICE))
    x = _tensor(3, 4)
    lazyxla.sync()
    with lazyxla.eager_mode(True), counted() as n:
        result = compiled(x)
    assert n.executions == 1
    assert_same(result, F.linear(x.cpu(), layer.weight.cpu(), layer.bias.cpu()).relu())
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())


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
    shallow = copy.copy(compiled)
    shallow.name = "its own"
    assert not hasattr(compiled, "name")
    assert shallow.weight is compiled.weight
    assert type(shallow).__call__ is not nn.Linear.__call__
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


class _Later:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (nn.LazyLinear(2), "cannot take a LazyLinear before its first call"),
        (_Later(), "cannot make a program of _Later: an async function"),
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
