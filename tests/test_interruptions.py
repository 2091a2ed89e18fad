"""What interrupts the recording of an operator reaches the caller, and leaves no trace.

Operators are asked for their results' shapes in Python, where Ctrl-C, or the handler of any other
signal, may raise at any step. Here the n-th call of a Python function raises, for many n.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE, assert_same

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _raise_at(n: int, kind: type[BaseException], function: Callable[[], Any]) -> bool:
    """Calls a function whose n-th call of a Python function raises; whether there was one."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if calls == n:
            sys.setprofile(None)
            raise kind

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls >= n


KINDS = [KeyboardInterrupt, MemoryError, RecursionError]

FUNCTIONS: dict[str, Function] = {
    "out": lambda a, b: torch.minimum(a, b, out=torch.empty_like(a)),
    "in place": lambda a, b: a.clone().cumsum_(0),
    "where": lambda a, b: torch.where(a > b, a, b),
    "index": lambda a, b: a[b.long()],
    "loss": lambda a, b: torch.nn.functional.mse_loss(a, b),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_recording_reaches_the_caller(name: str, kind: type[BaseException]) -> None:
    function = FUNCTIONS[name]
    before = dict(lazyxla.fallbacks())
    interrupted = 0
    for n in [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]:
        # A shape that was not asked for yet, so that Python is called again.
        size = 1000 * (1 + [*FUNCTIONS].index(name)) + 3 * n + KINDS.index(kind)
        a, b = torch.arange(size, dtype=torch.float32), torch.ones(size)
        on_device = a.to(DEVICE), b.to(DEVICE)
        try:
            raised = _raise_at(n, kind, lambda: function(*on_device))  # noqa: B023
        except kind:
            interrupted += 1
        else:
            assert not raised, f"the exception at call {n} was swallowed"
        if n in (3, 34):
            assert_same(function(*on_device), function(a, b))
    assert interrupted > 3
    assert lazyxla.fallbacks() == before
