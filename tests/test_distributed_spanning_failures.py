"""Processes that share a client, one of which cannot make the program that all agreed to make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.test_distributed_spanning import run_spanning

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)


FAILS = """
import threading, time
from datetime import timedelta
from lazyxla.lowering import registry
dist.init_process_group("lazyxla", timeout=timedelta(seconds=100), **group)
kind, culprits = sys.argv[1], [int(rank) for rank in sys.argv[2:]]
rows = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else [None, None]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])] if size == 4 else [None, None]
mine = rows[rank // 2], columns[rank % 2]
count = 0
@registry.rule("aten::cosh")
def cosh(b, x):
    global count
    count += 1
    if rank in culprits and count > 1:
        raise ValueError("no second form of it")
    return x * x
one = torch.tensor([2.0]).to("lazyxla")
def step():
    x = one.cosh() * (1.5 + rank if kind == "numbers" else 1.5)
    dist.all_reduce(x, group=mine[0])
    if kind == "parts" and rank == 0:
        x = x.neg()
    dist.all_reduce(x, group=mine[1])
    return x
begin = time.monotonic()
try:
    print(step().item())
except RuntimeError as error:
    print("no second form of it" in str(error), "process %d" % culprits[0] in str(error))
took = time.monotonic() - begin
try:
    y = torch.ones(1, device="lazyxla")
    dist.all_reduce(y, group=mine[0])
    print(y.item())
except RuntimeError as error:
    print("no second form of it" in str(error))
print(took < 50)
time.sleep(3)
"""


@pytest.mark.parametrize("kind", ["numbers", "parts"])
@pytest.mark.parametrize("size", [2, 4])
def test_one_that_cannot_make_what_all_agreed_on_tells_the_others(
    kind: str, size: int, tmp_path: Path
) -> None:
    """At once, whatever the group's timeout is: they wait for it with another form."""
    told = run_spanning(FAILS, size, tmp_path, kind, str(size - 1), timeout=200)
    for rank, out in enumerate(told):
        assert out.splitlines()[0] in ("True True", "True False")[: 1 + (rank == size - 1)]
        # Those of the other row fail in their columns only.
        assert out.splitlines()[1:] == ["2.0" if rank < size - 2 else "True", "True"]


def test_a_group_remains_if_none_can_make_it(tmp_path: Path) -> None:
    for out in run_spanning(FAILS, 2, tmp_path, "numbers", "0", "1"):
        assert out.splitlines() == ["True False", "2.0", "True"]
