"""Statistics of the devices' memory, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import lazyxla

KIB = 1024


@pytest.fixture
def before() -> dict[str, int]:
    """The statistics at the start, with peaks and sums from there on."""
    lazyxla.sync(wait=True)
    gc.collect()
    lazyxla.reset_peak_memory_stats()
    lazyxla.reset_accumulated_memory_stats()
    return lazyxla.memory_stats()


def test_current_and_peak(before: dict[str, int]) -> None:
    assert lazyxla.memory_allocated() == lazyxla.max_memory_allocated()
    start = lazyxla.memory_allocated()
    x = torch.zeros(256, KIB).to("lazyxla")
    y = torch.zeros(3, dtype=torch.int8).to("lazyxla")
    assert lazyxla.memory_allocated() - start == KIB * KIB + 3
    del x
    assert lazyxla.memory_allocated() - start == 3
    assert lazyxla.max_memory_allocated() - start == KIB * KIB + 3
    assert torch.lazyxla.max_memory_allocated("lazyxla:0") - start == KIB * KIB + 3
    lazyxla.reset_peak_memory_stats()
    assert lazyxla.max_memory_allocated() - start == 3
    assert y.nbytes == 3


def test_arrays_are_counted(before: dict[str, int]) -> None:
    xs = [torch.zeros(KIB).to("lazyxla") for _ in range(5)]
    del xs[3:]
    now = lazyxla.memory_stats()
    grown = {name: now[name] - before[name] for name in now}
    assert grown == {
        "allocation.all.current": 3,
        "allocation.all.peak": 5,
        "allocation.all.allocated": 5,
        "allocation.all.freed": 2,
        "allocated_bytes.all.current": 12 * KIB,
        "allocated_bytes.all.peak": 20 * KIB,
        "allocated_bytes.all.allocated": 20 * KIB,
        "allocated_bytes.all.freed": 8 * KIB,
        "reserved_bytes.all.current": 12 * KIB,
        "reserved_bytes.all.peak": 20 * KIB,
    }
    lazyxla.reset_accumulated_memory_stats()
    del xs[1:]
    now = lazyxla.memory_stats()
    assert now["allocated_bytes.all.allocated"] == 0
    assert now["allocated_bytes.all.freed"] == 8 * KIB
    assert now["allocation.all.freed"] == 2


def test_results_of_programs_are_counted_when_they_run(before: dict[str, int]) -> None:
    x = torch.zeros(KIB).to("lazyxla")
    y = x + 1
    assert lazyxla.memory_allocated() - before["allocated_bytes.all.current"] == 4 * KIB
    lazyxla.sync(wait=True)
    assert lazyxla.memory_allocated() - before["allocated_bytes.all.current"] == 8 * KIB
    assert y.shape == x.shape


def test_devices_are_counted_apart(before: dict[str, int]) -> None:
    start = lazyxla.memory_allocated("lazyxla:1")
    x = torch.zeros(KIB).to("lazyxla:1")
    assert lazyxla.memory_allocated(1) - start == x.nbytes == 4 * KIB
    assert lazyxla.memory_allocated() == before["allocated_bytes.all.current"]


def test_reserved_is_allocated_where_the_plugin_does_not_tell(before: dict[str, int]) -> None:
    x = torch.zeros(KIB).to("lazyxla")
    assert lazyxla.memory_reserved() == lazyxla.memory_allocated()
    del x
    assert lazyxla.max_memory_reserved() == lazyxla.max_memory_allocated()
    assert lazyxla.max_memory_reserved() == lazyxla.memory_reserved() + 4 * KIB


def test_accelerator(before: dict[str, int]) -> None:
    x = torch.zeros(KIB).to("lazyxla")
    accelerator = torch.accelerator
    assert accelerator.memory_allocated() == lazyxla.memory_allocated()
    assert accelerator.memory_reserved() == lazyxla.memory_reserved()
    del x
    assert accelerator.max_memory_allocated() == accelerator.memory_allocated() + 4 * KIB
    assert accelerator.max_memory_reserved() == lazyxla.max_memory_reserved()
    theirs, ours = accelerator.memory_stats(0), lazyxla.memory_stats(0)
    assert {name: theirs[name] for name in ours} == ours
    accelerator.reset_peak_memory_stats()
    assert lazyxla.max_memory_allocated() == lazyxla.memory_allocated()
    accelerator.reset_accumulated_memory_stats()
    assert lazyxla.memory_stats()["allocation.all.freed"] == 0
    accelerator.empty_cache()
    lazyxla.empty_cache()
    with pytest.raises(IndexError, match="device index 7 is out of range"):
        accelerator.memory_allocated(7)


def test_information_on_the_cpu_is_the_machines() -> None:
    sizes = {}
    with open("/proc/meminfo") as lines:
        for line in lines:
            name, size = line.split()[:2]
            sizes[name] = int(size) * KIB
    free, total = lazyxla.mem_get_info()
    assert total == sizes["MemTotal:"]
    assert 0 < free < total
    assert torch.accelerator.get_memory_info()[1] == total
    assert torch.lazyxla.mem_get_info("lazyxla:1")[1] == total


def test_summary(before: dict[str, int]) -> None:
    x = torch.zeros(KIB, KIB).to("lazyxla:1")
    lazyxla.reset_peak_memory_stats(1)
    title, header, arrays, memory, reserved = lazyxla.memory_summary(1).splitlines()
    assert title.startswith("lazyxla:1, cpu: ")
    assert title.endswith(" GiB free")
    assert header.split() == ["current", "peak", "allocated", "freed"]
    stats = lazyxla.memory_stats(1)
    assert arrays.split()[:3] == ["arrays", *[str(stats["allocation.all.current"])] * 2]
    size = stats["allocated_bytes.all.current"] / KIB**2
    assert memory.split()[:4] == ["their", "memory", f"{size:.1f}", "MiB"]
    assert reserved.split()[:3] == ["reserved", f"{size:.1f}", "MiB"]
    assert x.nbytes == 4 * KIB**2


def test_nothing_is_started(run_python: Any) -> None:
    code = """
