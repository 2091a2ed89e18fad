"""Assertions about the values of tensors.

PyTorch's functions bring some along: ``one_hot`` asserts that its classes are in range. The host
would wait for such a value within each call, and elsewhere the device checks no values, but with
the setting `check_indices`. So these assertions are left out. Those that the user's program makes,
such as ``assert (x > 0).all()``, are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lazyxla.config import settings

aten = torch.ops.aten

_OPERATORS = (aten._assert_async.default, aten._assert_async.msg)
_WRITTEN = {torch._assert_async, aten._assert_async, *_OPERATORS}
"""What Dynamo has in a graph for an assertion of the program's own."""


def _leave_out(*_: Any) -> None:
    """In place of an assertion."""


def _has_its_own(module: fx.GraphModule) -> bool:
    """Whether the program that Dynamo traced asserts something itself, perhaps in a branch."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return any(node.target in _WRITTEN for graph in graphs for node in graph.nodes)


def decompositions(module: fx.GraphModule) -> dict[Any, Any]:
    """What AOTAutograd puts in place of assertions: nothing, or else they are kept.

    Its table does not distinguish them: in a graph with an assertion of its own, all are kept.
    """
    if settings.check_indices or _has_its_own(module):
        return {}
    return dict.fromkeys(_OPERATORS, _leave_out)
