"""The table of docs/from_torchax.md, run in torchax and in lazyxla."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import ROOT, RunPython

ROWS = [
    re.findall(r"`([^`]*)`", line)
    for line in (ROOT / "docs" / "from_torchax.md")
    .read_text()
    .split("## What differs")[1]
    .splitlines()
    if line.startswith("| `")
]

# torchax 0.0.13 names overloads of operators that this PyTorch has no more, at import.
TORCHAX = """
import torch
packet = torch._ops.OpOverloadPacket
find = packet.__getattr__
def lenient(self, name):
    try:
        return find(self, name)
    except AttributeError:
        if name.startswith("_"):
            raise
        return self._qualified_op_name, name
packet.__getattr__ = lenient
import torchax as library
device = "jax"
"""

LAZYXLA = """
import torch
import lazyxla as library
device = "lazyxla"
"""

RUN = """
import copy, io, json
library.enable_globally()

def host(x):
    return x.to("cpu")

def with_autocast(call):
    with torch.autocast(device, torch.bfloat16):
        return call()

def result(code):
    names = {"torch": torch, "device": device, "host": host, "copy": copy, "io": io}
    names |= {"with_autocast": with_autocast, "x": torch.ones(2, 3).to(device)}
    *statements, last = code.split("; ")
    try:
        for statement in statements:
            exec(statement, names)
        return repr(eval(last, names))
    except Exception as error:
        return type(error).__name__

print(json.dumps([result(code) for code in CODES]))
"""


@pytest.mark.parametrize("which", ["torchax", "lazyxla"])
def test_the_table(run_python: RunPython, which: str) -> None:
    assert len(ROWS) > 15
    codes = f"CODES = {[row[0] for row in ROWS]!r}\n"
    code = (TORCHAX if which == "torchax" else LAZYXLA) + codes + RUN
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if which == "torchax" else {}
    done = run_python(code, JAX_PLATFORMS="cpu", **environment)
    found = json.loads(done.stdout.splitlines()[-1])
    column = 1 if which == "torchax" else 2
    for row, result in zip(ROWS, found, strict=True):
        assert result == row[column], row[0]
