"""A model that is made on the device runs before its first step, which is so compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import lazyxla
from tests.support import DEVICE, assert_same, counted

STEPS = 4
WIDTH = 6


class WithOwnState(nn.Module):
    """Its newest tensors are neither layers' nor initialised in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH).cumsum(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.first(x)))) * self.scale + self.mask


def layers(inner: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, inner), nn.ReLU(inplace=True), nn.Linear(inner, WIDTH))


def initialised_later() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH))
    model.to_empty(device=DEVICE)
    for part in model:
        part.reset_parameters()
    return model


def initialised_in_steps() -> nn.Module:
    """An orthogonal matrix is made on the host. What follows writes to what has data already."""
    model = layers(10)  # other sizes than all above: its step's program is known from no other test
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 0.5)
    nn.init.orthogonal_(model[2].weight[:, :4])
    nn.init.uniform_(model[0].bias)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "own state": WithOwnState,
    "from meta": initialised_later,
    "initialised in steps": initialised_in_steps,
    "tied": tied,
    "transformer": transformer,
}


def train(
    make: Callable[[], nn.Module],
    batch: Callable[[], torch.Tensor],
    synced: bool = False,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
) -> tuple[list[float], list[int]]:
    """The losses, and how many programs had been compiled after each step."""
    torch.manual_seed(7)
    with torch.device(DEVICE):
        model = make()
    if synced:
        lazyxla.sync()
    optimizer = optim.AdamW(model.parameters())
    called = wrap(model)
    losses, compiles = [], []
    for _ in range(STEPS):
        loss = called(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()
        losses.append(loss.detach())
        compiles.append(lazyxla.counters()["compiles"])
    return [loss.item() for loss in losses], compiles


def uploaded() -> torch.Tensor:
    return torch.full((4, WIDTH), 0.25).to(DEVICE)


def drawn() -> torch.Tensor:
    return torch.randn(4, WIDTH, device=DEVICE) * 2


@pytest.mark.parametrize("batch", [uploaded, drawn])
@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_a_model_made_on_the_device_is_compiled_once(
    name: str, batch: Callable[[], torch.Tensor]
) -> None:
    losses, compiles = train(MODELS[name], batch)
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)
    # Random numbers are drawn in the same order as without.
    expected, _ = train(MODELS[name], batch, synced=True)
    assert losses == expected


def by_lerp(mine: torch.Tensor, its: torch.Tensor) -> None:
    mine.lerp_(its, 0.1)


def by_copy(mine: torch.Tensor, its: torch.Tensor) -> None:
    mine.data.copy_(0.1 * its.data + 0.9 * mine.data)


@pytest.mark.parametrize("update", [by_lerp, by_copy])
@pytest.mark.parametrize("where", ["made there", "moved", "copied by its state"])
def test_a_copy_of_the_model_is_compiled_with_it_once(
    where: str, update: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """A copy shares the memory of what it copies until one of them is written to, but not its
    place in a program."""
    with torch.device("cpu" if where == "moved" else DEVICE):
        model = nn.Sequential(nn.Linear(WIDTH, 10), nn.BatchNorm1d(10), nn.Linear(10, WIDTH))
    model.to(DEVICE)
    average = copy.deepcopy(model)
    if where == "copied by its state":
        average.load_state_dict(copy.deepcopy(model.state_dict()))
    compiles = []
    for _ in range(STEPS):
        target = average(uploaded()).detach()
        (model(uploaded()) - target + 1).square().mean().backward()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters()):
                its.sub_(its.grad)
                update(mine, its)
        model.zero_grad()
        lazyxla.sync()
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)


def test_a_copy_takes_no_memory_of_its_own() -> None:
    tensor = torch.arange(6.0).to(DEVICE)
    with counted() as n:
        module = nn.Linear(2, 2).to(DEVICE)
        module.register_buffer("kept", tensor)
        twin = copy.deepcopy(module)
        lazyxla.sync()
    assert n.executions == 0
    with torch.no_grad():
        module.kept.add_(1)
        twin.weight.zero_()
    assert_same(twin.kept, torch.arange(6.0))
    assert_same(module.kept, torch.arange(6.0) + 1)
    assert module.weight.abs().max().item() > 0


PARAMETERS: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(WIDTH, device=DEVICE, requires_grad=True),
    "drawn": lambda: torch.randn(WIDTH, device=DEVICE, requires_grad=True),
    "computed": lambda: (torch.randn(WIDTH, device=DEVICE) / 4).requires_grad_(),
    "initialised": lambda: nn.Parameter(nn.init.uniform_(torch.empty(WIDTH, device=DEVICE))),
}


@pytest.mark.parametrize("added_later", [False, True])
@pytest.mark.parametrize("name", PARAMETERS)
def test_what_an_optimizer_is_given_need_not_be_a_module_s(name: str, added_later: bool) -> None:
    model = layers(12).to(DEVICE).requires_grad_(added_later)
    image = PARAMETERS[name]()
    optimizer = optim.AdamW(model.parameters() if added_later else [image])
    if added_later:
        optimizer.add_param_group({"params": [image]})
    compiles = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(uploaded() + image).square().mean().backward()
        optimizer.step()
        lazyxla.sync()
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)


