"""Training steps of whole models, compiled for TPUs or GPUs: ``python -m tests.aot.training``.

Needs their compilers, and none of them. Prints what the compiler tells of each, and ends with
status 1 if one is refused. A time that begins with ">" is a lower bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import MODELS
from lazyxla import aot

DEFAULT = ("decoder", "resnet50", "bert", "vit")
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def compile_training(name: str, topology: str | aot.Topology) -> aot.CompiledProgram:
    """One training step of a network, compiled for devices."""
    training = MODELS[name]
    with torch.device("meta"):
        model = training.make()
    step = train_step(training.loss)
    return aot.compile(model, training.batch("meta"), topology=topology, train_step=step)


def train_step(loss: Callable[..., torch.Tensor]) -> Callable[[nn.Module], Callable[..., Any]]:
    """One step of AdamW under autocast to bfloat16."""

    def training(model: nn.Module) -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(*inputs: torch.Tensor) -> torch.Tensor:
            with torch.autocast("lazyxla"):
                value = loss(model, *inputs)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    return training


def adamw_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _line(model: str, topology: str, program: aot.CompiledProgram) -> str:
    """Without what the compiler does not tell: that of GPUs counts no operations."""
    line = f"{model:<13}{topology:<11}{program.memory_stats()['peak'] / 2**30:10.2f}"
    line += f"{(program.memory_bytes or 0) / 2**30:8.2f}"
    if program.flops is None or program.estimated_seconds is None:
        return f"{line}{'':31}"
    bound = ">" if program.estimated_seconds == program.least_seconds else ""
    estimate = f"{bound}{program.estimated_seconds * 1e3:.2f}"
    return f"{line}{program.flops / 1e12:8.2f}{estimate:>14}{program.share_of_peak_flops:9.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--models", nargs="+", default=DEFAULT, choices=list(MODELS))
    arguments = parser.parse_args()
    failed = []
    print("model        topology     peak GiB  of GiB  TFLOPs  estimated ms  of peak  compiled in")
    for model in arguments.models:
        for topology in arguments.topologies:
            begin = time.monotonic()
            try:
                program = compile_training(model, topology)
            except (RuntimeError, ValueError) as error:
                failed.append(f"{model}, {topology}: {error}")
                continue
            took = time.monotonic() - begin
            print(_line(model, topology, program), f"{took:9.0f} s", flush=True)
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
