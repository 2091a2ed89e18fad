"""torch.distributed between processes: real ones, on the CPU, against PyTorch's Gloo group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.distributed import random_collectives
from tests.distributed.processes import THEMES, outputs, own_environment, run, run_cases, torchrun

SIZES = (2, 3)
OF_EVERY_SIZE = (
    "arguments",
    "collectives",
    "training",
)  # the others take long, and are of one, but if asked for
SERVED_BY_ONE_PROGRAM = (
    *("all_reduce", "asynchronous", "broadcast", "gathers", "scatters", "all_to_all", "in_a_ring"),
    *(
        "groups",
        "functional_collectives",
        "differentiable",
        "dtensors",
        "dtensors_in_attention",
        "traced",
    ),
    *("dtypes_that_are_only_moved", "parts_of_several_sizes", "experts"),
    "gradients_of_gathered_columns",
)
ONE_PROGRAM_PER_STEP = (
    *("ddp", "ddp_static", "ddp_accumulates", "ddp_hooks", "zero_adam", "zero_sgd"),
    *("fully_sharded", "fully_sharded_options"),
    *("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved"),
)
CALLS = {"threads_use_what_others_recorded": 48}  # of collectives: each runs once
RANDOM = ("random_programs", "random_programs_eager")
SETTLED = {"ddp_static": 4}  # steps until all are one program; its buckets are made anew one later
NOTHING_COMPILED = (  # PyTorch reads something in each step
    *("sync_batch_norm", "sync_batch_norm_2d", "sync_batch_norm_empty", "ddp_unused"),
)

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)


# One test for all cases of a file: processes start slowly.
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_as_on_the_cpu(theme: str, size: int, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    is_asked_for = pytestconfig.getoption("--every-size")
    if size != SIZES[0] and theme not in OF_EVERY_SIZE and not is_asked_for:
        pytest.skip("takes minutes: --every-size runs it")
    for found in run_cases(theme, size, tmp_path, timeout=600):
        check_counts(found)


def check_counts(found: dict[str, Any]) -> None:
    for case in found.values():
        assert case["counted"]["fallbacks"] == 0
    for name in found.keys() & set(SERVED_BY_ONE_PROGRAM):
        counted = found[name]["counted"]
        assert (counted["compiles"], counted["executions"]) == (1, 1), name
        assert counted["host_calls"] > 0
    for name in found.keys() & set(RANDOM):
        assert found[name]["counted"]["host_calls"] > 7 * random_collectives.COUNT
    for name in found.keys() & set(CALLS):
        assert found[name]["counted"]["host_calls"] == CALLS[name]
    for name in found.keys() & set(ONE_PROGRAM_PER_STEP):
        steps = found[name]["steps"]
        assert len(steps) >= 6
        for step in steps[SETTLED.get(name, 3) :]:
            assert (step["compiles"], step["executions"], step["downloads"]) == (0, 1, 0), name
    for name in found.keys() & set(NOTHING_COMPILED):
        steps = found[name]["steps"]
        assert not any(step["compiles"] for step in steps[4:]), name
        assert len({step["executions"] for step in steps[4::2]}) == 1, name


def resumed(size: int, where: Path, first: int) -> list[float]:
    """The losses of three steps from a checkpoint to the next, by processes or by devices."""
    (where / "meet").unlink(missing_ok=True)
    script = str(ROOT / "tests" / "distributed" / "resumed.py")
    devices = {"LAZYXLA_CPU_DEVICES": "4"} if size == 1 else {}
    losses = []
    command = [script, "{rank}", str(size), str(where), str(first)]
    for out in outputs(command, [own_environment(**devices)] * size, timeout=200):
        found = json.loads(out.splitlines()[-1])
        assert found["spread"]
        losses.append(found["losses"])
    assert all(each == losses[0] for each in losses)
    return losses[0]


def test_checkpoints_between_processes_and_devices(tmp_path: Path) -> None:
    """One process of four devices, then two processes, three, and one again, in one training."""
    places = (1, 2, 3, 1)
    ours = [loss for i, size in enumerate(places) for loss in resumed(size, tmp_path, 3 * i)]
    from tests.distributed import resumed as script

    model = script.make_model()
    optimizer = script.make_optimizer(model)
    theirs = []
    for step in range(len(ours)):
        loss = script.loss_of(model, *script.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-4)


DESTROYED = """
for round in range(3):
    group["init_method"] = f"file://{meet}{round}"
    dist.init_process_group("lazyxla", **group)
    x = torch.ones(3, device="lazyxla") * (rank + round)
    dist.all_reduce(x)
    dist.destroy_process_group()  # runs what is recorded
    assert x.tolist() == [1 + 2 * round] * 3
