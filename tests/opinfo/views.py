"""Calls on views of what the same program computes, for the part "views".

Each tensor of a sample becomes every other element of memory that the program makes, from the third
on. The operator is called, also in place and with such memory as its result, and then its results
are written to through views of them. What all of this leaves in results and arguments is compared,
so that it also tells which of them share memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.opinfo.compare import HOST_ARGUMENTS


def call(op: OpInfo, sample: SampleInput) -> Any:
    """What the operator gives, its other forms where there are some, and the arguments after all.

    A form that is refused gives nothing: that is one only if the other device refuses it, too.
    """
    scattered = sample.transform(_scattered)
    result = op(scattered.input, *scattered.args, **scattered.kwargs)
    forms = [result, *_other_forms(op, sample, result)]
    for x in _tensors(forms):
        if not _may_overlap(x):
            _write(x)
    others = () if op.name in HOST_ARGUMENTS else (scattered.args, scattered.kwargs)
    return forms, _tensors((scattered.input, others))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those of a tree that have strides."""
    leaves = tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]


def _other_forms(op: OpInfo, sample: SampleInput, result: Any) -> list[Any]:
    forms = []
    if op.get_inplace() is not None and not sample.broadcasts_input:
        forms.append(_attempt(op.get_inplace(), sample.transform(_scattered)))
    if op.supports_out and isinstance(result, torch.Tensor):
        out = _scattered(result.resolve_conj().resolve_neg())
        forms.append(_attempt(op, sample.transform(_scattered), out=out))
    return forms


def _attempt(form: Any, sample: SampleInput, **more: Any) -> Any:
    try:
        return form(sample.input, *sample.args, **sample.kwargs, **more)
    except Exception:
        return []


def _scattered(x: Any) -> Any:
    """The tensor as every other element of new memory, from the third on, in the same order."""
    if not _tensors(x) or x.is_conj() or x.is_neg():
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    if x.numel() == 0:
        return x.new_empty(4).as_strided(x.shape, x.stride(), 2)
    flat = x.as_strided((span,), (1,))
    memory = torch.stack([torch.cat([flat[:1], flat, flat[:1]])] * 2, 1).view(-1)
    return memory.as_strided(x.shape, [2 * stride for stride in x.stride()], 2)


def _may_overlap(x: torch.Tensor) -> bool:
    """Whether two elements may have one place in memory, where the order of writes is open."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _write(x: torch.Tensor) -> None:
    """Changes every other element along the first dimension."""
    part = x.unsqueeze(0).transpose(0, -1)[::2] if x.dim() else x.view(1)
    if part.dtype is torch.bool:
        part.logical_not_()
    else:
        part.add_(1)
