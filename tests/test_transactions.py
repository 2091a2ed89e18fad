"""A flush is a transaction: what fails leaves everything as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyxla

DEVICE = "lazyxla"
ROOT = Path(__file__).resolve().parent.parent


@torch.library.custom_op("transactions::refused", mutates_args=())
def refused(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@refused.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def run_steps(stage: str, mode: str, environment: dict[str, str]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/failing_steps.py"), stage, mode],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_what_cannot_be_lowered_changes_nothing() -> None:
    """Neither what was written, whole or in part, nor what reads it, nor the next attempt."""

    @lazyxla.lowering.rule("transactions::refused")
    def lower(b: Any, x: Any) -> Any:
        raise ValueError("this rule has no idea")

    x, y = torch.arange(6.0).view(2, 3).to(DEVICE), torch.zeros(3, device=DEVICE)
    lazyxla.sync()
    for _ in range(2):
        x.add_(1)
        y.add_(x[1])
        x[0].mul_(2)
        bad = refused(x)
        with pytest.raises(NotImplementedError, match="this rule has no idea"):
            lazyxla.sync()
        assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert y.tolist() == [0, 0, 0]
        with pytest.raises(RuntimeError, match="was not computed"):
            bad.cpu()
    y.add_(x[1])
    lazyxla.sync()
    assert y.tolist() == [3, 4, 5]


@pytest.mark.parametrize("mode", ["lazy", "region"])
@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("rule", "NotImplementedError.*this rule has no idea"),
        ("module", "RuntimeError.*nobody_has_this"),
        ("compile", "OutOfMemoryError.*no memory in this test"),
        ("execute", "OutOfMemoryError.*no memory in this test"),
    ],
)
def test_a_step_that_fails_changes_nothing(
    stage: str, message: str, mode: str, plugin: Callable[[str], dict[str, str]]
) -> None:
    found = run_steps(stage, mode, plugin("failing"))
    told = found["disturbed"]["messages"]
    assert len(told) == 2
    for text in told:
        assert re.search(message, text, re.DOTALL), text
    assert found["disturbed"]["changed"] == [0, 0]
    assert found["disturbed"]["losses"] == found["undisturbed"]["losses"]


def test_a_program_that_does_not_load_is_compiled(
    plugin: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    environment = plugin("failing") | {
        "LAZYXLA_CACHE_DIR": str(tmp_path / "cache"),
        "LAZYXLA_CACHE_SIZE": "1000000000",
    }
    run_steps("load", "lazy", environment)  # fills the cache
    found = run_steps("load", "lazy", environment)
    assert found["disturbed"]["messages"] == ["nothing failed"] * 2


def test_what_is_lost_is_told_once_and_by_name(plugin: Callable[[str], dict[str, str]]) -> None:
    found = run_steps("later", "lazy", plugin("failing"))
    (told,) = found["disturbed"]["messages"]
    assert told.startswith("OutOfMemoryError: lazyxla: out of device memory while waiting")
    assert "27 tensors are lost" in told
    assert "0.weight" in told
    assert "exp_avg of 0.bias" in told
    # Every read of what is lost tells it again.
    assert found["disturbed"]["changed"][0].startswith("OutOfMemoryError")


LATER = """
import ctypes, os, torch, lazyxla

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
x = torch.ones(1000, device="lazyxla")
lazyxla.sync(wait=True)
old = x.detach().clone()  # shares the data, so that the program must leave it alone
x.add_(1)
plugin.fail(b"later", 1)
lazyxla.sync()
y = x * 2  # recorded on what will fail
try:
    lazyxla.sync(wait=True)
except torch.OutOfMemoryError as error:
    assert "lost" not in str(error), error
    print("told")
lazyxla.sync(wait=True)  # told once
assert x.sum().item() == 1000
assert old.sum().item() == 1000
try:
    y.sum().item()
except torch.OutOfMemoryError:
    print("dependent")
lazyxla.sync(wait=True)
assert (x + 1).sum().item() == 2000
"""


def test_what_a_program_did_not_consume_is_restored(
    run_python: Callable[..., Any], plugin: Callable[[str], dict[str, str]]
) -> None:
    result = run_python(LATER, **plugin("failing"))
    assert result.stdout.split() == ["told", "dependent"]


EAGER = """
import ctypes, os, torch, lazyxla

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
lazyxla.eager_mode(True)
for round in range(20):
    stage = [b"compile", b"execute"][round % 2]
    before = torch.arange(8.0 + round)  # of a size of its own: its program is new
    x = before.to("lazyxla")
    if stage == b"execute":
        before.to("lazyxla").mul_(3)
    lazyxla.sync(wait=True)
    plugin.fail(stage, 1)
    try:
        x.mul_(3)
        lazyxla.sync(wait=True)
    except torch.OutOfMemoryError:
        pass
    plugin.fail(b"", 0)
    assert torch.equal(x.cpu(), before), (round, stage, x)
    x.mul_(3)
    assert torch.equal(x.cpu(), before * 3)