print("fine")
"""


def test_a_group_that_is_destroyed_and_made_anew(tmp_path: Path) -> None:
    for out in run(DESTROYED, 2, tmp_path):
        assert out.split() == ["fine"]


READS_FIRST = """
from datetime import timedelta
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=30))
found = []
def exchange():
    x = torch.ones(3, device="lazyxla") * (rank + len(found) + 1)
    dist.all_reduce(x)
    if rank == 0:
        x.tolist()
    found.append(x)
exchange()
group = dist.new_group([0, 1])
exchange()
objects = [None, None]
dist.all_gather_object(objects, rank)
exchange()
dist.barrier()
exchange()
dist.destroy_process_group()
print(objects, [x.sum().item() for x in found])
"""


def test_one_reads_before_they_meet(tmp_path: Path) -> None:
    """The other one, which reads nothing, does not let it wait."""
    for out in run(READS_FIRST, 2, tmp_path):
        assert out.strip() == "[0, 1] [9.0, 15.0, 21.0, 27.0]"


DEFAULT = """
import copy
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group(**group)
torch.manual_seed(0)
model, batches = torch.nn.Linear(3, 2), torch.randn(2, 4, 3)
alone = copy.deepcopy(model)
alone(batches.flatten(0, 1)).square().mean().backward()
# Without init_sync no collective runs before DDP asks for the group's default backend.
for group, init_sync in ((None, False), (None, True), (dist.new_group(), True)):
    ddp = DistributedDataParallel(
        copy.deepcopy(model).to("lazyxla"), process_group=group, init_sync=init_sync
    )
    ddp(batches[rank].to("lazyxla")).square().mean().backward()
    for ours, theirs in zip(ddp.parameters(), alone.parameters()):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
dist.barrier()
print(dist.get_backend_config(), "fine")
dist.destroy_process_group()
"""


def test_it_is_the_devices_backend_if_none_is_named(tmp_path: Path) -> None:
    """For DDP, too, which asks for the group's default backend."""
    # Collectives are the host's business in strict mode, too.
    for out in run(DEFAULT, 2, tmp_path, LAZYXLA_STRICT_HOST_CALLS="1"):
        assert out.split() == ["lazyxla:lazyxla", "fine"]


MESH = """
import torch, torch.distributed as dist, lazyxla
dist.init_process_group("lazyxla")
mesh = dist.init_device_mesh("lazyxla", (dist.get_world_size(),))
x = torch.ones(2, device="lazyxla")
dist.all_reduce(x, group=mesh.get_group())
print(f"{x.device.index} {x.tolist()}\\n", end="")  # in one piece
"""


def test_a_mesh_before_the_first_tensor(tmp_path: Path) -> None:
    """LOCAL_RANK is no number of a device where each process has devices of its own."""
    script = tmp_path / "mesh.py"
    script.write_text(MESH)
    assert torchrun(3, str(script), LAZYXLA_CPU_DEVICES="1") == ["0 [3.0, 3.0]"] * 3


def test_the_example_trains() -> None:
    lines = torchrun(2, str(ROOT / "examples" / "train_ddp.py"), "--steps=60")
    *steps, counted = lines
    losses = [float(line.rpartition(" ")[2]) for line in steps]
    assert losses[-1] < losses[0] - 0.3
    # Reading the loss is a program of its own.
    assert float(counted.split()[2]) < 1.6, counted


