"""What each mode costs: the same work in lazy, eager, fused eager and compiled form.

    python benchmarks/modes.py [--only chain,decoder,resnet50,host,warmup,inference] [--rounds 5]

All modes and the peers (PyTorch on the CPU, eager and inductor) run in one process and take turns,
so that a busy moment of the machine counts for all; each figure is the best of the rounds. The
inference of ten models by torch.compile is run.py's, where every model has a process of its own.
``host`` is the host's part of the decoder's settled step, its input there already, beside a call of
the same step by hand in ``jax.jit`` (host_time.py).
``--peers all`` adds torch_xla in an environment of its own, where it can be installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ.setdefault("LAZYXLA_CACHE_SIZE", "0")  # warm-up is measured from nothing
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "examples")]

import decoder_data as data  # noqa: E402
import docs_table  # noqa: E402
import host_time  # noqa: E402
import torch  # noqa: E402
from decoder_model import SMALL, Decoder, next_token_loss  # noqa: E402
from docs_table import Figure  # noqa: E402
from peers import torch_xla_python  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

import lazyxla  # noqa: E402
from lazyxla.dynamo import backend as lazyxla_backend  # noqa: E402

OPERATORS = 2000
WARM_UP_BAR = 1.3
PYTORCH = "PyTorch CPU eager"
DEVICE = "lazyxla"


@dataclass
class Way:
    """One way to do the work: ``run(n)`` does it n times, ``wait`` ends when the device has."""

    name: str
    run: Callable[[int], None]
    wait: Callable[[], None]
    mode: bool | str = False


def wait_for_device() -> None:
    lazyxla.sync(wait=True)


def on_device(name: str, mode: bool | str, step: Callable[[], object], sync: bool = False) -> Way:
    def run(times: int) -> None:
        for _ in range(times):
            result = step()  # alive at the sync, or nothing would run
            if sync:
                lazyxla.sync()
            del result

    return Way(name, run, wait_for_device, mode)


def on_host(name: str, step: Callable[[], object]) -> Way:
    def run(times: int) -> None:
        for _ in range(times):
            step()

    return Way(name, run, lambda: None)


def chain_step(device: str) -> Callable[[], Tensor]:
    x, y = torch.ones(16, 16).to(device), torch.ones(16, 16).to(device)

    def step() -> Tensor:
        z = x
        for _ in range(OPERATORS // 4):
            z = z + y
            z = z * 0.5
            z = z - 0.25
            z = -z
        return z

    return step


def chain() -> list[Way]:
    step = chain_step(DEVICE)
    return [
        on_device("lazy", False, step, sync=True),
        on_device("eager", True, step),
        on_device("fused eager", "fused", step),
        on_device("eager + compile", True, lazyxla.compile(step)),
        on_host(PYTORCH, chain_step("cpu")),
    ]


def training(
    make: Callable[[], nn.Module],
    batches: list[tuple[Tensor, Tensor]],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[nn.Module, str], torch.optim.Optimizer],
) -> list[Way]:
    def step_on(device: str, compiler: Any = None, parts: bool = False) -> Any:
        torch.manual_seed(0)
        model = make().to(device)
        optimizer = make_optimizer(model, device)
        stream = itertools.cycle(batches)
        forward = torch.compile(model, backend=compiler) if compiler else model

        def train(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = loss_function(forward(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def batch() -> tuple[Tensor, Tensor]:
            inputs, targets = next(stream)
            return inputs.to(device), targets.to(device)

        return (train, batch) if parts else lambda: train(*batch())

    def captured(parts: tuple[Any, Any]) -> Callable[[], Tensor]:
        train, batch = lazyxla.compile(parts[0], capture=True), parts[1]
        return lambda: train(*batch())

    return [
        on_device("lazy", False, step_on(DEVICE), sync=True),
        on_device("eager", True, step_on(DEVICE)),
        on_device("fused eager", "fused", step_on(DEVICE)),
        on_device("eager + compile", True, lazyxla.compile(step_on(DEVICE))),
        on_device("captured", False, captured(step_on(DEVICE, parts=True))),
        on_device("torch.compile", False, step_on(DEVICE, lazyxla_backend), sync=True),
        on_host(PYTORCH, step_on("cpu")),
        on_host("PyTorch CPU inductor", step_on("cpu", "inductor")),
    ]


def decoder() -> list[Way]:
    def make() -> nn.Module:
        model = Decoder(SMALL)
        weights = {name: torch.from_numpy(array) for name, array in data.weights().items()}
        model.load_state_dict(weights)
        return model

    def adam(model: nn.Module, device: str) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=data.LEARNING_RATE, fused=True)

    batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data.batches()]
    return training(make, batches, next_token_loss, adam)


def resnet50() -> list[Way]:
    torchvision = import_torchvision()
    if torchvision is None:
        raise SystemExit("resnet50 needs torchvision")
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, 64, 64), torch.randint(1000, (4,)))]

    def sgd(model: nn.Module, device: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    return training(torchvision.models.resnet50, batches, F.cross_entropy, sgd)


@dataclass
class Workload:
    """``bars``: the least speeds of ways, relative to ``reference``'s."""

    ways: Callable[[], list[Way]]
    times: int  # how often per measurement
    scale: float  # seconds of one time in `unit`
    unit: str
    bars: dict[str, float]
    reference: str = "lazy"


