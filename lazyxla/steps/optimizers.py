"""Optimizers in captured steps: numbers that change from step to step are inputs of the program.

A learning rate is given to the recorded step as a tensor, so that a scheduler changes what the
program takes and not the program. Step counts are on the device, where the step itself counts, as
PyTorch's `capturable` has it. Both are so within the optimizer's own step: outside, a group has the
numbers that its user gave it, to look at or to save.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lazyxla import _C, optimizer_steps
from lazyxla.optimizer_steps import Group
from lazyxla.runtime import BACKEND
from lazyxla.steps import trust
from lazyxla.steps.reachable import Reach

# Optimizers whose steps can take a learning rate as a tensor of the device without reading it, as
# those of subclasses can whose own code names no rates.
_TAKE_TENSORS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_RATES = ("lr", "param_groups")


class Rates:
    """The learning rates of a step's optimizers, as tensors.

    Attributes:
        varying: for :class:`Reach`: which keys of which groups vary.
        numbers: the tensors, each with the number in it, in the order of `varying`.
        optimizers: the optimizers of the step.
    """

    def __init__(self) -> None:
        self.varying: dict[int, dict[str, int]] = {}
        self.numbers: list[Any] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._sets_gradients = False
        self._are_returned = False
        self._given: dict[int, tuple[float, torch.Tensor]] = {}  # by a group's id: in this call
        self._groups: list[tuple[weakref.ref[torch.optim.Optimizer], int]] = []

    def find(self, reach: Reach) -> bool:
        """Makes the tensors for the optimizers that a walk reached, if they are others than before.

        A step that itself reads, sets or returns learning rates has them as numbers.

        Returns:
            Whether anything has changed.
        """
        as_numbers = reach.schedules or self._are_returned or _names_rates(reach)
        optimizers = reach.optimizers
        # The hook for it is among what is guarded.
        hooked = [optimizer_steps.reset_for_saving(optimizer) for optimizer in optimizers]
        groups = [
            (optimizer, position)
            for optimizer in optimizers
            if _steps_with_tensors(type(optimizer)) and not as_numbers
            for position, group in enumerate(optimizer.param_groups)
            if _takes_tensor(optimizer, group, "grad" in reach.names) and _on_device(group)
        ]
        self._sets_gradients = "grad" in reach.names
        varying = {id(o.param_groups[p]): {"lr": i} for i, (o, p) in enumerate(groups)}
        self.optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        if varying == self.varying:
            return any(hooked)
        self.varying = varying
        self._groups = [(weakref.ref(o), p) for o, p in groups]
        self.numbers = [_number(optimizer.param_groups[p]) for optimizer, p in groups]
        return True

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[bool]:
        """Gives the groups their tensors, and has steps counted on the device, in the steps that
        optimizers make within a block.

        Yields whether all groups that vary have their tensors.
        """
        self._given = {}
        for (reference, position), number in zip(self._groups, self.numbers, strict=True):
            optimizer = reference()
            groups = optimizer.param_groups if optimizer else []
            group = groups[position] if position < len(groups) else {}
            known = optimizer is not None and id(group) in self.varying
            if known and _takes_tensor(optimizer, group, self._sets_gradients):
                number.set(group["lr"])
                self._given[id(group)] = group["lr"], number.tensor
        optimizers = [optimizer for each in self.optimizers if (optimizer := each()) is not None]
        with optimizer_steps.replacing(optimizers, self._replaced):
            yield len(self._given) == len(self.numbers)

    def _replaced(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Group, str, Any]]:
        for group in optimizer.param_groups:
            if optimizer_steps.counts_apart(group) and _on_device(group):
                yield from optimizer_steps.count_on_device(optimizer, group)
            rate, tensor = self._given.get(id(group), (None, None))
            if rate is not None and group["lr"] is rate:  # else the step itself has set it
                yield group, "lr", tensor
                if isinstance(optimizer, torch.optim.SGD) and not group["fused"]:
                    # Its other forms read the tensor. They compute the same.
                    yield group, "fused", True

    def are_among(self, values: Iterable[Any]) -> bool:
        """Whether a rate that varies is among values that a step returns, or in their text, as an
        optimizer's is. All are numbers from then on."""
        rates = [rate for rate, _ in self._given.values()]
        for value in values:
            if type(value) is str:
                self._are_returned |= any(repr(rate) in value for rate in rates)
            elif type(value) in (int, float):
                self._are_returned |= value in rates
        return self._are_returned and bool(rates)


def _names_rates(reach: Reach) -> bool:
    """Whether code that a step may run names learning rates. What makes an optimizer does: its rate
    is an argument."""
    makers = {id(vars(each).get("__init__")) for o in reach.optimizers for each in type(o).__mro__}
    return any(
        not names.isdisjoint(_RATES)
        for function, names in reach.names_by_function.items()
        if function not in makers
    )


def _steps_with_tensors(kind: type) -> bool:
    """Whether a class's step is that of one of `_TAKE_TENSORS`, as far as it is PyTorch's."""
    bases = torch.optim.Optimizer, object, *_TAKE_TENSORS
    return issubclass(kind, _TAKE_TENSORS) and all(
        each in bases or not trust.is_trusted(each.__module__) for each in kind.__mro__
    )


def _takes_tensor(optimizer: Any, group: Group, sets_gradients: bool) -> bool:
    """Whether a group's learning rate is a number that its step would take as a tensor, too.

    `sets_gradients`: whether parameters may get gradients that do not require any.
    """
    if type(group.get("lr")) not in (int, float) or group.get("differentiable"):
        return False
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    if group["foreach"] or not all(p.is_floating_point() for p in group["params"]):
        return False
    # As one operator it must have momentum for all gradients, or for none.
    has_momentum = {
        p: (optimizer.state.get(p) or {}).get("momentum_buffer") is not None
        for p in group["params"]
    }
    return not any(has_momentum.values()) or all(
        has or not (p.requires_grad or p.grad is not None or sets_gradients)
        for p, has in has_momentum.items()
    )


def _on_device(group: Group) -> bool:
    return all(p.device.type == BACKEND for p in group["params"])


def _number(group: Group) -> Any:
    double = any(p.dtype == torch.float64 for p in group["params"])
    dtype = torch.float64 if double else torch.float32
    return _C.StepNumber(torch.zeros((), dtype=dtype).to(group["params"][0].device))