BARRIERS = """
backends, device = sys.argv[1:]
dist.init_process_group(backends, **group)
y = torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(y)
for ids in (None, [0], [rank], [7]):
    dist.barrier(device_ids=ids)
dist.barrier(dist.new_group(), device_ids=[rank])
dist.barrier(async_op=True, device_ids=[rank]).wait()
before = lazyxla.counters()["executions"]
print(y.tolist(), lazyxla.counters()["executions"] - before, lazyxla._C.initialized())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backends", "device"),
    [("gloo", "cpu"), ("lazyxla", "lazyxla"), ("cpu:gloo,lazyxla:lazyxla", "lazyxla")],
)
def test_barriers_name_the_device_of_the_local_rank(
    backends: str, device: str, tmp_path: Path
) -> None:
    """As Accelerate's and Lightning's do; those of the CPU start no device."""
    for out in run(BARRIERS, 2, tmp_path, backends, device):
        assert out.strip() == f"[3.0, 3.0, 3.0] 0 {device != 'cpu'}"


TRAINS = """
backends, device = sys.argv[1:]
dist.init_process_group(backends, **group)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(device))
for _ in range(12):  # DDP logs the times of the first ten steps
    model(torch.ones(1, 2, device=device)).sum().backward()
    lazyxla.sync()
logged = model._get_ddp_logging_data()
has_times = any(logged[key] for key in logged if key.startswith("avg"))
print(dist.group.WORLD.name(), dist.new_group().name(), has_times)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("gloo", "cpu", "gloo gloo True"),
        ("lazyxla", "lazyxla", "custom custom False"),
        ("cpu:gloo,lazyxla:lazyxla", "lazyxla", "custom custom False"),
        ("cpu:gloo,lazyxla:lazyxla", "cpu", "custom custom True"),
    ],
)
def test_a_training_warns_of_nothing(
    backends: str,
    device: str,
    expected: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither of a device that DDP takes no times of, nor of a group without default backend."""
    for out in run(TRAINS, 2, tmp_path, backends, device):
        assert out.strip() == expected
    assert "Warning" not in capfd.readouterr().err


def test_a_rank_that_is_not_in_the_group() -> None:
    with pytest.raises(ValueError, match="rank 5 in a group of 2 processes"):
        dist.init_process_group("lazyxla", store=dist.HashStore(), rank=5, world_size=2)
    assert not dist.is_initialized()


ACCELERATED = """
import os, sys
import torch
import torch.distributed as dist
import lazyxla

device = sys.argv[1]
if device != "cpu":
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    dist.init_process_group("cpu:gloo,lazyxla:lazyxla")
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(70, 8), torch.randint(3, (70,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, compiles = [], []
for epoch in range(4):
    seen = 0
    for x, labels in loader:
        with accelerator.accumulate(model):
            y = model(x)
            loss = torch.nn.functional.cross_entropy(y, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(y))
        lazyxla.sync()
    losses += accelerator.gather(loss).tolist()
    compiles.append(lazyxla.counters()["compiles"])
accelerator.wait_for_everyone()
used = next(model.parameters()).device.type
settled = compiles[-1] == compiles[-2] and not lazyxla.fallbacks()
accelerator.print(used, accelerator.num_processes, seen, settled, *losses)
accelerator.end_training()
"""


def test_accelerate_trains_as_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(ACCELERATED)
    found = {}
    for device in ("cpu", "lazyxla"):
        *_, line = torchrun(2, str(script), device)
        used, processes, seen, settled, *losses = line.split()
        assert (used, processes, seen, settled) == (device, "2", "70", "True")
        found[device] = [float(loss) for loss in losses]
    # AdamW divides by small roots: rounding grows over the steps.
    assert found["lazyxla"] == pytest.approx(found["cpu"], rel=1e-4)
