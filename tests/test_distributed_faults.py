"""Processes of torch.distributed that differ, come late or end, and what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import run, run_faults

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)


def test_processes_that_die_come_late_or_call_something_else(pytestconfig: pytest.Config) -> None:
    """All others are told who, and from which lines, within the group's timeout."""
    count = pytestconfig.getoption("--faults")
    assert run_faults(count, timeout=120 + 20 * count) == []


DYING = """
import os
from datetime import timedelta
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=20))
kept = torch.ones(3, device="lazyxla")
lazyxla.sync()
for step in range(20):
    if rank == 1 and step == 7:
        os._exit(0)
    x = torch.ones(3, device="lazyxla") + kept
    dist.all_reduce(x)
    try:
        x.tolist()
    except RuntimeError as error:
        assert "process 1: not there" in str(error), error
        assert kept.tolist() == [1, 1, 1]
        for again in range(2):  # the group is over
            y = kept.clone()
            dist.all_reduce(y)
            try:
                y.tolist()
            except RuntimeError as error:
                print("told", "process 1: not there" in str(error))
        os._exit(0)
"""


def test_what_a_process_that_dies_leaves(tmp_path: Path) -> None:
    """Nothing else of the other one is lost, and its later collectives fail at once."""
    survivor, _ = run(DYING, 2, tmp_path)
    assert survivor.split() == ["told", "True"] * 2


SETTING = """
from datetime import timedelta
lazyxla.settings.compare_collectives = sys.argv[1]
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=20))
for step in range(6):
    x = torch.ones(3, device="lazyxla")
    dist.all_reduce(x)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.all_reduce(x)
    dist.all_reduce(x)
    x.tolist()
x = torch.ones(3, device="lazyxla")
dist.all_reduce(x)
# Both have followed the sum before; Gloo would take one for the other.
dist.all_reduce(x, dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
try:
    print("values", x.tolist())
except RuntimeError as error:
    print("told", "different collectives" in str(error))
"""


@pytest.mark.parametrize(("setting", "told"), [("first", "values"), ("always", "told")])
def test_known_sequences_are_compared_if_asked_for(setting: str, told: str, tmp_path: Path) -> None:
    for out in run(SETTING, 2, tmp_path, setting):
        assert out.split()[0] == told


COMPARED = """
from datetime import timedelta
lazyxla.settings.compare_collectives = sys.argv[1]
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=20))
def step(*sizes):
    before = lazyxla.counters()["comparisons"]
    xs = [torch.ones(size, device="lazyxla") for size in sizes]
    for x in xs:
        dist.all_reduce(x)
    lazyxla.sync(wait=True)
    return lazyxla.counters()["comparisons"] - before
counts = [step(*[3, 7] * 10) for _ in range(6)]
print(*counts)
if sys.argv[1] == "always":
    try:
        step(3, 3 if rank else 7)  # each has followed 3 before
    except RuntimeError as error:
        print("different collectives" in str(error) and "float32[7], number 122" in str(error))
"""


@pytest.mark.parametrize(
    ("setting", "counts"),
    [
        ("always", "1 1 1 1 1 1"),
        ("first", "1 0 0 0 0 0"),
        ("never", "0 0 0 0 0 0"),
    ],
)
def test_what_is_recorded_is_compared_at_once(setting: str, counts: str, tmp_path: Path) -> None:
    """One round trip for a step, however many collectives it has; of other sizes, none hangs."""
    for out in run(COMPARED, 2, tmp_path, setting):
        assert out.splitlines() == [counts, "True"][: 1 + (setting == "always")]


MESSAGES = """
from datetime import timedelta
lazyxla.settings.compare_collectives = sys.argv[1]
size, dtype = int(sys.argv[2]), getattr(torch, sys.argv[3])
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=5))
x = torch.full((2, 3), 5.0, device="lazyxla")
empty = x[:0]
for step in range(4):
    if rank == 0:
        dist.send(x, 1)
        dist.send(empty, 1)
    else:
        y = torch.zeros(6, device="lazyxla")  # the shape is the receiver's business
        dist.recv(y, 0)
        dist.recv(empty, 0)
        assert y.tolist() == [5] * 6
try:
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(torch.zeros(size, device="lazyxla", dtype=dtype), 0)
    dist.barrier()
except RuntimeError as error:
    if rank == 1 and sys.argv[1] == "always":
        assert "process 0 sent 6 of float32 at " in str(error), error
    assert "script.py" in str(error), error
    print("told", "process 1: recv(from 0) of " in str(error))
"""


