"""Training loops: optimizers in all their implementations, schedules, clipping, accumulation,
dropout, averages of a model. Steps after the second compile nothing, whatever varies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, counted, programs

pytestmark = pytest.mark.cuda

STEPS = 5

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _optimizers() -> dict[str, MakeOptimizer]:
    """Every optimizer, in each implementation that PyTorch offers for it."""
    cases: dict[str, tuple[type, dict[str, Any], tuple[str, ...]]] = {
        "sgd": (torch.optim.SGD, {"lr": 0.05}, ("foreach", "fused")),
        "sgd_momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, ("foreach", "fused")),
        "sgd_nesterov": (
            torch.optim.SGD,
            {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
            ("foreach", "fused"),
        ),
        "adam": (torch.optim.Adam, {"lr": 1e-2}, ("foreach", "fused")),
        "adam_amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}, ("foreach", "fused")),
        "adamw": (torch.optim.AdamW, {"lr": 1e-2}, ("foreach", "fused")),
        "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}, ("foreach",)),
        "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, ("foreach",)),
        "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, ("foreach",)),
    }
    result: dict[str, MakeOptimizer] = {}
    for name, (cls, options, implementations) in cases.items():
        for implementation in ("default", *implementations):
            flags = {flag: flag == implementation for flag in implementations}
            result[f"{name}-{implementation}"] = (
                lambda params, cls=cls, options=options, flags=flags: cls(
                    params, **options, **flags
                )
            )
    return result


OPTIMIZERS = _optimizers()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 4)
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 12), torch.randint(0, 4, (16,))


class Pair:
    """The same model on the CPU and on the device, each with its optimizer."""

    def __init__(self, make: MakeOptimizer, model: nn.Module | None = None) -> None:
        reference = model or _model()
        self.models = [reference, copy.deepcopy(reference).to(DEVICE)]
        self.optimizers = [make(m.parameters()) for m in self.models]

    def assert_equal(self) -> None:
        reference, ours = self.models
        for expected, actual in zip(reference.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(actual.detach().cpu(), expected.detach())


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_matches_the_cpu_and_settles(name: str) -> None:
    pair = Pair(OPTIMIZERS[name])
    compiles, executions = [], []
    lazyxla.reset_counters()
    for _ in range(STEPS):
        x, y = _batch()
        expected = _train_step(pair.models[0], pair.optimizers[0], x, y)
        with counted() as n:
            loss = _train_step(pair.models[1], pair.optimizers[1], x.to(DEVICE), y.to(DEVICE))
            lazyxla.sync()
        compiles.append(n.compiles)
        executions.append(n.executions)
        torch.testing.assert_close(loss.cpu(), expected)
    pair.assert_equal()
    assert lazyxla.fallbacks() == {}
    assert compiles[2:] == [0] * (STEPS - 2), compiles
    if "adafactor" not in name:  # PyTorch's reads norms of parameters as numbers, in every step
        # The first step makes the optimizer's state besides, by small programs.
        assert executions[1:] == [1] * (STEPS - 1)
        assert compiles[1] == 0, compiles


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd_momentum-foreach", "adam-default", "adamw-fused"])
def test_schedules_cost_one_more_compile_at_most(name: str, optimizer: str) -> None:
    pair = Pair(OPTIMIZERS[optimizer])
    schedulers = [SCHEDULERS[name](o) for o in pair.optimizers]
    compiles = []
    for _ in range(8):
        x, y = _batch()
        _train_step(pair.models[0], pair.optimizers[0], x, y)
        with programs() as found:
            _train_step(pair.models[1], pair.optimizers[1], x.to(DEVICE), y.to(DEVICE))
            lazyxla.sync()
        for scheduler in schedulers:
            scheduler.step()
        compiles.append(len(found.large(5)))  # smaller ones make the optimizer's state
    pair.assert_equal()
    assert sum(compiles) <= 3, compiles
    assert compiles[5:] == [0, 0, 0], compiles


def test_clipping_and_accumulation() -> None:
    pair = Pair(OPTIMIZERS["adamw-foreach"])
    compiles = []
    for _ in range(4):
        batches = [_batch() for _ in range(3)]
        norms = []
        with programs() as found:
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                device = next(model.parameters()).device
                for x, y in batches:
                    (F.cross_entropy(model(x.to(device)), y.to(device)) / 3).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            lazyxla.sync()
        compiles.append(len(found.large(5)))  # smaller ones make the optimizer's state
        torch.testing.assert_close(norms[1].cpu(), norms[0])
    pair.assert_equal()
    assert compiles == [1, 0, 0, 0]


def test_gradients_that_stay_are_zeroed_in_place() -> None:
    pair = Pair(OPTIMIZERS["sgd-default"])
    compiles = []
    for _ in range(4):
        x, y = _batch()
        with counted() as n:
            for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
                device = next(model.parameters()).device
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            lazyxla.sync()
        compiles.append(n.compiles)
    pair.assert_equal()
    assert compiles[2:] == [0, 0]


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(12, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return self.head(F.dropout(F.relu(self.inner(x)), p))


def test_dropout_and_seeds_compile_nothing_new() -> None:
    model = Dropout().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.to(DEVICE) for t in _batch())
    compiles, losses = [], []
    for step in range(8):
        torch.manual_seed(step // 2)  # every seed twice
        with counted() as n:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, 0.1 + 0.05 * step), y)
            loss.backward()
            optimizer.step()
            lazyxla.sync()
        compiles.append(n.compiles)
        losses.append(loss.item())
    assert compiles[3:] == [0] * 5, compiles
    assert len(set(losses)) == len(losses)


def test_dropout_depends_on_the_seed_and_not_on_syncs() -> None:
    x = torch.ones(64, 64, device=DEVICE)

    def draw(sync: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        results = []
        for _ in range(3):
            results.append(F.dropout(x, 0.5))
            if sync:
                lazyxla.sync()
        return [r.cpu() for r in results]

    together, apart = draw(False), draw(True)
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(together[0], together[1])


def test_moving_average_of_a_model() -> None:
    pair = Pair(OPTIMIZERS["sgd-default"])
    averages = [
        torch.optim.swa_utils.AveragedModel(
            m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for m in pair.models
    ]
    compiles = []
    for _ in range(5):
        x, y = _batch()
        with counted() as n:
            for model, optimizer, average in zip(
                pair.models, pair.optimizers, averages, strict=True
            ):
                device = next(model.parameters()).device
                _train_step(model, optimizer, x.to(device), y.to(device))
                average.update_parameters(model)
            lazyxla.sync()
        compiles.append(n.compiles)
    for ours, theirs in zip(averages[1].parameters(), averages[0].parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    assert compiles[3:] == [0, 0], compiles


def test_step_keeps_one_copy_of_parameters_and_state() -> None:
    width = 256
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(4, width).to(DEVICE)
    parameters = 4 * width * width * 4
    for step in range(5):
        if step == 3:
            lazyxla.sync(wait=True)
            lazyxla.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lazyxla.sync(wait=True)
    # Parameters and the two moments live once; a second copy of any would add another third.
    assert lazyxla.max_memory_allocated() < 3 * parameters * 1.2
    assert lazyxla.memory_allocated() < 3 * parameters * 1.2


def test_linear_with_one_row_is_one_dot_on_the_weight_as_it_lies() -> None:
    from lazyxla import lowering, reporting

    texts: list[str] = []
    original = lowering.lower

    def spy(program: Any, platform: str, *rest: Any) -> Any:
        texts.append(lowering.lower_to_text(program, platform))
        return original(program, platform)

    from lazyxla import _C

    layer = nn.Linear(37, 53).to(DEVICE)
    x = torch.randn(1, 37).to(DEVICE)
    lazyxla.sync()
    _C.install_lowering(spy, lowering.how, lowering.check_lowering)
    try:
        with torch.no_grad():
            layer(x).cpu()
    finally:
        _C.install_lowering(reporting.lower, lowering.how, lowering.check_lowering)
    (text,) = texts
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 1
    assert (
        "tensor<53x37xf32>" in dots[0]
    )  # the weight itself, contracted along its second dimension
