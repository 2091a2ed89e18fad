"""Batches uploaded ahead: what the consumer gets, when, and that the graphs do not notice."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import lazyxla
from tests.support import assert_same, counted

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    others: list[torch.Tensor]
    name: str


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "lazyxla-loader"]


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does soon."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_nested_batches() -> None:
    def batch(i: int) -> dict[str, Any]:
        x = torch.full((2, 3), float(i))
        return {
            "pair": (x, [x.long(), None]),
            "named": Point(x, OrderedDict(mask=x > 0)),
            "sample": Sample(x.double(), [x, x.half()], f"sample {i}"),
            "packed": pack_sequence([x, x[:1]]),
            "label": "text",
            "count": i,
        }

    batches = [batch(i) for i in range(5)]
    results = list(lazyxla.DeviceLoader(batches))
    assert len(results) == 5
    for ours, theirs in zip(results, batches):
        assert ours["label"] == "text"
        assert ours["count"] == theirs["count"]
        assert ours["pair"][1][1] is None
        assert_same(ours["pair"][0], theirs["pair"][0])
        assert_same(ours["pair"][1][0], theirs["pair"][1][0])
        assert isinstance(ours["named"], Point)
        assert isinstance(ours["named"].y, OrderedDict)
        assert_same(tuple(ours["named"]), tuple(theirs["named"]))
        assert isinstance(ours["sample"], Sample)
        assert ours["sample"].name == theirs["sample"].name
        assert_same(ours["sample"].image, theirs["sample"].image)
        assert_same(ours["sample"].others, theirs["sample"].others)
        assert theirs["sample"].image.device.type == "cpu"
        assert isinstance(ours["packed"], PackedSequence)
        assert_same(ours["packed"].data, theirs["packed"].data)


@dataclass
class Unfinished:
    image: torch.Tensor
    label: torch.Tensor = field(init=False)


def test_fields_may_have_no_value_yet() -> None:
    (batch,) = lazyxla.DeviceLoader([Unfinished(torch.ones(2))])
    assert batch.image.device.type == "lazyxla"
    assert not hasattr(batch, "label")
    padded, _ = lazyxla.bucket(Unfinished(torch.ones(2)), dims=0, sizes=[3])
    assert padded.image.tolist() == [1, 1, 0]


def test_strides_and_devices() -> None:
    x = torch.arange(48.0).reshape(2, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    with counted() as n:
        (result,) = lazyxla.DeviceLoader([x], "lazyxla:1")
        assert result.device == torch.device("lazyxla:1")
        assert_same(result, x)
    assert (n.nodes_recorded, n.flushes, n.uploads, n.downloads) == (0, 0, 1, 1)
    with torch.lazyxla.device(1):
        assert next(iter(lazyxla.DeviceLoader([x]))).device == torch.device("lazyxla:1")
    assert next(iter(lazyxla.DeviceLoader([x]))).device == torch.device("lazyxla:0")


def test_loaders_with_workers() -> None:
    x = torch.randn(20, 3)
    loader = DataLoader(TensorDataset(x), batch_size=4, num_workers=2, persistent_workers=True)
    batches = lazyxla.DeviceLoader(loader, prefetch=3)
    assert len(batches) == 5
    for _ in range(2):
        assert_same(torch.cat([each for (each,) in batches]), x)
    for (each,) in batches:
        assert_same(each, x[:4])
        break
    assert_same(torch.cat([each for (each,) in batches]), x)


@pytest.mark.parametrize("mode", [False, True, "fused"])
def test_graphs_do_not_notice(mode: bool | str) -> None:
    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        data = [torch.randn(8, 4, generator=generator) for _ in range(12)]
        return [(x, x.sum(1, keepdim=True)) for x in data]

    def train(loader: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).to("lazyxla")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in loader:
            if not isinstance(loader, lazyxla.DeviceLoader):
                x, y = x.to("lazyxla"), y.to("lazyxla")
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            lazyxla.sync()
        return model.weight.detach()

    with lazyxla.eager_mode(mode):
        expected = train(batches())
        lazyxla.sync(wait=True)
        with counted() as plain:
            train(batches())
            lazyxla.sync(wait=True)
        with counted() as n:
            result = train(lazyxla.DeviceLoader(batches()))
            lazyxla.sync(wait=True)
        assert torch.equal(result.cpu(), expected.cpu())
    assert n.compiles == 0
    if mode != "fused":  # where its graphs end depends on the time
        assert plain.compiles == 0
        assert n.executions == plain.executions
    assert n.nodes_recorded == plain.nodes_recorded
    assert n.uploads == plain.uploads
    assert n.downloads == 0


def test_every_batch_is_a_leaf_of_one_program() -> None:
    batches = [torch.full((3, 5), float(i)) for i in range(10)]
    total = torch.zeros(3, 5, device="lazyxla")
    lazyxla.sync(wait=True)
    with counted() as n:
        for x in lazyxla.DeviceLoader(batches):
            total += x.sin() * 0.25
            lazyxla.sync()
    assert (n.compiles, n.executions, n.flushes, n.uploads) == (1, 10, 10, 10)
    torch.testing.assert_close(total.cpu(), sum(x.sin() * 0.25 for x in batches))


def test_uploads_run_no_pending_work() -> None:
    pending = torch.ones(3, device="lazyxla") + 1
    with counted() as n:
        batches = list(lazyxla.DeviceLoader([torch.ones(2)] * 4))
    assert (n.flushes, n.executions, n.uploads) == (0, 0, 4)
    assert batches[3].sum().item() == 2
    assert pending.sum().item() == 6


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_uploads_are_ahead_by_prefetch(prefetch: int) -> None:
    taken = []

    def load() -> Iterator[torch.Tensor]:
        for i in range(20):
            taken.append(i)
            yield torch.full((4,), i)

    with counted() as n:
        before = lazyxla.counters()["uploads"]
        batches = iter(lazyxla.DeviceLoader(load(), prefetch=prefetch))
        assert next(batches).tolist() == [0] * 4
        # One is taken, `prefetch` wait on the device and one on the host.
        until(lambda: len(taken) == prefetch + 2)
        until(lambda: lazyxla.counters()["uploads"] - before == prefetch + 1)
        time.sleep(0.05)
        assert len(taken) == prefetch + 2
        assert lazyxla.counters()["uploads"] - before == prefetch + 1
        for i in range(1, prefetch + 1):
            assert next(batches).tolist() == [i] * 4
        batches.close()
    assert n.loader_waits <= 1  # for the first


def test_waits_are_counted() -> None:
    gate = threading.Semaphore(0)

    def load() -> Iterator[torch.Tensor]:
        for _ in range(4):
            gate.acquire()
            yield torch.ones(2)

    with counted() as n:
        batches = iter(lazyxla.DeviceLoader(load()))
        for _ in range(4):
            threading.Timer(0.05, gate.release).start()
            next(batches)
        assert next(batches, None) is None  # the end is no batch
    assert n.loader_waits == 4


def test_errors_come_in_the_place_of_their_batch() -> None:
    def load() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        yield torch.ones(2)
        raise RuntimeError("the file is broken")

    batches = iter(lazyxla.DeviceLoader(load(), prefetch=5))
    assert [next(batches).sum().item() for _ in range(2)] == [2, 2]
    with pytest.raises(RuntimeError, match="the file is broken") as raised:
        next(batches)
    assert next(batches, None) is None
    assert any(entry.name == "load" for entry in raised.traceback)
    assert threads() == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_errors_of_uploads() -> None:
    batches = iter(lazyxla.DeviceLoader([torch.ones(2), torch.empty(4, dtype=torch.complex32)]))
    assert next(batches).sum().item() == 2
    with pytest.raises(NotImplementedError, match="XLA has no element type for torch's Complex"):
        next(batches)
    assert threads() == []


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="prefetch must be at least 1, got 0"):
        lazyxla.DeviceLoader([], prefetch=0)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        lazyxla.DeviceLoader([], prefetch=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a lazyxla device, got cpu"):
        lazyxla.DeviceLoader([], "cpu")
    with pytest.raises(IndexError, match="device index 7 is out of range"):
        lazyxla.DeviceLoader([], 7)
    with pytest.raises(TypeError, match="has no len"):
        len(lazyxla.DeviceLoader(iter([])))
    with pytest.raises(TypeError, match="not iterable"):
        iter(lazyxla.DeviceLoader(3))  # type: ignore[arg-type]


def test_a_break_stops_the_thread() -> None:
    closed = []

    def load() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.ones(1000)
        finally:
            closed.append(True)

    lazyxla.sync(wait=True)
    gc.collect()
    before = lazyxla.memory_allocated()
    for x in lazyxla.DeviceLoader(load()):
        assert len(threads()) == 1
        assert x.shape == (1000,)
        break
    assert threads() == []
    assert closed == [True]
    assert lazyxla.memory_allocated() - before == 4000  # x
    unused = iter(lazyxla.DeviceLoader(load()))  # starts nothing
    assert threads() == []
    del unused


def test_batches_are_let_go() -> None:
    batches = iter(lazyxla.DeviceLoader([torch.ones(1000)] * 4, prefetch=3))
    lazyxla.sync(wait=True)
    gc.collect()
    x = next(batches)
    until(lambda: len(threads()) == 0)  # everything is uploaded
    before = lazyxla.memory_allocated()
    del x
    assert before - lazyxla.memory_allocated() == 4000


def test_grad_mode_is_the_consumers() -> None:
    def load() -> Iterator[bool]:
        yield torch.is_grad_enabled()

    assert list(lazyxla.DeviceLoader(load())) == [True]
    with torch.no_grad():
        assert list(lazyxla.DeviceLoader(load())) == [False]


def test_a_program_may_end_within_an_iteration(run_python: Any) -> None:
    code = """
import itertools, torch, lazyxla
batches = iter(lazyxla.DeviceLoader(torch.ones(100) for _ in itertools.count()))
print(next(batches).sum().item())
"""
    result = run_python(code)
    assert result.stdout == "100.0\n"
    assert result.stderr == ""
