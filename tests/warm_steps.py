"""Steps that tests/test_warm_caches.py has compiled ahead, and run in another process.

    python tests/warm_steps.py store     captures them for the devices of the process
    python tests/warm_steps.py run       runs them, and prints what each step compiled

Each entry of KINDS makes a step and its arguments.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lazyxla
from examples.decoder_model import Decoder, DecoderConfig, next_token_loss
from lazyxla.dynamo import backend

CONFIG = DecoderConfig(
    hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, vocab=32, max_length=8
)
COUNTERS = ("lowerings", "compiles", "programs_loaded", "executions")
CAPTURED_STEPS, STEPS = 4, 6


def decoder_step(device: str = "lazyxla") -> tuple[Any, ...]:
    """AdamW with a learning rate that changes; its first step makes the optimizer's state."""
    torch.manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab, (2, CONFIG.max_length + 1))
    x, y = tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
    model = Decoder(CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    return step, x, y


def chain(device: str = "lazyxla") -> Callable[[], torch.Tensor]:
    """More operators than fused eager mode takes at a time. In no order that repeats itself, for
    where a host pauses twice the mode cuts, too."""
    state = torch.ones(8).to(device)
    choose = random.Random(0)
    functions = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf, torch.atan)
    order = [choose.choice(functions) for _ in range(100)]

    def step() -> torch.Tensor:
        x = state
        for function in order:
            x = function(x)
        state.mul_(0.5)
        return x

    return step


def inference(device: str = "lazyxla") -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Decoder(CONFIG).to(device).eval()
    return torch.no_grad()(model), torch.arange(8).view(1, 8).to(device)


def mlp(device: str = "lazyxla") -> Callable[[], torch.Tensor]:
    """Uploads a batch in every step, and draws random numbers."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> torch.Tensor:
        loss = model(torch.ones(4, 8).to(device)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * 0  # the CPU draws other numbers

    return step


def region(device: str = "lazyxla") -> Callable[[], torch.Tensor]:
    return lazyxla.compile(mlp(device), xla_options={"xla_cpu_enable_fast_min_max": True})


def numbers(device: str = "lazyxla") -> Callable[[], torch.Tensor]:
    """A number that is an input from its second value on, one that a program is compiled for, and
    a kernel of PyTorch's that the program calls."""
    x = torch.arange(16.0).view(4, 4).to(device)
    count = iter(range(100))

    def step() -> torch.Tensor:
        number = next(count)
        return torch.linalg.svdvals(x.roll(number % 2, 0)) + number

    return step


def traced(device: str = "lazyxla") -> tuple[Any, ...]:
    fn = (lambda x: torch.relu(x) * 2) if device == "cpu" else torch.compile(_relu, backend=backend)
    return fn, torch.ones(3).to(device)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


KINDS: dict[str, tuple[Callable[..., Any], lazyxla.modes.EagerMode]] = {
    "decoder": (decoder_step, False),
    "fused": (chain, "fused"),
    "region": (region, True),
    "eager": (mlp, True),
    "inference": (inference, False),
    "numbers": (numbers, False),
    "traced": (traced, False),
}


def steps(make: Callable[..., Any], count: int, device: str) -> tuple[list[Any], list[list[int]]]:
    """The results of some steps, and how much of COUNTERS each took."""
    made = make(device)
    step, *arguments = made if isinstance(made, tuple) else (made,)
    lazyxla.sync()
    results, counts = [], []
    for _ in range(count):
        before = lazyxla.counters()
        results.append(step(*arguments))
        lazyxla.sync()
        after = lazyxla.counters()
        counts.append([after[name] - before[name] for name in COUNTERS])
    return results, counts


def store() -> dict[str, int]:
    """How many programs each kind has."""
    found = {}
    for kind, (make, mode) in KINDS.items():
        lazyxla.eager_mode(mode)
        with lazyxla.aot.capture() as programs:
            steps(make, CAPTURED_STEPS, "lazyxla")
        for program in programs:
            program.store()
        found[kind] = len(programs)
    counters = lazyxla.counters()
    assert not any(counters[name] for name in (*COUNTERS, "uploads")), counters
    return found


def run() -> dict[str, list[list[int]]]:
    """What each step of each kind took; their results are those of PyTorch on the CPU."""
    found = {}
    for kind, (make, mode) in KINDS.items():
        lazyxla.eager_mode(mode)
        results, found[kind] = steps(make, STEPS, "lazyxla")
        lazyxla.eager_mode(False)
        expected, _ = steps(make, STEPS, "cpu")
        torch.testing.assert_close([result.cpu() for result in results], expected)
    return found


if __name__ == "__main__":
    print(json.dumps({"store": store, "run": run}[sys.argv[1]]()))
