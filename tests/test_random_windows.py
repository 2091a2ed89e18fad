"""Random programs that write windows of a tensor from windows of it, between other shapes.

Compilers may write in place only what nobody reads any more. Each program is run twice; windows
begin elsewhere the second time, where they are inputs of the program.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import lazyxla
from tests.support import DEVICE

Tensor = torch.Tensor
Step = Callable[[Tensor, int], Tensor]
"""From a flat tensor and how far windows are moved to another one."""

SOURCES: list[Callable[[Tensor], Tensor]] = [
    lambda s: s * 2,
    lambda s: s + 1,
    torch.sin,
    torch.neg,
    lambda s: s * 1,
    torch.clone,
]
COPIES: list[Callable[[Tensor], Tensor]] = [lambda y: y * 1, torch.clone, lambda y: y + 0]


def a_shape(size: int, chance: random.Random) -> list[int]:
    shape = []
    while size > 1 and len(shape) < 3 and chance.random() < 0.8:
        shape.append(chance.choice([d for d in range(2, size + 1) if size % d == 0]))
        size //= shape[-1]
    if size > 1 or not shape:
        shape.append(size)
    chance.shuffle(shape)
    return shape


def a_window(size: int, chance: random.Random) -> Step:
    shape = a_shape(size, chance)
    dim = chance.randrange(len(shape))
    length = chance.randrange(1, shape[dim] + 1)
    read, written = (chance.randrange(0, shape[dim] - length + 1) for _ in range(2))
    copy, source, own = chance.choice(COPIES), chance.choice(SOURCES), chance.random() < 0.5
    write = chance.choice(["copy_", "add_", "mul_"])

    def step(x: Tensor, moved: int) -> Tensor:
        y = copy(x.reshape(shape))
        values = source((y if own else x.reshape(shape)).narrow(dim, max(read - moved, 0), length))
        getattr(y.narrow(dim, max(written - moved, 0), length), write)(values)
        return y.reshape(-1)

    return step


def a_column(size: int, chance: random.Random) -> Step:
    shape = a_shape(size, chance)
    dim = chance.randrange(len(shape))
    read, written = (chance.randrange(shape[dim]) for _ in range(2))

    def step(x: Tensor, moved: int) -> Tensor:
        y = x.reshape(shape).clone()
        y.select(dim, max(written - moved, 0)).copy_(y.select(dim, read) * 2 + 1)
        return y.reshape(-1)

    return step


def within(size: int, chance: random.Random) -> Step:
    half = size // 2
    begin = chance.randrange(1, half)

    def step(x: Tensor, moved: int) -> Tensor:
        x.narrow(0, begin - moved, half).copy_(x[:half] * 0.5 + x[half:])
        return x

    return step


def a_move(size: int, chance: random.Random) -> Step:
    shape = a_shape(size, chance)
    dim, by = chance.randrange(len(shape)), chance.randrange(1, 7)
    moves: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.flip(dim),
        lambda x: x.roll(by, dim),
        lambda x: x.transpose(0, dim),
        lambda x: x - x.mean(dim, keepdim=True),
        lambda x: torch.tanh(x),
    ]
    move = chance.choice(moves)
    return lambda x, moved: move(x.reshape(shape)).reshape(-1)


@pytest.mark.parametrize("seed", range(60))
def test_random_windows(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([64, 96, 240, 256, 512, 2048])
    kinds = [a_window, a_window, a_column, within, a_move]
    steps = [chance.choice(kinds)(size, chance) for _ in range(chance.randrange(2, 6))]
    x = torch.randn(size, dtype=torch.float64)
    for moved in (0, 1):
        expected, ours = x.clone(), x.to(DEVICE)
        lazyxla.sync()
        for step in steps:
            expected, ours = step(expected, moved), step(ours, moved)
        torch.testing.assert_close(ours.cpu(), expected)