import torch, lazyxla
assert lazyxla.memory_stats() == {} == torch.accelerator.memory_stats()
assert lazyxla.memory_allocated() == torch.accelerator.memory_allocated() == 0
lazyxla.reset_peak_memory_stats()
torch.accelerator.reset_peak_memory_stats()
torch.accelerator.empty_cache()
assert not torch.lazyxla.is_initialized()
assert lazyxla.mem_get_info()[1] > 0
assert torch.lazyxla.is_initialized()
"""
    run_python(code)


STEPS = """
import resource, time
import torch, lazyxla
(torch.randn(512, 512) @ torch.randn(512, 512)).sin()  # on PyTorch's own threads
x = torch.randn(2**20, 8, device="lazyxla")

def step():
    return torch.sort(x, dim=1)[0].flip(0).cumsum(1).sum().item()

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident()
for _ in range(20):
    step()
faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before[0]) / 20
grown = resident() - before[1]
for empty_cache in (lazyxla.empty_cache, torch.accelerator.empty_cache):
    step()
    time.sleep(0.5)  # the plugin frees temporary memory on a thread, after the results are ready
    kept = resident()
    empty_cache()
    given_back = kept - resident()
    print(faults, grown, given_back)
step()
"""
"""Steps with temporary memory of 96 MiB. Prints the page faults of each, and in KiB by how much the
process grew, and what `empty_cache` gave back."""

PAGES = 96 * KIB / 4


def test_steps_use_their_memory_again(run_python: Any) -> None:
    out = run_python(STEPS, OMP_NUM_THREADS="2").stdout
    for line in out.splitlines():
        faults, grown, given_back = map(float, line.split())
        # One step may start before the one before has freed its memory, and takes as much again.
        assert faults < PAGES / 10
        assert grown < 128 * KIB
        assert given_back > 80 * KIB


def test_malloc_as_the_user_sets_it(run_python: Any) -> None:
    out = run_python(STEPS, OMP_NUM_THREADS="2", MALLOC_TOP_PAD_="0").stdout
    faults, _, given_back = map(float, out.splitlines()[0].split())
    assert faults > PAGES / 2
    assert given_back < 16 * KIB
