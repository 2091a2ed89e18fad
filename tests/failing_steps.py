"""Trains a small model whose steps fail: a script for tests/test_transactions.py.

Usage: failing_steps.py STAGE MODE. The plugin is tests/plugins/failing.cpp. Prints one JSON object:
the losses of an undisturbed run and of one in which some steps fail at the stage, what the failures
said, and what had changed after each of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

import lazyxla

DEVICE = "lazyxla"
STEPS, FAILING = 16, (3, 5)
plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])


@torch.library.custom_op("failing::pass_on", mutates_args=())
def pass_on(x: torch.Tensor, kind: int) -> torch.Tensor:
    return x.clone()


@pass_on.register_fake
def _(x: torch.Tensor, kind: int) -> torch.Tensor:
    return torch.empty_like(x)


@lazyxla.lowering.rule("failing::pass_on")
def _lower(b: Any, x: Any, kind: int) -> Any:
    if kind == 1:
        raise ValueError("this rule has no idea")
    # XLA refuses a call of a function that nobody has registered.
    return b.hlo.custom_call([x.type], [x], "nobody_has_this")


class Trainer:
    def __init__(self, mode: Any) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 4),
        ).to(DEVICE)  # fmt: skip
        # Counted on the device: a number of Python's own would go on counting in a failed step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, capturable=True)
        self.x = torch.randn(32, 8, device=DEVICE)
        self.y = torch.randint(0, 4, (32,), device=DEVICE)

    def step(self, kind: int = 0, operators: int = 0) -> torch.Tensor:
        """With more `operators` the step is a program that was not compiled before."""
        out = self.model(self.x)
        for _ in range(operators):
            out = out * 1.0
        loss = F.cross_entropy(out, self.y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if kind:
            with torch.no_grad():
                self.model[0].weight.add_(pass_on(self.model[0].weight, kind))
        if self.mode == "lazy":
            lazyxla.sync()
        return loss.detach()

    def run_step(self, **options: int) -> torch.Tensor:
        if self.mode == "region":
            with lazyxla.step():
                return self.step(**options)
        return self.step(**options)

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += state.values()
        return [t.cpu() for t in tensors] + [torch.lazyxla.get_rng_state()]


def fail(trainer: Trainer, stage: str, number: int) -> str:
    """One step that fails at the stage; what it says."""
    try:
        if stage in ("rule", "module"):
            trainer.run_step(kind=1 if stage == "rule" else 2)
        else:
            new = number if stage in ("compile", "load") else 0
            plugin.fail(stage.encode(), 1)
            trainer.run_step(operators=new)
        lazyxla.sync(wait=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        plugin.fail(b"", 0)
    return "nothing failed"


def train(stage: str | None, mode: str) -> dict[str, Any]:
    trainer = Trainer(mode)
    losses, messages, changed = [], [], []
    for number in range(STEPS):
        if stage and number in FAILING:
            before = trainer.state()
            messages.append(fail(trainer, stage, number))
            try:
                after = trainer.state()
            except Exception as error:  # a tensor is lost
                changed.append(f"{type(error).__name__}: {error}")
                break
            changed.append(sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        losses.append(trainer.run_step().item())
    return {"losses": losses, "messages": messages, "changed": changed}


if __name__ == "__main__":
    undisturbed = train(None, sys.argv[2])
    print(json.dumps({"undisturbed": undisturbed, "disturbed": train(sys.argv[1], sys.argv[2])}))
