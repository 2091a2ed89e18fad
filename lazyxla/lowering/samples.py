"""Small calls of operators, made up from their schemas, to learn what can be lowered.

Which shapes and numbers an operator takes is found by trying a few on meta tensors, which compute
nothing. For an operator that wants others than these there is no sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from lazyxla.lowering.fx_graph import program_of_call
from lazyxla.lowering.operators import on_meta
from lazyxla.lowering.program import Program

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
)

_SHAPES = ((3, 3), (3,), (2, 3, 3), (1, 2, 4, 4), (1, 2, 4, 4, 4), ())
_INTEGERS = (1, 0, 2)
_LENGTHS = (1, 2, 3)
_INDICES = ("index", "indices", "target", "offsets", "labels", "lengths", "segment")

Choice = tuple[tuple[int, ...], int, int]


class Sample(NamedTuple):
    """A call on meta tensors, and what PyTorch's meta function returns."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    result: Any

    def program(self) -> Program:
        return program_of_call(self.op, self.args, self.kwargs, self.result)


_found: dict[Any, Choice | None] = {}


def sample(op: Any, dtype: torch.dtype) -> Sample | None:
    """A call of `op` on tensors of `dtype`, or None if none was found."""
    if op in _found:
        choice = _found[op]
        return None if choice is None else _try(op, dtype, choice)
    kinds = " ".join(str(a.real_type) for a in op._schema.arguments)
    integers = _INTEGERS if "nt" in kinds else _INTEGERS[:1]  # int and SymInt
    lengths = _LENGTHS if "List" in kinds else _LENGTHS[:1]
    for choice in itertools.product(_SHAPES, integers, lengths):
        for first in dict.fromkeys((dtype, torch.float32)):
            if _try(op, first, choice) is not None:
                _found[op] = choice
                return _try(op, dtype, choice)
    _found[op] = None
    return None


def samples(op: Any) -> Iterator[tuple[torch.dtype, Sample]]:
    """Calls of `op` on tensors of each of the dtypes that it takes."""
    for dtype in (torch.float32, *(d for d in DTYPES if d != torch.float32)):
        if (found := sample(op, dtype)) is not None:
            yield dtype, found


def _try(op: Any, dtype: torch.dtype, choice: Choice) -> Sample | None:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = argument.default_value
        if not argument.has_default_value():
            value = _argument(str(argument.real_type), argument.name, dtype, choice)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        result = on_meta(op)(*args, **kwargs)
    except Exception:  # a meta function may refuse with any exception
        return None
    of_tensors = all(r is None or isinstance(r, torch.Tensor) for r in tree_leaves(result))
    return Sample(op, args, kwargs, result) if of_tensors else None


def _argument(kind: str, name: str, dtype: torch.dtype, choice: Choice) -> Any:
    shape, integer, length = choice
    if kind.startswith("Optional["):
        return None
    if kind.startswith("List["):
        return [_argument(kind[5:-1], name, dtype, choice)] * length
    if kind == "Tensor":
        if name.startswith(_INDICES):
            dtype = torch.int64
        elif "mask" in name or name == "condition":
            dtype = torch.bool
        return torch.empty(shape, dtype=dtype, device="meta")
    numbers = {"int": integer, "SymInt": integer, "float": 0.5, "number": 1, "bool": False}
    others = {"str": "none", "ScalarType": dtype, "Device": torch.device("meta")}
    return numbers.get(kind, others.get(kind))
