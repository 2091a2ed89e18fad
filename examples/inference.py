"""Serves the models of the training examples with torch.compile: one program per call.

Prints how long the first call takes (it traces and compiles) and the speed of the following ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from decoder_model import SMALL, Decoder
from torch import Tensor, nn
from torchvision_import import import_torchvision

import lazyxla


@dataclass
class Summary:
    """``rate`` is in `unit` per second; the counts are those of the calls after the first."""

    unit: str
    first_call: float
    rate: float
    calls: int
    compiles: int
    executions: int
    nodes_recorded: int

    def __str__(self) -> str:
        return (
            f"first call {self.first_call:.2f} s, then {self.rate:,.0f} {self.unit}/s; "
            f"{self.compiles} compiles and {self.executions} executions in {self.calls} calls"
        )


def make_model(name: str, batch: int) -> tuple[nn.Module, Callable[[], Tensor], str, int]:
    """A model with random weights, what makes an input, the unit of speed and units per call."""
    if name == "decoder":
        tokens = batch * SMALL.max_length
        shape = (batch, SMALL.max_length)
        return Decoder(SMALL), lambda: torch.randint(SMALL.vocab, shape), "tokens", tokens
    torchvision = import_torchvision()
    if torchvision is None:
        raise SystemExit("this example needs torchvision: pip install --no-deps torchvision")
    model = getattr(torchvision.models, name)()
    return model, lambda: torch.randn(batch, 3, 224, 224), "images", batch


def main(argv: Sequence[str] | None = None) -> Summary:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", choices=("decoder", "resnet18", "resnet50"), default="decoder")
    options.add_argument("--device", default="lazyxla", help="lazyxla or cpu (default: lazyxla)")
    options.add_argument("--batch", type=int, default=1, help="examples per call")
    options.add_argument("--calls", type=int, default=20)
    args = options.parse_args(argv)

    torch.manual_seed(0)
    model, make_input, unit, units = make_model(args.model, args.batch)
    model.to(args.device).eval()
    backend = "lazyxla" if args.device == "lazyxla" else "inductor"
    compiled = torch.compile(model, backend=backend)
    inputs = [make_input().to(args.device) for _ in range(4)]
    lazyxla.sync(wait=True)

    with torch.inference_mode():
        begin = time.perf_counter()
        compiled(inputs[0]).cpu()
        first_call = time.perf_counter() - begin
        before = lazyxla.counters()
        begin = time.perf_counter()
        for number in range(args.calls):
            result = compiled(inputs[number % len(inputs)])
            lazyxla.sync()  # the host prepares the next call meanwhile
        result.cpu()
        seconds = time.perf_counter() - begin
    after = lazyxla.counters()
    counts = {name: after[name] - before[name] for name in after}
    summary = Summary(
        unit,
        first_call,
        args.calls * units / seconds,
        args.calls,
        counts["compiles"],
        counts["executions"],
        counts["nodes_recorded"],
    )
    print(summary)
    return summary


if __name__ == "__main__":
    main()
