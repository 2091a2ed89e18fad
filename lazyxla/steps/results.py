"""What a captured step returns: new tensors, and objects that remain the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lazyxla.runtime import BACKEND
from lazyxla.steps.trust import Unfit

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# A kind and its content: (int, the position of a new tensor), (object, what is the same each time),
# (dict, templates by keys), (tuple or list, templates).
Template = tuple[Any, Any]


def describe(
    result: Any, state: list[torch.Tensor], reached: dict[int, Any], args: Any
) -> tuple[Template, list[torch.Tensor]]:
    """How to build a step's result from the tensors that it makes, and those of one result.

    Args:
        result: what the step returned.
        state: the tensors that it reached.
        reached: all objects that its code can reach, by their ids.
        args: what it was called with.

    Raises:
        Unfit: the result has something else, or a tensor through which backward() may still run.
    """
    description = _Description({id(tensor) for tensor in state}, reached, _containers(args, {}))
    return description.describe(result), description.fresh


def build(template: Template, made: list[torch.Tensor]) -> Any:
    """The result of a call that made these tensors."""
    kind, what = template
    if kind is int:
        return made[what]
    if kind is object:
        return what
    if kind is dict:
        return {key: build(each, made) for key, each in what.items()}
    return kind(build(each, made) for each in what)


def constants(template: Template) -> Iterator[Any]:
    """What is the same in each result."""
    kind, what = template
    if kind is object:
        yield what
    elif kind is not int:
        for each in what.values() if kind is dict else what:
            yield from constants(each)


class _Description:
    def __init__(
        self, state: set[int], reached: dict[int, Any], containers: dict[int, Any]
    ) -> None:
        self.fresh: list[torch.Tensor] = []
        self._state, self._reached, self._containers = state, reached, containers
        self._positions: dict[int, int] = {}

    def describe(self, result: Any) -> Template:
        kind = type(result)
        if kind in (list, dict):
            if id(result) in self._reached:
                return object, result
            if id(result) in self._containers:
                raise Unfit(f"it returns a {kind.__name__} of its arguments, or one twice")
            self._containers[id(result)] = result
        if kind in (torch.Tensor, torch.nn.Parameter):
            if id(result) in self._state:
                return object, result
            if kind is not torch.Tensor:
                raise Unfit("it returns a new parameter")
            if id(result) not in self._positions:
                if result.device.type != BACKEND:
                    raise Unfit("it returns a tensor of another device")
                if result.requires_grad and not _is_used_up(result):
                    raise Unfit(
                        "it returns a tensor whose gradients can still be computed; return it "
                        "detached"
                    )
                if result.__dict__:
                    raise Unfit("it returns a tensor with attributes")
                self._positions[id(result)] = len(self.fresh)
                self.fresh.append(result)
            return int, self._positions[id(result)]
        if kind in (tuple, list):
            return kind, [self.describe(each) for each in result]
        if kind is dict:
            if not all(type(key) in _VALUES for key in result):
                raise Unfit("it returns a dict with other keys than numbers and strings")
            return dict, {key: self.describe(each) for key, each in result.items()}
        if kind not in _VALUES:
            raise Unfit(f"it returns a {kind.__qualname__}")
        return object, result


def _containers(tree: Any, found: dict[int, Any]) -> dict[int, Any]:
    """The lists and dicts in arguments, by their ids."""
    if type(tree) in (tuple, list, dict):
        if type(tree) is not tuple:
            found[id(tree)] = tree
        for each in tree.values() if type(tree) is dict else tree:
            _containers(each, found)
    return found


def _is_used_up(tensor: torch.Tensor) -> bool:
    """Whether backward() went through a tensor's whole history, and freed what it had saved."""
    freed = False
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for is_freed in _saved(node):
            if not is_freed:
                return False
            freed = True
        waiting.extend(following for following, _ in node.next_functions)
    return freed


def _saved(node: Any) -> Iterator[bool]:
    """For each tensor that a node saved for its backward, whether it is freed."""
    for name in dir(node):
        if not name.startswith("_saved_") and name != "saved_tensors":
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # "Trying to backward through the graph a second time"
            yield True
            continue
        several = saved if isinstance(saved, (tuple, list)) else (saved,)
        if any(isinstance(each, torch.Tensor) for each in several):
            yield False
