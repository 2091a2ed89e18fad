"""What needs a process of its own: programs that are kept on disk, and devices that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunPython

STORE = """
import json, torch, lazyxla
torch.manual_seed(0)
mesh = lazyxla.Mesh((4, 2), ("data", "model"))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4))
lazyxla.fully_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses, specs = [], []
for _ in range(4):
    x = torch.ones(8, 8, device="lazyxla")
    out = model(x)
    loss = out.square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    lazyxla.sync()
    losses.append(loss.item())
    specs.append([str(lazyxla.sharding(t)) for t in (out, *model.parameters())])
counters = lazyxla.counters()
names = ("lowerings", "compiles", "programs_loaded")
print(json.dumps([losses, specs, {name: counters[name] for name in names}]))
"""


def test_programs_of_many_devices_are_loaded_from_disk(
    run_python: RunPython, tmp_path: Path
) -> None:
    cache = {"LAZYXLA_CACHE_DIR": str(tmp_path / "cache"), "LAZYXLA_CACHE_SIZE": "1000000000"}
    cold, warm = (json.loads(run_python(STORE, **cache).stdout) for _ in range(2))
    assert warm[0] == cold[0]
    assert warm[1] == cold[1]
    assert cold[2]["compiles"] > 0
    assert warm[2] == {"lowerings": 0, "compiles": 0, "programs_loaded": cold[2]["compiles"]}
    other = STORE.replace('(4, 2), ("data", "model")', '(4, 2), ("data", "x")')
    third = json.loads(run_python(other, **cache).stdout)
    assert third[0] == pytest.approx(cold[0], rel=1e-4)
    assert third[2]["programs_loaded"] == 0


FAILS = """
import ctypes, os, sys, torch, lazyxla

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
stage = sys.argv[1] if len(sys.argv) > 1 else STAGE
mesh = lazyxla.Mesh((4, 2), ("data", "model"))
x = lazyxla.shard(torch.ones(8, 6, device="lazyxla"), mesh, ("data", "model"))
lazyxla.sync(wait=True)
old = x.detach().clone() if stage == "later" else None  # the program must leave the data alone
lazyxla.sync(wait=True)
x.add_(1)
plugin.fail(stage.encode(), 1)
try:
    lazyxla.sync(wait=True)
    print("nothing")
except torch.OutOfMemoryError as error:
    assert "lost" not in str(error), error
    print("told")
lazyxla.sync(wait=True)  # told once
assert x.sum().item() == 48
assert x.add_(1).sum().item() == 96
assert lazyxla.sharding(x).spec == ("data", "model")
print("goes on")
"""


@pytest.mark.parametrize("stage", ["compile", "execute", "later"])
def test_a_failure_leaves_everything_as_it_was(
    stage: str, run_python: RunPython, plugin: Callable[[str], dict[str, Any]]
) -> None:
    result = run_python(FAILS.replace("STAGE", repr(stage)), **plugin("failing"))
    assert result.stdout.split() == ["told", "goes", "on"]
