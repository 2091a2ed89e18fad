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
    assert re.fullmatch(line + r"\(a new graph\), lowered in .* s", messages[0])
    assert re.fullmatch(
        line + r"\((a new graph|a known graph with other numbers: 1 become inputs)\), .*",
        messages[1],
    )


def test_nothing_is_said_by_default(run_python: Any) -> None:
    code = "import torch, lazyxla; (torch.ones(3, device='lazyxla') + 1).cpu()"
    assert run_python(code).stderr == ""
    shown = run_python(code, LAZYXLA_LOG="info").stderr
    assert re.search(r"lazyxla: <string>:1: compiling \d operators \(a new graph\)", shown), shown
