"""Trains a model while somebody presses Ctrl-C: a script for tests/interrupts.py.

Usage: interrupted_training.py MODE COLD SIGNALS SEED. Signals come from a process of their own, at
random moments. Each one that hits a step raises KeyboardInterrupt there; the script then checks
that all tensors can be read, puts back what it had before the step, as a training script would from
its checkpoint, and goes on. With COLD every step is a program that was not compiled before. Prints
one JSON object.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

ARMED = False  # whether a Ctrl-C interrupts
LATE = False  # one came while it did not
RAISED = ""  # where KeyboardInterrupt has been raised that was not caught here yet
DROPPED = False  # it was lost where Python or PyTorch can hand it to nobody

SENDER = """
import os, random, sys, time
pid, count, seed = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
longest = float(sys.argv[4])
chance = random.Random(seed)
while count:
    time.sleep(chance.uniform(0, longest))
    print(time.time(), flush=True)
    os.kill(pid, 2)
    count -= sys.stdin.readline() == "hit\\n"
"""


def interrupt(frame: FrameType | None) -> None:
    global RAISED, DROPPED
    RAISED = "".join(traceback.format_stack(frame))
    # Dynamo's guards in C++ take an exception of those in Python for "does not hold". It makes some
    # of these functions of a string.
    code = None if frame is None else frame.f_code
    DROPPED = code is not None and (
        code.co_filename.endswith("torch/_dynamo/guards.py")
        or (code.co_filename, code.co_name) == ("<string>", "guard")
    )
    raise KeyboardInterrupt


def handler(number: int, frame: FrameType | None) -> None:
    """Interrupts what the script is about, not its own book-keeping."""
    global LATE
    if ARMED:
        interrupt(frame)
    LATE = True


def note_dropped(dropped: Any) -> None:
    """Python's hook for exceptions in destructors and weak references' callbacks."""
    global DROPPED
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        DROPPED = True


def _attempt(action: Callable[[], Any], by_signal: bool) -> tuple[bool, bool, Any]:
    """Runs a function; whether it was interrupted, or the interrupt dropped, and its result."""
    global ARMED, RAISED, DROPPED
    was_interrupted, result = False, None
    try:
        ARMED = by_signal
        result = action()
        ARMED = False
    except KeyboardInterrupt:
        ARMED = False
        was_interrupted = True
    was_dropped = bool(RAISED) and not was_interrupted
    assert DROPPED or not was_dropped, f"a KeyboardInterrupt was swallowed, raised in\n{RAISED}"
    RAISED, DROPPED = "", False
    return was_interrupted, was_dropped, result


def interrupt_call(at: int, action: Callable[[], Any]) -> tuple[bool, Any]:
    """Runs a function in which the n-th call of a Python function on this thread is interrupted.

    Returns whether it was, and what the function returned if not.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if calls == at:
            sys.setprofile(None)
            interrupt(frame)

    def counted() -> Any:
        sys.setprofile(count)
        try:
            return action()
        finally:
            sys.setprofile(None)

    was_interrupted, _, result = _attempt(counted, by_signal=False)
    return was_interrupted, result


class Interrupted:
    """Runs functions until they end without an interrupt."""

    def __init__(self, signals: int, seed: int, longest: float) -> None:
        arguments = [str(os.getpid()), str(signals), str(seed), str(longest)]
        self.sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.latencies: list[float] = []
        self.left = signals

    def answer(self, hit: bool) -> float:
        """Tells the sender; when it had sent the signal."""
        assert self.sender.stdout is not None
        assert self.sender.stdin is not None
        sent = float(self.sender.stdout.readline())
        self.sender.stdin.write("hit\n" if hit else "late\n")
        self.sender.stdin.flush()
        return sent

    def attempt(self, action: Callable[[], Any]) -> tuple[bool, Any]:
        """Runs a function once: whether it was interrupted, and what it returned if not."""
        global LATE
        if LATE:
            LATE = False
            self.answer(hit=False)
        was_interrupted, was_dropped, result = _attempt(action, by_signal=True)
        now = time.time()
        if was_interrupted:
            self.left -= 1
            self.latencies.append(now - self.answer(hit=True))
        elif was_dropped:
            LATE = True
        return was_interrupted, result

    def run(self, action: Callable[[], Any], undo: Callable[[], None]) -> Any:
        while True:
            was_interrupted, result = self.attempt(action)
            if not was_interrupted:
                return result
            undo()


def main(mode: str, cold: bool, signals: int, seed: int) -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    import torch.nn.functional as F

    sys.unraisablehook = note_dropped
    signal.signal(signal.SIGINT, handler)
    interrupted = Interrupted(signals, seed, longest=1.0 if cold else 0.2)

    def start() -> Any:
        import lazyxla

        return lazyxla

    lazyxla = interrupted.run(start, lambda: None)
    if mode in ("eager", "fused"):
        lazyxla.eager_mode({"eager": True, "fused": "fused"}[mode])

    def build() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Dropout(0.1),
            torch.nn.Linear(32, 4),
        ).to("lazyxla")  # fmt: skip
        lazyxla.sync()
        return model

    model = interrupted.run(build, lambda: None)
    run = torch.compile(model, backend="lazyxla") if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
    chance = random.Random(seed)

    def step(more: int) -> float:
        def body() -> torch.Tensor:
            out = run(inputs.to("lazyxla"))
            for _ in range(more):
                out = out * 1.0
            loss = F.cross_entropy(out, labels.to("lazyxla"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        if mode == "region":
            with lazyxla.step():
                loss = body()
        else:
            loss = body()
        if mode == "lazy":
            lazyxla.sync(wait=chance.random() < 0.3)
        return loss.item()

    def state() -> Any:
        return (
            {name: value.cpu() for name, value in model.state_dict().items()},
            {
                index: {key: value.cpu().clone() for key, value in each.items()}
                for index, each in optimizer.state_dict()["state"].items()
            },
            torch.lazyxla.get_rng_state(),
        )

    def put_back(kept: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.cpu()  # nothing is lost
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.cpu()
        model.load_state_dict(kept[0])
        groups = optimizer.state_dict()["param_groups"]
        # A copy: the optimizer counts its steps in the very tensors that it is given.
        optimizer.load_state_dict({"state": copy.deepcopy(kept[1]), "param_groups": groups})
        optimizer.zero_grad()
        torch.lazyxla.set_rng_state(kept[2])
        assert not lazyxla._C.in_region()

    losses: list[float] = []
    number = 0
    while number < 12 or (interrupted.left > 0 and number < 400):
        number += 1
        kept = state()
        more = number if cold else 0
        attempt, undo = functools.partial(step, more), functools.partial(put_back, kept)
        losses.append(interrupted.run(attempt, undo))
    interrupted.sender.kill()
    told = {"losses": losses, "latencies": interrupted.latencies, "left": interrupted.left}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4]))
