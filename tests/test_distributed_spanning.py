"""torch.distributed where the client spans the processes: collectives are programs of all members.

The cases are those of test_distributed.py, whose programs call the host instead. The plugin is that
of tests/spanning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.processes import THEMES, run, run_cases, run_faults
from tests.spanning import cpu_plugin, plugin_path
from tests.test_distributed_faults import COMPARED

SIZES = (2, 3)
OF_EVERY_SIZE = (
    "arguments",
    "collectives",
)  # the others take long, and are of one, but if asked for
SETTLED = ("ddp", "fully_sharded", "zero_sgd", "pipeline_gpipe")
"""Training whose steps compile nothing from the fourth on, and all run as many programs."""
HOST_CALLS = ("one_meets_errors",)
"""Its first process factorizes matrices, which PyTorch's kernel does on the CPU."""
ONE_PROGRAM = ("traced",)
"""Three calls of a function with collectives, whose parts are graphs of torch.compile's."""

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)


def environment() -> dict[str, str]:
    """One device for each process."""
    plugin = {"LAZYXLA_PLUGIN_PATH": str(plugin_path())}
    return {"LAZYXLA_PLATFORM": "cpu", "LAZYXLA_CPU_DEVICES": "1", **plugin}


def run_spanning(
    code: str, size: int, where: Path, *arguments: str, timeout: float = 120
) -> list[str]:
    return run(code, size, where, *arguments, timeout=timeout, **environment())


# One test for all cases of a file: processes start slowly.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_as_on_the_cpu(theme: str, size: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    is_asked_for = pytestconfig.getoption("--every-size")
    if size != SIZES[0] and theme not in OF_EVERY_SIZE and not is_asked_for:
        pytest.skip("takes minutes: --every-size runs it")
    for found in run_cases(theme, size, tmp_path, timeout=900, **environment()):
        check_counts(found)


def check_counts(found: dict[str, Any]) -> None:
    for name, case in found.items():
        assert case["counted"]["fallbacks"] == 0
        if name not in HOST_CALLS:  # no program of several processes calls the host
            assert case["counted"]["host_calls"] == 0, name
    for name in found.keys() & set(ONE_PROGRAM):
        assert found[name]["counted"]["executions"] == 1, name
    for name in found.keys() & set(SETTLED):
        steps = found[name]["steps"]
        assert len(steps) >= 6
        for step in steps[3:]:
            assert step["compiles"] == 0, name
        assert len({step["executions"] for step in steps[3:]}) == 1, name


AHEAD = """
import time
from datetime import timedelta
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=30))
alone = [dist.new_group([member]) for member in range(size)][rank]
for number in range(4):
    x, y, z = (torch.full((3,), number + rank + i, device="lazyxla") for i in (1.0, 2.0, 3.0))
    if rank == 0:
        time.sleep(0.3)
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.all_reduce(x, group=alone)
    lazyxla.sync(wait=rank == number % 2)  # the other records its next call before this one runs
    dist.all_reduce(y)
    z = z + y
    dist.all_reduce(z, group=alone)
    lazyxla.sync()
    print(x[0].item(), y[0].item(), z[0].item() - rank)
"""


def test_processes_that_are_ahead_in_a_group_of_their_own(tmp_path: Path) -> None:
    """How far a process has agreed there does not decide which program it launches with others."""
    for out in run_spanning(AHEAD, 2, tmp_path):
        found = [[float(each) for each in line.split()] for line in out.splitlines()]
        assert found == [[n + 1, 2 * n + 5, 3 * n + 8] for n in range(4)]


SAME_OR_NOT = """
import random
dist.init_process_group("lazyxla", **group)
draw, total, seen = random.Random(size), 2.0, {}
weight = torch.full((3,), 2.0, device="lazyxla")
factor = torch.tensor(float(rank)).to("lazyxla")
for number in range(150):
    private = [draw.choice((0, 0, 0, 0, 1, 2)) for _ in range(size)]  # operators of each process
    rate, calls = draw.choice((0.5, 0.25)), draw.randint(1, 3)
    if number == 75:
        seen.clear()  # from here on there is a number that differs between processes
    before = lazyxla.counters()["executions"]
    x = weight * factor * (1.0 + rank if number >= 75 else 1.0)
    for _ in range(calls):
        dist.all_reduce(x)
        for _ in range(private[rank]):
            x = -(-x).neg().neg()
    weight = weight + x * rate * 1e-3
    lazyxla.sync()
    executions = lazyxla.counters()["executions"] - before
    if len(set(private)) > 1:
        assert executions > 1, (number, private)
    else:
        times = seen[private[0], calls] = seen.get((private[0], calls), 0) + 1
        assert executions == 1 or times <= 4, (number, private, executions, times)
    given = sum(r * (1.0 + r if number >= 75 else 1.0) for r in range(size))
    total *= 1 + given * size ** (calls - 1) * rate * 1e-3
    torch.testing.assert_close(weight.cpu(), torch.full((3,), total))
assert max(seen.values()) > 5
print(lazyxla.counters()["host_calls"])
"""