@pytest.mark.parametrize(
    ("setting", "size", "dtype"),
    [
        *(("always", 7, "float32"), ("always", 6, "int32"), ("always", 0, "float32")),
        *(("never", 7, "float32"), ("never", 5, "float32")),
    ],
)
def test_messages_that_are_not_what_is_expected(
    setting: str, size: int, dtype: str, tmp_path: Path
) -> None:
    """Neither is taken for the other, or ends a process."""
    for out in run(MESSAGES, 2, tmp_path, setting, str(size), dtype):
        assert out.split() == ["told", "True"]


SENT = """
dist.init_process_group("lazyxla", **group)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
x = torch.ones(1 << 20, device="lazyxla")  # 4 MiB
for step in range(160):
    if step == 10:
        before = resident()
    dist.send(x + step, 1) if rank == 0 else dist.recv(x, 0)
    lazyxla.sync(wait=True)
    dist.barrier()
print(resident() - before < 200 << 20)  # 600 MiB were sent
dist.destroy_process_group()
"""


def test_what_was_received_is_freed(tmp_path: Path) -> None:
    for out in run(SENT, 2, tmp_path):
        assert out.split() == ["True"]


THREADS = """
import threading, time
from datetime import timedelta
lazyxla.settings.compare_collectives = "never"
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=100))
count = 20
def reduce():
    for n in range(count):
        dist.all_reduce(torch.ones(n + 1, device="lazyxla"))
found = []
def receive():
    for n in range(count):
        x = torch.zeros(2, device="lazyxla")
        work = dist.irecv(x, 0)
        time.sleep(0.01)  # the other thread has begun its next one
        assert work.is_completed()  # with the GIL
        found.append(int(x[0].item()))
if rank == 0:
    for n in range(2 * count):
        dist.send(torch.full((2,), float(n), device="lazyxla"), 1)
    reduce()
else:
    lazyxla.eager_mode(True)
    lazyxla.settings.blocking = True
    threads = [threading.Thread(target=each) for each in (reduce, receive, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sorted(found) == list(range(2 * count)))
dist.barrier()
"""


def test_threads_receive_beside_each_other(tmp_path: Path) -> None:
    """From one process under one tag, while another thread holds what their order needs."""
    assert [out.split() for out in run(THREADS, 2, tmp_path)] == [[], ["True"]]


FAILED = """
import os, time
from datetime import timedelta
from pathlib import Path
lazyxla.settings.compare_collectives = "always"
dist.init_process_group("lazyxla", **group, timeout=timedelta(seconds=20))
over = Path(meet + " is over")
if rank == 0:
    dist.send(torch.ones(4, device="lazyxla"), 1)
    lazyxla.sync(wait=True)
    while not over.exists():
        time.sleep(0.05)
    os._exit(0)
lazyxla.eager_mode(True)
lazyxla.settings.blocking = True
works = [dist.irecv(torch.zeros(n, device="lazyxla"), 0) for n in (3, 4)]
for work in (*reversed(works), works[0]):  # what is taken first is the other one
    try:
        print(work.wait())
    except RuntimeError as error:
        print("told", "process 0 sent 4 of float32" in str(error))
over.touch()
os._exit(0)
"""


def test_each_receive_tells_its_failure(tmp_path: Path) -> None:
    _, told = run(FAILED, 2, tmp_path)
    assert told.split() == ["told", "True"] * 3


WAITS = """
import os, threading, time
from datetime import timedelta
from pathlib import Path
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(meet + "_").write_text(str(store.port))
    Path(meet + "_").rename(meet)
while not Path(meet).exists():
    time.sleep(0.01)
if rank == 1:
    store = dist.TCPStore("127.0.0.1", int(Path(meet).read_text()))
seconds = timedelta(seconds=30)
dist.init_process_group("lazyxla", store=store, rank=rank, world_size=size, timeout=seconds)
threading.Thread(target=store.wait, args=(["never"], timedelta(seconds=100)), daemon=True).start()
time.sleep(0.2)
start = time.monotonic()
x = torch.ones(3, device="lazyxla")
dist.all_reduce(x, dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
try:
    x.tolist()
except RuntimeError as error:
    print("different collectives" in str(error), time.monotonic() - start < 30, flush=True)
if rank == 0:
    time.sleep(3)  # it has the store
os._exit(0)
"""


def test_what_differs_is_told_while_a_thread_waits_in_the_store(tmp_path: Path) -> None:
    for out in run(WAITS, 2, tmp_path):
        assert out.split() == ["True", "True"]
