"""``flex_attention`` whose mask is known when it is traced: operators that TPUs have kernels for.

A mask that depends only on the indices of queries and keys is computed once, on the host, and
identified by its digest from then on. A kernel skips the tiles that the mask excludes, and never
writes scores (lowering/tpu/flex_attention.py). Elsewhere the operators are the formula, with the
mask computed on the device.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from lazyxla.jax.kernels import define_operator

_ROWS_AT_ONCE = 1024  # of which a mask is computed: its indices are int64
_MOST_SCORES = 1 << 28
"""Rows times columns up to which a mask is computed: a byte for each."""


class Known(NamedTuple):
    """A mask: its function, and its value for numbers of rows and columns."""

    function: fx.GraphModule
    shape: tuple[int, int]
    bits: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """[rows, columns] of bool."""
        count = self.shape[0] * self.shape[1]
        return np.unpackbits(self.bits, count=count).astype(bool).reshape(self.shape)


masks: dict[str, Known] = {}
"""By digest. A graph that has one is lowered in the process that traced it."""


def remember(function: fx.GraphModule, rows: int, columns: int) -> str | None:
    """The digest of a mask for the sizes; None if it depends on more than indices, or excludes all
    keys of a query (whose result is then 0, which the kernel does not compute)."""
    batch, head, *places = function.graph.find_nodes(op="placeholder")
    others = [user.target for user in (*batch.users, *head.users)]
    if not all(target in _CONSTANTS for target in others):
        return None
    if len(places) != 2 or rows * columns > _MOST_SCORES:
        return None
    if not all(_is_by_element(node) for node in function.graph.nodes):
        return None
    with _disable_current_modes(), torch.device("cpu"):
        parts = [
            _of_places(function, torch.arange(start, min(start + _ROWS_AT_ONCE, rows)), columns)
            for start in range(0, rows, _ROWS_AT_ONCE)
        ]
        seen = torch.cat(parts).numpy()
    if not seen.any(1).all():
        return None
    bits = np.packbits(seen)
    digest = hashlib.sha256(f"{rows}, {columns}: ".encode() + bits.tobytes()).hexdigest()
    masks.setdefault(digest, Known(function, (rows, columns), bits))
    return digest


def _is_by_element(node: fx.Node) -> bool:
    """Whether it computes of arrays what it does of numbers, which the graph was traced for. A
    captured tensor is none such."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_pointwise or node.target in _POINTWISE or node.target in _CONSTANTS


_aten = torch.ops.aten
_POINTWISE = (
    *(_aten.floor_divide.default, _aten.floor_divide.Scalar),
    *(_aten._to_copy.default, _aten.clone.default),
)
"""Without PyTorch's tag."""

_CONSTANTS = (
    *(_aten.full.default, _aten.full_like.default, _aten.scalar_tensor.default),
    *(_aten.ones_like.default, _aten.zeros_like.default),
    *(_aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default),
)
"""Operators that compute by element, for all values of their arguments."""


class _OnDevice(fx.Interpreter):
    """A graph on a device other than that which it was traced for."""

    def __init__(self, graph: fx.GraphModule, device: torch.device) -> None:
        super().__init__(graph)
        self._device = device

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)


def _of_places(function: fx.GraphModule, rows: Tensor, columns: int) -> Tensor:
    """[rows, columns] of bool."""
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
    positions = torch.arange(columns, device=rows.device)
    found = _OnDevice(function, rows.device).run(zero, zero, rows[:, None], positions)
    found = found[0] if isinstance(found, (tuple, list)) else found
    return found.expand(len(rows), columns)  # type: ignore[no-any-return]


def _weights(query: Tensor, key: Tensor, mask: str, scale: float) -> Tensor:
    """Scores, scaled and masked, in float32: [batch, groups, heads of a group, rows, columns]."""
    groups = key.shape[1]
    grouped = query.float().unflatten(1, (groups, -1))
    scores = grouped @ key.float().mT.unsqueeze(2) * scale
    rows = torch.arange(query.shape[2], device=query.device)
    seen = _of_places(masks[mask].function, rows, key.shape[2])
    return scores.masked_fill(~seen, -torch.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: str, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _weights(query, key, mask, scale)
    result = scores.softmax(-1).to(value.dtype) @ value.unsqueeze(2)
    logarithms = scores.logsumexp(-1) / math.log(2)
    return result.flatten(1, 2), logarithms.flatten(1, 2)


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    logarithms: Tensor,
    grad: Tensor,
    mask: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = (key.shape[1], -1)
    logarithms = logarithms.unflatten(1, parts).unsqueeze(-1) * math.log(2)
    weights = torch.exp(_weights(query, key, mask, scale) - logarithms)
    wide = grad.float().unflatten(1, parts)
    along = (result.float().unflatten(1, parts) * wide).sum(-1, keepdim=True)
    of_weights = wide @ value.float().mT.unsqueeze(2)
    of_scores = (weights * (of_weights - along) * scale).to(query.dtype)
    grouped = query.unflatten(1, parts)
    of_query = (of_scores @ key.unsqueeze(2)).flatten(1, 2)
    of_key = (of_scores.mT @ grouped).sum(2)
    of_value = (weights.to(query.dtype).mT @ grad.unflatten(1, parts)).sum(2)
    return of_query, of_key, of_value


forward = define_operator("lazyxla::flex_attention", _forward)
"""Queries [batch, heads, rows, size], keys and values [batch, groups, columns, size], the digest of
a mask and the scale to the result and the logarithms to base 2 of the rows' sums."""

backward = define_operator("lazyxla::flex_attention_backward", _backward)
"""The gradients of query, key and value; takes these, both results and the first's gradient."""
