"""Results that PyTorch leaves open: the index of which of several equal elements."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

# The position of the argument `dim`.
_DIM = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "mode": 1}
_ONE = ("kthvalue", "mode")


def same_choice(op: OpInfo, sample: SampleInput, result: Any, expected: Any) -> bool:
    """Whether the indices (the last result) select equal elements, none of them twice.

    The other results have to be equal as they are. A stable sort leaves no choice.
    """
    if op.name not in _DIM or sample.kwargs.get("stable"):
        return False
    ours, theirs = ([x.detach().cpu() for x in tree_leaves(r)] for r in (result, expected))
    x = sample.input.detach()
    given = [x, *sample.args]
    position = _DIM[op.name]
    dim = sample.kwargs.get("dim", given[position] if len(given) > position else -1)
    if op.name in _ONE and ours[-1].dim() < x.dim():
        ours[-1], theirs[-1] = ours[-1].unsqueeze(dim), theirs[-1].unsqueeze(dim)
    if op.name not in _ONE and x.dim() > 0:
        places = ours[-1].sort(dim).values
        if bool((places.diff(dim=dim) == 0).any()):
            return False
    ours[-1], theirs[-1] = x.gather(dim, ours[-1]), x.gather(dim, theirs[-1])
    return all(
        torch.equal(torch.nan_to_num(a, nan=-1), torch.nan_to_num(b, nan=-1))
        and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(ours, theirs, strict=True)
    )