"""


def test_an_operator_that_fails_in_eager_mode_changes_nothing(
    run_python: Callable[..., Any], plugin: Callable[[str], dict[str, str]]
) -> None:
    run_python(EAGER, **plugin("failing"))


SIZES = """
import ctypes, os, torch, lazyxla

plugin = ctypes.CDLL(os.environ["LAZYXLA_PLUGIN_PATH"])
count = lazyxla.device_count()
mesh = lazyxla.Mesh((count,), ("data",))
whole = torch.ones(500, 500, device="lazyxla")
sharded = lazyxla.shard(torch.ones(500 * count, 500), mesh, ("data", None))
for x in (whole, sharded):
    lazyxla.sync(wait=True)
    y = x.sin() @ x[:500]
    plugin.fail(b"size", 1)  # the first question follows the run
    try:
        lazyxla.sync(wait=True)
    except torch.OutOfMemoryError:
        print("told")
    lazyxla.sync(wait=True)
    assert plugin.unfinished() == 0
    assert x.sum().item() == x.numel()
"""


def test_a_run_whose_results_have_no_size_is_awaited(
    run_python: Callable[..., Any], plugin: Callable[[str], dict[str, str]]
) -> None:
    environment = plugin("failing") | {"LAZYXLA_CREATE_OPTIONS": "cpu_device_count=2"}
    assert run_python(SIZES, **environment).stdout.split() == ["told"] * 2


def test_programs_that_do_not_fit_are_refused_before_they_take_anything() -> None:
    x = torch.arange(1000.0, device=DEVICE)
    lazyxla.sync(wait=True)
    for _ in range(5):
        x.add_(1)
        huge = torch.empty(1 << 45, device=DEVICE) + x.sum()
        with pytest.raises(torch.OutOfMemoryError, match=r"test_transactions.py:\d+: the program"):
            lazyxla.sync()
        assert torch.equal(x.cpu(), torch.arange(1000.0))
        with pytest.raises(torch.OutOfMemoryError, match="needs 140737488"):
            huge[:1].cpu()
    lazyxla.sync(wait=True)  # nothing is left to be told


def test_failures_of_random_numbers_leave_the_generator() -> None:
    torch.manual_seed(3)
    x = torch.zeros(16, device=DEVICE)
    lazyxla.sync()
    state = torch.lazyxla.get_rng_state()
    for _ in range(4):
        x.add_(torch.rand(16, device=DEVICE)).add_(torch.empty(1 << 45, device=DEVICE).sum())
        y = torch.empty(1 << 45, device=DEVICE) + 1
        with pytest.raises(torch.OutOfMemoryError):
            lazyxla.sync()
        del y
        assert torch.equal(torch.lazyxla.get_rng_state(), state)
        assert x.sum().item() == 0


@pytest.mark.parametrize("mode", [True, "fused"])
def test_what_is_undone_while_nobody_waits_is_told(mode: Any) -> None:
    """By the next read, whatever it reads, or by a wait: the values alone would not show it."""

    @lazyxla.lowering.rule("transactions::refused")
    def lower(b: Any, x: Any) -> Any:
        raise ValueError("this rule has no idea")

    x = torch.zeros(3, device=DEVICE)
    lazyxla.sync()
    tellers: list[Callable[[], Any]] = [x.tolist, lambda: lazyxla.sync(wait=True)]
    with lazyxla.eager_mode(mode):
        for tell in tellers:
            # The failure, or that of the value that it was to be.
            with pytest.raises(RuntimeError, match="this rule has no idea"):  # noqa: PT012
                x.add_(refused(x))
                until = time.monotonic() + 20
                while lazyxla._C.is_pending(x) and time.monotonic() < until:
                    time.sleep(0.01)
                tell()
            assert x.tolist() == [0, 0, 0]
            lazyxla.sync(wait=True)  # it was told once


UNREADABLE = """
import sys, torch, lazyxla

x, y = torch.ones(3, device="lazyxla"), torch.zeros(3, device="lazyxla")
lazyxla.sync()
exec(compile("x.add_(1); y.sub_(x); lazyxla.sync()", "caf\\udce9.py", "exec"))
print(x.tolist(), y.tolist())
"""


def test_a_file_name_that_is_no_text(run_python: Callable[..., Any]) -> None:
    """The line of a program that is compiled is looked up when its values are promised already."""
    assert run_python(UNREADABLE).stdout.strip() == "[2.0, 2.0, 2.0] [-2.0, -2.0, -2.0]"
