"""Captured steps: what a settled step costs, and that every change between steps is seen.

Each test changes something in two trainings, of which one has captured steps, and compares all
parameters, gradients, optimizer states and results after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from tests.step_twins import Step, Training, Twins, adam, plain_step, sgd
from tests.support import DEVICE, counted


def _adam_w(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def _rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01)


class _Damped(torch.optim.Adam):
    """Has code of its own, which names no rates but where it is made."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, betas=(0.8, 0.99))
        for group in self.param_groups:
            group.setdefault("initial_lr", lr)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["exp_avg"].mul_(0.9)
        return loss


class _Plain(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Signs(torch.optim.SGD):
    """Computes with the rate itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


@pytest.mark.parametrize("optimizer", [sgd, adam, _adam_w, _rmsprop])
def test_a_settled_step_is_one_execution(optimizer) -> None:
    twins = Twins(optimizer=optimizer)
    twins.run(3)
    assert twins.run(5) == 5


def test_captured_steps_are_what_the_cpu_computes() -> None:
    twins = Twins(device="cpu")
    twins.run(3)
    assert twins.run(5) == 5


# --- Hyper-parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adam, _adam_w, _Damped, _Plain])
def test_a_learning_rate_that_a_scheduler_changes_is_an_input(optimizer) -> None:
    twins = Twins(optimizer=optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.7) for t in twins.both]
    captured = 0
    for _ in range(9):
        captured += twins.run(1)
        for scheduler in schedulers:
            scheduler.step()
    assert captured >= 6  # but for the first ones


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [
        (sgd, "momentum", 0.5),
        (sgd, "weight_decay", 0.1),
        (sgd, "nesterov", True),
        (adam, "betas", (0.5, 0.9)),
        (adam, "eps", 1e-2),
        (_adam_w, "weight_decay", 0.3),
        (_adam_w, "maximize", True),
        (_rmsprop, "lr", 0.1),
        (_Signs, "lr", 0.1),
    ],
)
def test_another_hyper_parameter_is_used_at_once(optimizer, name: str, value: object) -> None:
    twins = Twins(optimizer=optimizer)
    twins.settle()
    for training in twins.both:
        training.optimizer.param_groups[0][name] = value
    assert twins.run(1) == 0
    twins.settle()


def test_a_scheduler_in_the_step() -> None:
    def make(training: Training) -> Step:
        inner = plain_step(training)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.8)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = inner(x, y)
            scheduler.step()
            return loss

        return step

    assert Twins(make).run(7) == 0


def test_a_parameter_group_that_is_added_is_used() -> None:
    twins = Twins(optimizer=lambda parameters: sgd(list(parameters)[:2]))
    twins.settle()
    for training in twins.both:
        training.optimizer.add_param_group({"params": list(training.model[2].parameters())})
    assert twins.run(1) == 0
    twins.settle()


# --- The model -----------------------------------------------------------------------------------


def test_requires_grad() -> None:
    twins = Twins()
    twins.settle()
    for training in twins.both:
        training.model[0].weight.requires_grad_(False)
    assert twins.run(1) == 0
    twins.settle()


def _with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))


def test_train_and_eval() -> None:
    twins = Twins(model=_with_norm)
    twins.settle()
    for mode in (False, True, False):
        for training in twins.both:
            training.model.train(mode)
        twins.run(3)
        assert twins.run(2) == 2


@pytest.mark.parametrize("at", [0, 2])
def test_a_forward_hook_is_called(at: int) -> None:
    twins = Twins()
    twins.settle()
    handles = [t.model[at].register_forward_hook(lambda m, i, o: o * 2) for t in twins.both]
    assert twins.run(1) == 0
    twins.settle()
    for handle in handles:
        handle.remove()
    twins.run(1)
    twins.settle()


def _halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def test_hooks_of_gradients_are_called() -> None:
    registered: list[Callable[[nn.Module], Any]] = [
        lambda model: model[0].weight.register_hook(lambda g: g * 0.3),
        lambda model: model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
        lambda model: model[2].bias.register_post_accumulate_grad_hook(_halve),
        lambda model: nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 0.9),
    ]
    for register in registered:
        twins = Twins()
        twins.settle()
        handles = [register(t.model) for t in twins.both]
        try:
            assert twins.run(1) == 0
            twins.run(3)
        finally:
            for handle in handles:
                handle.remove()
        twins.run(2)


def test_a_hook_where_gradients_are_accumulated_is_called() -> None:
    twins = Twins()
    twins.settle()
    called = []
    kept = []
    for training in twins.both:
        weight = training.model[0].weight
        kept.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        kept[-1].register_hook(lambda *_: called.append(1))
    assert twins.run(2) == 0
    assert len(called) == 4


def test_a_parameter_that_is_replaced() -> None:
    twins = Twins()
    twins.settle()
    for training in twins.both:
        weight = nn.Parameter(training.model[0].weight.detach() * 0.5)
        training.model[0].weight = weight
        training.optimizer.add_param_group({"params": [weight]})
    assert twins.run(1) == 0
    twins.settle()


def test_values_that_are_written_from_outside_are_no_reason_to_run_the_code() -> None:
    twins = Twins()
    twins.settle()
    with torch.no_grad():
        for training in twins.both:
            training.model[0].weight.mul_(0.5)
            training.model[2].bias[1:3] = 7
            next(iter(training.optimizer.state.values()))["momentum_buffer"].zero_()
    lazyxla.sync()
    assert twins.run(2) == 2
    state = {
        name: torch.full_like(t, 0.1).cpu() for name, t in twins.other.model.state_dict().items()
    }
    for training in twins.both:
        training.model.load_state_dict(state)
    lazyxla.sync()
    assert twins.run(2) == 2


def test_other_memory_by_data() -> None:
    twins = Twins()
    twins.settle()
    for training in twins.both:
        training.model[0].weight.data = torch.ones(16, 8, device=training.model[0].weight.device)
    assert twins.run(1) == 0
    twins.settle()


def test_an_optimizer_s_state_that_is_loaded() -> None:
    twins = Twins(optimizer=adam)
    twins.settle()
    for training in twins.both:
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    twins.run(2)
    twins.settle()


def test_a_layer_that_is_added() -> None:
    twins = Twins()
    twins.settle()
    for training in twins.both:
        training.model.append(nn.Tanh())
    assert twins.run(1) == 0
    twins.settle()


def test_a_module_s_own_attribute() -> None:
    twins = Twins(model=lambda: nn.Sequential(nn.Linear(8, 4), nn.LeakyReLU(0.1)))
    twins.settle()
    for training in twins.both:
        training.model[1].negative_slope = 0.7
    assert twins.run(1) == 0
    twins.settle()


# --- Gradients -----------------------------------------------------------------------------------


def _cleared_first(training: Training) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = F.mse_loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    return step


def _set_to_zero(training: Training) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def _accumulating(training: Training) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(training.model(x), y) / 2
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("make", [_cleared_first, _set_to_zero])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_that_stay(make, optimizer) -> None:
    twins = Twins(make, optimizer=optimizer)
    twins.settle()


def test_gradients_of_captured_steps_are_new_tensors() -> None:
    twins = Twins(_cleared_first)
    twins.settle()
    before = twins.captured.model[0].weight.grad
    copy = before.cpu()
    twins.run(1)
    assert twins.captured.model[0].weight.grad is not before
    torch.testing.assert_close(before.cpu(), copy, rtol=0, atol=0)


def test_gradients_that_are_accumulated() -> None:
    twins = Twins(_accumulating)
    for _ in range(3):
        for training in twins.both:
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert twins.run(1) == 0  # its gradients are new, those of the next are added
        twins.run(2)
        assert twins.run(2) == 2


def test_gradients_that_are_cleared_from_outside() -> None:
    twins = Twins(_cleared_first)
    twins.settle()
    for training in twins.both:
        training.optimizer.zero_grad()
    assert twins.run(1) == 0
    twins.settle()


def test_a_gradient_that_is_given_to_a_frozen_parameter() -> None:
    twins = Twins()
    for training in twins.both:
        training.model[0].weight.requires_grad_(False)
    twins.settle()
    for training in twins.both:
        weight = training.model[0].weight
        weight.grad = torch.ones(16, 8, device=weight.device)
    assert twins.run(1) == 0  # which the optimizer has used, and cleared
    twins.settle()


# --- Random numbers ------------------------------------------------------------------------------


def test_dropout_draws_new_numbers_as_without_capture() -> None:
    twins = Twins(model=_with_norm)
    twins.settle()
    torch.manual_seed(5)
    assert twins.run(2) == 2
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        twins.captured.model[1].running_mean.zero_()
        x, y = torch.ones(6, 8, device=DEVICE), torch.ones(6, 4, device=DEVICE)
        with torch.no_grad():
            for p in twins.captured.model.parameters():
                p.fill_(0.3)
        with counted() as n:
            seen.append(twins.captured.step(x, y).item())
        assert n.captured_steps == 1
        seen.append(twins.captured.step(x, y).item())
    assert seen[0] == seen[2]


def test_a_step_that_sets_the_seed_is_not_captured() -> None:
    def make(training: Training) -> Step:
        inner = plain_step(training)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return inner(x, y)

        return step

    assert Twins(make, model=_with_norm).run(6) == 0
