"""The training loop that all examples share, in every mode.

It is plain PyTorch. ``--mode`` chooses when recorded work runs; the loop differs in three lines.
Two habits keep it fast on a device that records first and runs later, and harm nowhere else:

* Gradients are dropped before the step ends. What is alive then is computed and kept; gradients
  that the optimizer has used up are not worth keeping.
* The loss is read every ``--log-every`` steps only. Reading waits for the device; between two
  readings the host runs ahead.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm

import lazyxla

MODES = {
    "lazy": "each step is one program, run by lazyxla.sync()",
    "eager": "each operator is a program, run at its call",
    "fused": "operators run by themselves, several at a time",
    "eager-compile": "eager, but the step is one program, by lazyxla.compile()",
    "torch-compile": "lazy, the model traced by torch.compile()",
}

WARM_UP = 3  # steps in which programs compile: the first, the second, and one for varying numbers


@dataclass
class Summary:
    """What a training run did. The three counts are of lazyxla and stay zero elsewhere."""

    steps: int
    unit: str
    losses: list[float] = field(default_factory=list)  # those that were read, in order
    rate: float = math.nan  # units per second after the warm-up
    compiles: int = 0
    last_compile: int = 0  # the step (from 1) after which nothing was compiled
    executions: int = 0
    fallbacks: int = 0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}, "
            f"{self.rate:,.0f} {self.unit}/s; {self.compiles} compiles (the last in step "
            f"{self.last_compile}), {self.executions / self.steps:.2f} executions per step, "
            f"{self.fallbacks} operators on the host"
        )


def parser(
    description: str, *, steps: int, lr: float, optimizer: str, on_mesh: bool = False
) -> argparse.ArgumentParser:
    """The options of every example, with this example's defaults; ``on_mesh``, without a choice of
    the one device."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--mode",
        choices=MODES,
        default="lazy",
        help="; ".join(f"{name}: {text}" for name, text in MODES.items()),
    )
    if on_mesh:
        options.set_defaults(device="lazyxla")
    else:
        options.add_argument("--device", default="lazyxla", help="lazyxla (the default) or cpu")
    options.add_argument("--steps", type=int, default=steps)
    options.add_argument("--batch", type=int, help="examples per step")
    options.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default=optimizer)
    options.add_argument("--lr", type=float, default=lr, help="the highest learning rate")
    options.add_argument("--schedule", choices=("cosine", "constant"), default="cosine")
    options.add_argument("--log-every", type=int, default=10, help="steps per reading of the loss")
    options.add_argument("--seed", type=int, default=0)
    return options


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def schedule(name: str, steps: int) -> Callable[[int], float]:
    """The factor on the learning rate in each step (from 0)."""
    if name == "constant":
        return lambda step: 1.0
    rise = max(1, steps // 20)
    return lambda step: min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / steps)) / 2


def train(
    args: argparse.Namespace,
    model: nn.Module,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    unit: str,
    units_per_step: int,
) -> Summary:
    """Trains ``model``, which is on ``args.device`` already, and says what happened.

    ``batches`` gives (inputs, targets), on the host or on the device. ``unit`` is what the speed
    counts, such as "tokens", of which one step has ``units_per_step``.
    """
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.schedule, args.steps))
    model.train()
    forward = torch.compile(model, backend="lazyxla") if args.mode == "torch-compile" else model

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_function(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    if args.mode == "eager-compile":
        step = lazyxla.compile(step)
    eager = {"eager": True, "eager-compile": True, "fused": "fused"}.get(args.mode, False)
    with lazyxla.eager_mode(eager):
        summary = _loop(args, step, batches, Summary(args.steps, unit), units_per_step)
    print(summary)
    return summary


def _loop(
    args: argparse.Namespace,
    step: Callable[[Tensor, Tensor], Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
    summary: Summary,
    units_per_step: int,
) -> Summary:
    """Takes the steps and measures them."""
    lazyxla.sync()  # the model's first values are no part of the training step
    start = lazyxla.counters()
    warm_up = min(WARM_UP, args.steps - 1)
    clock = time.perf_counter()
    with tqdm(total=args.steps, unit="step") as bar:
        for number in range(1, args.steps + 1):
            inputs, targets = (tensor.to(args.device) for tensor in next(batches))
            loss = step(inputs, targets)
            if not lazyxla.eager_mode():
                lazyxla.sync()

            compiles = lazyxla.counters()["compiles"] - start["compiles"]
            if compiles > summary.compiles:
                summary.compiles, summary.last_compile = compiles, number
            if number == warm_up:
                lazyxla.sync(wait=True)
                clock = time.perf_counter()
            if number == 1 or number % args.log_every == 0 or number == args.steps:
                summary.losses.append(loss.item())
                if number > warm_up:
                    elapsed = time.perf_counter() - clock
                    summary.rate = (number - warm_up) * units_per_step / elapsed
                rate = "-" if math.isnan(summary.rate) else f"{summary.rate:,.0f} {summary.unit}/s"
                bar.set_postfix_str(f"loss {summary.losses[-1]:.3f}, {rate}", refresh=False)
            bar.update()
    end = lazyxla.counters()
    summary.executions = end["executions"] - start["executions"]
    summary.fallbacks = end["fallbacks"] - start["fallbacks"]
    return summary
