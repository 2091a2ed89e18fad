"""Processes end with exit status 0 and without a word, whatever the device is doing.

``pytest tests/test_exit.py --exits 500`` tries more than the ordinary run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT


def problems(kind: str, count: int, seed: int) -> list[dict[str, str]]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "exits.py"), kind, str(count), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 30 * count,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LAZYXLA_CACHE_SIZE": "100"},
    )
    assert result.returncode == 0, result.stderr
    found: list[dict[str, str]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_ends_in_the_middle_of_work(pytestconfig: pytest.Config) -> None:
    """With tensors alive, work pending, programs compiling or running, and loaders uploading."""
    assert problems("exit", pytestconfig.getoption("--exits"), 1) == []


def test_forked_children_end(pytestconfig: pytest.Config) -> None:
    """Children of a process whose threads are all at work, whether they touch the device or not."""
    assert problems("fork", pytestconfig.getoption("--exits"), 2) == []


def test_processes_that_watch_others_end() -> None:
    """They are seen to be alive whatever their threads do, and wait for none that is gone."""
    assert problems("watched", 5, 3) == []


WORK = """
import torch, lazyxla
x = torch.randn(2000, 2000).to("lazyxla")
y = x
for _ in range(20):
    y = y @ x * 1e-2
lazyxla.sync()  # the plugin makes its kernels while the process ends
"""


def test_long_work_at_the_end(run_python: Callable[..., Any]) -> None:
    run_python(WORK)


LOST = """
import os, torch, lazyxla
model = torch.nn.Linear(5, 3).to("lazyxla")
y = model(torch.randn(4, 5).to("lazyxla"))
plain = torch.ones(3, device="lazyxla")
lazyxla.sync(wait=True)
uses = {
    "operator": lambda: (y + 1).cpu(),
    "backward": lambda: y.sum().backward() or model.bias.grad.cpu(),
    "model": lambda: model(y[:, :1].expand(4, 5)).cpu(),
    "sync": lambda: (y * 2, lazyxla.sync(wait=True)),
    "write": lambda: (y * 2).fill_(1).cpu(),
    "stack": lambda: torch.stack([y, y]).cpu(),
    "no gradient": lambda: (plain + 1).cpu(),
    "view": lambda: y.t()[0].cpu(),
    "eager": lambda: (lazyxla.eager_mode(True), (y + 1).cpu()),
    "compiled": lambda: lazyxla.compile(lambda x: x * 2)(y).cpu(),
    "functional": lambda: torch.func.grad(lambda x: (x * x).sum())(plain).cpu(),
}
for name, use in uses.items():
    child = os.fork()
    if child == 0:
        try:
            use()
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
assert plain.sum().item() == 3
"""


def test_every_use_in_a_forked_child_is_an_error(run_python: Callable[..., Any]) -> None:
    """Also where autograd looks at the device before anything is read."""
    run_python(LOST)
