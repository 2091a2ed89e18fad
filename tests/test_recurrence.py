"""Training whose graphs do not recur is left to PyTorch's kernels, once a few were compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from tests.support import DEVICE, counted
from tests.test_host_programs import COMPILED_FIRST, new_line

COMPILED_AT, ON_HOST, IN_STAGES = 4, 16, 64  # runs of a graph that recurs all the same


@pytest.fixture(autouse=True)
def _host_programs() -> Iterator[None]:
    lazyxla.settings.host_programs = True
    yield
    lazyxla.settings.host_programs = False


Step = Callable[[int], torch.Tensor]


def trained(model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor]) -> Step:
    """A step of training on data of a size, which is run in a line of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = new_line()

    def step(size: int) -> torch.Tensor:
        loss = loss_of(model, size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync(True)
        return loss.detach()

    return step


def classifier(
    device: str, width: int = 12, dropout: float = 0.3, activation: nn.Module | None = None
) -> Step:
    torch.manual_seed(0)
    layers = [
        nn.Linear(6, width), nn.BatchNorm1d(width), activation or nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4),
    ]  # fmt: skip
    model = nn.Sequential(*layers).to(device)
    x, y = torch.randn(90, 6), torch.randint(4, (90,))

    def loss_of(model: nn.Module, size: int) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x[:size].to(device)), y[:size].to(device))

    return trained(model, loss_of)


@pytest.mark.parametrize(
    ("activation", "compiled", "on_host"),
    # The host does not draw the slopes of RReLU: a program of this one operator.
    [(nn.ReLU(), (0, 0), 1), (nn.RReLU(), (1, 1), 2)],
)
def test_sizes_that_never_recur(
    activation: nn.Module, compiled: tuple[int, int], on_host: int
) -> None:
    first = 20 if on_host == 1 else 40
    sizes = range(first, first + COMPILED_FIRST + 8)
    step = classifier(DEVICE, activation=activation)
    losses, counts = [], []
    for size in sizes:
        with counted() as n:
            losses.append(step(size).cpu())
        counts.append(n)
    assert all(n.host_programs == 0 for n in counts[:COMPILED_FIRST])
    assert [(n.compiles, n.graphs_cut) for n in counts[COMPILED_FIRST:]] == [compiled] * 8
    assert all(n.host_programs == on_host for n in counts[COMPILED_FIRST:])
    assert lazyxla.fallbacks() == {}

    lazyxla.settings.host_programs = False
    step = classifier(DEVICE, activation=activation)
    torch.testing.assert_close(losses, [step(size).cpu() for size in sizes])


@pytest.mark.parametrize(("mode", "compiled_first"), [(True, 0), ("fused", COMPILED_FIRST)])
def test_sizes_that_never_recur_in_the_eager_modes(mode: Any, compiled_first: int) -> None:
    sizes = range(70, 78) if mode == "fused" else range(80, 88)
    with lazyxla.eager_mode(mode):
        step = classifier(DEVICE)
        losses, counts = [], []
        for size in sizes:
            with counted() as n:
                losses.append(step(size).cpu())
            counts.append((n.compiles, n.host_programs > 0))
    assert counts[compiled_first:] == [(0, True)] * (8 - compiled_first)
    lazyxla.settings.host_programs = False
    step = classifier(DEVICE)
    torch.testing.assert_close(losses, [step(size).cpu() for size in sizes])


def test_what_recurs_after_all_is_compiled() -> None:
    step = classifier(DEVICE)
    for size in range(50, 50 + COMPILED_FIRST + 1):
        step(size)
    with counted() as n:
        step(62)
    assert n.host_programs > 0
    runs = []
    for _ in range(2, ON_HOST + 4):
        with counted() as n:
            step(62)
        runs.append((n.compiles, n.host_programs > 0))
    on_host = [(int(run == COMPILED_AT), True) for run in range(2, ON_HOST + 1)]
    assert runs == on_host + [(0, False)] * 3


