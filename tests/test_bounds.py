"""What a process remembers is bounded: a loop over ever new shapes does not grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

LOOP = """
import gc, json
import torch, lazyxla
from lazyxla.lowering import mlir

mlir._MOST = 400  # in proportion to the other bounds of this test

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def run(numbers):
    for i in numbers:
        x = torch.ones(1 + i * 7919 % 20011, device="lazyxla")  # small and large in turns
        y = (x * i + 1)[: 1 + i % 3]
        del x
        lazyxla.sync()

shapes = {shapes}
run(range(shapes // 2))
before = resident()
run(range(shapes // 2, shapes))
growth = resident() - before
print(json.dumps([growth, lazyxla._C.cached_shapes(), lazyxla._C.cached_programs()]))
"""


def test_a_loop_over_new_shapes_does_not_grow(
    run_python: Callable[..., Any], pytestconfig: pytest.Config
) -> None:
    shapes = pytestconfig.getoption("--shapes")
    result = run_python(
        LOOP.replace("{shapes}", str(shapes)),
        LAZYXLA_MAX_PROGRAMS="50",
        LAZYXLA_MAX_CALLS="500",
        timeout=60 + shapes / 5,
    )
    growth, calls, programs = json.loads(result.stdout)
    assert calls <= 500
    assert programs <= 50
    # Unbounded, 600 shapes took 5.6 MB and 10,000 took 95.
    assert growth < 3e6


RECALLED = """
import torch, lazyxla
from tests.support import counted

def step(n):
    y = torch.ones(n, device="lazyxla") * 2 + 1
    lazyxla.sync()
    return y

for n in range(1, 60):
    step(n)
    step(200)  # met all the time, so it is never forgotten
with counted() as n:
    assert step(200).tolist() == [3.0] * 200
assert n.compiles == 0 and n.shape_inferences == 0
with counted() as n:
    assert step(1).tolist() == [3.0]
assert n.shape_inferences > 0
"""


def test_what_is_used_is_not_forgotten(run_python: Callable[..., Any]) -> None:
    run_python(RECALLED, LAZYXLA_MAX_CALLS="40")
