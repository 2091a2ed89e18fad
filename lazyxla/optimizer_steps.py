"""Optimizers whose step counts are on the device, as torch.compile leaves them.

A plain ``optimizer.step()`` would read each count, and wait for it in the middle of the step. So it
computes with them on the device, as with PyTorch's `capturable`, which is set in the group during
the step only: a checkpoint of it can still be loaded for the CPU. Captured steps replace more there
(steps/optimizers.py).

A closure's forward and backward are no part of what the optimizer computes, and are recorded as
outside of the step.

SGD's first step takes a copy of the gradients as its momentum, and the later ones add them to it.
Here momentum begins as zeros, so that the first step adds, too: one program serves all steps.

With devices as one (spmd.py), gradients are spread as the parameters are, and so is state that was
loaded, as the state that an optimizer makes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lazyxla import _C, spmd, untraced
from lazyxla.lowering import lookup
from lazyxla.runtime import BACKEND

Group = dict[str, Any]
Replace = Callable[[torch.optim.Optimizer], Iterable[tuple[Group, str, Any]]]
"""What is to be in an optimizer's groups during a step: values of keys."""

# What is in groups during a step: a key's value before, and the one that it has.
_changed: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Group, str, Any, Any]]]
_changed = weakref.WeakKeyDictionary()
_replacing: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Replace]]
_replacing = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # their loads
_reset_for_saving: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def install() -> None:
    """Watches the steps of all optimizers."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


@contextlib.contextmanager
def replacing(optimizers: Iterable[torch.optim.Optimizer], replace: Replace) -> Iterator[None]:
    """In the block, optimizers find this in their groups during each of their steps."""
    changed = list(optimizers)
    for optimizer in changed:
        _replacing.setdefault(optimizer, []).append(replace)
    try:
        yield
    finally:
        for optimizer in changed:
            _reset(optimizer)  # its step may have failed
            _replacing[optimizer].remove(replace)  # another thread's may be the last one


def reset_for_saving(optimizer: torch.optim.Optimizer) -> bool:
    """Has its groups as they were where its state is saved after a step that failed, which has no
    end to reset them at, or in a hook of a step. Returns whether they were not so already."""
    is_new = optimizer not in _reset_for_saving
    if is_new:
        _reset_for_saving.add(optimizer)
        optimizer.register_state_dict_pre_hook(_reset)
    return is_new


@untraced.traced
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Returns other arguments of the step, if they have a closure."""
    given = None
    if not torch.compiler.is_compiling():  # which computes so by itself
        given = _with_marked_closure(optimizer, args, kwargs)
        _replace(optimizer)
        if _C.has_mesh() and _spread_gradients(optimizer) and optimizer not in _watched:
            _spread_state(optimizer)
            _watched.add(optimizer)
            optimizer.register_load_state_dict_post_hook(_after_loading)
        _begin_momentum(optimizer)
    return given


def _with_marked_closure(
    optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """The arguments of a step, the optimizer first, with a closure that C++ knows of
    (csrc/record/settings.h); None if there is none."""
    if len(args) > 1 and callable(args[1]):
        return (args[0], _marked(optimizer, args[1]), *args[2:]), kwargs
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _marked(optimizer, closure)}
    return None


def _marked(optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("Optimizer.closure"):
            loss = closure(*args, **kwargs)
        # Of the gradients that the closure made.
        _replace(optimizer)
        _begin_momentum(optimizer)
        return loss

    return run


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD's parameters the momentum that they begin with, where zeros give the same."""
    if type(optimizer) is not torch.optim.SGD:
        return
    known = len(optimizer.state)
    if known >= sum(len(group["params"]) for group in optimizer.param_groups):
        return  # all have some
    groups = (group["params"] for group in optimizer.param_groups if group["momentum"])
    if known >= sum(p.grad is not None for parameters in groups for p in parameters):
        return  # or all that are trained
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"] or group["differentiable"]:
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or gradient.device.type != BACKEND:
                continue  # a wrapper subclass may have no zeros of its kind
            if gradient.layout != torch.strided:
                continue
            if "momentum_buffer" not in state_of(optimizer, parameter):
                # Of the parameter, over whose devices it is spread as all state is.
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@untraced.traced
def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _reset(optimizer)


def _replace(optimizer: torch.optim.Optimizer) -> None:
    _reset(optimizer)  # the last step may have failed
    replacements = _replacing.get(optimizer) or [_capturable]
    changes = list(replacements[-1](optimizer))
    if changes:
        reset_for_saving(optimizer)
        _changed[optimizer] = [(group, key, group[key], value) for group, key, value in changes]
        for group, key, value in changes:
            group[key] = value


def _reset(optimizer: torch.optim.Optimizer) -> None:
    for group, key, before, value in _changed.pop(optimizer, ()):
        if group.get(key) is value:  # else the step itself has set it
            group[key] = before
            if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
                continue
            if value.is_inference() or value._version:  # it was written to
                with torch.no_grad():
                    before.copy_(value)


def _capturable(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Group, str, Any]]:
    for group in optimizer.param_groups:
        if counts_apart(group) and _counts_on_device(optimizer, group):
            yield from count_on_device(optimizer, group)


