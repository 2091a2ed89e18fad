"""Pinned memory: mapped for the devices where the plugin offers that, else plain host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.conftest import RunPython
from tests.support import DEVICE, counted


def test_pin() -> None:
    plain = torch.arange(6)
    assert not plain.is_pinned()
    pinned = plain.pin_memory()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert torch.equal(pinned, plain)
    assert torch.empty(0).pin_memory().numel() == 0


def test_the_cache_of_pinned_memory_can_be_emptied() -> None:
    torch.ones(1, device=DEVICE)  # PyTorch asks for nothing before the device is used
    pinned = torch.arange(6).pin_memory()
    torch.accelerator.empty_host_cache()
    assert torch.equal(pinned, torch.arange(6))


def test_data_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches), torch.arange(8))


def test_without_mapping_a_copy_is_made_at_once() -> None:
    pinned = torch.ones(1000).pin_memory()
    with counted() as n:
        x = pinned.to(DEVICE, non_blocking=True)
        pinned.zero_()
    assert n.uploads == 1
    assert torch.equal(x.cpu(), torch.ones(1000))


def test_mapped_memory_is_fetched_by_the_device(
    plugin: Callable[[str], dict[str, str]], run_python: RunPython
) -> None:
    code = """
import sys, torch, lazyxla
say = lambda text: print(text, file=sys.stderr, flush=True)
pinned = torch.arange(1000.).pin_memory()
say("plain")
torch.ones(3).to("lazyxla")
say("blocking")
x = pinned.to("lazyxla")
say("a part, not blocking")
y = pinned[500:].to("lazyxla", non_blocking=True)
say("converted on the host, or not in rows: another memory")
z = pinned.to("lazyxla", torch.float16), pinned.view(10, 100).t().to("lazyxla")
say("too large to be mapped")
v = torch.arange(1001.).pin_memory().to("lazyxla", non_blocking=True)
assert lazyxla.counters()["uploads"] == 6
say("its owner is gone before it is read")
w = (torch.arange(1000.).pin_memory() * 1).pin_memory().to("lazyxla", non_blocking=True)
lazyxla.sync(wait=True)
assert torch.equal(x.cpu(), torch.arange(1000.)) and torch.equal(w.cpu(), x.cpu())
assert torch.equal(y.cpu(), torch.arange(500., 1000.))
assert torch.equal(v.cpu(), torch.arange(1001.))
assert torch.equal(z[0].cpu(), torch.arange(1000.).half())
assert torch.equal(z[1].cpu(), torch.arange(1000.).view(10, 100).t())
say("end")
del pinned
"""
    result = run_python(code, LAZYXLA_PLATFORM="cpu", **plugin("mapping"))
    lines = result.stderr.splitlines()
    parts = [
        ("plain", ["copy now"]),
        ("blocking", ["copy later"]),
        ("a part, not blocking", ["copy later"]),
        ("converted on the host, or not in rows: another memory", ["copy now", "copy now"]),
        ("too large to be mapped", ["copy now"]),
    ]
    expected = ["map 4000"]
    for text, told in parts:
        expected += [text, *told]
    gone = "its owner is gone before it is read"
    at = lines.index(gone)
    assert lines[:at] == expected
    end = lines.index("end")
    # The blocks of the expression, one of which the device reads; both are unmapped.
    assert sorted(lines[at + 1 : end]) == ["copy later", *["map 4000"] * 2, *["unmap"] * 2]
    assert lines[end + 1 :] == ["unmap"]


def test_a_copy_that_does_not_end_can_be_interrupted(
    plugin: Callable[[str], dict[str, str]], run_python: RunPython
) -> None:
    code = """
import ctypes, os, signal, threading, torch, lazyxla
signal.signal(signal.SIGINT, signal.default_int_handler)
device = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
pinned = torch.arange(1000.).pin_memory()
pinned.to("lazyxla")
device.stall()
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pinned.to("lazyxla")
except KeyboardInterrupt:
    print("interrupted")
device.go_on()
assert torch.equal(pinned.to("lazyxla").cpu(), pinned)
"""
    result = run_python(code, timeout=60, LAZYXLA_PLATFORM="cpu", **plugin("mapping"))
    assert result.stdout.split() == ["interrupted"]
