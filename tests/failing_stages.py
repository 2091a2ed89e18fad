"""Runs a graph that is cut into three stages, one of which fails: for tests/test_cut_failures.py.

Usage: failing_stages.py HOW STAGE. The plugin is tests/plugins/failing.cpp; HOW is "execute" (the
plugin refuses to run the stage) or "later" (it says so after a while). Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import torch

import lazyxla

DEVICE = "lazyxla"
plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])


class State:
    """`turned` is written by the first stage, `weights` by the second, `seen` by the third."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.turned = torch.arange(16.0, device=DEVICE).reshape(4, 4)
        self.weights = [torch.full((4, 4), 0.1 * i, device=DEVICE) for i in range(1, 9)]
        self.seen = torch.zeros(4, 4, device=DEVICE)
        lazyxla.sync()

    def step(self, dims: list[int]) -> None:
        self.turned.copy_(self.turned.flip(dims))
        y = self.turned
        for weight in self.weights:
            y = torch.tanh(y @ weight)
            weight.mul_(0.5).add_(y.mean())
        self.seen.add_(y.flip(dims))

    def tensors(self) -> dict[str, torch.Tensor]:
        weights = {f"weight {i}": weight for i, weight in enumerate(self.weights)}
        return {"turned": self.turned, **weights, "seen": self.seen}

    def read(self) -> dict[str, list | None]:
        found: dict[str, list | None] = {}
        for name, tensor in self.tensors().items():
            try:
                found[name] = tensor.tolist()
            except RuntimeError:
                found[name] = None
        return found


def changed(before: dict, after: dict) -> list[str]:
    return [name for name in before if after[name] is not None and after[name] != before[name]]


def main(how: str, stage: int) -> None:
    state = State()
    for dims in ([0], [1], [0, 1]):
        state.step(dims)
        lazyxla.sync(wait=True)
    before = state.read()
    counts = lazyxla.counters()
    state.step([0, 1])
    lazyxla.sync(wait=True)
    executions = lazyxla.counters()["executions"] - counts["executions"]
    done = changed(before, state.read())

    before, message = state.read(), ""
    plugin.fail_after(how.encode(), stage, 1)
    try:
        state.step([0, 1])
        lazyxla.sync(wait=True)
    except RuntimeError as error:
        message = str(error)
    plugin.fail(b"", 0)
    after = state.read()

    result = {
        "executions": executions,
        "written": done,
        "message": message,
        "changed": changed(before, after),
        "lost": [name for name, value in after.items() if value is None],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
