"""Optimizers in captured steps: numbers that change from step to step are inputs of the program.

A learning rate is given to the recorded step as a tensor, so that a scheduler changes what the
program takes and not the program. Step counts are on the device, where the step itself counts, as
PyTorch's `capturable` has it. Both are so within the step only: outside, a group has the numbers
that its user gave it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from lazyxla import _C
from lazyxla.runtime import BACKEND

# Those whose steps can take a learning rate as a tensor of the device without reading it.
_TAKE_TENSORS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)

Group = dict[str, Any]


class Rates:
    """The learning rates of a step's optimizers, as tensors.

    Attributes:
        varying: for :class:`lazyxla.steps.reachable.Reach`: which keys of which groups vary.
        numbers: the tensors, each with the number in it, in the order of `varying`.
        optimizers: the optimizers of the step.
    """

    def __init__(self) -> None:
        self.varying: dict[int, dict[str, int]] = {}
        self.numbers: list[Any] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._groups: list[tuple[weakref.ref[torch.optim.Optimizer], int]] = []

    def find(self, optimizers: list[torch.optim.Optimizer], names: set[str]) -> bool:
        """Makes the tensors for these optimizers, if they are others than before.

        Args:
            names: those in the step's own code. One that reads learning rates has them as numbers.

        Returns:
            Whether anything has changed.
        """
        groups = [
            (optimizer, position)
            for optimizer in optimizers
            if type(optimizer) in _TAKE_TENSORS and names.isdisjoint(("lr", "param_groups"))
            for position, group in enumerate(optimizer.param_groups)
            if _takes_tensor(optimizer, group) and _on_device(group)
        ]
        varying = {id(o.param_groups[p]): {"lr": i} for i, (o, p) in enumerate(groups)}
        self.optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        if varying == self.varying:
            return False
        self.varying = varying
        self._groups = [(weakref.ref(o), p) for o, p in groups]
        self.numbers = [_number(optimizer.param_groups[p]) for optimizer, p in groups]
        return True

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Gives the groups their tensors, and has steps counted on the device, for a block."""
        changed: list[tuple[Group, str, Any, Any]] = []

        def change(group: Group, key: str, value: Any) -> None:
            changed.append((group, key, group[key], value))
            group[key] = value

        try:
            for reference in self.optimizers:
                optimizer = reference()
                for group in optimizer.param_groups if optimizer else ():
                    counts_apart = group.get("capturable") is False and not group.get("fused")
                    if counts_apart and _on_device(group):
                        _move_counts(optimizer, group)
                        change(group, "capturable", True)
            for (reference, position), number in zip(self._groups, self.numbers, strict=True):
                optimizer = reference()
                if optimizer is None or position >= len(optimizer.param_groups):
                    continue
                group = optimizer.param_groups[position]
                if id(group) in self.varying and type(group["lr"]) in (int, float):
                    number.set(group["lr"])
                    change(group, "lr", number.tensor)
                    if isinstance(optimizer, torch.optim.SGD) and not group["fused"]:
                        # Its other forms read the tensor. They compute the same.
                        change(group, "fused", True)
            yield
        finally:
            for group, key, before, value in reversed(changed):
                if group.get(key) is value:  # else the step itself has set it
                    group[key] = before


def _takes_tensor(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether a group's learning rate is a number that its step would take as a tensor, too."""
    if type(group.get("lr")) not in (int, float) or group.get("differentiable"):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        return not group["foreach"] and all(p.is_floating_point() for p in group["params"])
    return True


def _on_device(group: Group) -> bool:
    return all(p.device.type == BACKEND for p in group["params"])


def _number(group: Group) -> Any:
    double = any(p.dtype == torch.float64 for p in group["params"])
    dtype = torch.float64 if double else torch.float32
    return _C.StepNumber(torch.zeros((), dtype=dtype).to(group["params"][0].device))


def _move_counts(optimizer: Any, group: Group) -> None:
    """Moves step counts, and what else is a number there, to the parameters' device."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu:
                state[name] = value.to(parameter.device)
