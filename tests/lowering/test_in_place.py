"""A write in place whose source is read from its target, in another shape."""

from __future__ import annotations

import random

import pytest
import torch

import lazyxla
from lazyxla import lowering
from lazyxla.lowering.cpu import builder
from tests.support import DEVICE

SHAPES = [(16, 16), (256,), (4, 64), (2, 8, 16), (8, 32), (4, 4, 4, 4)]


def write(x: torch.Tensor, source: torch.Tensor, place: int) -> torch.Tensor:
    y = x.reshape(256) * 1
    y[place : place + 64] = source
    return y


def shifted(x: torch.Tensor, place: int) -> torch.Tensor:
    return write(x, (x[:4] + 1).reshape(64), place)


def test_rows_are_read_before_they_are_written() -> None:
    x = torch.randn(16, 16)
    ours = x.to(DEVICE)
    for row in range(8):
        torch.testing.assert_close(shifted(ours, 16 * row).cpu(), shifted(x, 16 * row))


@pytest.mark.parametrize("seed", range(40))
def test_random_windows(seed: int) -> None:
    chance = random.Random(seed)
    x = torch.randn(chance.choice(SHAPES))
    ours = x.to(DEVICE)
    lazyxla.sync()
    steps = [(chance.choice(SHAPES), chance.randrange(0, 190)) for _ in range(3)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for shape, place in steps:
            flat = x.reshape(shape).sin().reshape(-1)
            x = write(x, flat[place : place + 64] * 2 - x.reshape(-1)[:64], 190 - place)
            x = x.reshape(shape)
        return x

    torch.testing.assert_close(run(ours).cpu(), run(x))


def test_the_compiler_still_needs_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the compiler is mended: lowering/cpu/in_place.py can go."""
    monkeypatch.setattr(builder, "may_read_what_it_replaces", lambda x, update: False)
    x = torch.randn(16, 16, dtype=torch.float64)  # no other test's program
    ours = x.to(DEVICE)
    same = [torch.equal(shifted(ours, 16 * row).cpu(), shifted(x, 16 * row)) for row in (1, 2, 3)]
    assert not all(same)


def test_what_is_computed_elsewhere_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    lower = lowering.lower

    def noting(program: lowering.Program, target: lowering.Target) -> lowering.Lowered:
        texts.append(lowering.lower_to_text(program, target))
        return lower(program, target)

    monkeypatch.setattr(lowering, "lower", noting)
    cache, weight = torch.zeros(2, 31, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    hidden = torch.randn(2, 8, device=DEVICE)
    lazyxla.sync()
    texts.clear()
    cache[:, 5] = hidden @ weight
    (cache.sum(1) @ weight).cpu()
    text = "".join(texts)
    assert "dynamic_update_slice" in text
    assert "inlineable" not in text
