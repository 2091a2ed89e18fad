"""Random changes of what a training is made of, for tests of captured steps: to both of two twins.

A change is a function of the twins (tests/step_twins.py), and of a random generator. It returns a
context manager for the next call, or None.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import lazyxla
from tests.step_twins import Training, Twins

Change = Callable[[Twins, random.Random], AbstractContextManager[Any] | None]
CHANGES: list[Change] = []


def change(f: Change) -> Change:
    CHANGES.append(f)
    return f


def on_both(f: Callable[[Training, random.Random], object]) -> Change:
    """The same change to each twin, with the same random numbers."""

    def both(twins: Twins, rng: random.Random) -> None:
        state = rng.getstate()
        for training in twins.both:
            rng.setstate(state)
            f(training, rng)

    both.__name__ = f.__name__
    CHANGES.append(both)
    return both


def parameter(t: Training, rng: random.Random) -> nn.Parameter:
    return rng.choice(list(t.model.parameters()))


# --- The optimizer -------------------------------------------------------------------------------


@on_both
def learning_rate(t: Training, rng: random.Random) -> None:
    rng.choice(t.optimizer.param_groups)["lr"] = rng.choice([0.1, 0.01, 1e-3])


@on_both
def hyper_parameter(t: Training, rng: random.Random) -> None:
    group = rng.choice(t.optimizer.param_groups)
    group["weight_decay"] = rng.choice([0, 0.0, 0.1])
    group["maximize"] = rng.choice([True, False, False])


@on_both
def momentum(t: Training, rng: random.Random) -> None:
    for group in t.optimizer.param_groups:
        if isinstance(t.optimizer, torch.optim.SGD):
            group["momentum"] = rng.choice([0.9, 0.5])


@on_both
def order_of_parameters(t: Training, rng: random.Random) -> None:
    rng.shuffle(rng.choice(t.optimizer.param_groups)["params"])


@on_both
def state_that_is_loaded(t: Training, rng: random.Random) -> None:
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


@on_both
def state_of_a_parameter_that_is_dropped(t: Training, rng: random.Random) -> None:
    t.optimizer.state.pop(parameter(t, rng), None)


@on_both
def a_group_that_is_split(t: Training, rng: random.Random) -> None:
    group = t.optimizer.param_groups[0]
    if len(group["params"]) > 1:
        t.optimizer.add_param_group({"params": [group["params"].pop()], "lr": 0.05})


@on_both
def hook_of_the_optimizer(t: Training, rng: random.Random) -> None:
    hooks = t.config.__dict__.setdefault("hooks", [])
    if hooks and rng.choice([True, False]):
        hooks.pop().remove()
        return
    factor = rng.choice([0.5, 0.9])

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(factor)

    hooks.append(t.optimizer.register_step_pre_hook(hook))


# --- Parameters and their gradients --------------------------------------------------------------


@on_both
def values(t: Training, rng: random.Random) -> None:
    with torch.no_grad():
        parameter(t, rng).mul_(rng.choice([0.5, 0.9]))


@on_both
def values_through_a_view(t: Training, rng: random.Random) -> None:
    parameter(t, rng).detach().view(-1)[:2].fill_(0.25)


@on_both
def other_memory(t: Training, rng: random.Random) -> None:
    p = parameter(t, rng)
    p.data = p.data * 0.5


@on_both
def memory_laid_out_in_another_way(t: Training, rng: random.Random) -> None:
    weight = t.model[0].weight
    weight.data = weight.data.t().contiguous().t()


@on_both
def memory_that_two_share(t: Training, rng: random.Random) -> None:
    first, second = t.model[0].bias, t.config.__dict__.setdefault("bias", t.model[0].bias.data)
    first.data = rng.choice([second, second.clone()])


@on_both
def a_parameter_that_is_replaced(t: Training, rng: random.Random) -> None:
    t.model[2].bias = nn.Parameter(t.model[2].bias.detach().clone())


@on_both
def requires_grad(t: Training, rng: random.Random) -> None:
    p = rng.choice([t.model[0].weight, t.model[2].bias])
    p.requires_grad_(not p.requires_grad)


@on_both
def gradients_from_outside(t: Training, rng: random.Random) -> None:
    how = rng.choice(["none", "zeros", "ones", "of another"])
    for p in t.model.parameters():
        p.grad = None if how == "none" else torch.full_like(p, how != "zeros", requires_grad=False)
        if how == "of another":
            p.grad = (p.detach().t() * 0.5).t() if p.dim() == 2 else p.detach() * 0.5


@on_both
def hook_of_a_gradient(t: Training, rng: random.Random) -> None:
    """Nothing calls it any more."""
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.requires_grad_().register_hook(lambda grad: grad * 0.5)
            p.grad.requires_grad_(False)


@on_both
def attribute_of_a_gradient(t: Training, rng: random.Random) -> None:
    for p in t.model.parameters():
        if p.grad is not None:
            p.grad.scale = 0.5


@on_both
def hook_of_a_tensor(t: Training, rng: random.Random) -> None:
    p, factor = parameter(t, rng), rng.choice([0.5, 2.0])
    hooks = t.config.__dict__.setdefault("tensor_hooks", [])
    kind = rng.choice(["register_hook", "register_post_accumulate_grad_hook", "remove"])
    if kind == "remove" or not p.requires_grad:
        while hooks:
            hooks.pop().remove()
    elif kind == "register_hook":
        hooks.append(p.register_hook(lambda grad: grad * factor))
    else:
        hooks.append(p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(factor), None)[1]))


@on_both
def hook_where_gradients_are_accumulated(t: Training, rng: random.Random) -> None:
    p = t.model[0].bias
    node = torch.autograd.graph.get_gradient_edge(p).node
    t.config.node = node  # keeps it alive
    t.config.node_hook = node.register_prehook(lambda grads: (grads[0] * 0.5,))


# --- The model -----------------------------------------------------------------------------------


@on_both
def train_and_eval(t: Training, rng: random.Random) -> None:
    rng.choice([t.model, t.model[1]]).train(rng.choice([True, False]))


@on_both
def state_of_the_model_that_is_loaded(t: Training, rng: random.Random) -> None:
    state = {name: value * 0.5 for name, value in t.model.state_dict().items()}
    t.model.load_state_dict(state, assign=rng.choice([True, False]))


@on_both
def an_attribute_of_a_layer(t: Training, rng: random.Random) -> None:
    t.model[1].p = rng.choice([0.25, 0.5])


@on_both
def a_layer_that_is_replaced(t: Training, rng: random.Random) -> None:
    t.model[1] = rng.choice([nn.Dropout, nn.AlphaDropout])(0.5).train(t.model[1].training)


@on_both
def hook_of_a_layer(t: Training, rng: random.Random) -> None:
    hooks = t.config.__dict__.setdefault("layer_hooks", [])
    factor = rng.choice([0.5, 0.9])
    register = rng.choice(
        [nn.Module.register_forward_hook, nn.Module.register_full_backward_hook, None]
    )
    if register is None:
        while hooks:
            hooks.pop().remove()
    elif register is nn.Module.register_forward_hook:
        hooks.append(register(t.model[0], lambda m, args, out: out * factor))
    else:
        hooks.append(register(t.model[2], lambda m, grads, out: (grads[0] * factor,)))


@on_both
def spectral_norm(t: Training, rng: random.Random) -> None:
    parametrize = nn.utils.parametrize
    if parametrize.is_parametrized(t.model[2]):
        parametrize.remove_parametrizations(t.model[2], "weight")
    else:
        nn.utils.parametrizations.weight_norm(t.model[2])


# --- Around the call -----------------------------------------------------------------------------


@change
def no_gradients(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    return rng.choice([torch.no_grad, torch.enable_grad])()


@change
def anomalies(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    return torch.autograd.detect_anomaly(check_nan=rng.choice([True, False]))


@change
def level_of_forward_mode(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    return torch.autograd.forward_ad.dual_level()


@change
def saved_tensors(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    factor = rng.choice([0.5, 1.0])
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x * factor, lambda x: x)


@change
def eager(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    return lazyxla.eager_mode(rng.choice([True, "fused"]))


@change
def region(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    return lazyxla.compile()


@change
def deterministic(twins: Twins, rng: random.Random) -> AbstractContextManager[Any]:
    @contextlib.contextmanager
    def algorithms() -> Any:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    return algorithms()


@change
def shapes(twins: Twins, rng: random.Random) -> None:
    twins.size = rng.choice([6, 6, 3, 1])


@change
def random_state(twins: Twins, rng: random.Random) -> None:
    torch.lazyxla.manual_seed(rng.choice([1, 2]))