def counts_apart(group: Group) -> bool:
    """Whether a group's step would read its counts."""
    return group.get("capturable") is False and not group.get("fused")


def count_on_device(
    optimizer: torch.optim.Optimizer, group: Group
) -> Iterator[tuple[Group, str, Any]]:
    """Moves a group's counts to the device, and yields what has its step count there.

    The counts of PyTorch's optimizers are float64 during the step. So is what they compute of them
    on the host, where they are Python numbers: of 1 - 0.999 ** count float32 loses five digits in
    the first steps, and with them RAdam loses two of its step size.
    """
    parameters = group["params"]
    for parameter in parameters:
        move_numbers(state_of(optimizer, parameter), parameter.device)
    if _counts_in_float64(optimizer, group):
        if any(p.grad is not None and not state_of(optimizer, p) for p in parameters):
            _make_state(optimizer, group)
        for parameter in parameters:
            state = state_of(optimizer, parameter)
            count = state.get("step")
            if isinstance(count, torch.Tensor) and count.dtype == torch.float32:
                yield state, "step", count.double()
    yield group, "capturable", True


def _counts_in_float64(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether PyTorch's code makes the counts, and computes with them and without gradients.

    Not on TPUs, which have no float64: powers and roots of what stands for it take the compiler 2 s
    for each parameter.
    """
    kind: Any = type(optimizer)
    methods = (getattr(kind, name, None) for name in ("step", "_init_group"))
    is_torch = all(getattr(each, "__module__", "").startswith("torch.optim.") for each in methods)
    return is_torch and not group.get("differentiable") and lookup.recorded_platform() != "tpu"


def _make_state(optimizer: Any, group: Group) -> None:
    """Makes what a step begins with, so that the first one computes as all others."""
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    optimizer._init_group({**group, "capturable": True}, *([] for _ in range(lists)))


def _after_loading(optimizer: torch.optim.Optimizer) -> None:
    _spread_state(optimizer)


def _spread_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter is spread. Its gradients are from now on, whichever way it came here:
    as a copy of a sharded one, by a conversion of its module or by `load_state_dict`."""
    is_any = False
    for group in optimizer.param_groups:
        has_spread, leaves = _C.find_unspread(group["params"])
        is_any |= has_spread
        for leaf in leaves:
            spmd.spread_gradient(leaf)
            if leaf.grad is not None:
                _C.try_shard(leaf.grad, _C.declared_sharding(leaf))
    return is_any


def _spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Spreads it as the parameters are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_ours = parameter.device.type == BACKEND
            raw = _C.declared_sharding(parameter) if is_ours else None
            if raw is None:
                continue
            for value in state_of(optimizer, parameter).values():
                is_like = (
                    isinstance(value, torch.Tensor)
                    and value.device == parameter.device
                    and value.shape == parameter.shape
                    and value.stride() == parameter.stride()
                )
                if is_like and _C.declared_sharding(value) is None:
                    _C.shard(value, raw)


def _counts_on_device(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    for parameter in group["params"]:
        step = state_of(optimizer, parameter).get("step")
        if isinstance(step, torch.Tensor):
            return bool(step.device.type == parameter.device.type == BACKEND)
    return False


def state_of(optimizer: torch.optim.Optimizer, parameter: Any) -> Any:
    """A parameter's state; nothing where an optimizer keeps it in another form, such as one that
    has only some parameters' and None for those of other processes."""
    state = optimizer.state.get(parameter)
    return state if isinstance(state, dict) else {}


def move_numbers(state: dict[str, Any], device: torch.device) -> None:
    """Moves the other numbers there, such as NAdam's mu_product, to the counts' device."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu:
            state[name] = value.to(device)