def test_lines_whose_graphs_recur() -> None:
    sync = new_line()
    for width in range(3, 3 + 2 * COMPILED_FIRST):
        model = nn.Linear(width, width).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with counted() as n:
                model(torch.ones(2, width, device=DEVICE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                sync(False)
            assert n.host_programs == 0


def test_turned_off() -> None:
    lazyxla.settings.host_programs = False
    step = classifier(DEVICE, width=10)
    for size in range(20, 20 + COMPILED_FIRST + 2):
        with counted() as n:
            step(size)
        assert (n.compiles >= 1, n.host_programs) == (True, 0)


def episodes(device: str) -> torch.Tensor:
    """An actor and a critic that learn from episodes, each of another length."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 3).to(device), nn.Linear(4, 1).to(device)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
    losses = []
    for length in [*range(3, 15), 4, 13]:
        of_actor, of_critic = [], []
        for state in torch.linspace(-1, 1, 4 * length).view(length, 4).to(device):
            log_probs, value = actor(state).log_softmax(-1), critic(state)
            advantage = 1.0 - value.item()
            of_actor.append(-log_probs[length % 3] * advantage)
            of_critic.append(nn.functional.smooth_l1_loss(value, torch.ones(1, device=device)))
        loss = torch.stack(of_actor).sum() + torch.stack(of_critic).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_episodes() -> None:
    episodes(DEVICE)
    with counted() as n:
        losses = episodes(DEVICE)
    assert n.compiles <= 2  # where an episode ends; that of the first steps
    assert n.host_programs > 0
    torch.testing.assert_close(losses, episodes("cpu"))


class Letters(nn.Module):
    """Reads a sequence letter by letter with a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for letter in x:
            state = self.cell(letter, state)
        return state if isinstance(state, torch.Tensor) else torch.cat(state)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def entropy(**options: object) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        target = (torch.arange(logits.numel() // 5) % 5).to(x.device)
        target = target.view(logits.movedim(1, -1).shape[:-1])
        weight = torch.linspace(0.5, 1, 5, device=x.device) if options.get("weight") else None
        given = {**options, "weight": weight}
        return nn.functional.cross_entropy(logits, target, **given).sum()

    return loss_of


KERNELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), mean_square),
    "linear without a bias": (lambda: nn.Linear(6, 5, bias=False), mean_square),
    "linear of three dimensions": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Unflatten(0, (1, -1)), nn.Linear(5, 3)),
        mean_square,
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.Conv1d(3, 2, 2)),
        mean_square,
    ),
    "LSTM cell": (lambda: Letters(nn.LSTMCell(6, 4)), mean_square),
    "LSTM cell without a bias": (lambda: Letters(nn.LSTMCell(6, 4, bias=False)), mean_square),
    "GRU cell": (lambda: Letters(nn.GRUCell(6, 4)), mean_square),
    "GRU cell without a bias": (lambda: Letters(nn.GRUCell(6, 4, bias=False)), mean_square),
    "cross entropy": (lambda: nn.Linear(6, 5), entropy()),
    "of each sample": (lambda: nn.Linear(6, 5), entropy(reduction="none")),
    "summed": (lambda: nn.Linear(6, 5), entropy(reduction="sum")),
    "weighted": (lambda: nn.Linear(6, 5), entropy(weight=True)),
    "a class ignored": (lambda: nn.Linear(6, 5), entropy(ignore_index=2)),
    "of more dimensions": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 5, 3)),
        entropy(weight=True, ignore_index=1),
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    """Those that PyTorch's CPU lacks, and gradients that are not asked for."""
    make, loss_of = KERNELS[name]
    first, last = 5, 5 + COMPILED_FIRST + 3

    def train(device: str, counts: list[tuple[int, int]]) -> tuple[list[torch.Tensor], object]:
        torch.manual_seed(0)
        model = make()
        x = torch.randn(last, 6)
        model.to(device)
        data = {size: x[:size].to(device) for size in range(first, last)}
        lazyxla.sync()
        step = trained(model, lambda model, size: loss_of(model, data[size]))
        losses = []
        for size in range(first, last):
            with counted() as n:
                losses.append(step(size))
            counts.append((n.compiles, n.host_programs))
        return [loss.cpu() for loss in losses], {k: v.cpu() for k, v in model.state_dict().items()}

    counts: list[tuple[int, int]] = []
    ours = train(DEVICE, counts)
    assert counts[-2:] == [(0, 1)] * 2
    theirs = train("cpu", [])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_cut_graph_that_recurs_is_compiled_whole(on_host: bool) -> None:
    lazyxla.settings.host_programs = on_host
    torch.manual_seed(0)
    width = 9 if on_host else 11
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(20))).to(DEVICE)
    x = torch.randn(3, width, device=DEVICE)
    sync = new_line()
    lazyxla.sync()

    def run(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = change(layers(x).tanh())
        sync(True)
        return y

    def scale(number: int) -> torch.Tensor:
        return run(lambda y: y * number)

    for change in (torch.sin, torch.cos, torch.exp):
        with counted() as n:
            run(change)
    assert n.graphs_cut == 1
    twice = scale(2).cpu()
    counts = []
    for times in range(2, IN_STAGES + 4):
        number = 2 + times % 3
        with counted() as n:
            result = scale(number)
        counts.append((n.compiles, n.executions > 1))
        torch.testing.assert_close(result.cpu(), twice * number / 2)
    assert [compiles for compiles, _ in counts[4:]].count(1) == 1
    assert [in_stages for _, in_stages in counts] == [True] * (IN_STAGES - 1) + [False] * 3
    assert counts[-3:] == [(0, False)] * 3


def test_an_index_out_of_range() -> None:
    """The kernels raise where a program takes the last row; nothing is lost."""
    table = nn.Embedding(7, 3).to(DEVICE)

    def loss_of(model: nn.Module, size: int) -> torch.Tensor:
        index = torch.arange(abs(size)) % (7 if size > 0 else 9)
        return model(index.to(DEVICE)).square().mean()

    step = trained(table, loss_of)
    for size in range(8, 8 + COMPILED_FIRST + 2):
        step(size)
    before = table.weight.detach().cpu()
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        step(-40)
    assert torch.equal(table.weight.detach().cpu(), before)
    step(41)
    assert not torch.equal(table.weight.detach().cpu(), before)
