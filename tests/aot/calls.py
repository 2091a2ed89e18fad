"""One call of every operator that has a rule for a platform, as a program.

The calls are what samples of PyTorch's operator table come down to on the CPU; for operators that
none of them reaches, one of tests/calls.py or one made up from the schema
(lazyxla/lowering/samples.py).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lazyxla.lowering import Program, check_lowering, registry
from lazyxla.lowering.operators import find_op, schema_name
from lazyxla.lowering.samples import sample
from tests.calls import calls
from tests.lowering.harness import record
from tests.opinfo.entries import entries, samples

_SAMPLES = 24
"""Samples per entry: the first ones are the plain ones."""


_FIRST_CHOICES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""For entries that have no float32."""


class _Watch(TorchDispatchMode):
    """Keeps the first good call of each wanted operator as a program."""

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()
        self.wanted = set(wanted)
        self.found: dict[str, Program] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = schema_name(func), kwargs or {}
        if name in self.wanted and _telling(args, kwargs):
            with contextlib.suppress(Exception):  # a call that PyTorch itself refuses
                self.found[name] = record(name, *args, **_of_schema(func, kwargs)).program
                self.wanted.remove(name)
        return func(*args, **kwargs)


def _of_schema(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    known = {argument.name for argument in func._schema.arguments}
    return {name: value for name, value in kwargs.items() if name in known}


def _telling(args: Any, kwargs: Any) -> bool:
    """Whether a call has something to compute: no empty tensors, and not only 0-dim ones."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return all(x.numel() for x in tensors) and (
        not tensors or any(x.dim() and x.device.type == "cpu" for x in tensors)
    )


def find_all(platform: str) -> dict[str, Program]:
    """Programs of the operators that have a rule, of all for which there is a call."""
    watch = _Watch(registry.names(platform))
    _run(entries().values(), _FIRST_CHOICES, watch)
    watch.found |= made_by_hand(torch.float32)
    for name in sorted(watch.wanted - watch.found.keys()):
        call = sample(find_op(name), torch.float32)
        if call is not None and check_lowering(call.program(), "cpu") != "host":
            watch.found[name] = call.program()
    return watch.found


def find(
    operators: Iterable[str], dtype: torch.dtype, names: Iterable[str] | None = None
) -> dict[str, Program]:
    """Programs of those among the operators that entries of the operator table come down to.

    `names` are the entries' names; all that have the dtype unless given.
    """
    watch = _Watch(operators)
    chosen = entries().values() if names is None else [entries()[name] for name in names]
    _run(chosen, (dtype,), watch)
    return watch.found


def made_by_hand(dtype: torch.dtype) -> dict[str, Program]:
    """Programs of the calls of tests/calls.py, in a dtype of floats."""
    return {name: call.to(dtype).program(name) for name, call in calls().items()}


def _run(ops: Iterable[OpInfo], dtypes: tuple[torch.dtype, ...], watch: _Watch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops:
            _run_entry(op, dtypes, watch)


def _run_entry(op: OpInfo, dtypes: tuple[torch.dtype, ...], watch: _Watch) -> None:
    taken = op.supported_dtypes("cpu")
    dtype = next((d for d in dtypes if d in taken), None)
    if dtype is None or not watch.wanted:
        return
    gradients = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    for call in samples(op, dtype, _SAMPLES, gradients):
        with contextlib.suppress(Exception), watch:  # samples that PyTorch's CPU refuses
            inputs = (call.input, call.args, call.kwargs)
            first, args, kwargs = tree_map_only(torch.Tensor, lambda x: x.clone(), inputs)
            result = op(first, *args, **kwargs)
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            outputs = [x for x in outputs if x.requires_grad]
            if outputs:
                sum((x.abs() if x.is_complex() else x).square().sum() for x in outputs).backward()
