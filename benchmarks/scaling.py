"""What many devices, and several processes, cost the host.

``devices``: a flush of a known graph of 320 operators on 16 tensors that are spread over 1, 8 and
64 of the CPU plugin's devices. Recording is not in it. ``flush`` is lazyxla's own time, without the
plugin's execute function, in which the devices compute, if the machine has fewer processors than
they are; ``run`` is with it. The peer's is a call of `jax.jit` on the same plugin, with the same
shardings and donations.

``all_reduce``: one of two processes; a sum over both of 1,024 floats. lazyxla records 64 of them,
one after the other, and runs them as one program; Gloo is called 64 times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

from common import arguments, jax_devices, parser, report

COUNTS = (1, 8, 64)
TENSORS, OPERATORS, ROUNDS = 16, 320, 30
PROCESSES, SUMS = 2, 64

parser.add_argument("--rank", type=int)
parser.add_argument("--meeting-point")
args = arguments("lazyxla", "jax", "gloo", models=("devices", "all_reduce"))
if args.model == "devices":
    os.environ["LAZYXLA_CPU_DEVICES"] = str(max(COUNTS))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if args.side == "lazyxla":
    import lazyxla
    from lazyxla import _C


def flush_us(devices: int) -> tuple[float, float]:
    """lazyxla's own time for one flush, and the whole flush's, in microseconds."""
    mesh = lazyxla.Mesh((devices,), ("data",))
    xs = [lazyxla.shard(torch.ones(max(COUNTS), 16), mesh, ("data",)) for _ in range(TENSORS)]
    times, runs = [], []
    _C.measure_executions(True)
    for _ in range(ROUNDS):
        for x in xs:
            for _ in range(OPERATORS // TENSORS // 2):
                x.mul_(1.5).sub_(0.5)  # from 1 to 1
        plugin, begin = _C.seconds_in_executions(), time.perf_counter()
        lazyxla.sync()
        whole = time.perf_counter() - begin
        times.append(whole - (_C.seconds_in_executions() - plugin))
        runs.append(whole)
        lazyxla.sync(wait=True)
    _C.measure_executions(False)
    for x in xs:
        torch.testing.assert_close(x.cpu(), torch.ones(max(COUNTS), 16))
    return min(times) * 1e6, min(runs) * 1e6


def jax_run_us(devices: list[Any], count: int) -> float:
    """The time of a call of the same program by hand, in microseconds."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices[:count]), ("data",)), PartitionSpec("data"))
    ones = np.ones((max(COUNTS), 16), np.float32)
    xs = tuple(jax.device_put(ones, sharding) for _ in range(TENSORS))

    def compute(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for _ in range(OPERATORS // TENSORS // 2):
            xs = tuple(x * 1.5 - 0.5 for x in xs)
        return xs

    program = jax.jit(compute, donate_argnums=0)
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        xs = program(xs)
        times.append(time.perf_counter() - begin)
        jax.block_until_ready(xs)
    for x in xs:
        np.testing.assert_allclose(x, ones)
    return min(times) * 1e6


def all_reduce_us() -> float:
    """The time of one of SUMS all-reduces, in microseconds."""
    device = "lazyxla" if args.side == "lazyxla" else "cpu"
    dist.init_process_group(
        "cpu:gloo,lazyxla:lazyxla" if args.side == "lazyxla" else "gloo",
        init_method=f"file://{args.meeting_point}",
        rank=args.rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    x = torch.ones(1024, device=device)
    times = []
    for _ in range(ROUNDS):
        x.fill_(1.0)
        if device == "lazyxla":
            lazyxla.sync(wait=True)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(SUMS):
            dist.all_reduce(x)
        if device == "lazyxla":
            lazyxla.sync(wait=True)
        times.append(time.perf_counter() - begin)
    torch.testing.assert_close(x.cpu(), torch.full((1024,), float(PROCESSES) ** SUMS))
    dist.destroy_process_group()
    return min(times) * 1e6 / SUMS


def in_processes() -> None:
    """Runs this program once for each process; the first one reports."""
    with tempfile.TemporaryDirectory() as directory:
        meet = ["--meeting-point", os.path.join(directory, "store")]
        command = [sys.executable, *sys.argv, *meet, "--rank"]
        others = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL)
            for rank in range(1, PROCESSES)
        ]
        codes = [subprocess.run([*command, "0"]).returncode, *(other.wait() for other in others)]
    if any(codes):
        sys.exit(f"the processes ended with {codes}")


if args.model == "all_reduce" and args.side == "jax":
    report()
elif args.model == "all_reduce" and args.rank is None:
    in_processes()
elif args.model == "all_reduce":
    report(us=all_reduce_us())
elif args.side == "lazyxla":
    figures = {}
    for count in COUNTS:
        figures[f"flush_{count}_us"], figures[f"run_{count}_us"] = flush_us(count)
    report(**figures)
elif args.side == "jax":
    there = jax_devices(max(COUNTS))
    report(**{f"run_{count}_us": jax_run_us(there, count) for count in COUNTS})
else:
    report()
