"""A line that keeps compiling for the same reason is told, once, with what changes and the cure."""

from __future__ import annotations

import logging

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def caught(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="lazyxla")


def test_sizes_that_vary(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.ones(4, 4, device=DEVICE)
    lazyxla.sync()
    for length in range(20, 30):
        x = torch.ones(3, length, 4).to(DEVICE)
        y = (x @ weight).relu().sum(1).square() + 1
        lazyxla.sync()
        del y
        told = warnings_of(caplog)
        assert len(told) == (length >= 25), (length, told)
    (text,) = told
    assert text.startswith(__file__ + ":")
    assert "5 new programs for the same reason" in text
    assert "of shape [3, 25, 4] changed in dimension 1 from 24 to 25" in text
    assert "which aten::mm takes" in text or "which aten::bmm takes" in text
    assert "pad to a few sizes" in text


def test_sizes_that_vary_in_stages(caplog: pytest.LogCaptureFixture) -> None:
    """Each new size compiles one stage or more, none of them the largest; a graph counts once."""
    weight = torch.linspace(-1, 1, 16).reshape(4, 4).to(DEVICE)
    lazyxla.sync()
    with counted() as n:
        for length in range(120, 130):
            x = torch.ones(length, 4).to(DEVICE)
            y = (x @ weight).relu().exp().square().sum(0)
            for _ in range(10):
                y = (y.sin() @ weight).relu()
            z = (x + y).exp().cos().square().sum()
            lazyxla.sync()
            del y, z
            told = warnings_of(caplog)
            assert len(told) == (length >= 125), (length, told)
    assert n.graphs_cut > 5
    (text,) = told
    assert "of shape [125, 4] changed in dimension 0 from 124 to 125" in text


def test_another_line_is_another_cause(caplog: pytest.LogCaptureFixture) -> None:
    for length in range(41, 48):
        x = torch.ones(length).to(DEVICE)
        y = x.exp().cos().sin().tan()
        lazyxla.sync()
        z = x.sin().exp().cos().tan()
        lazyxla.sync()
        del y, z
    assert len({text.split(" ")[0] for text in warnings_of(caplog)}) == 2


def test_arguments_that_vary(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(30, 30, device=DEVICE)
    for dims in range(2, 12):
        y = x.sin().repeat(dims, 1).exp().cos()
        lazyxla.sync()
        del y
    (text,) = warnings_of(caplog)
    assert "repeat" in text or "other arguments" in text
    assert "keep its sizes and numbers the same" in text


def test_what_settles_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    data = torch.ones(64, 8, device=DEVICE)
    for i in range(20):
        y = (data[i : i + 4] * i).sin().exp().sum(0).roll(i)
        lazyxla.sync()
        del y
    assert warnings_of(caplog) == []


def test_eager_mode_compiles_each_kind_of_call_untold(caplog: pytest.LogCaptureFixture) -> None:
    with lazyxla.eager_mode(True):
        for size in range(70, 90):
            torch.ones(size, device=DEVICE).sin().exp().cos().tan()
    assert warnings_of(caplog) == []


def test_operators_that_vary(caplog: pytest.LogCaptureFixture) -> None:
    """Another operator in the middle each time: what comes after it is too much to cut it off."""
    kinds = [torch.sin, torch.cos, torch.tanh, torch.exp, torch.neg, torch.abs, torch.sigmoid]
    x = torch.ones(7, 9).to(DEVICE)
    for first in kinds:
        y = x
        for kind in [*[torch.square, torch.sqrt] * 6, first, *[torch.relu, torch.log1p] * 6]:
            y = kind(y)
        lazyxla.sync()
        del y
    (text,) = warnings_of(caplog)
    assert "operators differ: " in text
    assert "do the same in every step" in text


def test_small_stages_of_a_cut_graph_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    weights = [torch.eye(6).to(DEVICE) for _ in range(24)]
    seen = torch.zeros(0, 6, device=DEVICE)
    for _ in range(16):
        y = torch.ones(1, 6).to(DEVICE)
        for weight in weights:
            y = torch.tanh(y @ weight)
        seen = torch.cat([seen, y]) * 1.0 + 0.0
        lazyxla.sync()
    assert warnings_of(caplog) == []
