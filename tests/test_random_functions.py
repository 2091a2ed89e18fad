"""Functions of random lines agree with the CPU where they are compiled: results, aliases, what they
write to their arguments.

``pytest tests/test_random_functions.py --programs 10000`` runs more of them than the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

import lazyxla
from tests.random_programs import STEPS, Pick, RandomProgram, layout, storage_of
from tests.random_runs import portions, run_random

SHARES = {"region": 4, "captured": 4, "dynamo": 20, "dynamic": 20}
"""One in so many programs is compiled in this way."""

COMPILE: dict[str, Callable[[Any], Any]] = {
    "region": lazyxla.compile,
    "captured": lambda f: lazyxla.compile(f, capture=True),
    "dynamo": lambda f: torch.compile(f, backend="lazyxla"),
    "dynamic": lambda f: torch.compile(f, backend="lazyxla", dynamic=True),
}

"""How a function is compiled for the device."""

REFERENCE: dict[str, Callable[[Any], Any]] = {
    "dynamo": lambda f: torch.compile(f, backend="aot_eager"),
    "dynamic": lambda f: torch.compile(f, backend="aot_eager", dynamic=True),
}
"""What the CPU's results are of, if not of the function itself: strides of results that are written
in place in the function are what torch.compile makes of them."""


TRACED = [
    step
    for step in STEPS
    if step not in (RandomProgram.sync, RandomProgram.read, RandomProgram.delete)
]


class RandomFunction(RandomProgram):
    """Its lines are chosen on the CPU alone. What they compute is compared where it is called."""

    def __init__(self, pick: Pick) -> None:
        super().__init__(pick)
        self.inputs: list[str] = []

    def line(self, text: str) -> bool:
        done = self.cpu.run(compile(text, "<line>", "exec")) is None
        if done:
            self.lines.append(text)
        return done

    def compare_metadata(self) -> None:
        pass

    def make(self, steps: int) -> str:
        """The text of the function."""
        for _ in range(self.pick([1, 2, 2])):
            self.start()
        self.inputs = list(self.live)
        first = len(self.lines)
        for _ in range(steps):
            step, name = self.pick(TRACED), self.pick(self.live)
            step(self, name, self.cpu[name])
        body = "".join(f"    {line}\n" for line in self.lines[first:])
        made = [name for name in self.live if name not in self.inputs]
        return f"def f({', '.join(self.inputs)}):\n{body}    return [{', '.join(made)}]\n"

    def arguments(self, call: int) -> list[torch.Tensor]:
        """Those of a call: other numbers in each."""
        names: dict[str, Any] = {"torch": torch, "device": "cpu"}
        for line in self.lines[: len(self.inputs)]:
            exec(line, names)
        found = [names[name] for name in self.inputs]
        return [x ^ bool(call) if x.dtype == torch.bool else x + call for x in found]


def check(function: RandomFunction, how: str, steps: int) -> None:
    text = function.make(steps)
    hypothesis.note(text)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<function>", "exec"), names)
    compiled = COMPILE[how](names["f"])
    reference = REFERENCE.get(how, lambda f: f)(names["f"])
    for call in range(3):
        theirs = function.arguments(call)
        ours = [x.to("lazyxla") for x in theirs]
        hypothesis.note(f"call {call}")
        try:
            expected = [*theirs, *reference(*theirs)]
        except Exception:  # AOTAutograd refuses some aliases, and fails at others
            assert how in REFERENCE
            return
        got = [*ours, *compiled(*ours)]
        for a, b in zip(got, expected, strict=True):
            assert (a.dtype, a.shape, layout(a)) == (b.dtype, b.shape, layout(b))
            assert a.storage_offset() == b.storage_offset()
        assert shared(got) == shared(expected)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, equal_nan=True)


def shared(tensors: list[torch.Tensor]) -> list[int]:
    """For each tensor the first one that has its storage."""
    storages = [storage_of(x) for x in tensors]
    return [storages.index(storage) for storage in storages]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = portions(metafunc.config.getoption("--programs"), SHARES, each=20)
    metafunc.parametrize(("how", "seed", "count"), cases)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors is deprecated")
def test_random_functions(how: str, seed: int, count: int) -> None:
    def run(pick: Pick, steps: int) -> None:
        if how in REFERENCE:
            torch._dynamo.reset()
        check(RandomFunction(pick), how, steps)

    run_random(run, seed, count)