@pytest.mark.parametrize("size", SIZES)
def test_a_graph_is_one_program_where_all_have_the_same(size: int, tmp_path: Path) -> None:
    """Whoever differs in a step finds it out with the others; the values are the same each way."""
    for out in run_spanning(SAME_OR_NOT, size, tmp_path, timeout=300):
        assert out == "0\n"


NUMBERS = """
dist.init_process_group("lazyxla", **group)
one = torch.tensor([2.0]).to("lazyxla")
def counted(step):
    for number in range(6):
        before = lazyxla.counters()
        x = step(one, number)
        dist.all_reduce(x)
        y = x * 0.5
        lazyxla.sync()
        after = lazyxla.counters()
        yield [after[name] - before[name] for name in ("compiles", "executions")], y.item()
for step in (
    lambda x, number: x * (1.5 + rank),  # a number of each process: an input
    lambda x, number: x * (1.5 + rank + number),
    lambda x, number: torch.linalg.vector_norm(x, 1.5 + rank, 0, True),  # needed to compile
):
    *_, (counts, value) = counted(step)
    print(counts, value)
"""


def test_numbers_that_differ_between_processes(tmp_path: Path) -> None:
    """They become inputs of one program; those that cannot are compiled once, in pieces."""
    for out in run_spanning(NUMBERS, 2, tmp_path, timeout=200):
        assert out.splitlines() == ["[0, 1] 4.0", "[0, 1] 14.0", "[0, 3] 2.0"]


DATA_PARALLEL = """
import ctypes, os
from torch import nn
dist.init_process_group("lazyxla", **group)
launched = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"]).spanning_run_count
launched.restype = ctypes.c_int64
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 3)).to("lazyxla")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for number in range(11):
    before, runs = lazyxla.counters(), launched()
    loss = model(torch.randn(4, 6).to("lazyxla") * rank).square().mean()
    loss.backward()
    if number == 8 and rank == 0:
        logged = loss.detach() * 100
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    lazyxla.sync()
    after = lazyxla.counters()
    counted = ("flushes", "executions", "compiles", "comparisons")
    print(*[after[name] - before[name] for name in counted], launched() - runs)
"""


def test_a_settled_training_step_is_one_program(tmp_path: Path) -> None:
    """But where one process logs: then each collective is one, of both."""
    for out in run_spanning(DATA_PARALLEL, 2, tmp_path, timeout=200):
        *settled, logging, after, last = out.splitlines()[5:]
        assert {*settled, after, last} == {"1 1 0 1 1"}
        flushes, executions, _, comparisons, runs = logging.split()
        # A second comparison, once both have made the programs.
        assert (flushes, executions, comparisons, runs) == ("1", "3", "2", "1")


PROGRAMS = """
import ctypes, os
dist.init_process_group("lazyxla", **group)
launched = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"]).spanning_run_count
launched.restype = ctypes.c_int64
weight = torch.full((3, 5), 2.0, device="lazyxla")
def step(number):
    before, runs = lazyxla.counters(), launched()
    x = torch.full((4, 3), rank + number * 0.5, device="lazyxla")
    x = x @ weight
    dist.all_reduce(x)
    if rank == 0:
        x = x.square().sqrt()  # what only one of them computes
    y = x / 2
    dist.all_reduce(y)
    dist.broadcast(y, 1)
    result = y @ weight.t()
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    counted = [after[name] - before[name] for name in ("flushes", "executions", "compiles")]
    return [*counted, launched() - runs, result.unique().tolist()]
for number in range(4):
    print(*step(number))
"""


def test_each_collective_is_a_program_of_all(tmp_path: Path) -> None:
    """One flush, of the process's own programs and three of both; none is compiled twice."""
    for out in run_spanning(PROGRAMS, 2, tmp_path, timeout=200):
        steps = [line.split(maxsplit=4) for line in out.splitlines()]
        assert [step[:2] for step in steps] == [["1", "6"]] * 4
        assert steps[-1][2] == "0"
        assert [step[3] for step in steps] == ["3"] * 4
        sums = [2 * (number * 0.5) * 6 + 6 for number in range(4)]
        assert [float(step[4].strip("[]")) for step in steps] == [10 * total for total in sums]


def test_processes_that_die_come_late_or_call_something_else(pytestconfig: pytest.Config) -> None:
    """What is compared launches nothing that the others do not launch, and tells who differs."""
    count = pytestconfig.getoption("--faults")
    assert run_faults(count, "always", timeout=120 + 30 * count, **environment()) == []


@pytest.mark.parametrize(
    ("setting", "counts"),
    [("always", "1 1 1 1 1 1"), ("first", "1 1 1 1 1 1"), ("never", "0 0 0 0 0 0")],
)
def test_what_is_recorded_is_compared_at_once(setting: str, counts: str, tmp_path: Path) -> None:
    """One round trip for a step, also where each is launched by itself."""
    for out in run_spanning(COMPARED, 2, tmp_path, setting):
        assert out.splitlines() == [counts, "True"][: 1 + (setting == "always")]


