"""Steps in which some sizes are data: what does not depend on them is compiled once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyxla
from lazyxla.planning.outline import Operator, Outline
from lazyxla.planning.sizes import find_alternate_stages
from tests.support import DEVICE, counted, programs
from tests.test_host_programs import new_line

ANCHORS = 36


def detector(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(4):
        layers += [nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.Conv2d(width, 6, 1))


def box_loss(boxes: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One less the intersection over union, and a distance, of boxes (n, 4)."""
    sides = boxes[:, 2:].sigmoid(), targets[:, 2:]
    low = [boxes[:, :2] - sides[0] / 2, targets[:, :2] - sides[1] / 2]
    high = [boxes[:, :2] + sides[0] / 2, targets[:, :2] + sides[1] / 2]
    common = area((torch.minimum(*high) - torch.maximum(*low)).clamp(min=0))
    union = area(sides[0]) + area(sides[1]) - common + 1e-6
    apart = (boxes[:, :2] - targets[:, :2]).square().sum(1)
    return (1 - common / union + apart / (1 + apart)).mean()


def area(sides: torch.Tensor) -> torch.Tensor:
    return sides[:, 0] * sides[:, 1]  # of prod() the gradient's shapes are data


class Training:
    """Steps of a detector, whose loss has a row for each anchor that is found."""

    def __init__(self, device: str, width: int) -> None:
        self.device = device
        self.model = detector(width).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
        self.sync = new_line()

    def step(self, found: list[int]) -> float:
        draw = torch.Generator().manual_seed(len(found))
        images = torch.rand(1, 3, 6, 6, generator=draw).to(self.device)
        targets = torch.rand(ANCHORS, 4, generator=draw).to(self.device)
        rows = torch.tensor(found).to(self.device)
        out = self.model(images).flatten(2)[0].T
        classes = torch.zeros(ANCHORS, device=self.device)
        classes[rows] = 1.0
        weights = (targets[rows, :1] * 9).long().float() + 1  # which the host does not compute
        loss = box_loss(out[rows, :4] * weights.clamp(max=1), targets[rows])
        loss = loss + F.binary_cross_entropy_with_logits(out[:, 4], classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.device == DEVICE:
            self.sync(True)
        return loss.item()


def sizes_of(seed: int, count: int) -> list[list[int]]:
    """Different numbers of anchors."""
    pick = random.Random(seed)
    return [pick.sample(range(ANCHORS), n) for n in pick.sample(range(2, ANCHORS), count)]


@contextmanager
def host_programs(on: bool) -> Iterator[None]:
    lazyxla.settings.host_programs = on
    yield
    lazyxla.settings.host_programs = False


@pytest.mark.parametrize("on_host", [False, True])
def test_what_no_size_changes_is_compiled_once(on_host: bool) -> None:
    width = 12 if on_host else 8
    ours, theirs = Training(DEVICE, width), Training("cpu", width)
    steps = sizes_of(seed=on_host, count=12)
    lowered, compiles = [], []
    with host_programs(on_host), programs() as found:
        for rows in steps:
            with counted() as n:
                loss = torch.tensor(ours.step(rows))
            assert n.fallbacks == 0
            lowered.append(n.nodes_lowered)
            compiles.append(n.compiles)
            torch.testing.assert_close(loss, torch.tensor(theirs.step(rows)))
    # The first step, beside which momentum is made, and one of other sizes are whole programs. The
    # third or fourth has programs of parts, which all further ones take.
    whole = max(found.sizes)
    assert found.sizes.count(whole) == 2
    assert lowered[1] == whole <= lowered[0]
    assert compiles[4:] == [1] * 8
    if on_host:
        assert lowered[4:] == [1] * 8  # the cast to integers
    else:
        assert max(lowered[4:]) < whole - 40, lowered
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)


class Sized:
    """A random computation in float64 on matrices (4, 4) and rows (n, 4), which feed each other."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.runs = [
            [(pick.randrange(6), pick.randrange(3), pick.randrange(3)) for _ in range(length)]
            for length in (pick.randrange(18, 30), pick.randrange(3, 8), pick.randrange(18, 30))
        ]

    def run(self, device: str, n: int) -> list[torch.Tensor]:
        fixed = [torch.linspace(-1, 1 + i, 16, dtype=torch.float64) for i in range(3)]
        matrices = [x.reshape(4, 4).to(device) for x in fixed]
        rows = torch.linspace(0, 1, 4 * n, dtype=torch.float64).reshape(n, 4).to(device)
        for number, run in enumerate(self.runs):
            for kind, a, b in run:
                if number == 1:
                    rows = self.of_rows(kind, rows, matrices[a])
                else:
                    self.of_matrices(kind, matrices, a, b)
            if number == 1:
                matrices[run[0][1]].add_(rows.T @ rows / n)
        return [*matrices, rows]

    def of_rows(self, kind: int, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if kind == 0:
            return torch.tanh(rows @ x)
        if kind == 1:
            rows[::2].mul_(0.5)
            return rows
        return (rows + x[kind - 2]).sin() if kind < 4 else rows.flip(0) * x.mean()

    def of_matrices(self, kind: int, t: list[torch.Tensor], a: int, b: int) -> None:
        if kind == 0:
            t[a] = torch.tanh(t[a] + t[b])
        elif kind == 1:
            t[a][1:3].add_(t[b][:2].clone())
        elif kind == 2:
            t[a] = t[a] @ t[b].T * 0.2
        elif kind == 3:
            t[a].copy_(t[b] * 0.5)
        elif kind == 4:
            t[a] = torch.softmax(t[a], 1)
        else:
            t[a][:, 0] = t[b].sum(1)


@pytest.mark.parametrize("seed", range(6))
def test_random_computations(seed: int) -> None:
    computation, on_host = Sized(seed), seed % 2 == 1
    sizes = random.Random(seed).sample(range(3, 40), 10)
    sync = new_line()
    with host_programs(on_host), counted() as n:
        for size in sizes:
            ours = computation.run(DEVICE, size)
            sync(False)
            for mine, other in zip(ours, computation.run("cpu", size), strict=True):
                torch.testing.assert_close(mine.cpu(), other)
    assert n.graphs_cut > 0
    assert n.fallbacks == 0


@pytest.mark.parametrize("seed", range(40))
def test_stages_follow_what_they_take(seed: int) -> None:
    pick = random.Random(seed)
    length = pick.randrange(30, 200)
    kinds = [pick.randrange(5) for _ in range(length)]
    operators = [Operator(f"op{kind}", kind, 1, 1, False, False) for kind in kinds]
    recent = pick.choice([3, 10, 100])
    operands = [
        [pick.randrange(max(0, i + 2 - recent), i + 2) for _ in range(pick.randrange(3))]
        for i in range(length)
    ]
    graph = Outline(["a", "b"], operators, operands, [[]] * length, [length + 1], [], [-1, -1])
    begin = pick.randrange(length)
    differs = [begin <= i < begin + pick.randrange(1, 40) for i in range(length)]
    cut = find_alternate_stages(graph, differs)
    if cut is None:
        return
    odd = [i for i, stage in enumerate(cut.stages) if stage % 2 == 1]
    assert not any(differs[i] or cut.differs[i] for i in odd)
    assert len(odd) >= 16
    for i, sources in enumerate(graph.sources):
        assert all(cut.stages[source] <= cut.stages[i] for source in sources if source >= 0)
    # Where they were cut is where they differ from then on.
    again = find_alternate_stages(graph, cut.differs)
    assert again is not None
    assert [i for i, stage in enumerate(again.stages) if stage % 2 == 1] == odd
