"""Clients that span processes: two and three of these, by the plugin of tests/spanning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.distributed.processes import outputs
from tests.distributed.spanning_cases import CASES, FAILURES
from tests.spanning import environments

SIZES = (2, 3)


def run(size: int, *command: str, **more: str) -> None:
    with environments(size, devices=2) as own:
        outputs(command, [{**environment, **more} for environment in own], timeout=300)


@pytest.mark.parametrize("size", SIZES)
def test_what_works(size: int, tmp_path: Path) -> None:
    names = [name for name in CASES if name not in FAILURES]
    run(size, "-m", "tests.distributed.spanning_cases", str(tmp_path), *names)
    # One process with one device, and PyTorch's own planner.
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to("lazyxla")
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    assert state["step"] == 7
    for name, kept in torch.load(tmp_path / "kept.pt").items():
        assert torch.equal(model.state_dict()[name].cpu(), kept)


@pytest.mark.parametrize("failure", FAILURES)
def test_failures(failure: str, tmp_path: Path) -> None:
    run(2, "-m", "tests.distributed.spanning_cases", str(tmp_path), failure)


def test_a_process_that_misbehaves(pytestconfig: pytest.Config) -> None:
    """A fifth as many trials as `--faults` says, since each starts processes.

    All is compared: of what is not, the plugin says that it differs, where devices would wait.
    """
    compare = {"LAZYXLA_COMPARE_COLLECTIVES": "always"}
    for seed in range(pytestconfig.getoption("--faults") // 5):
        run(2 + seed % 2, "-m", "tests.distributed.spanning_faults", str(seed), **compare)


def test_devices_that_are_in_use_are_not_shared_any_more(tmp_path: Path) -> None:
    code = """
import pytest, torch, torch.distributed as dist, lazyxla
torch.ones(2, device="lazyxla").cpu()
with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group before"):
    dist.init_process_group("lazyxla")
"""
    run(2, "-c", code)
