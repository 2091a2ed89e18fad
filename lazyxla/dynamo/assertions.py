"""Assertions about the values of tensors in a graph, which PyTorch's functions bring along
(``one_hot`` asserts that its classes are in range).

The host would have to wait for such a value within each call. A compiled function's values are not
checked, as everywhere on the device, but with the setting `check_indices`.
"""

from __future__ import annotations

from typing import Any

import torch

from lazyxla.config import settings

aten = torch.ops.aten


def _leave_out(*_: Any) -> None:
    """In place of an assertion."""


def decompositions() -> dict[Any, Any]:
    """What AOTAutograd puts in place of assertions."""
    if settings.check_indices:
        return {}
    return dict.fromkeys((aten._assert_async.default, aten._assert_async.msg), _leave_out)