TWO_DIMENSIONS = """
import copy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("lazyxla", **group)
mesh = dist.init_device_mesh("lazyxla", (2, 2), mesh_dim_names=("data", "model"))
torch.manual_seed(0)
alone = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
batches = torch.randn(6, 2, 4, 6)  # by step and position along "data"
model = copy.deepcopy(alone).to("lazyxla")
parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
for step, both in enumerate(batches):
    before = lazyxla.counters()
    losses = []
    for module, optimizer, x in (
        (model, optimizers[0], both[rank // 2].to("lazyxla")),
        (alone, optimizers[1], both.flatten(0, 1)),
    ):
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    lazyxla.sync()
    counted = [lazyxla.counters()[name] - before[name] for name in ("executions", "compiles")]
    dist.all_reduce(losses[0], dist.ReduceOp.AVG, group=mesh.get_group("data"))
    torch.testing.assert_close(losses[0].cpu(), losses[1])
print(*counted, lazyxla.counters()["host_calls"])
dist.destroy_process_group()
"""


def test_sharded_in_two_dimensions(tmp_path: Path) -> None:
    """FSDP over one dimension of a mesh, tensor parallelism over the other: one program a step."""
    for out in run_spanning(TWO_DIMENSIONS, 4, tmp_path, timeout=300):
        assert out.split() == ["1", "0", "0"]


GROUPS = """
import random
dist.init_process_group("lazyxla", **group)
KINDS = {
    "rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]], "all": [[0, 1, 2, 3]],
    "diagonals": [[0, 3], [1, 2]], "three": [[0, 1, 2], [3]], "each": [[0], [1], [2], [3]],
}
groups = {}
for kind, rows in KINDS.items():
    made = [dist.new_group(row) for row in rows]
    groups[kind] = next(group for group, row in zip(made, rows) if rank in row)
draw, seen = random.Random(0), {}
ones = torch.ones(3, device="lazyxla")
for number in range(120):
    kinds = draw.choices(list(KINDS), weights=(4, 4, 2, 1, 1, 1), k=draw.randint(1, 3))
    expected = [float(r + number) for r in range(4)]
    before = lazyxla.counters()["executions"]
    x = ones * (rank + number)
    for kind in kinds:
        dist.all_reduce(x, group=groups[kind])
        x = x * 0.5
        sums = {r: sum(expected[m] for m in row) * 0.5 for row in KINDS[kind] for r in row}
        expected = [sums[r] for r in range(4)]
    lazyxla.sync()
    executions = lazyxla.counters()["executions"] - before
    torch.testing.assert_close(x.cpu(), torch.full((3,), expected[rank]))
    used = set(kinds) - {"each"}
    times = seen[tuple(kinds)] = seen.get(tuple(kinds), 0) + 1
    is_grid = used <= {"rows", "columns"} or len(used) == 1 or used == {"rows", "columns", "all"}
    if not is_grid:
        assert executions > 1, (number, kinds)
    else:
        assert executions == 1 or times <= 3, (number, kinds, executions, times)
assert max(seen.values()) > 4
print("ok")
"""


def test_groups_of_a_program_are_rows_of_a_grid(tmp_path: Path) -> None:
    """Where they are not, each collective is a program; the values are the same."""
    for out in run_spanning(GROUPS, 4, tmp_path, timeout=400):
        assert out == "ok\n"


ALONE = """
dist.init_process_group("lazyxla", **group)
x = torch.arange(3.0, device="lazyxla")
dist.all_reduce(y := x * 2)
parts = [torch.empty(3, device="lazyxla")]
dist.all_gather(parts, y)
dist.broadcast(y, 0)
dist.barrier()
print(lazyxla.runtime.platform(), (y + parts[0]).tolist(), lazyxla.counters()["host_calls"])
"""


def test_one_process_where_no_program_calls_the_host(tmp_path: Path) -> None:
    """As on a GPU: what is lowered for one runs on the CPU here."""
    cpu = {"LAZYXLA_PLATFORM": "cuda", "LAZYXLA_PLUGIN_PATH": str(cpu_plugin())}
    (out,) = run(ALONE, 1, tmp_path, **cpu)
    assert out.strip() == "cuda [0.0, 4.0, 8.0] 0"


OTHER_DEVICE = """
dist.init_process_group("lazyxla", **group)
x = torch.ones(3, device="lazyxla:1")
try:
    dist.all_reduce(x)
except NotImplementedError as error:
    print("first devices" in str(error) and "lazyxla:1" in str(error))
dist.all_reduce(y := x.to("lazyxla:0"))
dist.barrier(device_ids=[rank])
before = lazyxla.counters()["executions"]
print(y.tolist(), lazyxla.counters()["executions"] - before)
"""


def test_collectives_are_of_the_first_devices(tmp_path: Path) -> None:
    two = {**environment(), "LAZYXLA_CPU_DEVICES": "2"}
    for out in run(OTHER_DEVICE, 2, tmp_path, **two):
        assert out.split("\n") == ["True", "[2.0, 2.0, 2.0] 0", ""]
