"""What processes do whose client spans them: one of several, for tests/test_spanning.py.

Usage: ``python -m tests.distributed.spanning_cases DIRECTORY NAME...`` runs these cases in their
order. A problem ends the process with its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import lazyxla
from lazyxla.checkpoint import LoadPlanner, SavePlanner
from tests.support import DEVICE, counted

TIMEOUT = timedelta(seconds=6)
"""Of the group's processes for each other; each of the failures below takes so long at most."""


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


class Processes:
    """All there are; each with two devices."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self.rank, self.size, self.directory = rank, size, directory
        self.mesh = lazyxla.Mesh((size, 2), ("data", "model"))

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


# ---- what works ----


def devices_are_of_all_processes(all_: Processes) -> None:
    assert lazyxla.device_count() == 2
    assert lazyxla.global_device_count() == 2 * all_.size
    first = 2 * all_.rank
    mine = lazyxla.Mesh((2,), ("x",), [f"{DEVICE}:1", torch.device(DEVICE, 0)])
    assert mine.devices == (first + 1, first)
    x = lazyxla.shard(grid(4, 2), mine, ("x",))  # nobody else takes part
    with counted() as n:
        torch.testing.assert_close((x + 1).cpu(), grid(4, 2) + 1)
    assert (n.executions, n.comparisons) == (1, 0)
    other = (first + 2) % (2 * all_.size)
    with pytest.raises(ValueError, match="has none of this process's devices"):
        lazyxla.shard(grid(2), lazyxla.Mesh((1,), ("x",), [other]), ("x",))
    with pytest.raises(IndexError, match="there are"):
        lazyxla.Mesh((1,), ("x",), [2 * all_.size])


def a_value_is_read_by_all(all_: Processes) -> None:
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data", "model"))
    with counted() as n:
        assert torch.equal(x.cpu(), grid(4, 6))
    assert (n.executions, n.downloads) == (1, 1)  # the parts meet, then one is read
    whole = lazyxla.replicate(grid(4, 6), all_.mesh)
    with counted() as n:
        assert torch.equal(whole.cpu(), grid(4, 6))
    assert n.executions == 0
    assert x.sum().item() == grid(4, 6).sum().item()
    assert str(x[1, :2].tolist()) == "[6.0, 7.0]"


def each_process_loads_its_part(all_: Processes) -> None:
    sharding = lazyxla.Sharding(all_.mesh, ("data",))
    whole = [grid(2 * all_.size, 6) + i for i in range(3)]
    own = [x[2 * all_.rank : 2 * all_.rank + 2] for x in whole]
    batches = [*lazyxla.DeviceLoader(own, sharding=sharding, local=True)]
    for batch, expected in zip(batches, whole):
        assert batch.shape == expected.shape
        assert lazyxla.sharding(batch) == (all_.mesh, ("data", None))
        assert torch.equal(batch.cpu(), expected)
    one = lazyxla.shard_local(grid(3, 4).t() + all_.rank, all_.mesh, (None, "data"))
    expected = torch.cat([grid(3, 4).t() + rank for rank in range(all_.size)], 1)
    assert torch.equal(one.cpu(), expected)
    with pytest.raises(ValueError, match="does not divide evenly"):
        lazyxla.shard_local(grid(4, 3), all_.mesh, (None, ("data", "model")))
    columns = lazyxla.Mesh((2, all_.size), ("a", "b"))
    with pytest.raises(ValueError, match="not one block"):
        lazyxla.shard_local(grid(4, 4), columns, (("b", "a"),))
    with pytest.raises(ValueError, match="must be on the CPU"):
        lazyxla.shard_local(grid(4).to(DEVICE), all_.mesh, ("data",))


def processes_differ_where_they_are_alone(all_: Processes) -> None:
    """One logs, evaluates, compiles and syncs between the steps that all take."""
    model = lazyxla.fully_shard(all_.model(), all_.mesh, "data")
    alone = all_.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    reference = all_.model()
    theirs = torch.optim.AdamW(reference.parameters())
    for step in range(6):
        batch = grid(4, 6).sin() + step
        loss = model(lazyxla.shard(batch.clone(), all_.mesh, ("data",))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % all_.size == all_.rank:
            lazyxla.sync()
            with torch.no_grad():
                value = alone(batch.to(DEVICE)[: step + 1]).sum()
            torch.testing.assert_close(value.cpu(), all_.model()(batch[: step + 1]).sum().detach())
            assert loss.item() > 0
        else:
            lazyxla.sync()
        expected = reference(batch).square().mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss.cpu(), expected.detach())
    for ours, its in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.detach().cpu(), its.detach())


def what_one_computes_alone_is_no_part_of_the_program(all_: Processes) -> None:
    """Recorded in between, or of values that every device has whole."""
    model = lazyxla.replicate(all_.model(), all_.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = all_.model(seed=1).to(DEVICE)
    batch = grid(4, 6).sin()
    logged = []
    for step in range(5):
        loss = model(lazyxla.shard(batch.clone(), all_.mesh, ("data",))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % all_.size == all_.rank:
            with torch.no_grad():
                pending = alone(batch.to(DEVICE)).sum() * step  # when all others sync
            with counted() as n:
                lazyxla.sync()
            assert n.executions == 2
            expected = all_.model(seed=1)(batch).sum().detach() * step
            torch.testing.assert_close(pending.cpu(), expected)
            logged.append((loss * 100).item())  # by this process's own device
            with torch.no_grad():  # parameters that all have, and a batch of its own
                evaluated = model(batch[:1].to(DEVICE)).sum()
            with counted() as n:
                assert evaluated.isfinite().item()
            assert n.comparisons == 0
            del pending
        else:
            lazyxla.sync()
    assert all(value > 0 for value in logged)
    reference = all_.model()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(5):
        reference(batch).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    for ours, its in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.detach().cpu(), its.detach())


def a_settled_step_compiles_and_compares_nothing(all_: Processes) -> None:
    model = lazyxla.fully_shard(all_.model(), all_.mesh, "data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        with counted() as n:
            x = lazyxla.shard(grid(4, 6) / 24, all_.mesh, ("data",))
            model(x).square().mean().backward()
            optimizer.param_groups[0]["lr"] *= 0.9  # is an input from the second step on
            optimizer.step()
            optimizer.zero_grad()
            lazyxla.sync()
        if step >= 4:
            assert (n.compiles, n.executions, n.comparisons) == (0, 1, 0)


def what_is_recorded_starts_before_others_are_met(all_: Processes) -> None:
    """One reads, which needs all; the others wait for it in a collective of the host."""
    on_the_host = dist.new_group(backend="gloo")
    total = (lazyxla.shard(grid(4, 6), all_.mesh, ("data",)) * 2).sum()
    if all_.rank == 0:
        assert total.item() == 2 * grid(4, 6).sum().item()
    told: list[Any] = [None] * all_.size
    dist.all_gather_object(told, all_.rank, group=on_the_host)
    assert told == [*range(all_.size)]
    assert total.item() == 2 * grid(4, 6).sum().item()


def what_the_backward_thread_holds_is_no_result(all_: Processes) -> None:
    """It may let go of a result only after the pass, in one process sooner than in another."""
    x = lazyxla.replicate(torch.linspace(-1, 1, 8).reshape(4, 2), all_.mesh)
    for number in range(40):

        def loss(y: torch.Tensor, number: int = number) -> torch.Tensor:
            return (lazyxla.constrain((y * 2).sin(), all_.mesh, ("data",)) * y).sum() * number

        gradient = torch.func.grad(loss)(x)
        with counted() as n:
            lazyxla.sync()
        assert n.executions == 1
        assert gradient.shape == x.shape


def a_mesh_of_some_processes(all_: Processes) -> None:
    """The others do something else meanwhile."""
    mesh = lazyxla.Mesh((4,), ("x",), range(4))
    if all_.rank < 2:
        x = lazyxla.shard(grid(8, 2), mesh, ("x",))
        for _ in range(3):
            x = x * 2 + x.flip(0)
        expected = grid(8, 2)
        for _ in range(3):
            expected = expected * 2 + expected.flip(0)
        assert torch.equal(x.cpu(), expected)
    else:
        assert (grid(3).to(DEVICE) + 1).sum().item() == 6
    y = lazyxla.shard(grid(6, 2), all_.mesh, ("data",))
    assert torch.equal((y.flip(0) + 1).cpu(), grid(6, 2).flip(0) + 1)


def checkpoints_by_parts(all_: Processes) -> None:
    """Saved over one mesh, loaded over another; tests/test_spanning.py loads it in one process."""
    path = all_.directory / "checkpoint"
    model = lazyxla.fully_shard(all_.model(seed=1), all_.mesh, "data")
    optimizer = torch.optim.AdamW(model.parameters())
    model(lazyxla.shard(grid(4, 6), all_.mesh, ("data",))).square().mean().backward()
    optimizer.step()
    lazyxla.sync()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    on_the_host = dist.new_group(backend="gloo")
    with counted() as n:
        dcp.save(state, checkpoint_id=path, planner=SavePlanner(), process_group=on_the_host)
    assert n.executions == 0  # nothing is gathered
    kept = {name: x.detach().cpu() for name, x in model.state_dict().items()}

    other = lazyxla.Mesh((2, all_.size), ("a", "b"))
    loaded = lazyxla.shard(
        all_.model(seed=2), other, lambda _, x: ("b",) if x.dim() == 1 else ("a", "b")
    )
    before = {name: lazyxla.sharding(x) for name, x in loaded.state_dict().items()}
    state = {"model": loaded.state_dict()}
    with counted() as n:
        dcp.load(state, checkpoint_id=path, planner=LoadPlanner(), process_group=on_the_host)
    assert n.executions == 0
    for name, x in loaded.state_dict().items():
        assert lazyxla.sharding(x) == before[name]
        assert torch.equal(x.cpu(), kept[name]), name
    if all_.rank == 0:
        torch.save(kept, all_.directory / "kept.pt")


def a_group_is_made_again(all_: Processes) -> None:
    """The client stays, and goes on comparing."""
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data",))
    dist.destroy_process_group()
    assert torch.equal((x + 1).cpu(), grid(4, 6) + 1)
    dist.init_process_group(
        "lazyxla",
        init_method=f"file://{all_.directory}/again",
        rank=all_.rank,
        world_size=all_.size,
        timeout=TIMEOUT,
    )
    assert torch.equal((x + 2).cpu(), grid(4, 6) + 2)


# ---- what goes wrong ----


def different_programs_are_named(all_: Processes) -> None:
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data",))
    y = (x + 1) * 2 if all_.rank == 0 else (x + 1) / 2
    with pytest.raises(RuntimeError) as raised:
        y.sum().item()
    text = str(raised.value)
    assert "processes of a group launch different programs:" in text
    assert "process 0: program " in text
    assert ", operator 1 of which is aten::mul.Tensor Float[4, 6] at " in text
    assert ", operator 1 of which is aten::div.Tensor Float[4, 6] at " in text
    assert text.count(f"{Path(__file__).name}:") == 2
    with pytest.raises(RuntimeError, match="launch different programs"):
        (x + 3).sum().item()  # nothing that comes later waits
    assert (grid(3).to(DEVICE) + 1).sum().item() == 6  # what is one's own goes on


def one_reads_alone(all_: Processes) -> None:
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data",))
    lazyxla.sync(wait=True)
    if all_.rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="process 1: not there: it ended, is late"):
            x.cpu()
        assert time.monotonic() - begin < TIMEOUT.total_seconds() + 5


def one_ends(all_: Processes) -> None:
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data",))
    assert torch.equal((x + 1).cpu(), grid(4, 6) + 1)
    if all_.rank == all_.size - 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {all_.size - 1}: not there: it ended"):
        (x * 2).cpu()
    assert time.monotonic() - begin < TIMEOUT.total_seconds() + 5
    assert (grid(3).to(DEVICE) + 1).sum().item() == 6
    os._exit(0)  # the group cannot be taken down together


def one_ends_while_others_wait_for_it(all_: Processes) -> None:
    """Nothing is compared any more: the devices wait, until the one is missed."""
    x = lazyxla.shard(grid(4, 6), all_.mesh, ("data",))
    for _ in range(5):
        assert torch.equal((x + 1).cpu(), grid(4, 6) + 1)
    with counted() as n:
        assert torch.equal((x + 1).cpu(), grid(4, 6) + 1)
    assert n.comparisons == 0
    if all_.rank == all_.size - 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"process {all_.size - 1} has ended, or its machine"):
        (x + 1).cpu()
    assert time.monotonic() - begin < 2 * TIMEOUT.total_seconds() + 5
    os._exit(0)


CASES: dict[str, Callable[[Processes], None]] = {
    case.__name__: case
    for case in (
        devices_are_of_all_processes,
        a_value_is_read_by_all,
        each_process_loads_its_part,
        processes_differ_where_they_are_alone,
        what_one_computes_alone_is_no_part_of_the_program,
        a_settled_step_compiles_and_compares_nothing,
        what_is_recorded_starts_before_others_are_met,
        what_the_backward_thread_holds_is_no_result,
        a_mesh_of_some_processes,
        checkpoints_by_parts,
        a_group_is_made_again,
        different_programs_are_named,
        one_reads_alone,
        one_ends,
        one_ends_while_others_wait_for_it,
    )
}
FAILURES = (
    *("different_programs_are_named", "one_reads_alone"),
    *("one_ends", "one_ends_while_others_wait_for_it"),
)


def main(rank: int, size: int, directory: Path, names: list[str]) -> None:
    dist.init_process_group("lazyxla", timeout=TIMEOUT)
    processes = Processes(rank, size, directory)
    for name in names:
        print(name, file=sys.stderr, flush=True)
        CASES[name](processes)
    if not set(names) & set(FAILURES):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), sys.argv[2:])
