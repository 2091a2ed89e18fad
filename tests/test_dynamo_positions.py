"""torch.compile of slices of a fixed size that begin at an int that varies: one program for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, assert_same, counted

CALLS = 9


def written(c, q, i):
    c[:, i : i + 2] = q[:, None]
    return c[:, i : i + 2] * 2


def written_through_views(c, q, i):
    c = c.clone()
    c[:, i : i + 2].mul_(3)
    c.narrow(1, i + 1, 2).add_(q[:, None])
    return c


def gradient_of_written(c, q, i):
    z = c * 2
    z[:, i : i + 2] = q[:, None] * 3
    return z.pow(2).sum()


def views(c, q, i):
    view = c[:, i : i + 2]
    return view, view * q[:, None], view.transpose(0, 1)


def views_of_computed(c, q, i):
    y = c * 2
    return y, y[:, i : i + 2], y.narrow(1, i, 1).squeeze(1)


ONE: dict[str, Callable[..., Any]] = {
    "narrow": lambda c, q, i: c.narrow(1, i, 1) * q[:, None],
    "select": lambda c, q, i: c.select(1, i) * q,
    "select_scatter": lambda c, q, i: c.select_scatter(q, 1, i),
    "gradient of select": lambda c, q, i: (c.select(1, i) * q).pow(2).sum(),
    "slice": lambda c, q, i: c[:, i : i + 2] * q[:, None],
    "step": lambda c, q, i: c[:, i : i + 4 : 2] * q[:, None],
    "from the end": lambda c, q, i: c.narrow(1, -i - 2, 2) * q[:, None],
    "batch": lambda c, q, i: (c.view(-1, 8)[i * 2 : i * 2 + 2] @ q.t()).relu(),
    "slice of slice": lambda c, q, i: c[:, i : i + 4][:, 1:3].reshape(2, -1).t().contiguous(),
    "two": lambda c, q, i: c[:, i : i + 2, 2:5] + c[:, i + 1 : i + 3, 1:4],
    "computed with, too": lambda c, q, i: c.narrow(1, i, 3) * i,
    "gradient": lambda c, q, i: (c.narrow(1, i, 3) * q[:, None]).pow(2).sum(),
    "gradient of written": gradient_of_written,
    "written": written,
    "written through views": written_through_views,
    "views": views,
    "views of computed": views_of_computed,
}


def run(function: Callable[..., Any], device: str, i: int, is_gradient: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 32, 8), (2, 8)
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    if is_gradient:
        tensors = [t.requires_grad_() for t in tensors]
    result = function(*tensors, i)
    if is_gradient:
        result.backward()
        tensors += [t.grad for t in tensors]
    return [result, *tensors]


@pytest.mark.parametrize("name", ONE)
def test_one_program_serves_all_positions(name):
    """The first is of a static graph; a number is an input once it has changed."""
    compiled, is_gradient = torch.compile(ONE[name], backend=backend), "gradient" in name
    compiles = []
    for i in range(1, CALLS):
        expected = run(ONE[name], "cpu", i, is_gradient)
        with counted() as n:
            assert_same(run(compiled, DEVICE, i, is_gradient), expected)
        compiles.append(n.compiles)
        assert n.fallbacks == 0
    assert max(compiles[:3]) <= 1
    assert compiles[3:] == [0] * (CALLS - 4)


def test_views_that_are_returned_compile_nothing():
    compiled = torch.compile(lambda c, i: c[:, i : i + 2], backend=backend)
    c = torch.randn(2, 16).to(DEVICE)
    lazyxla.sync()
    for i in range(1, 6):
        with counted() as n:
            view = compiled(c, i)
            assert (view.storage_offset(), view.stride()) == (i, (16, 1))
            assert view.data_ptr() == c[:, i:].data_ptr()
        assert n.compiles == 0
    view.fill_(1)
    assert c[:, 5:7].cpu().eq(1).all()


def test_where_a_size_depends_on_it_slices_stay():
    """There is a program for each value anyway."""
    compiled = torch.compile(
        lambda c, i: c[:, :i].sum(1) + c.narrow(1, i, 1).squeeze(1), backend=backend
    )
    c = torch.randn(2, 16)
    ours = c.to(DEVICE)
    for i in range(1, 6):
        with counted() as n:
            result = compiled(ours, i).cpu()
        torch.testing.assert_close(result, c[:, : i + 1].sum(1))
        assert n.compiles == 1
    module = lazyxla.stablehlo(lambda c: compiled(c, 5), ours)
    assert "gather" not in module
