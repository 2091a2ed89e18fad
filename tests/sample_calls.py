"""Calls of operators on sample inputs of PyTorch's own tests, with one of the tensors changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = sorted({op.name for op in op_db if torch.float32 in op.dtypes})
Change = Callable[[torch.Tensor], torch.Tensor]


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_map_tensors(element, change) for element in value)
    if isinstance(value, dict):
        return {name: _map_tensors(element, change) for name, element in value.items()}
    return value


def _tensors_of(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_tensors(value, found.append)
    return found


def _outcome(call: Callable[[], Any]) -> Any:
    """The results' sizes and dtypes, or the error."""
    try:
        return [(tuple(x.shape), x.dtype) for x in _tensors_of(call())]
    except NotImplementedError:
        return None  # the CPU has no kernel for it
    except Exception as error:
        return type(error)


class _Call:
    """A call in which the tensor of a position is changed, or (-1) all tensors of float32 are."""

    def __init__(self, op: Any, sample: Any, position: int, change: Change) -> None:
        self.op, self.sample, self.position, self.change = op, sample, position, change

    def __call__(self, device: str) -> Any:
        count = itertools.count()

        def changed(x: torch.Tensor) -> torch.Tensor:
            index = next(count)
            is_all = self.position < 0 and x.dtype is torch.float32
            x = self.change(x) if index == self.position or is_all else x
            return x.clone().to(device)

        everything = (self.sample.input, list(self.sample.args), self.sample.kwargs)
        first, args, kwargs = _map_tensors(everything, changed)
        if "device" in kwargs:
            kwargs["device"] = device
        return self.op.op(first, *args, **kwargs)


def _calls(name: str, changes: dict[str, Change]) -> Iterator[tuple[str, _Call]]:
    for op in op_db:
        if op.name != name or torch.float32 not in op.dtypes:
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)), None)
        given = _tensors_of((sample.input, sample.args, sample.kwargs)) if sample else []
        if not given or any(x.layout is not torch.strided for x in given):
            continue
        for position, change in itertools.product(range(-1, min(3, len(given))), changes):
            yield (
                f"{name}, tensor {position} {change}",
                _Call(op, sample, position, changes[change]),
            )


def check(name: str, changes: dict[str, Change]) -> tuple[list[str], int]:
    """Calls an operator with each change made to each of its first tensors, and (position -1) to
    all of float32. Which calls the device and the CPU do not agree about, in words, whether they
    are refused and what sizes and dtypes they give; and how many the CPU refuses."""
    differ, refused = [], 0
    for told, call in _calls(name, changes):
        expected = _outcome(lambda call=call: call("cpu"))
        refused += isinstance(expected, type)
        if expected is None:
            continue
        found = _outcome(lambda call=call: call("lazyxla"))
        if found != expected:
            differ.append(f"{told}: {found}, the CPU {expected}")
    return differ, refused