# At most 3.5 and 1.5 us per operator on a machine where PyTorch takes 1.6: others are slower.
CHAIN_BARS = {"eager": 1.6 / 3.5, "fused eager": 1.6 / 1.5}
WORKLOADS = {
    "chain": Workload(chain, 10, 1e6 / OPERATORS, "us/op", CHAIN_BARS, PYTORCH),
    "decoder": Workload(
        decoder, 5, 1e3, "ms", {"eager": 0.8, "fused eager": 0.9, "eager + compile": 0.98}
    ),
    "resnet50": Workload(resnet50, 2, 1e3, "ms", {"eager": 0.7, "fused eager": 0.9}),
}

# The programs of run.py that measure torch_xla, lazily; they print a line of JSON.
TORCH_XLA = {"chain": ["pointwise.py"], "decoder": ["decoder.py"], "resnet50": ["resnet.py"]}


def settle(way: Way) -> None:
    """Runs it until nothing is compiled any more, nor run by PyTorch's kernels in its place."""
    for _ in range(40):
        before = lazyxla.counters()
        way.run(4)
        way.wait()
        after = lazyxla.counters()
        if all(after[name] == before[name] for name in ("compiles", "host_programs")):
            return


def measure(workload: Workload, rounds: int) -> dict[str, tuple[float, float]]:
    """Per way: seconds until the warm-up was done, and the best seconds of one time."""
    figures: dict[str, tuple[float, float]] = {}
    ways = workload.ways()
    for way in ways:
        begin = time.perf_counter()
        with lazyxla.eager_mode(way.mode):  # type: ignore[arg-type]
            settle(way)
        figures[way.name] = (time.perf_counter() - begin, float("inf"))
    for _ in range(rounds):
        for way in ways:
            with lazyxla.eager_mode(way.mode):  # type: ignore[arg-type]
                way.run(1)
                way.wait()
                begin = time.perf_counter()
                way.run(workload.times)
                way.wait()
                seconds = (time.perf_counter() - begin) / workload.times
            warm, best = figures[way.name]
            figures[way.name] = (warm, min(best, seconds))
    return figures


def show(name: str, workload: Workload, figures: dict[str, tuple[float, float]]) -> None:
    print(f"\n{name:<21} {workload.unit:>9} {'speed':>8} {'warm-up s':>10}")
    reference = figures[workload.reference][1]
    for way, (warm, seconds) in figures.items():
        speed = reference / seconds
        note = ""
        if (bar := workload.bars.get(way)) is not None:
            met = "met" if speed >= bar else "MISSED"
            note = f"  bar: at least {bar:.2f} of {workload.reference}, {met}"
        value = seconds * workload.scale
        print(f"{way:<21} {value:>9.2f} {speed:>8.2f} {warm:>10.2f}{note}")


def rows_of(name: str, workload: Workload, figures: dict[str, tuple[float, float]]) -> list[Figure]:
    """The lines of docs/performance.md: lazyxla's ways beside the reference."""
    peer, reference = workload.reference, figures[workload.reference][1] * workload.scale
    return [
        Figure(name, f"{way}, {workload.unit}", seconds * workload.scale, peer, reference)
        for way, (_, seconds) in figures.items()
        if way != workload.reference and not way.startswith("PyTorch")
    ]


def show_warm_up(rounds: int, torch_xla: str) -> float:
    """The first eager forward pass of ResNet-18: each of its one-operator programs compiles."""

    def best(python: str, side: str) -> float:
        command = [python, str(HERE / "eager_warm_up.py"), "--side", side]
        return min(float(subprocess.check_output(command)) for _ in range(rounds))

    seconds = best(sys.executable, "lazyxla")
    verdict = "met" if seconds <= WARM_UP_BAR else "MISSED"
    print(f"\nfirst eager forward pass of resnet18: {seconds:.2f} s  ", end="")
    print(f"bar: at most {WARM_UP_BAR} s, {verdict}")
    if torch_xla:
        print(f"  torch_xla: {best(torch_xla, 'torch_xla'):.2f} s")
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = ["host", "warmup", "inference"]
    options.add_argument("--only", default=",".join([*WORKLOADS, *others]))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--peers", choices=("installed", "all"), default="installed")
    options.add_argument(
        "--write-docs", action="store_true", help="put the figures into docs/performance.md"
    )
    args = options.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(WORKLOADS) - set(others):
        options.error(f"no workload named {', '.join(sorted(unknown))}")
    load = os.getloadavg()[0]
    torch_xla = ""
    if args.peers == "all":
        try:
            torch_xla = torch_xla_python(HERE.parent / "build" / "torch-xla")
        except RuntimeError as error:
            print(f"torch_xla is left out: {error}", file=sys.stderr)
    rows: list[Figure] = []
    for name in names:
        if name == "warmup":
            seconds = show_warm_up(args.rounds, torch_xla)
            what = "first eager forward pass of resnet18, s"
            rows.append(Figure(name, what, seconds, bar=WARM_UP_BAR))
            continue
        if name == "host":
            host_time.show(host_time.measure(args.rounds))
            continue
        if name == "inference":
            print(flush=True)
            command = [sys.executable, str(HERE / "run.py"), "--only", name, "--rounds", "1"]
            subprocess.run(command + ["--write-docs"] * args.write_docs, check=True)
            continue
        figures = measure(WORKLOADS[name], args.rounds)
        show(name, WORKLOADS[name], figures)
        rows += rows_of(name, WORKLOADS[name], figures)
        if torch_xla and name in TORCH_XLA:
            for program in TORCH_XLA[name]:
                subprocess.run([torch_xla, str(HERE / program), "--side", "torch_xla"], check=True)
    print(f"\n{len(os.sched_getaffinity(0))} CPUs, load {load:.1f} before")
    if args.write_docs:
        here = docs_table.machine()
        docs_table.write(dataclasses.replace(row, group="modes", machine=here) for row in rows)


if __name__ == "__main__":
    main()