def test_an_optimizer_within_a_compiled_function(fresh_dynamo: None) -> None:
    model = layers(14).to(DEVICE)

    @torch.compile(backend="lazyxla")
    def first_loss(x: torch.Tensor) -> torch.Tensor:
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = uploaded()
    losses = [first_loss(x).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[2]


def test_a_batch_that_is_older_than_the_model() -> None:
    x = torch.randn(4, WIDTH, device=DEVICE)
    _, compiles = train(layers, lambda: x)
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)


def test_lazily_initialised_layers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(WIDTH))

    def wrap(model: nn.Module) -> nn.Module:
        model(uploaded())  # as PyTorch asks for: a dry run, before the optimizer is made
        return model

    torch.manual_seed(7)
    with torch.device(DEVICE):
        model = make()
    wrap(model)
    optimizer = optim.AdamW(model.parameters())
    compiles = []
    for _ in range(STEPS):
        model(uploaded()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()
        compiles.append(lazyxla.counters()["compiles"])
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)


def test_parameters_that_are_computed_from_others() -> None:
    """They cannot be told from the step's own work once the others have run."""

    def make() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 9)), nn.Linear(9, WIDTH))

    _, compiles = train(make, uploaded)
    assert compiles[1] == compiles[0] + 1
    assert compiles[2:] == [compiles[1]] * (STEPS - 2)
    _, compiles = train(make, uploaded, synced=True)
    assert compiles == [compiles[0]] * STEPS


def test_graphs_of_torch_compile(fresh_dynamo: None) -> None:
    wrap = lambda model: torch.compile(model, backend="lazyxla")  # noqa: E731
    _, compiles = train(layers, uploaded, wrap=wrap)
    assert compiles[1:] == [compiles[0]] * (STEPS - 1)


def test_a_capture_has_the_programs_of_a_run() -> None:
    with lazyxla.aot.capture() as captured:
        with torch.device(DEVICE):
            model = layers()
        for _ in range(STEPS):
            model.zero_grad()
            model(uploaded()).square().mean().backward()
            lazyxla.sync()
    assert [program.times for program in captured] == [1, STEPS]


def test_only_a_model_is_run_apart() -> None:
    """Functions of tensors that require gradients are one program, as all else."""
    with counted() as n:
        weight = torch.randn(WIDTH, WIDTH, device=DEVICE, requires_grad=True)
        x = torch.randn(4, WIDTH, device=DEVICE)
        (x @ weight).sum().backward()
        lazyxla.sync()
    assert n.executions == 1


def test_what_else_reads_the_model_s_old_data() -> None:
    """It is run with the model's first step, after the model was run apart."""
    with torch.device(DEVICE):
        model = nn.Linear(WIDTH, WIDTH)
    lazyxla.sync()
    before = model.weight.detach().cpu()
    with torch.no_grad():
        model.weight.mul_(2)
    kept = model.weight.detach() * 3
    model(uploaded())
    lazyxla.sync()
    assert_same(kept, before * 2 * 3)


def test_fused_mode_runs_no_model_apart() -> None:
    """It goes by the number of operators alone."""

    def made_and_called() -> torch.Tensor:
        with torch.device(DEVICE):
            value = nn.Linear(WIDTH, WIDTH)(torch.ones(4, WIDTH)).sum()
        lazyxla.sync()
        return value

    with counted() as lazy:
        made_and_called()
    with lazyxla.eager_mode("fused"), counted() as fused:
        made_and_called()
    assert (lazy.executions, fused.executions) == (2, 1)


def test_updates_by_hand_run_nothing_apart() -> None:
    model = layers().to(DEVICE)
    x = uploaded()

    def step() -> None:
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9).sub_(parameter.grad)
                parameter.grad = torch.zeros_like(parameter)

    step()
    lazyxla.sync()
    with counted() as n:
        step()
        step()
        lazyxla.sync()
    assert n.executions == 1


def initialised_by_several_operators() -> nn.Module:
    """What is drawn is not what a parameter holds, but what that is computed from."""
    model = layers()
    nn.init.trunc_normal_(model[2].weight)
    return model


@pytest.mark.parametrize("make", [layers, initialised_by_several_operators])
def test_a_step_that_fails_keeps_the_numbers_that_the_model_drew(
    make: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(3)
    with torch.device(DEVICE):
        model = make()
    drawn_by_the_model = torch.lazyxla.get_rng_state()
    x = F.dropout(torch.ones(4, WIDTH, device=DEVICE))
    y = model(x).sum()
    huge = torch.empty(1 << 45, device=DEVICE) + y
    with pytest.raises(torch.OutOfMemoryError):
        lazyxla.sync()
    del huge
    assert torch.equal(torch.lazyxla.get_rng_state(), drawn_by_the_model)
    assert model[0].weight.abs().max().item() > 0
