"""Sharded tensors in the modes, in regions, under torch.compile, on disk, in threads."""

from __future__ import annotations

import copy
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sharded, spec_of
from models import MESH, PLANS, Mlp, batches
from torch.utils.data import DataLoader, TensorDataset

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, counted


@pytest.mark.parametrize("mode", [True, "fused"])
def test_eager(mode: Any) -> None:
    x, w = torch.randn(8, 6), torch.randn(6, 4)
    with lazyxla.eager_mode(mode):
        d, v = sharded(x, "data"), sharded(w, None, "model")
        for _ in range(3):
            y = torch.relu(d @ v + 1)
            d = d + y.sum(1, keepdim=True)
            z = torch.relu(x @ w + 1)
            x = x + z.sum(1, keepdim=True)
            torch.testing.assert_close(y.cpu(), z)
        torch.testing.assert_close(d.cpu(), x)


def test_regions() -> None:
    @lazyxla.compile
    def step(d: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w.add_(1)
        return lazyxla.constrain(d @ w, MESH, ("data", "model"))

    x = torch.randn(8, 6)
    d, w = sharded(x, "data"), sharded(torch.zeros(6, 4), None, "model")
    step(d, w)
    with counted() as n:
        y = step(d, w)
    assert (n.compiles, n.executions) == (0, 1)
    assert spec_of(y) == ("data", "model")
    torch.testing.assert_close(y.cpu(), x @ torch.full((6, 4), 2.0))


@pytest.mark.parametrize("eager", [False, True])
def test_torch_compile(eager: bool, fresh_dynamo: None) -> None:
    def run(plan: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Mlp().to(DEVICE)
        if plan:
            lazyxla.shard(model, MESH, PLANS[plan])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if plan:
                x = lazyxla.constrain(x, MESH, ("data",))
            return model.loss(x, y)

        compiled = torch.compile(loss, backend="lazyxla", fullgraph=True)
        losses = []
        with lazyxla.eager_mode(eager):
            for x, y in batches(Mlp, 3):
                value = compiled(x.to(DEVICE), y.to(DEVICE))
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.detach())
            return [value.cpu() for value in losses]

    alone = run(None)
    torch._dynamo.reset()
    torch.testing.assert_close(run("fsdp x tensor"), alone)


def test_checkpoints(tmp_path: Path) -> None:
    model = lazyxla.shard(Mlp(), MESH, PLANS["fsdp x tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        x, y = batches(Mlp, 1)[0]
        loss = model.loss(x.to(DEVICE), y.to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().cpu()

    step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    specs = {name: spec_of(p) for name, p in model.named_parameters()}
    expected = [step(), step()]
    state = torch.load(tmp_path / "c")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert {name: spec_of(p) for name, p in model.named_parameters()} == specs
    torch.testing.assert_close([step(), step()], expected)
    on_cpu = torch.load(tmp_path / "c", map_location="cpu")
    model.load_state_dict(on_cpu["model"])
    assert {name: spec_of(p) for name, p in model.named_parameters()} == specs
    for name, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), on_cpu["model"][name])


def test_copies_and_pickles() -> None:
    model = lazyxla.shard(Mlp(), MESH, PLANS["fsdp"])
    same = copy.deepcopy(model)
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach().cpu())
    memory = io.BytesIO()
    torch.save(model.up.weight, memory)
    memory.seek(0)
    assert torch.equal(torch.load(memory).detach().cpu(), model.up.weight.detach().cpu())


def powers(x: torch.Tensor, count: int) -> torch.Tensor:
    result = x
    for _ in range(count):
        result = torch.tanh(result @ x)
    return result


# All processes have to launch the same programs in the same order; of threads any may be first.
in_any_order = pytest.mark.skipif(
    "WORLD_SIZE" in os.environ, reason="threads launch different programs in any order"
)


@in_any_order
@pytest.mark.parametrize("count", range(10, 15))  # each a program of its own
def test_a_flush_in_another_thread_is_waited_for(count: int) -> None:
    """Its results' shardings must be known before what reads them is a key."""
    x = torch.randn(64, 64) / 16
    y = powers(sharded(x, "data"), count)
    thread = threading.Thread(target=y.cpu)
    thread.start()
    while _C.is_pending(y):  # from then on it is promised, and its program is compiled
        time.sleep(0.001)
    z = (y.t() + 1).sum(0)
    torch.testing.assert_close(z.cpu(), (powers(x, count).t() + 1).sum(0))
    thread.join()


@in_any_order
def test_threads_that_train() -> None:
    results: dict[int, list[torch.Tensor]] = {}

    def train(number: int) -> None:
        torch.manual_seed(0)
        w = sharded(torch.eye(8), "data", "model")
        for _ in range(10):
            w.add_((w @ w).sin(), alpha=0.01)
            lazyxla.sync()
        results[number] = [w.cpu()]

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_the_loader_gives_each_device_its_part() -> None:
    x, y = torch.randn(24, 6), torch.arange(24)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    ahead = lazyxla.DeviceLoader(loader, sharding=lazyxla.Sharding(MESH, ("data", "model")))
    for i, (a, b) in enumerate(ahead):
        assert spec_of(a) == ("data", "model")
        assert spec_of(b) == ("data",)
        assert torch.equal(a.cpu(), x[8 * i : 8 * i + 8])
        assert torch.equal(b.cpu(), y[8 * i : 8 * i + 8])
    by_function = lazyxla.DeviceLoader(loader, sharding=lambda t: lazyxla.Sharding(MESH, ()))
    assert spec_of(next(iter(by_function))[0]) == (None, None)
    with pytest.raises(TypeError, match=r"must be a lazyxla\.Sharding"):
        lazyxla.DeviceLoader(loader, sharding=("data",))  # type: ignore[arg-type]


def test_an_error_of_the_loader_surfaces_there() -> None:
    sharding = lazyxla.Sharding(MESH, ("rows",))
    with pytest.raises(ValueError, match="names the axis 'rows'"):
        next(iter(lazyxla.DeviceLoader([torch.ones(8)], sharding=sharding)))


def test_subclasses_without_memory_of_their_own() -> None:
    """As DTensor is, whose optimizers step beside those of sharded parameters."""
    from torch.testing._internal.two_tensor import TwoTensor

    sharded(torch.ones(8), "data")  # there is a mesh
    parts = [torch.ones(4, device=DEVICE), torch.full((4,), 2.0, device=DEVICE)]
    parameter = torch.nn.Parameter(TwoTensor(*parts))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * 2).sum().backward()
        optimizer.step()
    doubled = lazyxla.compile(lambda x: x * 2)(parameter.detach())  # it looks at its arguments
    assert [part.cpu().tolist() for part in (doubled.a, doubled.b)] == [[0.0] * 4, [2.0] * 4]
    assert lazyxla.sharding(parameter) is None
    assert [part.cpu().tolist() for part in parts] == [[0.0] * 4, [1.0] * 4]
