"""When a program is compiled, the log says so, with the reason and the user's line."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    lazyxla.settings.log_level = "info"
    caplog.set_level(logging.INFO, logger="lazyxla")
    yield caplog
    lazyxla.settings.log_level = "warning"


def test_compiling_names_line_and_reason(log: pytest.LogCaptureFixture) -> None:
    x = torch.ones(13, 5, device=DEVICE)
    for factor in (2.0, 3.0, 4.0):
        ((x * factor).sin() + 1).sum().item()
    messages = [record.getMessage() for record in log.records]
    assert len(messages) == 2, messages
    line = r"\S*test_reporting\.py:\d+: compiling \d operators "
    assert re.fullmatch(line + r"\(a new graph.*\), lowered in .* s", messages[0])
    assert re.fullmatch(
        line + r"\((a new graph.*|a known graph with other numbers: 1 become inputs)\), .*",
        messages[1],
    )


def _reason(log: pytest.LogCaptureFixture) -> str:
    log.clear()
    lazyxla.sync()
    (record,) = log.records
    return record.getMessage().split("operators (")[1].split("), lowered")[0]


def test_a_new_graph_is_compared_with_one_before(log: pytest.LogCaptureFixture) -> None:
    lazyxla.sync()
    x, y = torch.ones(3, 7, device=DEVICE), torch.ones(3, 8, device=DEVICE)
    lazyxla.sync()
    kept = [x.sinh().cosh().tan()]
    _reason(log)
    kept.append(y.sinh().cosh().tan())
    expected = "a new graph: like one before, but input 0 is Float[3, 8], not Float[3, 7]"
    assert _reason(log) == expected
    kept.append(x.sinh().cosh().erf())
    assert _reason(log) == (
        "a new graph: like one before up to operator 2, aten::erf, which was aten::tan"
    )
    kept.append(x.sinh())
    kept.append(kept[-1].cosh().tan())
    assert _reason(log) == (
        "a new graph: like one before, but 2 results are alive at its end, not 1 or not the same"
    )
    kept.append(x.sinh().cosh().tan().sum(1).sum(0))
    assert _reason(log) == "a new graph: like one before up to operator 3, aten::sum.dim_IntList"
    kept.append(x.sinh().cosh().tan().sum(0).sum(0))
    assert _reason(log) == (
        "a new graph: like one before, but operator 3, aten::sum.dim_IntList, has other arguments"
    )


def test_nothing_is_said_by_default(run_python: Any) -> None:
    code = "import torch, lazyxla; (torch.ones(3, device='lazyxla') + 1).cpu()"
    assert run_python(code).stderr == ""
    shown = run_python(code, LAZYXLA_LOG="info").stderr
    assert re.search(r"lazyxla: <string>:1: compiling \d operators \(a new graph\)", shown), shown
